"""Machines that may compute different bits from the same input have different names."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_swarm.protocol.messages.calls import ComputeMode
from lightning_swarm.server import arithmetic
from lightning_swarm.server.arithmetic import arithmetic_of, precision_of

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _anew() -> Iterator[None]:
    arithmetic._processor.cache_clear()
    yield
    arithmetic._processor.cache_clear()


def test_a_machine_has_one_name() -> None:
    before = arithmetic_of(CPU)
    arithmetic._processor.cache_clear()
    assert arithmetic_of(CPU) == before
    assert torch.__version__ in before
    assert len(before) <= 100


@pytest.mark.parametrize("name", ["MKL_CBWR", "ONEDNN_MAX_CPU_ISA"])
def test_what_the_libraries_are_told_is_in_it(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    before = arithmetic_of(CPU)
    monkeypatch.setenv(name, "AVX2")
    arithmetic._processor.cache_clear()
    assert arithmetic_of(CPU) != before


@pytest.mark.parametrize(
    ("mode", "dtype", "expected"),
    [
        ({}, torch.float32, "float32"),
        ({"matmul_precision": ("none", "ieee")}, torch.float32, "float32"),
        ({"matmul_precision": "high"}, torch.float32, "bfloat16"),
        ({"matmul_precision": ("none", "bf16")}, torch.float32, "bfloat16"),
        ({"matmul_precision": ("tf32", "ieee")}, torch.float32, "bfloat16"),
        ({"matmul_precision": "medium"}, torch.float64, "float64"),
        ({"autocast": "float16"}, torch.float32, "float16"),
    ],
)
def test_results_are_as_precise_as_the_mode_has_it(mode: dict[str, Any], dtype: torch.dtype, expected: str) -> None:
    assert precision_of(ComputeMode(training=True, grad=True, **mode), dtype) == expected


def test_the_number_of_threads_is_in_it() -> None:
    before, num_threads = arithmetic_of(CPU), torch.get_num_threads()
    torch.set_num_threads(num_threads + 1)
    try:
        assert arithmetic_of(CPU) != before
    finally:
        torch.set_num_threads(num_threads)


@pytest.mark.parametrize(("model", "is_alike"), [("17", True), ("18", False)])
def test_two_models_with_the_same_instructions_differ(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, model: str, is_alike: bool
) -> None:
    """The libraries choose their kernels by the processor's model; its clock rate, for example, does not matter."""
    facts = tmp_path / "cpuinfo"
    monkeypatch.setattr(arithmetic, "_CPUINFO", facts)
    facts.write_text("processor\t: 0\ncpu family\t: 25\nmodel\t\t: 17\ncpu MHz\t\t: 2500\n\nprocessor\t: 1\n")
    before = arithmetic_of(CPU)
    facts.write_text(f"processor\t: 0\ncpu family\t: 25\nmodel\t\t: {model}\ncpu MHz\t\t: 3000\n\n")
    arithmetic._processor.cache_clear()
    assert (arithmetic_of(CPU) == before) is is_alike


def test_where_the_system_tells_no_model_there_is_a_name_all_the_same(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(arithmetic, "_CPUINFO", tmp_path / "nothing")
    assert arithmetic_of(CPU)


@pytest.mark.thorough
def test_other_instructions_are_in_it() -> None:
    code = f"import torch; from {arithmetic.__name__} import arithmetic_of; print(arithmetic_of(torch.device('cpu')))"
    found = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "ATEN_CPU_CAPABILITY": capability},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for capability in ("default", "avx2")
    }
    assert len(found) == 2
