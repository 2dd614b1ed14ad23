"""What it costs that only invited peers take part: the same swarm with `trust="invited"` and with `"open"`, in turns.

Once it computes (two blocks of d_model 512), once it does not, so that a step is all calls (as in
`benchmarks.hops`). Then the start of a run of two peers, with all imports done.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, Final

import torch
from torch import nn
from torch.optim import SGD

from benchmarks.report import picture, table, write
from benchmarks.runs import Turns
from lightning_swarm import SwarmStrategy
from lightning_swarm.model.partition import find_blocks
from lightning_swarm.peer.config import SwarmConfig, TrustLevel
from lightning_swarm.peer.entry import entry_of
from lightning_swarm.peer.manifest import RunSpec
from lightning_swarm.peer.peer import hivemind_peer
from lightning_swarm.peer.process import owners_folder
from lightning_swarm.server.stage_builder import ComputeSettings, PeerModel

MODES: Final[tuple[TrustLevel, TrustLevel]] = ("open", "invited")
COMPUTES = ("--devices", 2, "--num-stages", 2, "--width", 512, "--num-blocks", 2, "--batch-size", 64)
CALLS = ("--nop", "--role", "trainer", "--devices", 3, "--num-stages", 2, "--width", 64, "--num-blocks", 2)
NUM_MICROBATCHES = 64
CPU = torch.device("cpu")
SPEC = RunSpec(
    ranges=[range(1), range(1, 2)],
    num_servers=1,
    num_trainers=0,
    seed=0,
    gradient_clip_norm=None,
    gradient_clip_value=None,
    first_step=0,
    selection=None,
    max_steps=None,
    total_steps=None,
)


def seconds(options: Sequence[object], num_turns: int, environment: dict[str, str]) -> dict[str, list[float]]:
    """The time of each step of both ways, in turns; the first ones do not count."""
    ways = {str(mode): ("benchmarks.train", ("--by-turns", *options, "--trust", mode)) for mode in MODES}
    found: dict[str, list[float]] = {mode: [] for mode in MODES}
    with Turns(ways, environment=environment) as turns:
        for turn in range(num_turns + 2):
            for mode in MODES if turn % 2 else reversed(MODES):
                took_s = turns.take(mode)
                if turn > 1:
                    found[mode].append(took_s)
    return found


def start_s(mode: TrustLevel) -> float:
    """Seconds until a run of two peers in this process has begun: all of a start but the imports."""

    def config(**options: Any) -> SwarmConfig:
        return SwarmStrategy(num_stages=2, target_batch_size=1, trust=mode, **options).config

    def peer_model() -> PeerModel:
        module = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        return PeerModel(module, find_blocks(module, None), lambda _: SGD(module.parameters()), ComputeSettings(CPU))

    model, began_s = peer_model(), time.monotonic()
    entry = entry_of(config(), owners_folder, now_s=time.time())
    with ExitStack() as stack:
        starter = hivemind_peer(config(), entry)
        stack.callback(starter.close)
        initial, invite = starter.address, None
        if entry is not None:
            invite = stack.enter_context(tempfile.NamedTemporaryFile("w", suffix=".invite"))
            invite.write(entry.invitation_for_children(1, train=False, now_s=time.time()) or "")
            invite.flush()
        own = config(initial_peers=initial, role="server", invite=None if invite is None else invite.name)
        joiner = hivemind_peer(own, entry_of(own, owners_folder, now_s=time.time()))
        stack.callback(joiner.close)
        joiner.serve(peer_model())
        starter.start_run(SPEC, model, CPU, lambda: None)
        return time.monotonic() - began_s


def main(words: Sequence[str] | None = None) -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=60)
    parser.add_argument("--starts", type=int, default=30)
    arguments = parser.parse_args(words)
    rows: list[list[object]] = [["what", "open", "invited", "invited / open", "quartiles"]]
    shown: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        environment = {"XDG_CONFIG_HOME": folder}
        calls = (*CALLS, "--batch-size", NUM_MICROBATCHES)
        for name, options, num_turns in (
            ("a step that computes", COMPUTES, arguments.turns // 4),
            ("a step of calls alone", calls, arguments.turns),
        ):
            found = seconds(options, num_turns, environment)
            rows.append(row(name, found, "ms", 1e3))
            shown |= {f"{name}, {mode}": [1e3 * took_s for took_s in found[mode]] for mode in MODES}
        os.environ |= environment
        starts: dict[str, list[float]] = {mode: [] for mode in MODES}
        for turn in range(arguments.starts + 1):
            for mode in MODES if turn % 2 else MODES[::-1]:
                took_s = start_s(mode)
                starts[mode] += [took_s] if turn else []
        rows.append(row("the start", starts, "ms", 1e3))
    title = "What it costs that only invited peers take part"
    write("trust", table(title, rows))
    picture("trust", title, "ms a step", shown)


def row(name: str, found: dict[str, list[float]], unit: str, factor: float) -> list[object]:
    """Of the table."""
    ratios = [invited / alone for alone, invited in zip(found["open"], found["invited"], strict=True)]
    low, median, high = statistics.quantiles(ratios, n=4)
    each = [f"{factor * statistics.median(found[mode]):.3g} {unit}" for mode in MODES]
    return [name, *each, f"{median:.3f}", f"{low:.3f} to {high:.3f}"]


if __name__ == "__main__":
    main()
