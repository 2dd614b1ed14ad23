"""The holders of microbatches in averaging rounds, which records do not contain: a record only names the round."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from lightning_swarm.coordinator.server_calls import ServerCalls
from lightning_swarm.core.errors import SwarmError
from lightning_swarm.network import PeerId
from lightning_swarm.protocol.messages.calls import Receipt, to_ranges, unpack
from lightning_swarm.protocol.messages.step import AverageReply, Closing, NamedReceipts, Record


class Held:
    """The receipts that servers were asked to average."""

    def __init__(self) -> None:
        self._rounds: defaultdict[tuple[int, int, int], dict[tuple[int, PeerId], set[Receipt]]] = defaultdict(dict)

    def note(self, peer: PeerId, closing: Closing, named: Sequence[NamedReceipts]) -> None:
        """Note the receipts that a server holds."""
        for one in named:
            self._rounds[_round(closing)][one.stage_index, peer] = unpack(one.receipts)

    def by_stage(self, record: Record) -> list[dict[PeerId, set[Receipt]]]:
        """Return the receipts that the servers of each stage hold in a record's step."""
        found: list[dict[PeerId, set[Receipt]]] = [{} for _ in record.touched]
        for (stage, peer), receipts in self._rounds[_round(record.closing)].items():
            found[stage][peer] = receipts
        return found

    def counted(self, record: Record, num_stages: int | None = None) -> list[Receipt]:
        """Return the counted microbatches, each with one holder per stage, of all stages or the first `num_stages`."""
        counted: list[Receipt] = []
        for stage in self.by_stage(record)[:num_stages]:
            held = sorted(receipt for receipts in stage.values() for receipt in receipts)
            assert len(set(held)) == len(held), "a microbatch has one holder"
            assert not (counted and held) or counted == held, "each stage counts the same microbatches"
            counted = counted or held
        assert {first for first, _, _ in counted} <= set(batches_of(record))
        return counted


def _round(closing: Closing) -> tuple[int, int, int]:
    return closing.generation, closing.step, closing.round


def batches_of(record: Record) -> list[int]:
    """Return the places of the batches that a record counts."""
    return [first for places in to_ranges(record.closing.batches) for first in places]


@contextmanager
def watched() -> Iterator[Held]:
    """Note the averaging requests of any coordinator in this process."""
    held = Held()
    average = ServerCalls.average

    async def noted(
        self: ServerCalls, closing: Closing, named: Mapping[PeerId, list[NamedReceipts]], **options: Any
    ) -> tuple[dict[PeerId, AverageReply], dict[PeerId, SwarmError]]:
        for peer, one in named.items():
            held.note(peer, closing, one)
        return await average(self, closing, named, **options)

    with patch.object(ServerCalls, "average", noted):
        yield held
