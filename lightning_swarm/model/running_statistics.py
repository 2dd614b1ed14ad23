"""Running statistics of batch norms, which change only when a step's record is applied.

A forward leaves them unchanged, and reports the batch statistics of its microbatch instead. All servers of a stage get
the reports of a step with the gradients, and apply them in the microbatches' order, as one machine would.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping
from typing import Final

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_swarm.core.errors import ConfigError
from lightning_swarm.model.partition import StageModule
from lightning_swarm.model.portable import integer_power
from lightning_swarm.protocol.messages.calls import PLACES, CallKey, Receipt

_MAX_USES: Final = 2.0**31  # uses of a norm in one microbatch


class BatchStatistics:
    """The batch statistics of one microbatch."""

    values: Tensor | None = None  # ``[length]`` float64; None if no norm was used


class RunningStatistics:
    """The running statistics of the batch norms in a stage's module.

    Running statistics and batch statistics are float64 vectors. For n norms of c channels in total, the layout is
    ``[uses (n) | means (c) | variances (c) | momenta (n)]``. The momentum of a norm with `momentum=None` is -1. Momenta
    are in the vector because a trainer may change them during the run.
    """

    def __init__(self, stage: StageModule) -> None:
        norms = [norm for norm in stage.counted_modules() if isinstance(norm, _BatchNorm)]
        self.norms = [norm for norm in norms if isinstance(norm.running_mean, Tensor)]  # norms that have statistics
        self._sizes = [_mean(norm).numel() for norm in self.norms]
        self._by_step: dict[int, dict[Receipt, Tensor]] = {}  # step -> microbatch -> batch statistics
        self.length = 2 * len(self.norms) + 2 * sum(self._sizes)

    def __bool__(self) -> bool:
        return bool(self.norms)

    @property
    def buffers(self) -> list[Tensor]:
        """The buffers of all batch norms."""
        return [buffer for norm in self.norms for buffer in norm.buffers(recurse=False)]

    @contextlib.contextmanager
    def unchanged(self) -> Iterator[BatchStatistics]:
        """Inside, keep running statistics unchanged. Afterwards, the yielded object has the batch statistics."""
        result, norms = BatchStatistics(), [norm for norm in self.norms if norm.training]
        if not norms:
            yield result
            return
        present = [(buffer, buffer.data) for norm in norms for buffer in norm.buffers(recurse=False)]
        momenta = [norm.momentum for norm in norms]
        for buffer, data in present:
            buffer.data = torch.zeros_like(data)
        for norm in norms:
            norm.momentum = 1.0  # so that the new running statistics are the batch statistics
        try:
            yield result
            values = self._read(only_training=True)
        finally:
            for buffer, data in present:
                buffer.data = data
            for norm, momentum in zip(norms, momenta, strict=True):
                norm.momentum = momentum
        num = len(self.norms)
        values[-num:] = values.new_tensor([_momentum(norm) for norm in self.norms])
        result.values = values
        if any(count > 1 for count in values[:num].tolist()):
            raise ConfigError(
                "a `BatchNorm` in a block must be used once for each sample, got a norm that is used several times in "
                "one forward. Use separate norms."
            )

    @contextlib.contextmanager
    def watched(self) -> Iterator[BatchStatistics]:
        """Inside, let norms update their running statistics. Afterwards, the yielded object has the batch statistics.

        This is for norms around the pipeline, which may be used several times, one after the other.
        """
        # Computed from the buffers, because a compiled module may not run hooks.
        result = BatchStatistics()
        if not self.norms:
            yield result
            return
        before = self._read()
        yield result
        after, num = self._read(), len(self.norms)
        uses, momenta = after[:num] - before[:num], after[-num:]
        if not uses.any():
            return
        if bool((uses < 0).any()):
            raise ConfigError(
                "a `BatchNorm` that is used in `training_step` must count all of its batches, got a norm whose "
                "`num_batches_tracked` was reset there. Leave out `reset_running_stats()`."
            )
        # The share of a norm's old statistics in its new ones. Without a momentum, statistics are means over all uses.
        old_share = torch.where(momenta < 0.0, before[:num] / after[:num].clamp(min=1.0), (1.0 - momenta) ** uses)
        owners = self._owners.to(old_share.device)
        old, new = old_share[owners], (1.0 - old_share)[owners]
        means = (after[num:-num] - old * before[num:-num]) / torch.where(new > 0.0, new, 1.0)
        result.values = torch.cat([uses, torch.where(new > 0.0, means, 0.0), momenta])

    @property
    def _owners(self) -> Tensor:
        """The index of the norm to which each mean and each variance belongs."""
        return torch.arange(len(self.norms)).repeat(2).repeat_interleave(torch.tensor(self._sizes * 2))

    def add(self, key: CallKey, values: Tensor | None) -> None:
        """Keep the batch statistics of a microbatch whose gradient was added."""
        if values is not None:
            self._by_step.setdefault(key.step, {})[key.receipt] = values

    def batch_statistics_of(self, step: int, counted: Collection[Receipt]) -> dict[Receipt, Tensor]:
        """Return the batch statistics that this server has of microbatches that count in a step."""
        held = self._by_step.get(step, {})
        return {receipt: held[receipt] for receipt in sorted(counted) if receipt in held}

    def merged(self, batches: Mapping[Receipt, Tensor]) -> Tensor:
        """Return the running statistics ``[length]`` after these batch statistics, in the order of one machine."""
        state = self._read()
        num_norms, end = len(self.norms), self.length - len(self.norms)  # variances end at `end`
        owners = self._owners.to(state.device)
        for _, values in sorted(batches.items(), key=lambda item: _order(item[0])):
            values, momenta = values.to(state).split([end, num_norms])  # noqa: PLW2901
            uses = values[:num_norms]
            state[:num_norms] += uses
            # The share of the batch statistics in each norm's new statistics.
            new_share = torch.where(
                momenta < 0.0, uses / state[:num_norms].clamp(min=1.0), 1.0 - _powers(1.0 - momenta, uses)
            )
            factor = new_share[owners]
            state[num_norms:end] = (1.0 - factor) * state[num_norms:end] + factor * values[num_norms:]
        return state

    def set(self, state: Tensor, step: int) -> None:
        """Set the norms' running statistics to a result of `merged`, and drop the batch statistics until this step."""
        num = len(self.norms)
        parts = state[num : self.length - num].split(self._sizes * 2)
        for norm, count, mean, var in zip(self.norms, state[:num], parts[:num], parts[num:], strict=True):
            # Through `data`, because autograd graphs that wait for their backward must not see a new version.
            assert norm.running_var is not None
            _mean(norm).data.copy_(mean)
            norm.running_var.data.copy_(var)
            if norm.num_batches_tracked is not None:
                norm.num_batches_tracked.data.copy_(count)
        self._by_step = {later: batches for later, batches in self._by_step.items() if later > step}

    def clear(self) -> None:
        """Drop all batch statistics, because the run rolls back."""
        self._by_step = {}

    def _read(self, *, only_training: bool = False) -> Tensor:
        """Return the norms' buffers as a vector; with `only_training`, zeros for norms in eval mode."""
        means = [_mean(norm) for norm in self.norms]
        variances = [norm.running_var for norm in self.norms if norm.running_var is not None]
        uncounted = means[0].new_zeros(())
        counts = [uncounted if (count := norm.num_batches_tracked) is None else count for norm in self.norms]
        off = [only_training and not norm.training for norm in self.norms] * 3
        parts = zip((*counts, *means, *variances), off, strict=True)
        values = [
            (torch.zeros_like(part) if is_off else part.detach()).to(torch.float64).view(-1) for part, is_off in parts
        ]
        return torch.cat([*values, values[0].new_tensor([_momentum(norm) for norm in self.norms])])


def _momentum(norm: _BatchNorm) -> float:
    return -1.0 if norm.momentum is None else norm.momentum


def _mean(norm: _BatchNorm) -> Tensor:
    assert norm.running_mean is not None
    return norm.running_mean


def _order(receipt: Receipt) -> tuple[int, int, int]:
    """Return a microbatch's sort key in the order of one machine, which runs the calls of a batch one by one."""
    first, index, call = receipt
    return first % PLACES, call, index  # a batch that was granted again keeps its place in the step


def _powers(bases: Tensor, uses: Tensor) -> Tensor:
    """Raise numbers to powers that a peer sent, with the same bits on every machine; NaN for invalid counts."""
    counts = (uses >= 0.0) & (uses == uses.floor()) & (uses < _MAX_USES)
    return torch.where(counts, integer_power(bases, torch.where(counts, uses, 0.0)), torch.nan)
