"""Copies of stages that a server keeps against the death of all that hold one: of its own, and of a neighbour's."""

from __future__ import annotations

import asyncio
import logging
import mmap
import tempfile
import time
from collections.abc import Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import IO, Any, cast

import torch
from msgspec import UNSET
from torch import Tensor

from lightning_swarm.core.errors import ProtocolError, SwarmError, TicketGone
from lightning_swarm.core.limits import Limits
from lightning_swarm.model.fingerprint import fingerprint
from lightning_swarm.network import Message, PeerId, Transport
from lightning_swarm.network.addresses import host_of
from lightning_swarm.protocol import plain_values, serialization
from lightning_swarm.protocol.messages.batches import TravellingLoop
from lightning_swarm.protocol.messages.run import Manifest
from lightning_swarm.protocol.messages.state import (
    HeldSnapshot,
    HeldSnapshots,
    KeptLoop,
    OrderedSnapshots,
    Snapshot,
    SnapshotRequest,
)
from lightning_swarm.protocol.messages.step import Record
from lightning_swarm.protocol.messages.wire import decode, encode
from lightning_swarm.protocol.methods import HELD, KEEP, KEEP_LOOP, SNAPSHOT
from lightning_swarm.server.activation_cache import num_bytes
from lightning_swarm.server.admission import Admission
from lightning_swarm.server.executor import FIRST, Executor
from lightning_swarm.server.stage import Stage
from lightning_swarm.server.step_handlers import StepHandlers


# The loop's state came from the lead, and only this peer reads it. It is checked when it comes, so that what cannot be
# read is refused then.
class KeptLoops:
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
        stepping: StepHandlers,
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
        """What the loop was at: a value of `plain_values`'s.

        Raises:
            KeyError: It is not kept here.
        """
        return plain_values.unpack(self._kept[version].tensors)

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
        TravellingLoop.read(plain_values.unpack(message.tensors))
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


_log = logging.getLogger(__name__)


def copied(stage: Stage, generation: int) -> Message:
    """A copy of all that a stage is, on the CPU. On the compute thread."""
    weights, state = stage.weights(), stage.optimizer_state()
    structure, tensors = serialization.flatten(list(state.values()))
    head = Snapshot(
        generation=generation,
        stage_index=stage.index,
        version=stage.version,
        version_hash=stage.fingerprint(),
        weights=list(weights),
        optimizer=list(state),
        structure=structure,
        selection=stage.selection,
    )
    # Copied: it may take long to send, and records go on changing the original.
    return Message(encode(head), tuple(one.detach().to("cpu", copy=True) for one in [*weights.values(), *tensors]))


@dataclass
class _StoredSnapshot:
    head: Snapshot
    tensors: Sequence[Tensor]
    file: IO[bytes] | None = None  # has the tensors, if they are not here
    num_bytes: int = 0  # in memory

    def close(self) -> None:
        if self.file is not None:
            self.file.close()


class SnapshotStore:
    """Snapshots in memory, and beyond `max_bytes` in files that vanish with this process."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._kept: dict[tuple[int, int], _StoredSnapshot] = {}  # by version and stage

    @property
    def held(self) -> list[HeldSnapshot]:
        """What is there, oldest first."""
        return [
            HeldSnapshot(stage_index=index, version=version, version_hash=one.head.version_hash)
            for (version, index), one in sorted(self._kept.items())
        ]

    @property
    def used_bytes(self) -> int:
        """In memory."""
        return sum(one.num_bytes for one in self._kept.values())

    async def put(self, head: Snapshot, tensors: Sequence[Tensor], *, wanted: Callable[[], bool]) -> None:
        """Keep a snapshot, if it is `wanted` still once it is written. The tensors must not change any more.

        Raises:
            OSError: There is no room for it on the disk.
        """
        size = num_bytes(tensors)
        kept = _StoredSnapshot(head, tensors, num_bytes=size)
        if self.used_bytes + size > self._max_bytes:
            kept = _StoredSnapshot(head, (), await asyncio.to_thread(_written, tensors))
        if not wanted():
            kept.close()
            return
        self._drop(head.version, head.stage_index)
        self._kept[head.version, head.stage_index] = kept

    async def get(self, stage_index: int, version: int) -> tuple[Snapshot, Sequence[Tensor]]:
        """A snapshot that is there.

        Raises:
            TicketGone: It is not.
        """
        kept = self._kept.get((version, stage_index))
        if kept is None:
            raise TicketGone(f"stage {stage_index} at version {version} is not kept here (any more)")
        if kept.file is None:
            return kept.head, kept.tensors
        # Mapped here and now, for it may be dropped while it is read; and each reader has a position of its own.
        mapped = mmap.mmap(kept.file.fileno(), 0, access=mmap.ACCESS_READ)
        return kept.head, await asyncio.to_thread(_read, mapped)

    def keep_only(self, version: int | None) -> None:
        """Drop what is of another version."""
        for key in [key for key in self._kept if key[0] != version]:
            self._drop(*key)

    def _drop(self, version: int, stage_index: int) -> None:
        kept = self._kept.pop((version, stage_index), None)
        if kept is not None:
            kept.close()


def _written(tensors: Sequence[Tensor]) -> IO[bytes]:
    file = tempfile.TemporaryFile(prefix="lightning-swarm-")  # noqa: SIM115 - open for as long as it is kept
    try:
        torch.save(list(tensors), file)
        file.flush()
    except BaseException:
        file.close()
        raise
    return file


def _read(mapped: mmap.mmap) -> Sequence[Tensor]:
    with mapped:
        tensors: list[Tensor] = torch.load(cast(IO[bytes], mapped), weights_only=True)
    return tensors


@dataclass(frozen=True, eq=False)
class _PendingSnapshot:
    """What a record said."""

    generation: int
    version: int  # of the weights after it
    keep: int | None
    keepers: Sequence[PeerId | None]
    at_s: float


class Snapshots:
    """Takes snapshots when a record says so, sends them to who shall keep them, and keeps others'.

    Args:
        transport: The server's network.
        executor: Computes.
        admission: Knows the run.
        stepping: Its stages.
        limits: Bounds.
    """

    def __init__(
        self, transport: Transport, executor: Executor, admission: Admission, stepping: StepHandlers, *, limits: Limits
    ) -> None:
        self._transport = transport
        self._executor = executor
        self._admission = admission
        self._stepping = stepping
        self._limits = limits
        self._order: _PendingSnapshot | None = None  # the last one
        self.store = SnapshotStore(limits.snapshot_bytes)
        self.loops = KeptLoops(transport, admission, stepping, self._versions, limits=limits)
        transport.handle_call(HELD, self._handle_held)
        transport.handle_stream(KEEP, self._handle_keep, max_bytes=limits.max_message_bytes)
        transport.handle_stream(SNAPSHOT, self._handle_snapshot, max_bytes=0)

    def go_back(self) -> None:
        """The run entered its next generation, or is over: what was kept is of no use."""
        self._order = None
        self.store.keep_only(None)
        self.loops.prune()

    @property
    def ordered(self) -> OrderedSnapshots | None:
        """The newest order that was seen here, of this run."""
        order = self._order
        return None if order is None else OrderedSnapshots(order.version, order.keep, order.at_s)

    def _versions(self) -> set[int]:
        order = self._order
        return set() if order is None else {one for one in (order.version, order.keep) if one is not None}

    def on_record(self, record: Record) -> Coroutine[Any, Any, None] | None:
        """A record was applied here. The work of taking a snapshot, if it says so."""
        if record.snapshot is None or not self._admission.is_member:
            return None
        snapshot, generation = record.snapshot, record.closing.generation
        order = _PendingSnapshot(generation, record.step + 1, snapshot.keep, snapshot.keepers, time.monotonic())
        self._order = order
        self.store.keep_only(record.snapshot.keep)  # so there are never more than two
        self.loops.prune()
        rosters = self._admission.run.rosters  # after the record
        first = {index for index, roster in enumerate(rosters) if roster[0] == self._admission.me}
        return self._take(order, [self._stepping.stage(index) for index in self._stepping.stages], first)

    async def _take(self, order: _PendingSnapshot, stages: Sequence[Stage], first: Collection[int]) -> None:
        """Copy stages as they are now, before the next record, and send those of which this server is the first.

        The run may go back, or on without this server, at any moment: then nobody wants the rest.
        """
        taken: dict[int, Message] = {}
        for stage in stages:
            message, _ = await self._executor.submit(FIRST, partial(copied, stage, order.generation))
            head = decode(message.body, Snapshot)
            if head.version == order.version and await self._put(head, message.tensors, order):  # else it is further
                taken[stage.index] = message
        for index in sorted(first & taken.keys()):
            keeper = order.keepers[index] if index < len(order.keepers) else None
            if keeper is not None and self._order is order:
                await self._send(keeper, taken[index])

    async def _send(self, keeper: PeerId, message: Message) -> None:
        try:
            await self._transport.stream(keeper, KEEP, message, timeout=self._limits.join_timeout, max_bytes=0)
        except SwarmError as error:
            _log.warning("%s does not keep a snapshot of this server's stage: %s", keeper, error)

    async def _put(self, head: Snapshot, tensors: Sequence[Tensor], order: _PendingSnapshot) -> bool:
        """Whether it is kept: there is room, and no other order has come meanwhile."""
        try:
            await self.store.put(head, tensors, wanted=lambda: self._order is order)
        except OSError as error:
            _log.warning("No room for a snapshot of stage %d: %s", head.stage_index, error)
            return False
        return self._order is order

    # ------------------------------------------------------------------ the others' calls

    async def _handle_held(self, caller: PeerId, body: bytes) -> bytes:
        run = self._admission.run
        if body:
            raise ProtocolError(f"{HELD} takes no arguments, got {len(body)} bytes")
        if caller not in (*run.trainers, *run.servers):
            raise ProtocolError(f"{caller} is not in run {run.manifest.run_id!r}")
        addresses = await self._transport.addresses()
        host = host_of(addresses)[:100]
        return encode(HeldSnapshots(host=host, snapshots=self.store.held, loops=self.loops.versions or UNSET))

    async def _handle_keep(self, caller: PeerId, message: Message) -> Message:
        """A copy of another server's stage, as the record of its version told both."""
        head = decode(message.body, Snapshot)
        self._admission.run.check_generation(head.generation)
        await self._stepping.reached(head.version)
        self._check_ordered(caller, head)
        if await asyncio.to_thread(fingerprint, message.tensors) != head.version_hash:
            raise ProtocolError(f"the copy of stage {head.stage_index} is not what its sender took")
        order = self._check_ordered(caller, head)  # there may be a newer one by now
        if not await self._put(head, message.tensors, order):
            raise SwarmError(f"there is no room for a snapshot of stage {head.stage_index} here, or no use any more")
        return Message()

    def _check_ordered(self, caller: PeerId, head: Snapshot) -> _PendingSnapshot:
        run = self._admission.run
        run.check_generation(head.generation)
        order = self._order
        if (
            order is None
            or head.version != order.version
            or head.stage_index >= min(len(order.keepers), len(run.rosters))
            or order.keepers[head.stage_index] != self._transport.peer_id
        ):
            raise ProtocolError(f"nobody said that stage {head.stage_index} at version {head.version} is kept here")
        if caller not in {member.peer_id for member in run.rosters[head.stage_index]}:
            raise ProtocolError(f"{caller} does not hold stage {head.stage_index}")
        names = [name for name, _, _ in run.manifest.stages[head.stage_index].parameters]
        if head.weights[: len(names)] != names:
            raise ProtocolError(f"stage {head.stage_index} has the weights {names[:5]}, got {head.weights[:5]}")
        return order

    async def _handle_snapshot(self, caller: PeerId, message: Message) -> Message:
        self._admission.run.check_trainer(caller)
        request = decode(message.body, SnapshotRequest)
        head, tensors = await self.store.get(request.stage_index, request.version)
        return Message(encode(head), tuple(tensors))
