"""Running statistics of a stage's batch norms: written by records only, once for each microbatch that counts.

A forward leaves them as they are and reports what it saw. With the gradients, all reports of a step go to each of the
stage's servers, which enters them in the microbatches' order, as one machine would.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_swarm.core.errors import ConfigError, ProtocolError
from lightning_swarm.core.tasks import gather
from lightning_swarm.network import Message
from lightning_swarm.protocol.compression import from_message, to_message
from lightning_swarm.protocol.messages.calls import CallKey, Receipt
from lightning_swarm.server.averaging.all_reduce import Group, fetched, withhold

_TICKET: Final = "seen"
_PATIENCE: Final = 2.0  # timeout in exchanges: other replicas may come to the round a little later


class BatchStatistics:
    """Vector of what batch norms saw of one microbatch."""

    values: Tensor | None = None  # ``[length]`` float64; None: there are no norms, or nothing has gone through them


class RunningStatistics:
    """The running statistics of the batch norms in a stage's module.

    They, and what a microbatch shows of them, are float64 vectors: how often each norm was used, then the means of all
    channels, then their variances, and at last each norm's momentum, or -1: a trainer may change it during the run.
    """

    def __init__(self, module: nn.Module) -> None:
        norms = [norm for norm in module.modules() if isinstance(norm, _BatchNorm)]
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

    # ------------------------------------------------------------------ a microbatch

    @contextlib.contextmanager
    def kept(self) -> Iterator[BatchStatistics]:
        """Inside, let norms in train mode write what they see elsewhere; afterwards the yielded object has it."""
        seen = BatchStatistics()
        norms = [norm for norm in self._norms if norm.training]
        if not norms:
            yield seen
            return
        own = [(buffer, buffer.data) for norm in norms for buffer in norm.buffers(recurse=False)]
        momenta = [norm.momentum for norm in norms]
        for buffer, data in own:
            buffer.data = torch.zeros_like(data)
        for norm in norms:
            norm.momentum = 1.0  # what they write is what they see
        try:
            yield seen
            found = self._read(seen=True)
        finally:
            for buffer, data in own:
                buffer.data = data
            for norm, momentum in zip(norms, momenta, strict=True):
                norm.momentum = momentum
        num = len(self._norms)
        found[-num:] = found.new_tensor([_momentum(norm) for norm in self._norms])
        seen.values = found
        if int(found[:num].max()) > 1:
            raise ConfigError(
                "a `BatchNorm` in a block must be used once for each sample, got one that is used several times in one "
                "forward. Give each place a norm of its own."
            )

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
        owners = torch.arange(num).repeat(2).repeat_interleave(torch.tensor(self._sizes * 2)).to(state.device)
        for _, values in sorted(seen.items(), key=lambda item: _order(item[0])):
            values, fixed = values.to(state).split([numbers, num])  # noqa: PLW2901
            state[:num] += values[:num]
            factors = torch.where(fixed < 0.0, 1.0 / state[:num].clamp(min=1.0), fixed) * values[:num]
            factor = factors[owners]
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


def _momentum(norm: _BatchNorm) -> float:
    return -1.0 if norm.momentum is None else norm.momentum


def _mean(norm: _BatchNorm) -> Tensor:
    assert norm.running_mean is not None
    return norm.running_mean


def _order(receipt: Receipt) -> tuple[int, int, int]:
    """The order of one machine, which makes the calls of a batch one after the other, and cuts each of them."""
    first, index, call = receipt
    return first, call, index


# ---------------------------------------------------------------------- between replicas: small vectors, not averaged


def offer_statistics(own: Mapping[Receipt, Tensor], length: int, group: Group) -> None:
    """Offer what this peer saw of microbatches, a vector ``[length]`` for each."""
    keys = torch.tensor(list(own), dtype=torch.int64).view(-1, 3)
    values = torch.stack(list(own.values())) if own else torch.zeros(0, length, dtype=torch.float64)
    group.tickets.offer(f"{group.prefix}/{_TICKET}", to_message((keys, values)))


async def collect_statistics(
    own: Mapping[Receipt, Tensor], length: int, group: Group, place: int | None
) -> dict[Receipt, Tensor]:
    """Collect what all replicas saw. `place` is this peer's in the roster; None: it has no part in the round."""
    read = partial(_read_statistics, length=length)
    patient = replace(group, timeout=_PATIENCE * group.timeout)
    others = [i for i in range(len(group.roster)) if i != place]
    found = [dict(own), *(await gather(fetched(patient, i, _TICKET, read) for i in others))]
    every = {receipt: values for seen in found for receipt, values in seen.items()}
    if len(every) < sum(map(len, found)):
        raise ProtocolError("members of a stage have seen the same microbatch, where each has one holder")
    return every


def refuse_statistics(group: Group, reason: str) -> None:
    """Give nothing in this round, unless it was given by now."""
    withhold(group, [_TICKET], reason)


async def _read_statistics(message: Message, length: int) -> dict[Receipt, Tensor]:
    tree = from_message(message)[0]
    keys, values = tree if isinstance(tree, tuple) and len(tree) == 2 else (None, None)
    if (
        not isinstance(keys, Tensor)
        or not isinstance(values, Tensor)
        or (keys.dtype, values.dtype) != (torch.int64, torch.float64)
        or (*keys.shape, *values.shape) != (len(values), 3, len(values), length)
    ):
        raise ProtocolError(f"what a member saw must be vectors of {length} numbers, each with its microbatch's name")
    receipts = [(int(first), int(index), int(call)) for first, index, call in keys.tolist()]
    return dict(zip(receipts, values, strict=True))
