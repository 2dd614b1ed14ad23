"""Finds calls that change running statistics of batch norms; refuses or warns if plain Lightning would differ."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Final

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_swarm.core.errors import ConfigError

_log = logging.getLogger(__name__)
_MAX_NAMED: Final = 5


class NormWatch:
    """Watches calls of a pipeline that may have batch norms in its blocks."""

    def __init__(self, modules: Iterable[tuple[str, nn.Module]]) -> None:
        """Find the batch norms among the modules of blocks, given with their names."""
        self.names = {module: name for name, module in modules if isinstance(module, _BatchNorm)}
        self._has_warned_of_loss = self._has_warned_of_parts = False

    def changes(self, *, in_batch: bool) -> bool:
        """Return whether a call now would change running statistics; refuse such a call outside of a batch."""
        changing = next(filter(_tracks, self.names), None)
        if changing is not None and not in_batch:
            raise ConfigError(
                "running statistics of `BatchNorm` in blocks may change in `training_step` only: got a call of the "
                f"pipelined module in another hook, with {self.names[changing]!r} in train mode. Call `eval()` "
                "first. To estimate new statistics, as `update_bn` does, call a copy (`copy.deepcopy`) and load "
                "its state."
            )
        return changing is not None

    def cut(self, size: int) -> None:
        """Warn once that batch norms normalise by the statistics of microbatches of `size` rows, not of the batch."""
        # Norms in eval mode normalise by their running statistics, in microbatches as in a batch.
        names = [name for norm, name in self.names.items() if norm.training or norm.running_mean is None]
        if names and not self._has_warned_of_parts:
            self._has_warned_of_parts = True
            _log.warning(
                "Blocks of the pipeline contain %d BatchNorm modules (%s%s). They normalise each microbatch (of %d "
                "samples) by the statistics of this microbatch, not of the whole batch, as in a plain loop over "
                "batches of that size. Running statistics count each microbatch once, in order. For statistics over "
                "more samples, raise `microbatch_size`. GroupNorm and LayerNorm do not depend on the batch, and train "
                "as on one machine.",
                len(names),
                ", ".join(names[:_MAX_NAMED]),
                ", ..." if len(names) > _MAX_NAMED else "",
                size,
            )

    def batch_without_loss(self) -> None:
        """Warn once that running statistics do not count a batch whose `training_step` returned no loss."""
        if any(map(_tracks, self.names)) and not self._has_warned_of_loss:
            self._has_warned_of_loss = True
            _log.warning(
                "BatchNorm in the pipeline is in train mode, and a `training_step` returned no loss: its running "
                "statistics do not count that batch, as they would in plain Lightning. Return a loss of zero instead."
            )


def _tracks(norm: _BatchNorm) -> bool:
    """Return whether a forward changes the running statistics of a batch norm."""
    return norm.training and norm.running_mean is not None
