"""The trainer's mode is entered where a stage computes, and left again."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import torch

from lightning_swarm.core.errors import ProtocolError
from lightning_swarm.model import autocast
from lightning_swarm.model.autocast import capture, enter_backward_modes, enter_modes
from lightning_swarm.protocol.messages.calls import ComputeMode
from lightning_swarm.protocol.messages.wire import decode, encode

HAS_BACKENDS = hasattr(torch.backends.cuda.matmul, "fp32_precision")  # missing in the oldest supported torch


def matmul_flags() -> tuple[str, ...]:
    """Return the precision of products of float32, with CUDA and on the CPU."""
    if not HAS_BACKENDS:
        return (torch.get_float32_matmul_precision(),)
    found = torch.backends.cuda.matmul.fp32_precision, torch.backends.mkldnn.matmul.fp32_precision
    return tuple("ieee" if one == "none" else one for one in found)


def flags() -> dict[str, Any]:
    """Return all flags that a mode may change."""
    return {
        "default_dtype": torch.get_default_dtype(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "warn_only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "anomaly": torch.is_anomaly_enabled(),
        "matmul": matmul_flags(),
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
    }


@pytest.fixture(autouse=True)
def untouched() -> Iterator[None]:
    before = flags()
    yield
    assert flags() == before


PLAIN = ComputeMode(training=True, grad=True)
OTHER = ComputeMode(training=False, grad=False, autocast="bfloat16", default_dtype="float64", deterministic="warn")


def test_the_modes_flags_hold_inside_and_only_there() -> None:
    before = flags()
    with enter_modes(OTHER, "cpu"):
        inside = flags()
        assert torch.get_autocast_dtype("cpu") == torch.bfloat16
    assert flags() == before
    assert inside == {
        "default_dtype": torch.float64,
        "deterministic": True,
        "warn_only": True,
        "anomaly": False,
        "matmul": ("ieee", "ieee") if HAS_BACKENDS else ("highest",),
        "grad": False,
        "inference": False,
        "autocast": True,
    }


def test_a_plain_mode_undoes_what_surrounds_it() -> None:
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16), enter_modes(PLAIN, "cpu"):
        assert (torch.is_inference_mode_enabled(), torch.is_grad_enabled()) == (False, True)
        assert not torch.is_autocast_enabled("cpu")
        assert not torch.ones(1).is_inference()


@pytest.mark.parametrize("enter", [lambda: enter_modes(OTHER, "cpu"), lambda: enter_backward_modes(OTHER)])
def test_an_error_inside_leaves_nothing_behind(enter: Callable[[], Any]) -> None:
    with pytest.raises(ZeroDivisionError), enter():
        raise ZeroDivisionError


def test_backward_runs_outside_autocast() -> None:
    with enter_backward_modes(OTHER):
        assert not torch.is_autocast_enabled("cpu")
        assert torch.get_default_dtype() == torch.float64


@pytest.mark.parametrize(
    ("surround", "expected"),
    [
        (lambda: torch.autocast("cpu", torch.bfloat16), {"autocast": "bfloat16"}),
        (lambda: torch.autograd.set_detect_anomaly(True, check_nan=False), {"anomaly": True}),
        (
            lambda: enter_modes(ComputeMode(training=True, grad=True, default_dtype="float64"), "cpu"),
            {"default_dtype": "float64"},
        ),
        (
            lambda: enter_modes(ComputeMode(training=True, grad=True, deterministic="on"), "cpu"),
            {"deterministic": "on"},
        ),
        (
            lambda: enter_modes(ComputeMode(training=True, grad=True, deterministic="warn"), "cpu"),
            {"deterministic": "warn"},
        ),
    ],
    ids=["autocast", "anomaly", "dtype", "deterministic", "warn"],
)
@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
def test_what_is_captured_travels_to_another_thread(surround: Callable[[], Any], expected: dict[str, Any]) -> None:
    with surround():
        mode = decode(encode(capture("cpu", training=True, grad=True, input_grad=False)), ComputeMode)
        there: list[dict[str, Any]] = []

        def compute() -> None:
            with enter_modes(mode, "cpu"):
                there.append(flags())

        thread = threading.Thread(target=compute)
        thread.start()
        thread.join()
        here = flags()
    for name, value in expected.items():
        assert getattr(mode, name) == value
    assert there == [here]


def set_backends(cuda: str, cpu: str) -> None:
    torch.backends.cuda.matmul.fp32_precision = cuda
    torch.backends.mkldnn.matmul.fp32_precision = cpu


BACKENDS = [("tf32", "ieee"), ("ieee", "bf16")] if HAS_BACKENDS else []


@pytest.mark.parametrize("theirs", [("highest",), ("high",), ("medium",), *BACKENDS], ids=str)
@pytest.mark.parametrize("ours", [("highest",), ("high",), *BACKENDS], ids=str)
def test_products_are_as_precise_as_the_trainers_and_then_as_before(
    ours: tuple[str, ...], theirs: tuple[str, ...]
) -> None:
    def use(precision: tuple[str, ...]) -> None:
        torch.set_float32_matmul_precision(precision[0] if len(precision) == 1 else "highest")
        if len(precision) == 2:
            set_backends(*precision)

    try:
        use(theirs)
        wanted = matmul_flags()
        mode = decode(encode(capture("cpu", training=True, grad=True, input_grad=False)), ComputeMode)
        use(ours)
        before = matmul_flags()
        for enter in (enter_modes(mode, "cpu"), enter_backward_modes(mode)):
            with enter:
                assert matmul_flags() == wanted
            assert matmul_flags() == before
        if len(ours) == 1:
            assert torch.get_float32_matmul_precision() == ours[0]
    finally:
        torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize("precision", ["low", ["bf16", "ieee"], ["ieee"], ["ieee", "int8"], 3, None])
def test_a_precision_that_there_is_not_is_refused(precision: object) -> None:
    mode = msgspec.to_builtins(PLAIN) | {"matmul_precision": precision}
    with pytest.raises(ProtocolError):
        decode(msgspec.msgpack.encode(mode), ComputeMode)


def test_a_torch_without_such_settings_refuses_them_and_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autocast, "_backends", lambda: (None, None))
    mode = msgspec.structs.replace(PLAIN, matmul_precision=("tf32", "ieee"), default_dtype="float64")
    with pytest.raises(ProtocolError, match="Update torch"), enter_modes(mode, "cpu"):
        pytest.fail("entered")


@pytest.mark.parametrize("names", [{"default_dtype": "int8"}, {"autocast": "x"}])
def test_a_dtype_that_no_mode_has_is_refused(names: dict[str, str]) -> None:
    mode = msgspec.structs.replace(PLAIN, **names)
    with pytest.raises(ProtocolError, match="must be one of"), enter_modes(mode, "cpu"):
        pytest.fail("entered")
