"""Benchmarks that measure in one process, each in a small run of its real code."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from benchmarks import audit_costs, honest_audits, simulated, spot, trust, unlike, unlike_faults
from benchmarks.routing import NUM_SLOWED
from tests.benchmarks.small import ROOT, Small, run
from tests.benchmarks.test_links import LINKS
from tests.benchmarks.test_processes import PROCESSES

SMALL = {
    "alone": Small("--repeats 1 --steps 3", {"NUM_STAGES": (2,)}),
    "boundary": Small("--steps 2 --ratios 2 --scales 1", {"BATCH": 2}),
    "codecs": Small("--turns 1 --turn-seconds 0", {"SIZES": (1 << 12, 1 << 16)}),
    "compression": Small("--steps 2 --seeds 1 --processes 0 --only 8bit", {"EVERY": 1}),
    "decisions": Small(
        constants={"NUM_PEERS": (10,), "NUM_STAGES": (4,), "PER_STAGE": 20, "NUM_LOST": (0, 2), "REPEATS": 1}
    ),
    "late": Small("--steps 10 --seeds 0 --rates 1e-3 --processes 0"),
    "liars": Small("--attack 'no numbers' --liars 3 --defence audits", {"SINCE": 1, "NUM_STEPS": 2}),
    "memory": Small("--steps 2 --seeds 1 --processes 0", {"OPTIONS": {}}),
    "rebalancing": Small("--seeds 1", {"SIZES": {4: 1}, "TRACES": {"bursts": spot.bursts, "growth": spot.growth}}),
    "routing": Small(constants={"NUM_SERVERS": NUM_SLOWED + 1, "NUM_STEPS": 4, "LEARNING": 2, "NUM_SEEDS": 1}),
    "traffic": Small("--most 10"),
    "unlike": Small("--only drift --steps 2 --seeds 0", {"NUM_HELD_OUT": 4}),
}
"""Each takes about a second."""


HELPERS = {"bare", "delays", "ends", "gpipe", "joined", "together", "train", "waiting", "wan.peers", "wan.swarm"}
"""Programs of the processes that benchmarks start."""


@pytest.mark.filterwarnings(
    "ignore:torch.quantize_per_tensor", "ignore:Conversion of an array", "ignore:The given NumPy"
)  # caused by hivemind's codecs
@pytest.mark.parametrize("name", SMALL)
def test_it_measures(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "nan" not in run(name, SMALL[name], folder, monkeypatch)


def test_liars_counts_convictions_of_honest_servers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(honest_audits, "NUM_STEPS", 2)
    found = run("liars", Small("--honest 1"), folder, monkeypatch)
    assert " 0 convictions" in found


@pytest.mark.thorough
def test_liars_measures_what_audits_cost(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"NUM_PEERS": 4, "WIDTH": 16, "BATCH": 8, "NUM_STEPS": 5, "WARM_UP": 3, "NUM_VIRTUAL_STEPS": 5}
    for name, value in {**sizes, "NUM_TURNS": 2}.items():
        monkeypatch.setattr(audit_costs, name, value)
    found = run("liars", Small("--overhead"), folder, monkeypatch)
    # A stage's first steps are audited entirely, and new servers' work for longer, so these servers count as old.
    [share] = re.findall(r"([\d.]+) of server-steps audited", found)
    assert float(share) < 0.5


def test_unlike_counts_honest_replicas_left_out(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"RUN_STEPS": 3, "HONEST": {"AdamW": ("AdamW", {})}}
    found = run("unlike", Small("--only honest --steps 3", sizes), folder, monkeypatch)
    assert re.findall(r"^all +3 +0 +[1-9]", found, flags=re.MULTILINE)


def test_unlike_measures_what_portable_steps_cost(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"LARGE": unlike.SMALL, "COSTS": (("AdamW", 4),)}
    found = run("unlike", Small("--only cost --steps 6", sizes), folder, monkeypatch)
    [row] = [line.split() for line in found.splitlines() if line.startswith("AdamW")]
    assert row[1] == "64"
    assert float(row[-1]) == pytest.approx(1.0, abs=1e-3)


@pytest.mark.parametrize(("number", "left_out"), [(3, "broken 1, honest 0"), (2, "broken 0, honest 1")])
def test_unlike_finds_a_flipped_bit(number: int, left_out: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unlike_faults, "FAULTS", {"flipped": partial(unlike_faults.flip, 0)})
    monkeypatch.setattr(unlike_faults, "STAGES", {"few": (number, True)})
    monkeypatch.setattr(unlike_faults, "NO_DROPOUT", {})
    found = run("unlike", Small("--only faults --steps 2 --seeds 0"), folder, monkeypatch)
    [row] = [line for line in found.splitlines() if line.startswith("flipped")]
    assert re.search(r"few +1 +1 +1 +", row)
    assert row.endswith(left_out)


@pytest.mark.parametrize("settings", [{}, {"trust": "audited"}], ids=["trusted", "audited"])
def test_only_audits_find_a_replica_without_dropout(settings: dict[str, str]) -> None:
    found = unlike_faults.spoil(None, (2, True), seed=0, at=1, num_steps=6, **settings)
    assert (found.num_steps is not None, found.is_right) == (bool(settings), bool(settings))


def test_a_start_of_invited_peers_is_measured() -> None:
    assert all(trust.start_s(mode) > 0.0 for mode in trust.MODES)


def test_a_swarm_of_hosts_is_simulated() -> None:
    slow, fast = (
        simulated.predicted(simulated.Swarm([[50.0]] * 2, 8, boundary_bytes=250_000, mbits=[[mbit]] * 2), 3.0)
        for mbit in (20.0, 40.0)
    )
    assert fast == pytest.approx(2 * slow, rel=0.2)  # links are the bottleneck


def test_every_benchmark_is_tried() -> None:
    tried = [*SMALL, *PROCESSES, *LINKS]
    assert len(tried) == len(set(tried))
    assert {*tried, "lightning_suite"} | HELPERS == modules_with_main()


def test_make_runs_benchmarks_that_are_there() -> None:
    [line] = re.findall(r"^BENCHMARKS := (.*)$", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    assert {*line.split()} <= {*SMALL, *PROCESSES}


@pytest.mark.skipif(shutil.which("make") is None, reason="it needs make")
def test_make_goes_on_past_a_benchmark_that_fails() -> None:
    """`wan` has no program, and `tea` does not exist: both fail immediately."""
    command = ["make", "-C", str(ROOT), "-o", ".venv/.installed", "bench", "BENCHMARKS=wan tea"]
    environment = {**os.environ, "BIN": str(Path(sys.executable).parent)}
    made = subprocess.run([*command, "-e"], env=environment, capture_output=True, text=True, check=False)
    assert [line for line in made.stdout.splitlines() if line.startswith("==")] == ["== wan", "== tea"]
    assert "Failed: wan tea" in made.stderr.splitlines()
    assert made.returncode != 0


def modules_with_main() -> set[str]:
    folder = ROOT / "benchmarks"
    return {
        ".".join(path.relative_to(folder).with_suffix("").parts)
        for path in folder.rglob("*.py")
        if '__name__ == "__main__"' in path.read_text()
    }
