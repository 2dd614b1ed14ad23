"""Which calls change the running statistics of batch norms, and a warning of those that no step counts."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

_log = logging.getLogger(__name__)


class NormWatch:
    """Watches calls of a pipeline that may have batch norms in its blocks."""

    def __init__(self, stages: Iterable[nn.Module]) -> None:
        modules = [module for stage in stages for module in stage.modules()]
        self._norms = [module for module in modules if isinstance(module, _BatchNorm)]
        self._has_warned = False

    @property
    def has_norms(self) -> bool:
        """True if there is a batch norm in the blocks."""
        return bool(self._norms)

    def changes(self, *, in_batch: bool) -> bool:
        """True if a call changes running statistics in the step of a batch."""
        if not any(norm.training and norm.running_mean is not None for norm in self._norms):
            return False
        if not in_batch:
            self._warn("outside of a `training_step`", "Call `eval()` before")
        return in_batch

    def batch_without_loss(self) -> None:
        """Note that a batch whose `training_step` returned no loss counts nowhere."""
        if self._norms:
            self._warn("in a `training_step` without a loss", "Return a loss of zero")

    def _warn(self, where: str, remedy: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            _log.warning(
                "BatchNorm in the pipeline was called in train mode %s: its running statistics do not count that, and "
                "plain Lightning's would. %s.",
                where,
                remedy,
            )
