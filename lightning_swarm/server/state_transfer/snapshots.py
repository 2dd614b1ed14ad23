"""Snapshots of stages, in case all servers of a stage die: of a server's own stages, and of another server's."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from msgspec import UNSET
from torch import Tensor

from lightning_swarm.core.errors import ProtocolError, SwarmError, TicketGone
from lightning_swarm.model.fingerprint import digest, fingerprint
from lightning_swarm.model.tensor_file import TensorFile, TensorPlace
from lightning_swarm.network import Message, PeerId
from lightning_swarm.network.addresses import host_of
from lightning_swarm.protocol import plain_values, serialization
from lightning_swarm.protocol.messages.batches import TravellingLoop
from lightning_swarm.protocol.messages.run import HeldSnapshot, Manifest
from lightning_swarm.protocol.messages.state import HeldSnapshots, KeptLoop, OrderedSnapshots, Snapshot, SnapshotRequest
from lightning_swarm.protocol.messages.step import Record
from lightning_swarm.protocol.messages.wire import encode
from lightning_swarm.protocol.rpc import HELD, KEEP, KEEP_LOOP, SNAPSHOT, WithTensors
from lightning_swarm.server.context import ServerContext
from lightning_swarm.server.sample_costs import num_bytes
from lightning_swarm.server.stage import Stage
from lightning_swarm.server.step_handlers import StepHandlers


class KeptLoops:
    """States of the lead's loop that this peer keeps, one for each snapshot, so that it could lead the run."""

    def __init__(self, context: ServerContext, steps: StepHandlers, ordered: Callable[[], set[int]]) -> None:
        self._membership = context.membership
        self._steps = steps
        self._ordered = ordered  # returns the versions of the ordered snapshots
        self._kept: dict[int, Message] = {}  # version -> the state as received
        self.unfit: Callable[[Manifest], str] = lambda _: ""  # why this peer could not lead a run; empty if it could
        max_bytes = context.limits.loop_bytes
        KEEP_LOOP.serve(context.transport, self._handle_keep, max_bytes=max_bytes, admit=self._check_lead)

    @property
    def versions(self) -> list[int]:
        """The versions of the weights to which the states belong."""
        return sorted(self._kept)

    def get(self, version: int) -> Any:
        """Return the loop's state at a version, a value of `plain_values`; raise `KeyError` if it is not kept here."""
        return plain_values.unpack(self._kept[version].tensors)

    def prune(self) -> None:
        """Drop states without a snapshot."""
        ordered = self._ordered()
        self._kept = {version: loop for version, loop in self._kept.items() if version in ordered}

    async def _handle_keep(self, caller: PeerId, head: KeptLoop, message: Message) -> None:
        """Keep the loop's state of a version whose snapshot was ordered."""
        self._check(caller, head)
        await self._steps.wait_for_next(head.version)  # the record that orders it may come here later than to the lead
        self._check(caller, head)  # the run may have changed meanwhile
        if head.version not in self._ordered():
            raise ProtocolError(f"no record orders a snapshot of version {head.version}")
        TravellingLoop.read(plain_values.unpack(message.tensors))  # refuses a state that could not be read later
        self._kept[head.version] = message
        self.prune()

    def _check_lead(self, caller: PeerId) -> None:
        self._membership.check_lead(caller, "says what its loop was at")

    def _check(self, caller: PeerId, head: KeptLoop) -> None:
        run = self._membership.run
        run.check_generation(head.generation)
        self._check_lead(caller)
        if why := self.unfit(run.manifest):
            raise ProtocolError(f"this peer could not lead the run: {why}")


_log = logging.getLogger(__name__)


def copied(stage: Stage, generation: int) -> tuple[Snapshot, list[Tensor]]:
    """Copy a stage's weights and optimizer state to the CPU, on the compute thread."""
    weights, state = stage.weights(), stage.optimizer.state()
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
    # Copied, because sending may take long, and records change the stage meanwhile.
    return head, [tensor.detach().to("cpu", copy=True) for tensor in [*weights.values(), *tensors]]


@dataclass(frozen=True)
class _StoredSnapshot:
    head: Snapshot
    digest: bytes  # digest of head and tensors
    tensors: Sequence[Tensor]  # empty if they are in the file
    file: TensorFile | None = None  # removed with the last reference to it, which a reader may hold
    places: Sequence[TensorPlace] = ()  # of the tensors in the file


class SnapshotStore:
    """Snapshots in memory, and beyond `max_bytes` in files that vanish with this process."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._kept: dict[tuple[int, int], _StoredSnapshot] = {}  # (version, stage) -> snapshot

    @property
    def held(self) -> list[HeldSnapshot]:
        """The snapshots that are kept, oldest first."""
        return [
            HeldSnapshot(stage_index=index, version=version, digest=snapshot.digest)
            for (version, index), snapshot in sorted(self._kept.items())
        ]

    @property
    def used_bytes(self) -> int:
        """The bytes of the snapshots in memory."""
        return sum(num_bytes(snapshot.tensors) for snapshot in self._kept.values())

    async def put(self, head: Snapshot, tensors: Sequence[Tensor], *, wanted: Callable[[], bool]) -> None:
        """Keep an immutable snapshot if it is still `wanted` once written; raise `OSError` if there is no room."""
        own = await asyncio.to_thread(digest, tensors, encode(head))
        kept = _StoredSnapshot(head, own, tensors)
        if self.used_bytes + num_bytes(tensors) > self._max_bytes:
            file = TensorFile()
            kept = _StoredSnapshot(head, own, (), file, await asyncio.to_thread(file.write, tensors))
        if wanted():
            self._kept[head.version, head.stage_index] = kept

    async def get(self, stage_index: int, version: int) -> tuple[Snapshot, Sequence[Tensor]]:
        """Return a snapshot; raise `TicketGone` if it is not kept."""
        kept = self._kept.get((version, stage_index))
        if kept is None:
            raise TicketGone(f"stage {stage_index} at version {version} is not kept here (any more)")
        if kept.file is None:
            return kept.head, kept.tensors
        return kept.head, await asyncio.to_thread(kept.file.read, kept.places)

    def keep_only(self, version: int | None) -> None:
        """Drop the snapshots of all other versions."""
        self._kept = {key: kept for key, kept in self._kept.items() if key[0] == version}

    def discard(self, version: int, stage_index: int) -> None:
        """Drop a snapshot, if it is kept."""
        self._kept.pop((version, stage_index), None)


@dataclass(frozen=True, eq=False)
class _SnapshotOrder(OrderedSnapshots):
    """A record's order for snapshots of the weights after it, see `SnapshotOrder`."""

    generation: int
    backups: Sequence[PeerId | None]  # for each stage, the other server that keeps a copy


class Snapshots:
    """Takes snapshots when a record orders them, sends them to other servers, and keeps other servers' snapshots."""

    def __init__(self, context: ServerContext, steps: StepHandlers) -> None:
        transport, limits = context.transport, context.limits
        self._transport, self._compute, self._spawn = transport, context.compute, context.tasks.spawn
        self._membership, self._steps = context.membership, steps
        self._limits, self._events = limits, context.events
        self.ordered: _SnapshotOrder | None = None  # the newest order
        self._older: _SnapshotOrder | None = None  # the order of the older version that is kept
        self._senders: dict[tuple[int, int], PeerId] = {}  # (stage, version) -> sender of the copy kept here
        self.store = SnapshotStore(limits.snapshot_bytes)
        self.loops = KeptLoops(context, steps, self._versions)
        steps.unrecorded_snapshots = self._unrecorded
        HELD.serve(transport, self._handle_held)
        max_bytes, admit = limits.max_message_bytes, self._membership.check_server
        KEEP.serve(transport, self._handle_keep, max_bytes=max_bytes, admit=admit)
        SNAPSHOT.serve(transport, self._handle_snapshot)

    def discard(self) -> None:
        """Drop all snapshots, even while they are written: the run is over, or in its next generation."""
        self.ordered = self._older = None
        self.store.keep_only(None)
        self.loops.prune()

    def _unrecorded(self) -> list[HeldSnapshot]:
        """Return the newest snapshots of this server's own stages whose digests no record names yet."""
        order, run = self.ordered, self._membership.run
        if order is None:
            return []
        own = [one for one in self.store.held if one.version == order.version and one.stage_index in self._steps.stages]
        return [one for one in own if run.digest_of(one.stage_index, one.version) is None]

    def _versions(self) -> set[int]:
        """Return the versions whose snapshots are to be kept."""
        order = self.ordered
        return set() if order is None else {version for version in (order.version, order.keep) if version is not None}

    def on_record(self, record: Record) -> Coroutine[Any, Any, None] | None:
        """Return the work of taking a snapshot after a record, if the record orders it."""
        if record.snapshots and self._membership.run.trusted:
            self._spawn(self._replace_false(record.snapshots))
        if record.snapshot is None or not self._membership.is_member:
            return None
        snapshot, generation = record.snapshot, record.closing.generation
        order = _SnapshotOrder(record.step + 1, snapshot.keep, time.monotonic(), generation, snapshot.backups)
        self._older = next((one for one in (self.ordered, self._older) if one and one.version == snapshot.keep), None)
        self.ordered = order
        self._senders = {key: peer for key, peer in self._senders.items() if self._order_of(key[1]) is not None}
        self.store.keep_only(record.snapshot.keep)  # the new version is added once it is copied
        self.loops.prune()
        rosters = self._membership.run.rosters  # rosters after the record
        # Only the first replica of a stage sends a copy to the server that the order names.
        first = {index for index, roster in enumerate(rosters) if roster[0] == self._membership.me}
        return self._take(order, [self._steps.stage(index) for index in self._steps.stages], first)

    async def _take(self, order: _SnapshotOrder, stages: Sequence[Stage], first: Collection[int]) -> None:
        """Copy stages before the next record, and send the copies of the stages in `first` to other servers."""
        taken: dict[int, tuple[Snapshot, list[Tensor]]] = {}
        # Copy all stages before hashing any copy, because hashing may take longer than a step.
        for head, tensors in [await self._compute(partial(copied, stage, order.generation)) for stage in stages]:
            if head.version == order.version and await self._put(head, tensors, order):  # else the stage is ahead
                taken[head.stage_index] = head, tensors
        for index in sorted(first & taken.keys()):
            backup = order.backups[index] if index < len(order.backups) else None
            if backup is None or self.ordered is not order:  # no server keeps it, or the order is void by now
                continue
            try:
                timeout = self._limits.join_timeout
                await KEEP.ask(self._transport, backup, *taken[index], timeout=timeout, max_bytes=0)
            except SwarmError as error:
                _log.warning("%s does not keep a snapshot of this server's stage: %s", backup, error)

    async def _put(self, head: Snapshot, tensors: Sequence[Tensor], order: _SnapshotOrder) -> bool:
        """Keep a snapshot; return False if there is no room, or if another order has come meanwhile."""
        try:
            await self.store.put(head, tensors, wanted=lambda: self.ordered is order)
        except OSError as error:
            _log.warning("No room for a snapshot of stage %d: %s", head.stage_index, error)
            return False
        return self.ordered is order

    # ------------------------------------------------------------------ if servers are not trusted

    async def _replace_false(self, recorded: Sequence[HeldSnapshot]) -> None:
        """Replace kept snapshots of other servers' stages whose digest is not the record's."""
        mine = {(one.stage_index, one.version): one.digest for one in self.store.held}
        for one in recorded:
            if mine.get((one.stage_index, one.version), one.digest) != one.digest:
                self.store.discard(one.version, one.stage_index)
                await self._fetch(one)

    async def _fetch(self, recorded: HeldSnapshot) -> None:
        """Fetch a snapshot from a server that took it, because another server sent a false copy."""
        index, version, order = recorded.stage_index, recorded.version, self._order_of(recorded.version)
        if order is None or index >= len(order.backups) or order.backups[index] != self._transport.peer_id:
            return
        sender = self._senders.pop((index, version), None)
        if sender is not None:
            reason = "the snapshot that it sent is not what its stage's servers took"
            self._events.note("unconfirmed", peer=sender, stage=index, step=version, reason=reason)
        request = SnapshotRequest(stage_index=index, version=version)
        timeout, max_bytes = self._limits.join_timeout, self._limits.max_message_bytes
        for peer in [one.peer_id for one in self._membership.run.rosters[index] if one.peer_id != sender]:
            try:
                head, tensors = await SNAPSHOT.ask(self._transport, peer, request, timeout=timeout, max_bytes=max_bytes)
                if await asyncio.to_thread(digest, tensors, encode(head)) == recorded.digest:
                    await self.store.put(head, tensors, wanted=lambda: self._order_of(version) is order)
                    return
            except (SwarmError, OSError) as error:
                _log.info("%s gives no snapshot of stage %d: %s", peer, index, error)

    def _order_of(self, version: int) -> _SnapshotOrder | None:
        """Return the order for the kept snapshots of a version."""
        return next((one for one in (self.ordered, self._older) if one is not None and one.version == version), None)

    # ------------------------------------------------------------------ calls of other peers

    async def _handle_held(self, caller: PeerId, _: None) -> HeldSnapshots:
        run = self._membership.run
        if caller not in (*run.trainers, *run.servers):
            raise ProtocolError(f"{caller} is not in run {run.manifest.run_id!r}")
        host = host_of(await self._transport.addresses())[:100]
        return HeldSnapshots(host=host, snapshots=self.store.held, loops=self.loops.versions or UNSET)

    async def _handle_keep(self, caller: PeerId, head: Snapshot, message: Message) -> None:
        """Keep a copy of another server's stage, as the record of its version ordered."""
        self._membership.run.check_generation(head.generation)
        await self._steps.wait_for_next(head.version)
        self._check_ordered(caller, head)
        if await asyncio.to_thread(fingerprint, message.tensors) != head.version_hash:
            raise ProtocolError(f"the copy of stage {head.stage_index} is not what its sender took")
        recorded = self._membership.run.digest_of(head.stage_index, head.version)
        if recorded is not None and await asyncio.to_thread(digest, message.tensors, encode(head)) != recorded:
            held = any(one.digest == recorded for one in self.store.held)
            if self._membership.run.trusted and not held:
                self._senders[head.stage_index, head.version] = caller
                self._spawn(
                    self._fetch(HeldSnapshot(stage_index=head.stage_index, version=head.version, digest=recorded))
                )
            raise ProtocolError(
                f"a record tells the BLAKE3 digest of stage {head.stage_index} at version {head.version}, and this "
                "copy has another one"
            )
        order = self._check_ordered(caller, head)  # a newer order may have come
        self._senders[head.stage_index, head.version] = caller
        if not await self._put(head, message.tensors, order):
            raise SwarmError(f"there is no room for a snapshot of stage {head.stage_index} here, or no use any more")

    def _check_ordered(self, caller: PeerId, head: Snapshot) -> _SnapshotOrder:
        """Return the order by which this server keeps a stage's copy; refuse a copy that no order asks for."""
        run = self._membership.run
        run.check_generation(head.generation)
        order = self.ordered
        if (
            order is None
            or head.version != order.version
            or head.stage_index >= min(len(order.backups), len(run.rosters))
            or order.backups[head.stage_index] != self._transport.peer_id
        ):
            raise ProtocolError(
                f"no record orders that stage {head.stage_index} at version {head.version} is kept here"
            )
        if caller not in {member.peer_id for member in run.rosters[head.stage_index]}:
            raise ProtocolError(f"{caller} does not hold stage {head.stage_index}")
        names = [name for name, _, _ in run.manifest.stages[head.stage_index].parameters]
        if head.weights[: len(names)] != names:
            raise ProtocolError(f"stage {head.stage_index} has the weights {names[:5]}, got {head.weights[:5]}")
        return order

    async def _handle_snapshot(self, caller: PeerId, request: SnapshotRequest) -> WithTensors[Snapshot]:
        """Send a kept snapshot to the server that is to keep another copy, or to a trainer."""
        order = self._order_of(request.version)
        backups = order.backups if order is not None else ()
        if request.stage_index >= len(backups) or backups[request.stage_index] != caller:
            self._membership.run.check_trainer(caller)
        head, tensors = await self.store.get(request.stage_index, request.version)
        return head, tensors
