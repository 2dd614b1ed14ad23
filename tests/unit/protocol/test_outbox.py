"""Records that go to a peer in one message: an error concerns only its sender."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from torch import Tensor

from lightning_swarm.core.clock import VirtualLoop
from lightning_swarm.network import PeerId
from lightning_swarm.protocol.messages.inference import SessionOutput
from lightning_swarm.protocol.outbox import Outbox


def output(structure: object) -> SessionOutput:
    return SessionOutput(session="0" * 32, number=1, length=None, structure=structure, num_tensors=0)


@pytest.mark.parametrize("structure", [1 << 70, "\ud800"])
def test_a_record_that_cannot_be_encoded_stops_no_other(structure: object) -> None:
    loop = VirtualLoop()

    async def send(_: PeerId, records: list[SessionOutput], tensors: list[Tensor]) -> Sequence[int]:
        return [len(records)] * len(records)

    async def go() -> list[int | BaseException]:
        outbox = Outbox[SessionOutput, int](send)
        asked = [outbox.put(PeerId("a"), output(one), ()) for one in (1, structure, 2)]
        async with asyncio.timeout(60.0):
            return await asyncio.gather(*asked, return_exceptions=True)

    first, second, third = loop.run_until_complete(go())
    assert (first, third) == (2, 2)
    assert isinstance(second, OverflowError | UnicodeEncodeError)
    loop.close()
