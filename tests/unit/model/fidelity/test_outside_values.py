"""Values outside of blocks that their code reads, and changes of these values."""

from __future__ import annotations

import weakref
from argparse import Namespace
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_swarm.core.errors import ConfigError
from lightning_swarm.model.fidelity.outside_values import OutsideValues

HEAT: list[float] = [1.0]
NESTED: dict[str, Any] = {"heat": [1.0, {"of": 1.0}], "names": ("a", ["b"])}
MIXED: dict[str, Any] = {"heat": 1.0, "function": torch.tanh}
FACTOR = 1.0
CALLS = 0


class Settings:
    heat = 1.0

    def __init__(self) -> None:
        self.mode = "soft"


SETTINGS = Settings()


def scaled(x: Tensor) -> Tensor:
    return x * FACTOR


class Owner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heat = 1.0
        self.unread = 1.0

    def heated(self, x: Tensor) -> Tensor:
        return x * self.heat if self.training else x


class ByList(nn.Module):
    @override
    def forward(self, x: Tensor) -> Tensor:
        return x * HEAT[0]


class ByNested(nn.Module):
    @override
    def forward(self, x: Tensor) -> Tensor:
        heated: Tensor = x * NESTED["heat"][1]["of"]
        return heated if NESTED["names"][1][0] == "b" else x


class ByEntry(nn.Module):
    @override
    def forward(self, x: Tensor) -> Tensor:
        heated: Tensor = MIXED["function"](x) * MIXED["heat"]
        return heated


class ByFunction(nn.Module):
    @override
    def forward(self, x: Tensor) -> Tensor:
        return scaled(x)


class ByObject(nn.Module):
    @override
    def forward(self, x: Tensor) -> Tensor:
        return x if SETTINGS.mode == "soft" else x * Settings.heat


class ByClass(nn.Module):
    rate = 1.0

    @override
    def forward(self, x: Tensor) -> Tensor:
        return x * type(self).rate


class ByReference(nn.Module):
    def __init__(self, owner: Any) -> None:
        super().__init__()
        self.owner = owner

    @override
    def forward(self, x: Tensor) -> Tensor:
        owner = self.owner() if isinstance(self.owner, weakref.ref) else self.owner[0]
        heated: Tensor = x * owner.heat
        return heated


class ByVariable(nn.Module):
    def __init__(self, scale: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.scale = scale

    @override
    def forward(self, x: Tensor) -> Tensor:
        return self.scale(x)


class Counting(nn.Module):
    """Sets a global itself, as libraries do to warn once."""

    @override
    def forward(self, x: Tensor) -> Tensor:
        global CALLS  # noqa: PLW0603
        CALLS += 1
        return x + 0.0 * np.pi


def around() -> tuple[nn.Module, Callable[[float], None]]:
    heat = 1.0

    def change(value: float) -> None:
        nonlocal heat
        heat = value

    return ByVariable(lambda x: x * heat), change


def set_global(value: float) -> None:
    globals()["FACTOR"] = value


class ByHidden(nn.Module):
    owner: Any

    @override
    def forward(self, x: Tensor) -> Tensor:
        return x * self.owner.heat


class Reversal(torch.autograd.Function):
    heat = 1.0

    @staticmethod
    @override
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    @override
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return -HEAT[0] * Reversal.heat * grad


class ByGradient(nn.Module):
    @override
    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = Reversal.apply(x)
        return found


class Heater:
    def __call__(self, x: Tensor) -> Tensor:
        return x * FACTOR


class ByDefault(nn.Module):
    @override
    def forward(self, x: Tensor, heat: Any = HEAT, *, other: Any = HEAT) -> Tensor:
        heated: Tensor = x * heat[0] * other[0]
        return heated


ARGUMENTS = Namespace(model=SimpleNamespace(heat=1.0))


class ByArguments(nn.Module):
    @override
    def forward(self, x: Tensor) -> Tensor:
        heated: Tensor = x * ARGUMENTS.model.heat
        return heated


class Hyper(L.LightningModule):
    def __init__(self, heat: float = 1.0) -> None:
        super().__init__()
        self.save_hyperparameters({"heat": heat, "kind": torch.tanh})


class ByHyper(ByHidden):
    @override
    def forward(self, x: Tensor) -> Tensor:
        return x * self.owner.hparams["heat"] if "heat" in self.owner.hparams else x


class ByMethod(ByHidden):
    @override
    def forward(self, x: Tensor) -> Tensor:
        return self.owner.heated(x)


class ByMode(ByHidden):
    @override
    def forward(self, x: Tensor) -> Tensor:
        owner = self.owner
        return x * owner.heat if owner.training else x


def hidden(owner: nn.Module, kind: type[ByHidden] = ByHidden) -> ByHidden:
    block = kind()
    vars(block)["owner"] = owner  # no submodule
    return block


def cases() -> dict[str, tuple[nn.Module, Callable[[float], None], str]]:
    owner, other, hyper = Owner(), Owner(), Hyper()
    by_variable, change = around()
    return {
        "a list": (ByList(), lambda value: HEAT.__setitem__(0, value), "`HEAT`, a global of"),
        "a dict of lists": (ByNested(), lambda value: NESTED["heat"][1].update(of=value), "`NESTED`, a global of"),
        "a list in a tuple": (
            ByNested(),
            lambda value: NESTED["names"][1].__setitem__(0, "b" if value == 1.0 else "c"),
            "`NESTED`, a global of",
        ),
        "a dict with functions": (ByEntry(), lambda value: MIXED.update(heat=value), "`heat`, an entry of `MIXED`"),
        "a method": (hidden(owner, ByMethod), lambda value: setattr(owner, "heat", value), "attribute of Owner"),
        "a mode": (
            hidden(owner, ByMode),
            lambda value: setattr(owner, "training", value == 1.0),
            r"`training`, an attribute of Owner .* Read the block's own",
        ),
        "a bound method": (
            ByVariable(owner.heated),
            lambda value: setattr(owner, "heat", value),
            "`heat`, an attribute of Owner",
        ),
        "a default": (
            ByDefault(),
            lambda value: HEAT.__setitem__(0, value),
            "`heat`, a default of `ByDefault",
        ),
        "an object in a namespace": (
            ByArguments(),
            lambda value: setattr(ARGUMENTS.model, "heat", value),
            "`heat`, an attribute of SimpleNamespace",
        ),
        "hyperparameters": (
            hidden(hyper, ByHyper),
            lambda value: hyper.hparams.update(heat=value),
            "`heat`, an entry of `hparams`",
        ),
        "a function's gradient": (
            ByGradient(),
            lambda value: setattr(Reversal, "heat", value),
            "`heat`, an attribute of Reversal",
        ),
        "what a function's gradient reads": (
            ByGradient(),
            lambda value: HEAT.__setitem__(0, value),
            "`HEAT`, a global of",
        ),
        "what a callable reads": (ByVariable(Heater()), set_global, "`FACTOR`, a global of"),
        "a function's global": (ByFunction(), set_global, "`FACTOR`, a global of"),
        "an object": (
            ByObject(),
            lambda value: setattr(SETTINGS, "mode", str(value)),
            "`mode`, an attribute of Settings",
        ),
        "a class": (ByObject(), lambda value: setattr(Settings, "heat", value), "`heat`, an attribute of Settings"),
        "its own class": (ByClass(), lambda value: setattr(ByClass, "rate", value), "`rate`, an attribute of class"),
        "a module in a list": (ByReference([owner]), lambda value: setattr(owner, "heat", value), "attribute of Owner"),
        "a hidden module": (hidden(owner), lambda value: setattr(owner, "heat", value), "attribute of Owner"),
        "a weak reference": (
            ByReference(weakref.ref(other)),
            lambda value: setattr(other, "heat", value),
            "`heat`, an attribute of Owner",
        ),
        "a variable": (by_variable, change, "`heat`, a variable around"),
    }


@pytest.mark.parametrize("case", cases())
def test_a_change_is_refused(case: str) -> None:
    module, change, message = cases()[case]
    change(1.0)
    values = OutsideValues([("net.0", module)])
    values.check()
    change(2.0)
    with pytest.raises(ConfigError, match=message):
        values.check()
    change(1.0)


MASKS: dict[int, Tensor] = {}
SIZES: list[int] = []


class Caching(nn.Module):
    """Fills containers that all modules share."""

    @override
    def forward(self, x: Tensor) -> Tensor:
        if len(x) not in MASKS:
            MASKS[len(x)] = torch.ones(len(x))
            SIZES.append(len(x))
            SETTINGS.newest = len(x)  # type: ignore[attr-defined]
        return x * MASKS[len(x)]


def test_what_is_not_read_may_change() -> None:
    owner = Owner()
    values = OutsideValues(
        [("a", ByReference([owner])), ("b", Counting()), ("c", nn.Linear(2, 2)), ("d", Caching()), ("e", ByObject())]
    )
    owner.unread, owner.training = 2.0, False
    Counting()(torch.zeros(1))
    Caching()(torch.zeros(3))
    assert MASKS
    assert SIZES
    values.check()


def test_what_a_constructor_read_may_change() -> None:
    made = nn.Linear(2, 2)

    class Wrapping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(*made.children(), nn.Linear(HEAT[0] == 1.0 or 2, 2))

        @override
        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.inner(x)
            return found

    values = OutsideValues([("net.0", Wrapping())])
    HEAT[0] = 2.0
    values.check()
    HEAT[0] = 1.0


def test_a_module_of_the_same_stage_may_be_referred_to() -> None:
    class Tied(nn.Module):
        def __init__(self, other: nn.Linear) -> None:
            super().__init__()
            self.other = (other,)

        @override
        def forward(self, x: Tensor) -> Tensor:
            return x @ self.other[0].weight

    linear = nn.Linear(2, 2)
    OutsideValues([("a", linear), ("b", Tied(linear))]).check()
    with pytest.raises(ConfigError, match=r"the code of 'b' reads `other` \(Linear\), whose weights are not"):
        OutsideValues([("b", Tied(linear))])


class Calls(nn.Module):
    def __init__(self, other: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.other = [other]

    @override
    def forward(self, x: Tensor) -> Tensor:
        return self.other[0](x)


def test_weights_that_a_block_does_not_hold_are_refused() -> None:
    linear = nn.Linear(2, 2)
    for block in (Calls(linear), ByVariable(linear.forward), ByVariable(lambda x: x + linear(x))):
        with pytest.raises(ConfigError, match=r"the code of 'b' reads `\w+` \(Linear\), whose weights are not"):
            OutsideValues([("b", block)])
        OutsideValues([("a", linear), ("b", block)]).check()


@pytest.mark.parametrize("tensor", [nn.Parameter(torch.ones(1)), None])
def test_a_tensor_outside_of_the_block_is_refused(tensor: nn.Parameter | None) -> None:
    owner = Owner()
    del owner.heat
    if tensor is None:
        owner.register_buffer("heat", torch.ones(1))
    else:
        owner.heat = tensor  # type: ignore[assignment]
    found = r"\['heat'\] of Owner, which is not in the block" if tensor is None else r"`owner` \(Owner\), whose weights"
    with pytest.raises(ConfigError, match=rf"the code of 'net\.0' reads {found}"):
        OutsideValues([("net.0", ByReference([owner]))])


def test_the_trainers_state_is_refused() -> None:
    class Module(nn.Module):
        _trainer = None

    class Block(nn.Module):
        def __init__(self, owner: nn.Module) -> None:
            super().__init__()
            self.owner = [owner]

        @override
        def forward(self, x: Tensor) -> Tensor:
            stepped: Tensor = x * self.owner[0].global_step  # type: ignore[operator]
            return stepped

    owner = Module()
    vars(owner)["_trainer"] = None
    with pytest.raises(ConfigError, match=r"reads \['global_step'\] of Module"):
        OutsideValues([("net.0", Block(owner))])
