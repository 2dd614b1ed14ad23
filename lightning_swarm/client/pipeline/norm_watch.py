"""Finds calls that change running statistics of batch norms; refuses or warns where plain Lightning differs."""

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
        self._has_warned = self._has_warned_of_parts = False

    def changes(self, *, in_batch: bool) -> bool:
        """Return whether a call changes running statistics; refuse a change outside of a batch."""
        changing = next(filter(_tracks, self.names), None)
        if changing is not None and not in_batch:
            raise ConfigError(
                "running statistics of `BatchNorm` in blocks change in `training_step` only: got a call of the "
                f"pipelined module in another hook, with {self.names[changing]!r} in train mode. Call `eval()` "
                "before; to estimate the statistics anew, as `update_bn` does, call a copy (`copy.deepcopy`) and load "
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
                "BatchNorm is in blocks of the pipeline, in %d places (%s%s). There it normalises each microbatch (of "
                "%d samples) by the statistics of this microbatch, as in a plain loop over batches of that size, not "
                "by those of the whole batch; its running statistics count each microbatch once, in order. For "
                "statistics over more samples raise `microbatch_size`; GroupNorm and LayerNorm know no batch, and "
                "train as on one machine.",
                len(names),
                ", ".join(names[:_MAX_NAMED]),
                ", ..." if len(names) > _MAX_NAMED else "",
                size,
            )

    def batch_without_loss(self) -> None:
        """Warn once that running statistics do not count a batch whose `training_step` returned no loss."""
        if any(map(_tracks, self.names)) and not self._has_warned:
            self._has_warned = True
            _log.warning(
                "BatchNorm in the pipeline is in train mode, and a `training_step` returned no loss: its running "
                "statistics do not count that batch, and plain Lightning's would. Return a loss of zero."
            )


def _tracks(norm: _BatchNorm) -> bool:
    """Return whether a forward changes the running statistics of a batch norm."""
    return norm.training and norm.running_mean is not None
