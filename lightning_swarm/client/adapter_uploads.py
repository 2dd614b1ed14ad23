"""Sends adapters to servers: each once to each server, whichever calls and texts of this client name it."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import Final

from lightning_swarm.client.adapters import PackedAdapter
from lightning_swarm.network import PeerId, Transport
from lightning_swarm.protocol.methods import TUNE_ADAPTER

_MAX_UPLOADS: Final = 256  # that are remembered: what is forgotten is sent once more needlessly


class AdapterUploads:
    """The uploads of one client."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._uploads: OrderedDict[tuple[PeerId, bytes], asyncio.Task[None]] = OrderedDict()  # the newest at the end

    async def send(self, peer: PeerId, adapter: PackedAdapter, *, timeout: float, again: bool = False) -> None:
        """Send a server an adapter, unless that was done before; `again`: it has dropped it."""
        key = (peer, adapter.name)
        upload = self._uploads.get(key)
        if upload is None or (upload.done() and (again or upload.cancelled() or upload.exception() is not None)):
            upload = asyncio.ensure_future(self._send(peer, adapter, timeout))
            upload.add_done_callback(lambda one: one.cancelled() or one.exception())  # perhaps nobody waits any more
        self._uploads[key] = upload
        self._uploads.move_to_end(key)
        if len(self._uploads) > _MAX_UPLOADS:
            self._forget_one()
        await asyncio.shield(upload)

    def _forget_one(self) -> None:
        """Forget the oldest upload that is through."""
        oldest = next((key for key, task in self._uploads.items() if task.done()), None)
        if oldest is not None:
            del self._uploads[oldest]

    async def _send(self, peer: PeerId, adapter: PackedAdapter, timeout: float) -> None:
        await self._transport.stream(peer, TUNE_ADAPTER, adapter.upload, timeout=timeout, max_bytes=0)

    def cancel(self) -> None:
        """End what is under way."""
        for upload in self._uploads.values():
            upload.cancel()
