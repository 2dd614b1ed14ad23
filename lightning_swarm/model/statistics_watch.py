"""What the batch norms of a trainer's own module see of a batch, while they write their statistics as always."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_swarm.model.running_statistics import BatchStatistics, mean_of, momentum_of, writing_what_it_sees


class StatisticsWatch:
    """Lets the norms of a trainer's own module write their statistics as always, and notes what they see of a batch.

    A norm may be used several times in a row. Each time, `before` is called and, when it has written, `wrote`.
    """

    def __init__(
        self, norms: Sequence[_BatchNorm], before: Callable[[nn.Module], None], wrote: Callable[[nn.Module], None]
    ) -> None:
        self._norms = [_NormWatch(norm, before, wrote) for norm in norms]

    @contextlib.contextmanager
    def batch(self) -> Iterator[BatchStatistics]:
        """Note inside what norms see; afterwards the yielded object has it."""
        seen = BatchStatistics()
        for norm in self._norms:
            norm.begin()
        try:
            yield seen
        finally:
            for norm in self._norms:
                norm.is_active = False
        if any(norm.num_uses for norm in self._norms):
            parts = [norm.mean_of_uses() for norm in self._norms]
            counts = parts[0][0].new_tensor([norm.num_uses for norm in self._norms])
            momenta = counts.new_tensor([norm.momentum for norm in self._norms])
            seen.values = torch.cat([counts, *(mean for mean, _ in parts), *(var for _, var in parts), momenta])

    def release(self) -> None:
        """Leave the norms as they were."""
        for norm in self._norms:
            norm.release()


class _NormWatch:
    """What one norm sees in one batch."""

    def __init__(
        self, norm: _BatchNorm, before: Callable[[nn.Module], None], wrote: Callable[[nn.Module], None]
    ) -> None:
        self._norm, self._before, self._wrote = norm, before, wrote
        self._aside: contextlib.ExitStack | None = None  # while the norm computes in train mode
        self.begin()
        self.is_active = False  # a batch is in hand
        # Once for the run: a compiler takes no notice of hooks that come later. Those of the user see the norm's own
        # statistics.
        self._hooks = [
            norm.register_forward_pre_hook(_Hook(self._begin)),
            norm.register_forward_hook(_Hook(self._end), prepend=True, always_call=True),
        ]

    def begin(self) -> None:
        """Begin with a batch, of which nothing was seen yet."""
        self.is_active, self.num_uses = True, 0
        self._mean = torch.zeros_like(mean_of(self._norm), dtype=torch.float64)
        self._var = torch.zeros_like(self._mean)
        self._share = 0.0  # of all uses in the sums

    def release(self) -> None:
        """Watch no more."""
        for hook in self._hooks:
            hook.remove()

    @property
    def momentum(self) -> float:
        """The norm's; -1: it averages."""
        return momentum_of(self._norm)

    def mean_of_uses(self) -> tuple[Tensor, Tensor]:
        """Return the means and the variances that the norm saw, weighted as it weighs its uses."""
        share = self._share or 1.0
        return self._mean.view(-1) / share, self._var.view(-1) / share

    def _begin(self, norm: nn.Module, _args: Any) -> None:
        if self.is_active and norm.training:
            self._before(norm)
            self._aside = contextlib.ExitStack()
            self._aside.enter_context(writing_what_it_sees(self._norm))

    def _end(self, _norm: nn.Module, _args: Any, _output: Any) -> None:
        if self._aside is None:
            return
        mean, var = mean_of(self._norm).data, _var(self._norm).data
        self._aside.close()
        self._aside = None
        self.num_uses += 1
        count = self._norm.num_batches_tracked
        if count is not None:
            count.data.add_(1)
        own = self._norm.momentum
        factor = own if own is not None else 1.0 / self.num_uses
        self._mean += factor * (mean - self._mean)
        self._var += factor * (var - self._var)
        self._share += factor * (1.0 - self._share)
        # As the norm itself would.
        factor = own if own is not None else 1.0 / max(1, 0 if count is None else int(count))
        mean_of(self._norm).data.lerp_(mean, factor)
        _var(self._norm).data.lerp_(var, factor)
        self._wrote(self._norm)


class _Hook:
    """A hook that copies of its module do not have, and that runs as it is where its module is compiled."""

    def __init__(self, call: Callable[..., None]) -> None:
        self._call = call

    @torch.compiler.disable
    def __call__(self, *args: Any) -> None:
        self._call(*args)

    def __reduce__(self) -> tuple[Callable[[], Callable[..., None]], tuple[()]]:
        return _no_hook, ()


def _no_hook() -> Callable[..., None]:
    return _do_nothing


def _do_nothing(*_args: Any) -> None:
    """Stand where a hook was in a copied module."""


def _var(norm: _BatchNorm) -> Tensor:
    assert norm.running_var is not None
    return norm.running_var
