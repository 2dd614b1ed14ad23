"""Running statistics of batch norms: written by records only, once for each microbatch or batch that counts.

A forward leaves them as they are and reports what it saw. With the gradients, all reports of a step go to each of the
stage's servers, which enters them in the microbatches' order, as one machine would.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.hooks import RemovableHandle

from lightning_swarm.core.errors import ConfigError
from lightning_swarm.model.partition import StageModule
from lightning_swarm.protocol.messages.calls import PLACES, CallKey, Receipt


class BatchStatistics:
    """Vector of what batch norms saw of one microbatch."""

    values: Tensor | None = None  # ``[length]`` float64; None: there are no norms, or nothing has gone through them


class RunningStatistics:
    """The running statistics of the batch norms in a stage's module.

    They, and what a microbatch shows of them, are float64 vectors: how often each norm was used, then the means of all
    channels, then their variances, and at last each norm's momentum, or -1: a trainer may change it during the run.
    """

    def __init__(self, stage: StageModule) -> None:
        norms = [norm for norm in stage.counted_modules() if isinstance(norm, _BatchNorm)]
        self._norms = [norm for norm in norms if isinstance(norm.running_mean, Tensor)]
        self._sizes = [_mean(norm).numel() for norm in self._norms]
        self._seen: dict[int, dict[Receipt, Tensor]] = {}  # by step
        self.length = 2 * len(self._norms) + 2 * sum(self._sizes)

    def __bool__(self) -> bool:
        return bool(self._norms)

    @property
    def buffers(self) -> list[Tensor]:
        """The buffers of all batch norms."""
        return [buffer for norm in self._norms for buffer in norm.buffers(recurse=False)]

    @property
    def norms(self) -> list[_BatchNorm]:
        """The batch norms that have statistics."""
        return self._norms

    # ------------------------------------------------------------------ a microbatch

    @contextlib.contextmanager
    def kept(self) -> Iterator[BatchStatistics]:
        """Inside, let norms in train mode write what they see elsewhere; afterwards the yielded object has it."""
        seen = BatchStatistics()
        norms = [norm for norm in self._norms if norm.training]
        if not norms:
            yield seen
            return
        with contextlib.ExitStack() as stack:
            for norm in norms:
                stack.enter_context(_writing_what_it_sees(norm))
            yield seen
            found = self._read(seen=True)
        num = len(self._norms)
        found[-num:] = found.new_tensor([_momentum(norm) for norm in self._norms])
        seen.values = found
        if any(count > 1 for count in found[:num].tolist()):
            raise ConfigError(
                "a `BatchNorm` in a block must be used once for each sample, got one that is used several times in one "
                "forward. Give each place a norm of its own."
            )

    @contextlib.contextmanager
    def watched(
        self, before: Callable[[nn.Module], None], wrote: Callable[[nn.Module], None]
    ) -> Iterator[BatchStatistics]:
        """Inside, let norms write their own statistics as always, and note what they see of a batch.

        Afterwards the yielded object has it. A norm may be used several times, one after the other: each time, `before`
        is called and, after it has written, `wrote`.
        """
        seen = BatchStatistics()
        found = [_NormWatch(norm, before, wrote) for norm in self._norms]
        with contextlib.ExitStack() as stack:
            for watch in found:
                for hook in watch.hooks():
                    stack.callback(hook.remove)
            yield seen
        if any(one.num_uses for one in found):
            counts = _mean(self._norms[0]).new_tensor([one.num_uses for one in found], dtype=torch.float64)
            parts = [one.mean_of_uses() for one in found]
            momenta = counts.new_tensor([_momentum(norm) for norm in self._norms])
            seen.values = torch.cat([counts, *(mean for mean, _ in parts), *(var for _, var in parts), momenta])

    @property
    def _owners(self) -> Tensor:
        """The norm of each mean and of each variance."""
        return torch.arange(len(self._norms)).repeat(2).repeat_interleave(torch.tensor(self._sizes * 2))

    def add(self, key: CallKey, values: Tensor | None) -> None:
        """Keep what was seen of a microbatch whose gradient was added."""
        if values is not None:
            self._seen.setdefault(key.step, {})[key.receipt] = values

    # ------------------------------------------------------------------ a step

    def seen(self, step: int, counted: Collection[Receipt]) -> dict[Receipt, Tensor]:
        """The microbatches that count in a step, and what this server saw of them."""
        here = self._seen.get(step, {})
        return {receipt: here[receipt] for receipt in sorted(counted) if receipt in here}

    def after(self, seen: Mapping[Receipt, Tensor]) -> Tensor:
        """The statistics after all of this is entered, in the order of one machine; ``[length]``."""
        state = self._read()
        num, numbers = len(self._norms), self.length - len(self._norms)
        owners = self._owners.to(state.device)
        for _, values in sorted(seen.items(), key=lambda item: _order(item[0])):
            values, fixed = values.to(state).split([numbers, num])  # noqa: PLW2901
            state[:num] += values[:num]
            counted = torch.where(
                fixed < 0.0, values[:num] / state[:num].clamp(min=1.0), 1.0 - (1.0 - fixed) ** values[:num]
            )
            factor = counted[owners]
            state[num:numbers] = (1.0 - factor) * state[num:numbers] + factor * values[num:]
        return state

    def enter(self, state: Tensor, step: int) -> None:
        """Take over what `after` gave. What was seen until this step is dropped."""
        num = len(self._norms)
        parts = state[num : self.length - num].split(self._sizes * 2)
        for norm, count, mean, var in zip(self._norms, state[:num], parts[:num], parts[num:], strict=True):
            # Not of the tensors themselves: a graph that waits for its backward would take them for changed.
            assert norm.running_var is not None
            _mean(norm).data.copy_(mean)
            norm.running_var.data.copy_(var)
            if norm.num_batches_tracked is not None:
                norm.num_batches_tracked.data.copy_(count)
        self._seen = {later: seen for later, seen in self._seen.items() if later > step}

    def clear(self) -> None:
        """Drop what was seen: the run rolls back."""
        self._seen = {}

    def _read(self, *, seen: bool = False) -> Tensor:
        """Return what the norms hold; with `seen`, nothing of those in eval mode."""
        means = [_mean(norm) for norm in self._norms]
        variances = [norm.running_var for norm in self._norms if norm.running_var is not None]
        uncounted = means[0].new_zeros(())
        counts = [uncounted if (count := norm.num_batches_tracked) is None else count for norm in self._norms]
        off = [seen and not norm.training for norm in self._norms] * 3
        parts = zip((*counts, *means, *variances), off, strict=True)
        found = [
            (torch.zeros_like(part) if is_off else part.detach()).to(torch.float64).view(-1) for part, is_off in parts
        ]
        return torch.cat([*found, found[0].new_tensor([_momentum(norm) for norm in self._norms])])


@contextlib.contextmanager
def _writing_what_it_sees(norm: _BatchNorm) -> Iterator[None]:
    """Inside, have a norm in train mode write what it sees to statistics that begin at zero; then put back its own."""
    own = [(buffer, buffer.data) for buffer in norm.buffers(recurse=False)]
    momentum = norm.momentum
    for buffer, data in own:
        buffer.data = torch.zeros_like(data)
    norm.momentum = 1.0  # what it writes is what it sees
    try:
        yield
    finally:
        for buffer, data in own:
            buffer.data = data
        norm.momentum = momentum


class _NormWatch:
    """What a norm of the trainer's own module sees in one batch."""

    def __init__(
        self, norm: _BatchNorm, before: Callable[[nn.Module], None], wrote: Callable[[nn.Module], None]
    ) -> None:
        self._norm, self._before, self._wrote = norm, before, wrote
        self._aside: contextlib.ExitStack | None = None  # while the norm computes in train mode
        self.num_uses = 0
        self._mean = torch.zeros_like(_mean(norm), dtype=torch.float64)
        self._var = torch.zeros_like(self._mean)
        self._share = 0.0  # of all uses in the sums

    def hooks(self) -> list[RemovableHandle]:
        """Watch the norm's forwards. Hooks of the user see its own statistics before and after."""
        norm = self._norm
        return [
            norm.register_forward_pre_hook(self._begin),
            norm.register_forward_hook(self._end, prepend=True, always_call=True),
        ]

    def mean_of_uses(self) -> tuple[Tensor, Tensor]:
        """Return the means and the variances that the norm saw, weighted as it weighs its uses."""
        share = self._share or 1.0
        return self._mean.view(-1) / share, self._var.view(-1) / share

    def _begin(self, norm: nn.Module, _args: Any) -> None:
        if norm is self._norm and norm.training:  # else it is a copy, which has the hooks, too
            self._before(norm)
            self._aside = contextlib.ExitStack()
            self._aside.enter_context(_writing_what_it_sees(self._norm))

    def _end(self, norm: nn.Module, _args: Any, _output: Any) -> None:
        if norm is not self._norm or self._aside is None:
            return
        mean, var = _mean(self._norm).data, _var(self._norm).data
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
        _mean(self._norm).data.lerp_(mean, factor)
        _var(self._norm).data.lerp_(var, factor)
        self._wrote(self._norm)


def _momentum(norm: _BatchNorm) -> float:
    return -1.0 if norm.momentum is None else norm.momentum


def _mean(norm: _BatchNorm) -> Tensor:
    assert norm.running_mean is not None
    return norm.running_mean


def _var(norm: _BatchNorm) -> Tensor:
    assert norm.running_var is not None
    return norm.running_var


def _order(receipt: Receipt) -> tuple[int, int, int]:
    """The order of one machine, which makes the calls of a batch one after the other, and cuts each of them."""
    first, index, call = receipt
    return first % PLACES, call, index  # a batch that was granted again has its place in the step still
