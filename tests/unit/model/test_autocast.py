"""The trainer's mode is entered where a stage computes, and left again."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import torch

from lightning_swarm.core.errors import ProtocolError
from lightning_swarm.model.autocast import capture, enter_backward_modes, enter_modes
from lightning_swarm.protocol.messages.calls import ComputeMode
from lightning_swarm.protocol.messages.wire import decode, encode


def flags() -> dict[str, Any]:
    """Everything that a mode may touch."""
    return {
        "default_dtype": torch.get_default_dtype(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "warn_only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "anomaly": torch.is_anomaly_enabled(),
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


@pytest.mark.parametrize("names", [{"default_dtype": "int8"}, {"autocast": "x"}])
def test_a_dtype_that_no_mode_has_is_refused(names: dict[str, str]) -> None:
    mode = msgspec.structs.replace(PLAIN, **names)
    with pytest.raises(ProtocolError, match="must be one of"), enter_modes(mode, "cpu"):
        pytest.fail("entered")
