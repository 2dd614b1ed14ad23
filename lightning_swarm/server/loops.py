"""What the lead's loop was at the versions of the snapshots: kept by peers that could take the run over.

It came from the lead, and nobody but this peer reads it. It is looked at when it comes, so that what cannot be read is
refused then.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning_swarm import plain
from lightning_swarm.config import Limits
from lightning_swarm.errors import ProtocolError
from lightning_swarm.network import Message, PeerId, Transport
from lightning_swarm.server import KEEP_LOOP
from lightning_swarm.server.admission import Admission
from lightning_swarm.server.stepping import Stepping
from lightning_swarm.types.loops import TravellingLoop
from lightning_swarm.types.runs import Manifest
from lightning_swarm.types.snapshots import KeptLoop
from lightning_swarm.types.wire import decode


class Loops:
    """Those that this peer keeps: no more than there are snapshots.

    Args:
        transport: Its network.
        admission: Its place in the run.
        stepping: Its stages.
        ordered: The versions of the snapshots that there are to be.
        limits: Bounds.

    Attributes:
        unfit: Why this peer could not lead a run; nothing, if it could.
    """

    def __init__(
        self,
        transport: Transport,
        admission: Admission,
        stepping: Stepping,
        ordered: Callable[[], set[int]],
        *,
        limits: Limits,
    ) -> None:
        self._admission = admission
        self._stepping = stepping
        self._ordered = ordered
        self._kept: dict[int, Message] = {}
        self.unfit: Callable[[Manifest], str] = lambda _: ""
        transport.handle_stream(KEEP_LOOP, self._handle_keep, max_bytes=limits.loop_bytes)

    @property
    def versions(self) -> list[int]:
        """Of the weights that go with them."""
        return sorted(self._kept)

    def get(self, version: int) -> Any:
        """What the loop was at: a value of `plain`'s.

        Raises:
            KeyError: It is not kept here.
        """
        return plain.unpack(self._kept[version].tensors)

    def prune(self) -> None:
        """Forget those that no snapshot goes with."""
        ordered = self._ordered()
        self._kept = {version: one for version, one in self._kept.items() if version in ordered}

    async def _handle_keep(self, caller: PeerId, message: Message) -> Message:
        head = decode(message.body, KeptLoop)
        self._check(caller, head)
        await self._stepping.reached(head.version)  # its record may come here later than to the lead
        self._check(caller, head)
        if head.version not in self._ordered():
            raise ProtocolError(f"nobody said that there is a snapshot of version {head.version}")
        TravellingLoop.read(plain.unpack(message.tensors))
        self._kept[head.version] = message
        self.prune()
        return Message()

    def _check(self, caller: PeerId, head: KeptLoop) -> None:
        run = self._admission.run
        run.check_generation(head.generation)
        if caller != run.manifest.lead:
            raise ProtocolError(f"the lead {run.manifest.lead} says what its loop was at, not {caller}")
        if why := self.unfit(run.manifest):
            raise ProtocolError(f"this peer could not lead the run: {why}")
