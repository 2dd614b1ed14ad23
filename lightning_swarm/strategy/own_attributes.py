"""Plain attributes that change while several trainers train: each has its own, and nothing brings them together."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Final

from torch import nn

from lightning_swarm.model.attribute_values import same
from lightning_swarm.model.module_states import plain_attributes

_log = logging.getLogger(__name__)

_FIRST: Final = 8  # batches that are all looked at; then each eighth is
_MAX_NAMED: Final = 5


class OwnAttributes:
    """Warns once of attributes of a module that change from batch to batch.

    A counter of batches, a queue or a moving mean has another value on each trainer. So has what only the lead sets, in
    validation say. Such a value may be harmless: nobody can tell whether a loss depends on it.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._first: Mapping[str, Mapping[str, Any]] | None = None
        self._num_looks = 0
        self._warned = False

    def look(self) -> None:
        """Look at the attributes where a batch begins."""
        self._num_looks += 1
        if self._warned or (self._num_looks > _FIRST and self._num_looks % _FIRST):
            return
        found = plain_attributes(self._module)
        if self._first is None:
            self._first = found
        changed = [
            f"{name}.{key}" if name else key
            for name, own in found.items()
            for key, value in own.items()
            if key != "training" and key in self._first.get(name, {}) and not same(value, self._first[name][key])
        ]
        if changed:
            self._warned = True
            _log.warning(
                "Attributes change while several trainers train: %s. Each trainer has its own values. Where the loss "
                "depends on one, compute it from `self.trainer.global_step`, which is the run's; what only the lead "
                "sets, as in validation, does not reach the others.",
                ", ".join(map(repr, changed[:_MAX_NAMED])),
            )
