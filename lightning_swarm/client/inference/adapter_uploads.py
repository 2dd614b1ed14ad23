"""Uploads adapters to servers: each adapter once to each server, however many calls and texts name it."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import Final

from lightning_swarm.client.inference.adapters import PackedAdapter
from lightning_swarm.network import PeerId, Transport
from lightning_swarm.protocol.rpc import TUNE_ADAPTER

_MAX_UPLOADS: Final = 256  # remembered uploads; a forgotten adapter may be sent again needlessly


class AdapterUploads:
    """Remembers one client's uploads, and shares each upload between its waiters."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._uploads: OrderedDict[tuple[PeerId, bytes], asyncio.Task[None]] = OrderedDict()  # last used at the end

    async def send(self, peer: PeerId, adapter: PackedAdapter, *, timeout: float, again: bool = False) -> None:
        """Send an adapter to a server unless it was sent before. Set `again` if the server has dropped it."""
        key = (peer, adapter.name)
        upload = self._uploads.get(key)
        if upload is None or (upload.done() and (again or upload.cancelled() or upload.exception() is not None)):
            upload = asyncio.ensure_future(self._send(peer, adapter, timeout))
            # Retrieves the error, because no waiter may be left.
            upload.add_done_callback(lambda task: task.cancelled() or task.exception())
        self._uploads[key] = upload
        self._uploads.move_to_end(key)
        if len(self._uploads) > _MAX_UPLOADS:
            self._forget_oldest()
        await asyncio.shield(upload)

    def _forget_oldest(self) -> None:
        """Forget the oldest finished upload."""
        oldest = next((key for key, task in self._uploads.items() if task.done()), None)
        if oldest is not None:
            del self._uploads[oldest]

    async def _send(self, peer: PeerId, adapter: PackedAdapter, timeout: float) -> None:
        await TUNE_ADAPTER.ask(self._transport, peer, adapter.upload, adapter.tensors, timeout=timeout, max_bytes=0)

    def cancel(self) -> None:
        """Cancel the uploads under way."""
        for upload in self._uploads.values():
            upload.cancel()
