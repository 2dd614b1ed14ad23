"""Benchmarks that start real processes on shared cores, each in a small run of its real code."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import overhead
from tests.benchmarks.small import Small, run

# The end of a benchmark's process closes its children's pipes; here the process goes on.
pytestmark = [
    pytest.mark.timeout(580),  # processes start slowly on a busy machine
    pytest.mark.filterwarnings("ignore:unclosed", "ignore::pytest.PytestUnraisableExceptionWarning"),
]

TINY = ("--width", 64, "--num-blocks", 2, "--batch-size", 4)
LARGE = ("--devices", 2, "--num-stages", 2, "--max-steps", 2, "--d-model", 64, "--num-blocks", 2)
SERVED = "--width 64 --num-blocks 2"  # the served model's size

PROCESSES = {
    # The parts of `make bench`.
    "throughput": Small("--turns 2 --num-blocks 2 --microbatch-size 1", {"WIDTH": 64, "NUM_MICROBATCHES": 4}),
    "streaming": Small("--repeats 1"),
    "allreduce": Small("--peers 2 --parameters 100000 --repeats 2"),
    "hops": Small("--rounds 1 --seconds 3", {"NUM_MICROBATCHES": 8}),
    "steps": Small("--seconds 3 --steps 1", {"WIDTHS": (64,), "NUM_PEERS": 2}),
    "startup": Small("--repeats 1", {"NUM_PEERS": 2}),
    "recovery": Small("--repeats 1 --seconds 15", {"SWARM": (*overhead.SWARM, *TINY)}),
    "overhead": Small(
        "--repeats 1 --seconds 15", {"SWARM": ("--role", "trainer", "--devices", 3, "--num-stages", 2, *TINY)}
    ),
    # Further benchmarks.
    "generation": Small(f"--stages 2 --repeats 1 {SERVED}"),
    "generation_large": Small(SERVED, {"NUM_PEERS": 2}),
    "generation_quantized": Small(f"--repeats 1 {SERVED}"),
    "generation_many": Small(f"--stages 1 --texts 2 --repeats 1 {SERVED}"),
    "generation_turns": Small(f"--stages 1 --prompt 300 --repeats 1 {SERVED}"),
    "honest_kinds": Small("--peers 2 --steps 2", {"CONDITIONS": ("float32, dropout",)}),
    "large": Small("--memory-mb 0", {"WAYS": {"a swarm of 2": LARGE}}),
    "moving": Small("--seconds 20 --interval-s 4", {"NUM_MICROBATCHES": 8, "BEGIN": ((1.0,), (1.0, 3.0))}),
    "trainers": Small("--repeats 1", {"SIZES": (("tiny", 16, 1, 8, 3),)}),
    "trust": Small("--turns 8 --starts 2"),
    "tuning": Small(f"--users 1 --repeats 1 --seconds 2 {SERVED}"),
}
"""Each starts two to five processes at once, once or a few times."""

CHECKED = ("allreduce", "steps", "overhead")
"""Run by `make check`; the other benchmarks take too long together."""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.thorough if name in CHECKED else pytest.mark.benchmark)
        for name in PROCESSES
    ],
)
def test_it_measures(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(name, PROCESSES[name], folder, monkeypatch)


@pytest.mark.benchmark
def test_memory_measures_peers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"WIDTH": 64, "NUM_BLOCKS": 2, "OPTIONS": {"8 bits": ("--eight-bits",)}}
    run("memory", Small("--steps 0", sizes), folder, monkeypatch)


@pytest.mark.benchmark
def test_lightnings_own_tests_run_in_a_swarm(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tests = folder / "lightning" / "tests" / "tests_pytorch" / "core"
    tests.mkdir(parents=True)
    (folder / "lightning" / "pyproject.toml").touch()
    (tests / "test_fit.py").write_text(LIGHTNING_TESTS)
    words = f"{folder / 'lightning'} --folders core --how stage"
    found = run("lightning_suite", Small(words), folder, monkeypatch)
    [row] = [line.split() for line in found.splitlines() if line.startswith("all ")]
    # Both pass unchanged and with a swarm; one of them has a Trainer.
    assert row == ["all", "2", "2", "0", "0", "0", "1", "100.0%"]


LIGHTNING_TESTS = """
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel


def test_fit(tmp_path):
    Trainer(default_root_dir=tmp_path, max_steps=2, logger=False, accelerator="cpu", devices=1).fit(BoringModel())


def test_nothing():
    pass
"""
