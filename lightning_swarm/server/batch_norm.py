"""Exchanges batch norm statistics between the servers of a stage: one small vector per microbatch, not averaged."""

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
_PATIENCE: Final = 2.0  # factor of the timeout, because other replicas may begin the round later


def offer_statistics(statistics: Mapping[Receipt, Tensor], length: int, group: Group) -> None:
    """Offer this server's statistics to the other replicas: a vector ``[length]`` for each microbatch."""
    keys = torch.tensor(list(statistics), dtype=torch.int64).view(-1, 3)
    values = torch.stack(list(statistics.values())) if statistics else torch.zeros(0, length, dtype=torch.float64)
    group.offer(STATISTICS, to_message((keys, values)))


async def collect_statistics(
    statistics: Mapping[Receipt, Tensor], length: int, group: Group, rank: int | None
) -> dict[Receipt, Tensor]:
    """Collect the statistics of all replicas. `rank` is this server's roster index; None: it is not in the round."""
    read = partial(_read_statistics, length=length)
    patient = replace(group, timeout=_PATIENCE * group.timeout)
    by_member = [dict(statistics), *(await gather(fetch(patient, i, STATISTICS, read) for i in group.others(rank)))]
    merged = {receipt: values for each in by_member for receipt, values in each.items()}
    if len(merged) < sum(map(len, by_member)):
        raise ProtocolError("only one member of a stage may have a microbatch's batch norm statistics, got two")
    return merged


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
            f"a member's batch norm statistics must be vectors of {length} numbers, each with its microbatch's receipt"
        )
    receipts = [(int(first), int(index), int(call)) for first, index, call in keys.tolist()]
    return dict(zip(receipts, values, strict=True))
