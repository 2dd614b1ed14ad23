"""Exchanges batch norm statistics between the servers of a stage: small vectors, which are not averaged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Final

import torch
from torch import Tensor

from lightning_swarm.core.errors import ProtocolError
from lightning_swarm.core.tasks import gather
from lightning_swarm.network import Message
from lightning_swarm.protocol.compression import from_message, to_message
from lightning_swarm.protocol.messages.calls import Receipt
from lightning_swarm.server.averaging.all_reduce import Group, fetch

STATISTICS: Final = "seen"  # name of the ticket of a replica's statistics in a round
_PATIENCE: Final = 2.0  # factor of the timeout, because other replicas may begin the round a little later


def offer_statistics(own: Mapping[Receipt, Tensor], length: int, group: Group) -> None:
    """Offer this peer's statistics: a vector ``[length]`` for each microbatch."""
    keys = torch.tensor(list(own), dtype=torch.int64).view(-1, 3)
    values = torch.stack(list(own.values())) if own else torch.zeros(0, length, dtype=torch.float64)
    group.offer(STATISTICS, to_message((keys, values)))


async def collect_statistics(
    own: Mapping[Receipt, Tensor], length: int, group: Group, rank: int | None
) -> dict[Receipt, Tensor]:
    """Collect the statistics of all replicas. `rank` is this peer's roster index; None: it is not in the round."""
    read = partial(_read_statistics, length=length)
    patient = replace(group, timeout=_PATIENCE * group.timeout)
    found = [dict(own), *(await gather(fetch(patient, i, STATISTICS, read) for i in group.others(rank)))]
    every = {receipt: values for seen in found for receipt, values in seen.items()}
    if len(every) < sum(map(len, found)):
        raise ProtocolError("members of a stage have seen the same microbatch, where each has one holder")
    return every


async def _read_statistics(message: Message, length: int) -> dict[Receipt, Tensor]:
    """Return a replica's statistics by microbatch; refuse malformed messages."""
    tree = from_message(message)[0]
    keys, values = tree if isinstance(tree, tuple) and len(tree) == 2 else (None, None)
    if (
        not isinstance(keys, Tensor)
        or not isinstance(values, Tensor)
        or (keys.dtype, values.dtype) != (torch.int64, torch.float64)
        or (*keys.shape, *values.shape) != (len(values), 3, len(values), length)
    ):
        raise ProtocolError(
            f"a member's batch norm statistics must be vectors of {length} numbers, each with its microbatch's name"
        )
    receipts = [(int(first), int(index), int(call)) for first, index, call in keys.tolist()]
    return dict(zip(receipts, values, strict=True))
