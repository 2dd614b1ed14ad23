"""Modes and attributes of modules in blocks, set by hooks."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor, nn
from typing_extensions import override

from lightning_swarm.core.errors import ConfigError
from tests.features.both import fit_both
from tests.features.mark import REFUSED, WORKS, feature
from tests.parity.harness import run_swarm
from tests.parity.models import digits, loader
from tests.parity.test_modes import STEPS, Frozen

pytestmark = pytest.mark.filterwarnings("ignore:Found .* in eval mode")


@feature(
    "frozen parts that stay in eval mode (by an overridden `train()`, or in hooks)",
    WORKS,
    "each module has its own mode, also inside of blocks; a `BatchNorm` in eval mode uses its running statistics",
)
def test_frozen_parts_in_eval_mode() -> None:
    fit_both(Frozen, max_steps=STEPS)


class Annealed(Frozen):
    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.net[1].temperature = 0.9**batch_idx


@feature(
    "attributes of blocks that hooks change (temperatures, dropout rates, flags)",
    WORKS,
    "numbers, strings, None and short lists of these, in attributes that the blocks have from the start",
)
def test_annealed_attributes() -> None:
    fit_both(Annealed, max_steps=STEPS)


class Replaced(Frozen):
    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.net[2] = nn.ReLU()


@feature(
    "modules of blocks that hooks replace, and attributes that become other objects",
    REFUSED,
    "at the next call; replace them where every peer does it: in `__init__`, `setup` or `configure_model`",
)
def test_replaced_modules() -> None:
    with pytest.raises(ConfigError, match="blocks must not be replaced during a run"):
        run_swarm(Replaced, loader(digits()), max_steps=STEPS)


HEAT = [1.0]


class Heated(nn.Module):
    @override
    def forward(self, x: Tensor) -> Tensor:
        return x * HEAT[0]


class GlobalHeat(Frozen):
    def __init__(self) -> None:
        super().__init__()
        self.net.insert(2, Heated())
        HEAT[0] = 1.0

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        HEAT[0] = 0.9**batch_idx


@feature(
    "globals, closure variables and other objects that blocks read, if they change during `fit`",
    REFUSED,
    "other peers have their own; pass the value to the block as an argument, or keep it as an attribute of the "
    "block. Containers are compared up to four levels deep, and with up to 4096 values",
)
def test_globals_that_blocks_read() -> None:
    with pytest.raises(ConfigError, match=r"`HEAT`, a global of .*test_modes that the code of '2' reads"):
        run_swarm(GlobalHeat, loader(digits()), max_steps=STEPS)


class Borrowing(nn.Module):
    """Computes with a layer that is registered elsewhere."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.borrowed = [layer]

    @override
    def forward(self, x: Tensor) -> Tensor:
        return x + self.borrowed[0](x)


class Borrows(Frozen):
    def __init__(self) -> None:
        super().__init__()
        self.around = nn.Linear(8, 8)
        self.net.insert(2, Borrowing(self.around))


@feature(
    "weights that a block reaches only through a list, a variable or a bound method",
    REFUSED,
    "when the run begins; register them in the block. Weights may be tied across stages",
)
def test_borrowed_weights() -> None:
    with pytest.raises(ConfigError, match=r"the code of '2' reads `borrowed` \(Linear\), whose weights are not"):
        run_swarm(Borrows, loader(digits()), max_steps=STEPS, pipeline="net")
