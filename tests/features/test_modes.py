"""Modes and attributes of modules in blocks, set by hooks."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn
from typing_extensions import override

from lightning_swarm.core.errors import ConfigError
from tests.features.both import fit_both
from tests.features.mark import REFUSED, WORKS, feature
from tests.parity.harness import run_swarm
from tests.parity.models import digits, loader
from tests.parity.test_modes import STEPS, Frozen

pytestmark = pytest.mark.filterwarnings("ignore:Found .* in eval mode")


@feature(
    "frozen parts that stay in eval mode (`train()` overridden, or in hooks)",
    WORKS,
    "modes are those of each module, also inside of blocks; a `BatchNorm` in eval mode uses its running statistics",
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
    "numbers, texts, None and short lists of them, of attributes that the blocks have from the start",
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
    "at the next call: replace them where every peer does, in `__init__`, `setup` or `configure_model`",
)
def test_replaced_modules() -> None:
    with pytest.raises(ConfigError, match="blocks must stay what they are during a run"):
        run_swarm(Replaced, loader(digits()), max_steps=STEPS)
