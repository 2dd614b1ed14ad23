"""Processes of two kinds of machines hold one stage: processors with and without fused operations."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.hosts import Hosts
from tests.p2p.processes import MODULE, SCRIPT, Run

# Cold starts of peers in this file: 2, and in thorough runs 4 more.

UNFUSED = {"ATEN_CPU_CAPABILITY": "default", "GLIBC_TUNABLES": "glibc.cpu.hwcaps=-FMA,-AVX2,-AVX2_Usable,-FMA4"}
"""Environment that turns off fused multiplication and addition."""
_JOINER_AT = 5
_KILLED_AFTER = 30

pytestmark = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() == "DEFAULT", reason="this machine is of one kind only: no AVX2"
)


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    if missing := Hosts.missing():
        pytest.skip(f"two machines are network namespaces, which need {missing}")
    with Hosts([0.0, 0.0]) as found:
        yield found


def _join(
    start: Callable[..., Run], run: Run, out: Path, kind: Mapping[str, str], *on: str, listen: str = "127.0.0.1"
) -> Run:
    """Start a joiner of a kind of machine, and return once the run has continued with it."""
    invitation = run.wait_for("can join this run: lightning-swarm join ")
    address = invitation.partition("lightning-swarm join ")[2].split()[0]
    run.wait_for("waiting for a joiner")
    (out / "joiner").mkdir()
    joiner = start(
        *("serve", address, SCRIPT, "gpt-losses", out / "joiner", "--devices", 1, "--listen", listen),
        program=[*on, *MODULE],
        environment={"PYTHONPATH": str(SCRIPT.parents[2]), **kind},
    )
    joiner.wait_for("In run 'swarm' from step")
    run.wait_for("waiting for an onlooker")
    (out / "seen").touch()
    return joiner


def _begun(start: Callable[..., Run], out: Path, kind: Mapping[str, str], *on: str, listen: str = "127.0.0.1") -> Run:
    return start(
        *("gpt-losses", out, "--devices", 1, "--num-stages", 2, "--microbatch-size", 3, "--max-steps", 50),
        *("--joiner-at", _JOINER_AT, "--listen", listen),
        *("--rebalancing", "none"),  # otherwise the lead may give up the stage that it shares with the joiner
        program=[*on, sys.executable, str(SCRIPT)],
        environment=kind,
    )


def _assert_joined_and_exact(run: Run, out: Path, kind: Mapping[str, str]) -> dict[str, Any]:
    assert run.wait() == 0, "".join(run.output)
    found: dict[str, Any] = json.loads((out / "result.json").read_text())
    assert [len(peers) for _, peers in found["newcomers"]] == [1], "it came in once, and was left out never"
    assert not [line for line in run.output if "left out" in line]
    # On a machine of the lead's kind, because data and initial weights also differ in their last bits between kinds.
    code = "import sys, pathlib, tests.p2p.test_processes as t; t.assert_plain(pathlib.Path(sys.argv[1]), 'gpt-losses')"
    environment = {**os.environ, "PYTHONPATH": str(SCRIPT.parents[2]), "OMP_NUM_THREADS": "1", **kind}
    plain = subprocess.run(
        [sys.executable, "-c", code, str(out)], check=False, env=environment, capture_output=True, text=True
    )
    assert plain.returncode == 0, plain.stderr
    return found


@pytest.mark.thorough
def test_a_machine_of_another_kind_joins_and_is_killed(start: Callable[..., Run], tmp_path: Path) -> None:
    run = _begun(start, tmp_path, {})
    joiner = _join(start, run, tmp_path, UNFUSED)
    run.wait_for(f"batch {_KILLED_AFTER}\n")
    for pid in joiner.alive():
        os.kill(pid, signal.SIGKILL)
    _assert_joined_and_exact(run, tmp_path, {})


@pytest.mark.thorough
@pytest.mark.exhaustive
def test_the_lead_is_of_the_other_kind(start: Callable[..., Run], tmp_path: Path) -> None:
    run = _begun(start, tmp_path, UNFUSED)
    joiner = _join(start, run, tmp_path, {})
    found = _assert_joined_and_exact(run, tmp_path, UNFUSED)
    assert sorted(map(len, found["status"])) == [1, 2], "both kinds held a stage to the end"
    assert all(count > 0 for stage in found["status"] for count in stage)
    assert joiner.wait() == 0, "".join(joiner.output)


@pytest.mark.thorough
@pytest.mark.exhaustive
def test_two_machines_of_two_kinds(start: Callable[..., Run], hosts: Hosts, tmp_path: Path) -> None:
    run = _begun(start, tmp_path, {}, *hosts.on(0), listen=hosts.address(0))
    joiner = _join(start, run, tmp_path, UNFUSED, *hosts.on(1), listen=hosts.address(1))
    found = _assert_joined_and_exact(run, tmp_path, {})
    assert sorted(map(len, found["status"])) == [1, 2]
    assert joiner.wait() == 0, "".join(joiner.output)


@pytest.mark.thorough
def test_the_kinds_differ() -> None:
    """The same operation has other bits on the two kinds; otherwise the tests above would show nothing."""
    code = (
        "import torch; x = torch.arange(1, 4097).double().reciprocal(); print(torch.lerp(x, x.flip(0), 0.1).tolist())"
    )
    command = [sys.executable, "-c", code]
    kinds = [{**os.environ, **kind} for kind in ({}, UNFUSED)]
    said = [subprocess.run(command, env=kind, capture_output=True, text=True, check=True).stdout for kind in kinds]
    assert len(json.loads(said[0])) == len(json.loads(said[1]))
    assert said[0] != said[1]
