"""Running statistics of batch norms, which only records change: once for each microbatch or batch that counts.

A forward leaves them unchanged, and reports the batch statistics instead. With the gradients, all reports of a step go
to each of the stage's servers. Each applies them in the microbatches' order, as one machine would.
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

    values: Tensor | None = None  # ``[length]`` float64; None: there are no norms, or none was used


class RunningStatistics:
    """The running statistics of the batch norms in a stage's module.

    They, and the batch statistics of a microbatch, are float64 vectors. A vector has the number of uses of each norm,
    the means of all channels, their variances, and each norm's momentum, or -1. A trainer may change momenta during the
    run.
    """

    def __init__(self, stage: StageModule) -> None:
        norms = [norm for norm in stage.counted_modules() if isinstance(norm, _BatchNorm)]
        self.norms = [norm for norm in norms if isinstance(norm.running_mean, Tensor)]  # norms that have statistics
        self._sizes = [_mean(norm).numel() for norm in self.norms]
        self._seen: dict[int, dict[Receipt, Tensor]] = {}  # step -> microbatch -> batch statistics
        self.length = 2 * len(self.norms) + 2 * sum(self._sizes)

    def __bool__(self) -> bool:
        return bool(self.norms)

    @property
    def buffers(self) -> list[Tensor]:
        """The buffers of all batch norms."""
        return [buffer for norm in self.norms for buffer in norm.buffers(recurse=False)]

    @contextlib.contextmanager
    def kept(self) -> Iterator[BatchStatistics]:
        """Keep running statistics unchanged inside; afterwards the yielded object has the batch statistics."""
        seen, norms = BatchStatistics(), [norm for norm in self.norms if norm.training]
        if not norms:
            yield seen
            return
        own = [(buffer, buffer.data) for norm in norms for buffer in norm.buffers(recurse=False)]
        momenta = [norm.momentum for norm in norms]
        for buffer, data in own:
            buffer.data = torch.zeros_like(data)
        for norm in norms:
            norm.momentum = 1.0  # buffers then get the batch statistics themselves
        try:
            yield seen
            found = self._read(seen=True)
        finally:
            for buffer, data in own:
                buffer.data = data
            for norm, momentum in zip(norms, momenta, strict=True):
                norm.momentum = momentum
        num = len(self.norms)
        found[-num:] = found.new_tensor([_momentum(norm) for norm in self.norms])
        seen.values = found
        if any(count > 1 for count in found[:num].tolist()):
            raise ConfigError(
                "a `BatchNorm` in a block must be used once for each sample, got one that is used several times in one "
                "forward. Give each place a norm of its own."
            )

    @contextlib.contextmanager
    def watched(self) -> Iterator[BatchStatistics]:
        """Inside, let norms update their running statistics; afterwards the yielded object has the batch statistics.

        A norm may be used several times, one after the other.
        """
        # Computed from the buffers, because a compiled module may not run hooks.
        seen = BatchStatistics()
        if not self.norms:
            yield seen
            return
        before = self._read()
        yield seen
        after, num = self._read(), len(self.norms)
        uses, momenta = after[:num] - before[:num], after[-num:]
        if not uses.any():
            return
        if bool((uses < 0).any()):
            raise ConfigError(
                "a `BatchNorm` that is used in `training_step` must count on from its last batch, got one whose "
                "`num_batches_tracked` was set back there. Leave out `reset_running_stats()`."
            )
        # The share of a norm's old statistics in its new ones. Without a momentum, statistics are means over all uses.
        kept = torch.where(momenta < 0.0, before[:num] / after[:num].clamp(min=1.0), (1.0 - momenta) ** uses)
        owners = self._owners.to(kept.device)
        old, new = kept[owners], (1.0 - kept)[owners]
        found = (after[num:-num] - old * before[num:-num]) / torch.where(new > 0.0, new, 1.0)
        seen.values = torch.cat([uses, torch.where(new > 0.0, found, 0.0), momenta])

    @property
    def _owners(self) -> Tensor:
        """The index of the norm of each mean and of each variance."""
        return torch.arange(len(self.norms)).repeat(2).repeat_interleave(torch.tensor(self._sizes * 2))

    def add(self, key: CallKey, values: Tensor | None) -> None:
        """Keep the batch statistics of a microbatch whose gradient was added."""
        if values is not None:
            self._seen.setdefault(key.step, {})[key.receipt] = values

    def seen(self, step: int, counted: Collection[Receipt]) -> dict[Receipt, Tensor]:
        """Return the batch statistics that this server has of microbatches that count in a step."""
        here = self._seen.get(step, {})
        return {receipt: here[receipt] for receipt in sorted(counted) if receipt in here}

    def after(self, seen: Mapping[Receipt, Tensor]) -> Tensor:
        """Return the running statistics ``[length]`` after these batch statistics, in the order of one machine."""
        state = self._read()
        num, numbers = len(self.norms), self.length - len(self.norms)
        owners = self._owners.to(state.device)
        for _, values in sorted(seen.items(), key=lambda item: _order(item[0])):
            values, fixed = values.to(state).split([numbers, num])  # noqa: PLW2901
            state[:num] += values[:num]
            # The share of the batch statistics in each norm's new statistics; `fixed` are the norms' momenta.
            counted = torch.where(
                fixed < 0.0, values[:num] / state[:num].clamp(min=1.0), 1.0 - _powers(1.0 - fixed, values[:num])
            )
            factor = counted[owners]
            state[num:numbers] = (1.0 - factor) * state[num:numbers] + factor * values[num:]
        return state

    def enter(self, state: Tensor, step: int) -> None:
        """Set the norms' running statistics to a result of `after`, and drop the batch statistics until this step."""
        num = len(self.norms)
        parts = state[num : self.length - num].split(self._sizes * 2)
        for norm, count, mean, var in zip(self.norms, state[:num], parts[:num], parts[num:], strict=True):
            # Through `data`, because graphs that wait for their backward would otherwise count the tensors as changed.
            assert norm.running_var is not None
            _mean(norm).data.copy_(mean)
            norm.running_var.data.copy_(var)
            if norm.num_batches_tracked is not None:
                norm.num_batches_tracked.data.copy_(count)
        self._seen = {later: seen for later, seen in self._seen.items() if later > step}

    def clear(self) -> None:
        """Drop all batch statistics, because the run rolls back."""
        self._seen = {}

    def _read(self, *, seen: bool = False) -> Tensor:
        """Return the norms' buffers as a vector; with `seen`, zeros for norms in eval mode."""
        means = [_mean(norm) for norm in self.norms]
        variances = [norm.running_var for norm in self.norms if norm.running_var is not None]
        uncounted = means[0].new_zeros(())
        counts = [uncounted if (count := norm.num_batches_tracked) is None else count for norm in self.norms]
        off = [seen and not norm.training for norm in self.norms] * 3
        parts = zip((*counts, *means, *variances), off, strict=True)
        found = [
            (torch.zeros_like(part) if is_off else part.detach()).to(torch.float64).view(-1) for part, is_off in parts
        ]
        return torch.cat([*found, found[0].new_tensor([_momentum(norm) for norm in self.norms])])


def _momentum(norm: _BatchNorm) -> float:
    return -1.0 if norm.momentum is None else norm.momentum


def _mean(norm: _BatchNorm) -> Tensor:
    assert norm.running_mean is not None
    return norm.running_mean


def _order(receipt: Receipt) -> tuple[int, int, int]:
    """Return a microbatch's place in the order of one machine, which makes and cuts the calls of a batch one by one."""
    first, index, call = receipt
    return first % PLACES, call, index  # a batch that was granted again keeps its place in the step


def _powers(bases: Tensor, uses: Tensor) -> Tensor:
    """Raise numbers to the powers of a peer's counts, to the same bits on every machine; NaN for invalid counts."""
    counts = (uses >= 0.0) & (uses == uses.floor()) & (uses < _MAX_USES)
    return torch.where(counts, integer_power(bases, torch.where(counts, uses, 0.0)), torch.nan)
