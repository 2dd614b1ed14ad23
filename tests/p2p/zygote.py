"""A process that has all imports and forks peers, which are real processes without the seconds of importing.

It reads one JSON object per line from its standard input, and answers with the process id of the new peer, or with the
exit status of a peer. It has no thread and no event loop of its own, so its forks are as clean as new processes. Its
arguments are the names of further modules to import.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import json
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import lightning as L
import torch

import lightning_swarm.network.hivemind  # noqa: F401 - it takes a second to import
from lightning_swarm import SwarmStrategy, cli
from lightning_swarm.core import program
from lightning_swarm.core.limits import Limits
from lightning_swarm.peer import _bootstrap, preemption
from lightning_swarm.peer.preemption import Endpoint
from lightning_swarm.protocol.compression import codec
from lightning_swarm.testing import FaultPlan, FaultySwarmStrategy, Phase
from tests.p2p.kinds import serve_kind
from tests.p2p.several import train
from tests.p2p.train import WatchedStrategy, Wide
from tests.parity.models import MODELS, Recipe

_PR_SET_PDEATHSIG = 1
_CLONE_NEWNET = 0x40000000

Planned = Sequence[tuple[str, str, dict[str, Any]]]
"""Faults in JSON: a method of `FaultPlan`, a name, and the method's keywords, with the phase as a name."""


def planned(faults: Planned) -> FaultPlan:
    """Return the plan for these faults."""
    plan = FaultPlan()
    for kind, peer, when in faults:
        getattr(plan, kind)(peer, **{**when, "at": Phase[when["at"]]})
    return plan


def build(name: str) -> L.LightningModule:
    """Return one of the tests' models."""
    if name == "writer":
        from tests.parity.test_generation import Writing, made  # imports transformers, which takes seconds

        return made("llama", "greedy", Writing)
    return Wide() if name == "wide" else MODELS[name][0](Recipe(optimizer="sgd"))


def main() -> None:
    codec("8bit")  # imports bitsandbytes, which takes seconds
    for name in sys.argv[1:]:
        importlib.import_module(name)
    print("ready", flush=True)
    peers: set[int] = set()  # process ids of forks that were not waited for
    for line in sys.stdin:
        order = json.loads(line)
        if "ended" in order:
            print(_status(order["ended"], peers), flush=True)
            continue
        if "end" in order:
            while peers:
                pid = peers.pop()
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            print(flush=True)
            continue
        pid = os.fork()
        if pid == 0:
            _live(order)
        peers.add(pid)
        print(pid, flush=True)


def _status(pid: int, peers: set[int]) -> str:
    """Return a peer's exit status, as `subprocess` has it, or nothing while the peer lives."""
    if pid not in peers:
        return str(-signal.SIGKILL)  # it was ended with all others
    found, status = os.waitpid(pid, os.WNOHANG)
    if not found:
        return ""
    peers.discard(pid)
    return str(os.waitstatus_to_exitcode(status))


def _live(order: dict[str, Any]) -> None:
    """Run as a peer until the run is over."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if order["netns"]:
        with Path("/run/netns", order["netns"]).open() as netns:
            assert ctypes.CDLL(None).setns(netns.fileno(), _CLONE_NEWNET) == 0
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    status = 1
    try:
        _ROLES[order["role"]](**order["options"])
        status = 0
    except SystemExit as end:
        status = int(end.code or 0)
    except BaseException:  # noqa: BLE001 - it is the end of this process
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def serve(
    *,
    model: str,
    num_stages: int,
    initial_peers: list[str],
    limits: dict[str, float],
    faults: Planned | None = None,
    name: str = "",
    fired: str = "",
    metadata: tuple[str, int] | None = None,
    traffic: str = "",
    invite: str = "",
    identity_path: str = "",
    pipeline: str = "net",
) -> None:
    """Serve as a user's script that joins a run would.

    Args:
        model: One of the tests' models.
        num_stages: The run's number of stages.
        initial_peers: Peers of the run; empty: this is its first server.
        limits: As in `Limits`.
        faults: Faults of the whole swarm; None: no faults are planned.
        name: This process's name in that plan.
        fired: File that records the faults that struck.
        metadata: Address of a cloud's metadata service whose notices this server obeys.
        traffic: Folder for the traffic that it sent, written at the end.
        invite: File of its invitation, if the run only admits invited peers.
        identity_path: File of its key, with which it returns as the same peer.
        pipeline: As in `SwarmStrategy`.
    """
    torch.manual_seed(len(initial_peers))  # its own initial weights are never used
    options: dict[str, Any] = {
        "role": "server",
        "num_stages": num_stages,
        "pipeline": pipeline,
        "initial_peers": initial_peers,
        "limits": Limits(**limits),
    }
    if invite:
        options |= {"trust": "invited", "invite": invite, "identity_path": identity_path}
    if metadata is not None:
        known = preemption.clouds(Endpoint(*metadata))
        preemption.watch = functools.partial(preemption.watch, known=known, every_s=0.5)  # type: ignore[assignment]
        options["preemption"] = "aws"
    if traffic:
        strategy: SwarmStrategy = WatchedStrategy(Path(traffic), **options)
    elif faults is None:
        strategy = SwarmStrategy(**options)
    else:
        strategy = FaultySwarmStrategy(faults=planned(faults), fired=Path(fired), name=name, **options)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=strategy,
        precision="64-true",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(build(model))


def type_in(*, command: list[str], folder: str, environment: dict[str, str]) -> None:
    """Run ``python`` or ``lightning-swarm`` as typed in a folder; `environment` adds to this process's."""
    os.chdir(folder)
    program._imported_in = Path(folder)  # otherwise the zygote's folder, which imported the package for all
    os.environ.update(environment)
    if command[0] == "python":
        _bootstrap.run(command[1:])
    else:
        main = sys.modules["__main__"]
        main.__spec__, main.__file__ = None, str(Path(sys.executable).with_name(command[0]))  # as in a user's process
        sys.argv[:] = command
        sys.exit(cli.main())


_ROLES = {"serve": serve, "train": train, "kind": serve_kind, "type": type_in}


if __name__ == "__main__":
    main()
