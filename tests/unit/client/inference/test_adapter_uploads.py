"""Uploads of adapters: once to each server, however many calls need one at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
import torch

from lightning_swarm.client.inference.adapter_uploads import _MAX_UPLOADS, AdapterUploads
from lightning_swarm.client.inference.adapters import PackedAdapter
from lightning_swarm.core.clock import VirtualLoop
from lightning_swarm.core.errors import Busy
from lightning_swarm.core.tasks import gather
from lightning_swarm.network import Message, PeerId
from lightning_swarm.network.memory import MemoryNetwork
from lightning_swarm.protocol.messages.tuning import AdapterUpload
from lightning_swarm.protocol.rpc import TUNE_ADAPTER

SERVER = PeerId("a")
UPLOAD = AdapterUpload(model="0" * 64, stage=0, digest=bytes(32), loras=[])


class Swarm:
    """A client, and a server that counts uploads."""

    def __init__(self) -> None:
        self.loop, network = VirtualLoop(), MemoryNetwork()
        self.came: list[int] = []
        self.refuses = False
        network.transport(SERVER).handle_stream(TUNE_ADAPTER.name, self._take, max_bytes=1 << 20)
        self.uploads = AdapterUploads(network.transport("client"))

    async def _take(self, caller: PeerId, message: Message) -> Message:
        await asyncio.sleep(1.0)
        self.came.append(int(message.tensors[0]))
        if self.refuses:
            raise Busy("no room")
        return Message()

    def send(self, *numbers: int, again: bool = False) -> None:
        async def send(number: int) -> None:
            adapter = PackedAdapter(bytes([number % 256, number // 256]), UPLOAD, (torch.tensor(number),))
            await self.uploads.send(SERVER, adapter, timeout=60.0, again=again)

        self.loop.run_until_complete(gather(map(send, numbers)))


@pytest.fixture
def swarm() -> Iterator[Swarm]:
    made = Swarm()
    yield made
    made.loop.close()


def test_each_goes_once(swarm: Swarm) -> None:
    swarm.send(1, 1, 2, 1)
    swarm.send(1, 2)
    assert sorted(swarm.came) == [1, 2]
    swarm.send(1, 1, again=True)  # both calls found it missing there, and one upload serves both
    assert sorted(swarm.came) == [1, 1, 2]


def test_one_that_failed_is_sent_again(swarm: Swarm) -> None:
    swarm.refuses = True
    with pytest.raises(Busy):
        swarm.send(1)
    swarm.refuses = False
    swarm.send(1)
    assert swarm.came == [1, 1]


def test_the_oldest_are_forgotten(swarm: Swarm) -> None:
    for number in range(_MAX_UPLOADS + 3):
        swarm.send(number)
    swarm.came.clear()
    swarm.send(_MAX_UPLOADS + 2, _MAX_UPLOADS // 2, 3)
    assert swarm.came == []
    swarm.send(0)
    assert swarm.came == [0]
    assert len(swarm.uploads._uploads) == _MAX_UPLOADS


def test_what_is_under_way_is_ended(swarm: Swarm) -> None:
    async def leave() -> None:
        sending = asyncio.ensure_future(
            swarm.uploads.send(SERVER, PackedAdapter(b"", UPLOAD, (torch.tensor(1),)), timeout=60.0)
        )
        await asyncio.sleep(0.5)
        swarm.uploads.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending

    swarm.loop.run_until_complete(leave())
    assert swarm.came == []
