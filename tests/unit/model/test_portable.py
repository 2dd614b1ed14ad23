"""Arithmetic with the same bits on all machines: correct up to rounding, and equal under other kernels of torch."""

from __future__ import annotations

import hashlib
import math
import os
import random
import subprocess
import sys
from collections import Counter
from contextlib import nullcontext
from fractions import Fraction
from functools import partial
from typing import Any

import pytest
import pytorch_optimizer
import torch
from torch import Tensor, nn

from lightning_swarm.model.portable import PortableArithmetic, Unportable, integer_power
from lightning_swarm.model.portable_numbers import PortableFloat, portable_groups
from lightning_swarm.model.portable_products import exact_product, tree_sum
from lightning_swarm.testing import UnlikeMachine

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "AdamW": {"amsgrad": True},
    "Adam": {"weight_decay": 0.1},
    "SGD": {"momentum": 0.9, "nesterov": True},
    "NAdam": {},
    "RAdam": {},
    "RMSprop": {"centered": True, "momentum": 0.5},
    "Adagrad": {},
    "Adadelta": {},
    "Adamax": {},
    "ASGD": {},
    "Rprop": {},
    "Adafactor": {},
    "Muon": {},
}
DTYPES = (torch.float32, torch.float64, torch.bfloat16)
STEPS = 8
OTHER_KERNELS = {
    "ATEN_CPU_CAPABILITY": "default",
    "GLIBC_TUNABLES": "glibc.cpu.hwcaps=-FMA,-AVX2_Usable,-AVX2,-FMA4",
}


def stepped(name: str, dtype: torch.dtype, *, portable: bool) -> tuple[torch.optim.Optimizer, list[Tensor]]:
    """Step small parameters with gradients that have the same bits on all machines."""
    draw = random.Random(name)
    shapes = [(6, 5), (3, 9)] if name == "Muon" else [(6, 5), (7,)]

    def numbers(shape: tuple[int, ...]) -> Tensor:
        values = [draw.randrange(-4096, 4096) / 4096 for _ in range(math.prod(shape))]
        return torch.tensor(values, dtype=torch.float64).reshape(shape).to(dtype)

    parameters = [nn.Parameter(numbers(shape)) for shape in shapes]
    optimizer = getattr(torch.optim, name)(parameters, lr=1e-2, **OPTIMIZERS[name])
    for _ in range(STEPS):
        for parameter in parameters:
            parameter.grad = numbers(tuple(parameter.shape))
        if portable:
            with portable_groups(optimizer), PortableArithmetic():
                optimizer.step()
        else:
            optimizer.step()
    return optimizer, [parameter.detach() for parameter in parameters]


def digest(optimizer: torch.optim.Optimizer, weights: list[Tensor]) -> str:
    """Return the digest of weights and state."""
    found = hashlib.sha256()
    for tensor in [*weights, *(one for state in optimizer.state.values() for one in state.values())]:
        if isinstance(tensor, Tensor):
            found.update(tensor.reshape(-1).contiguous().view(torch.uint8).numpy().tobytes())
        else:
            found.update(repr(tensor).encode())
    return found.hexdigest()


def digests(*, portable: bool) -> list[str]:
    return [digest(*stepped(name, dtype, portable=portable)) for name in OPTIMIZERS for dtype in DTYPES]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_step_as_torch_does_up_to_rounding(name: str, dtype: torch.dtype) -> None:
    _, native = stepped(name, dtype, portable=False)
    optimizer, portable = stepped(name, dtype, portable=True)
    # Muon computes its orthogonal directions in bfloat16 for parameters of any dtype.
    rounding = torch.finfo(torch.bfloat16 if name == "Muon" else dtype).eps
    for one, other in zip(native, portable, strict=True):
        assert float((one - other).abs().max()) <= (STEPS * rounding if name != "Muon" else 1e-2)
    numbers = [value for group in optimizer.param_groups for value in group.values()]
    numbers += [value for state in optimizer.state.values() for value in state.values()]
    assert not [value for value in numbers if isinstance(value, PortableFloat)]


@pytest.mark.thorough
def test_other_kernels_step_to_the_same_bits() -> None:
    if torch.backends.cpu.get_cpu_capability() == "DEFAULT":
        pytest.skip("this processor has no other kernels")
    code = (
        "from tests.unit.model import test_portable as t; print(*t.digests(portable=True), *t.digests(portable=False))"
    )
    environment = {**os.environ, **OTHER_KERNELS, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-W", "ignore", "-c", code]
    told = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.split()
    here = digests(portable=True)
    assert told[: len(here)] == here
    assert told[len(here) :] != digests(portable=False), "the other kernels do not differ"


@pytest.mark.parametrize("name", ["AdamW", "RMSprop", "Adafactor"])
def test_an_unlike_machine_differs_by_its_own_arithmetic_alone(name: str) -> None:
    machine = UnlikeMachine()
    there = machine.compute(lambda: digest(*stepped(name, torch.float32, portable=False)))
    assert machine.num_moved
    assert there != digest(*stepped(name, torch.float32, portable=False))
    there = machine.compute(lambda: digest(*stepped(name, torch.float32, portable=True)))
    assert there == digest(*stepped(name, torch.float32, portable=True))


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore")
def test_other_libraries_optimizers_step_to_the_same_bits_or_are_refused() -> None:
    """Optimizers of `pytorch_optimizer` that need only gradients step here as on an unlike machine, or are refused."""

    def step(make: Any, *, portable: bool) -> bytes:
        torch.manual_seed(0)
        parameters = [nn.Parameter(torch.randn(6, 5)), nn.Parameter(torch.randn(7))]
        optimizer = make(parameters, lr=1e-2)
        for _ in range(STEPS):
            for parameter in parameters:
                parameter.grad = torch.randn_like(parameter)
            with (
                portable_groups(optimizer) if portable else nullcontext(),
                PortableArithmetic() if portable else nullcontext(),
            ):
                optimizer.step()
        return b"".join(parameter.detach().numpy().tobytes() for parameter in parameters)

    there, outcomes = UnlikeMachine(seed=3), Counter[str]()
    for name in pytorch_optimizer.get_supported_optimizers():
        make = pytorch_optimizer.load_optimizer(name)
        try:
            here = step(make, portable=True)
        except Unportable:
            outcomes["refused"] += 1
        except Exception:  # noqa: BLE001 - some take a loss, a module or names, and each says so in its own way
            outcomes["needs more than gradients"] += 1
        else:
            assert there.compute(partial(step, make, portable=True)) == here, name
            outcomes["equal"] += 1
            native = step(make, portable=False)
            outcomes["natively unequal"] += there.compute(partial(step, make, portable=False)) != native
    assert outcomes["equal"] > 80
    assert outcomes["natively unequal"] > 80
    assert outcomes["refused"] > 10


# ---------------------------------------------------------------------- products and sums


@pytest.mark.parametrize("length", [1, 7, 5000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_products_are_exact_to_more_than_the_operands_bits(length: int, dtype: torch.dtype) -> None:
    torch.manual_seed(length)
    left, right = torch.randn(2, length, dtype=torch.float64).to(dtype), torch.randn(length, 2).to(dtype)
    found = exact_product(left, right)
    for row in range(2):
        for column in range(2):
            factors = list(zip(left[row].tolist(), right[:, column].tolist(), strict=True))
            true = sum(Fraction(one) * Fraction(other) for one, other in factors)
            size = float(left[row].abs().max()) * float(right[:, column].abs().max()) * length
            assert abs(float(Fraction(found[row, column].item()) - true)) <= size * torch.finfo(dtype).eps


def test_products_of_what_is_no_number() -> None:
    left = torch.tensor([[0.0, 0.0], [math.inf, 1.0], [math.nan, 0.0], [1e300, 1e-300]], dtype=torch.float64)
    found = exact_product(left, torch.tensor([[1.0], [2.0]], dtype=torch.float64))[:, 0]
    assert found[0] == 0.0
    assert found[1:3].isnan().all()
    assert found[3] == 1e300
    tiny = torch.tensor([[2.0**-1070]], dtype=torch.float64)
    assert exact_product(tiny, torch.ones(1, 1, dtype=torch.float64)).item() == 2.0**-1070


@pytest.mark.parametrize("length", [0, 1, 2, 3, 1000])
def test_sums_are_of_all_numbers(length: int) -> None:
    values = torch.arange(length, dtype=torch.float64)
    assert tree_sum(values).item() == length * (length - 1) / 2


# ---------------------------------------------------------------------- powers


def test_whole_powers() -> None:
    bases, exponents = torch.tensor([0.5, 3.0, -2.0, 0.0, 0.9]), torch.tensor([10.0, 4.0, 3.0, 0.0, 1.0])
    assert torch.equal(integer_power(bases, exponents), torch.tensor([0.5**10, 81.0, -8.0, 1.0, 0.9]))


@pytest.mark.parametrize("exponent", [-1.0, 0.5, math.nan, math.inf, 1e300])
def test_exponents_that_are_no_counts_are_refused(exponent: float) -> None:
    with pytest.raises(Unportable, match="not nonnegative integers"):
        integer_power(torch.ones(1, dtype=torch.float64), torch.tensor([exponent], dtype=torch.float64))


def test_powers_of_hyperparameters_are_correctly_rounded() -> None:
    draw = random.Random(0)
    for _ in range(200):
        base, exponent = draw.uniform(0.5, 1.5), draw.randrange(200)
        found = PortableFloat(base) ** exponent
        true = Fraction(base) ** exponent
        errors = [abs(Fraction(one) - true) for one in (found, math.nextafter(found, 0.0), math.nextafter(found, 9e99))]
        assert errors[0] == min(errors)
    assert isinstance((1 - PortableFloat(0.9)) / 2 + 1, PortableFloat)
    assert PortableFloat(0.0) ** 2 == 0.0
    assert PortableFloat(2.0) ** math.inf == math.inf


# ---------------------------------------------------------------------- operations


# An operation's arguments after the first list: "l" for another list, plain numbers, and keyword arguments.
ON_LISTS: dict[str, tuple[tuple[Any, ...], dict[str, float]]] = {
    "add-multiple": (("l",), {"alpha": 0.3}),
    "add-number": ((0.3,), {}),
    "sub": (("l",), {"alpha": -1.7}),
    "mul": (("l",), {}),
    "mul-numbers": (([0.3, 1.7],), {}),
    "mul-tensor": ((torch.tensor(0.3),), {}),
    "div": (("l",), {}),
    "div-number": ((0.3,), {}),
    "div-numbers": (([0.3, 1.7],), {}),
    "sqrt": ((), {}),
    "addcmul": (("l", "l"), {"value": 0.3}),
    "addcmul-numbers": (("l", "l", [0.3, 1.7]), {}),
    "addcdiv": (("l", "l"), {"value": -0.3}),
    "addcdiv-numbers": (("l", "l", [0.3, 1.7]), {}),
    "lerp": (("l", 0.3), {}),
    "lerp-far": (("l", 0.9), {}),
    "lerp-weights": (("l", "l"), {}),
}
LIST_DTYPES = {"alike": (torch.float32, torch.float32), "mixed": (torch.float32, torch.bfloat16)}


@pytest.mark.parametrize("dtypes", LIST_DTYPES)
@pytest.mark.parametrize("case", ON_LISTS)
def test_an_operation_on_lists_has_the_bits_of_those_on_their_tensors(case: str, dtypes: str) -> None:
    name, (operands, named) = case.partition("-")[0], ON_LISTS[case]
    draw = torch.Generator().manual_seed(1)

    def tensors() -> list[Tensor]:
        shapes = zip(((40, 3), (7,)), LIST_DTYPES[dtypes], strict=True)
        return [(torch.rand(shape, generator=draw) + 0.01).to(dtype) for shape, dtype in shapes]

    first, operands = tensors(), tuple(tensors() if one == "l" else one for one in operands)
    with PortableArithmetic():
        found = getattr(torch, f"_foreach_{name}")(first, *operands, **named)
        changed = [one.clone() for one in first]
        getattr(torch, f"_foreach_{name}_")(changed, *operands, **named)
        for place, one in enumerate(first):
            own, values = [other[place] if isinstance(other, list) else other for other in operands], dict(named)
            if len(own) == 3:
                values["value"] = own.pop()
            alone = getattr(torch, name)(one, *own, **values)
            assert alone.dtype == found[place].dtype == changed[place].dtype
            assert torch.equal(alone, found[place])
            assert torch.equal(alone, changed[place])


@pytest.mark.parametrize(
    ("count", "size", "at_once"), [(256, 1 << 16, True), (257, 1 << 16, False), (2, (1 << 16) + 1, False)]
)
def test_an_optimizer_of_large_tensors_steps_one_after_the_other(count: int, size: int, at_once: bool) -> None:
    optimizer = torch.optim.AdamW([nn.Parameter(torch.empty(size, device="meta")) for _ in range(count)])
    with portable_groups(optimizer):
        assert optimizer.param_groups[0]["foreach"] is at_once
    assert optimizer.param_groups[0]["foreach"] is None


@pytest.mark.parametrize("name", ["tanh", "exp", "sin", "cumsum_", "erf"])
def test_an_unknown_operation_is_refused_by_its_name(name: str) -> None:
    arguments = (0,) if name == "cumsum_" else ()
    with PortableArithmetic(), pytest.raises(Unportable, match=f"aten::{name}"):
        getattr(torch.ones(3), name)(*arguments)


def test_whole_numbers_are_computed_as_they_are() -> None:
    with PortableArithmetic():
        assert torch.arange(4).cumsum(0).tolist() == [0, 1, 3, 6]
