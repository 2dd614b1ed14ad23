"""Snapshots of a server's own stages and of another server's, in case all servers of a stage die.

A record may order snapshots of the weights after it. Then each server copies its stages before the next record, and
the first replica of each stage sends its copy to the backup that the order names (KEEP). The coordinator asks servers
for lists of the snapshots that they keep (HELD). In a rollback, trainers fetch snapshots (SNAPSHOT).
"""

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
    """Keeps states of the lead's loop, one for each snapshot, so that this peer could lead the run."""

    def __init__(self, context: ServerContext, steps: StepHandlers, ordered: Callable[[], set[int]]) -> None:
        self._membership = context.membership
        self._steps = steps
        self._ordered = ordered  # returns the versions of the ordered snapshots
        self._kept: dict[int, Message] = {}  # version -> the state as received
        self.unfit: Callable[[Manifest], str] = lambda _: ""  # returns why this peer could not lead; empty if it could
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
        await self._steps.wait_for_next(head.version)  # the lead may apply the record that orders it earlier
        self._check(caller, head)  # the run may have changed meanwhile
        if head.version not in self._ordered():
            raise ProtocolError(f"no record orders a snapshot of version {head.version}")
        TravellingLoop.read(plain_values.unpack(message.tensors))  # refuses a state that could not be read later
        self._kept[head.version] = message
        self.prune()

    def _check_lead(self, caller: PeerId) -> None:
        self._membership.check_lead(caller, "sends its loop's state")

    def _check(self, caller: PeerId, head: KeptLoop) -> None:
        run = self._membership.run
        run.check_generation(head.generation)
        self._check_lead(caller)
        if why := self.unfit(run.manifest):
            raise ProtocolError(f"this peer could not lead the run: {why}")


_log = logging.getLogger(__name__)


def copy_stage(stage: Stage, generation: int) -> tuple[Snapshot, list[Tensor]]:
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
    # Copied even on the CPU, because sending may take long, and records change the stage meanwhile.
    return head, [tensor.detach().to("cpu", copy=True) for tensor in [*weights.values(), *tensors]]


@dataclass(frozen=True)
class _StoredSnapshot:
    head: Snapshot
    digest: bytes  # digest of head and tensors
    tensors: Sequence[Tensor]  # empty if they are in the file
    file: TensorFile | None = None  # deleted with its last reference, which a reader may still have
    places: Sequence[TensorPlace] = ()  # where the tensors are in the file


class SnapshotStore:
    """Keeps snapshots in memory, and beyond `max_bytes` in files that vanish with this process."""

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
        """Keep a snapshot, which must not change, if it is still `wanted` once written; `OSError` without room."""
        own_digest = await asyncio.to_thread(digest, tensors, encode(head))
        kept = _StoredSnapshot(head, own_digest, tensors)
        if self.used_bytes + num_bytes(tensors) > self._max_bytes:
            file = TensorFile()
            kept = _StoredSnapshot(head, own_digest, (), file, await asyncio.to_thread(file.write, tensors))
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
        newest = [snapshot for snapshot in self.store.held if snapshot.version == order.version]
        own = [snapshot for snapshot in newest if snapshot.stage_index in self._steps.stages]
        return [snapshot for snapshot in own if run.digest_of(snapshot.stage_index, snapshot.version) is None]

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
        self._older = self._order_of(snapshot.keep)
        self.ordered = order
        self._senders = {key: peer for key, peer in self._senders.items() if self._order_of(key[1]) is not None}
        self.store.keep_only(record.snapshot.keep)  # the new version is added once it is copied
        self.loops.prune()
        rosters = self._membership.run.rosters  # rosters after the record
        # Only the first replica of a stage sends a copy to the server that the order names.
        sent = {index for index, roster in enumerate(rosters) if roster[0] == self._membership.me}
        return self._take(order, [self._steps.stage(index) for index in self._steps.stages], sent)

    async def _take(self, order: _SnapshotOrder, stages: Sequence[Stage], sent: Collection[int]) -> None:
        """Copy stages before the next record, and send the copies of the stages in `sent` to other servers."""
        taken: dict[int, tuple[Snapshot, list[Tensor]]] = {}
        # Copy all stages before hashing any copy, because hashing may take longer than a step.
        for head, tensors in [await self._compute(partial(copy_stage, stage, order.generation)) for stage in stages]:
            if head.version == order.version and await self._put(head, tensors, order):  # else it is ahead
                taken[head.stage_index] = head, tensors
        for index in sorted(sent & taken.keys()):
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
        """Replace kept snapshots of other servers' stages whose digests differ from the record's."""
        digests = {(kept.stage_index, kept.version): kept.digest for kept in self.store.held}
        for snapshot in recorded:
            if digests.get((snapshot.stage_index, snapshot.version), snapshot.digest) != snapshot.digest:
                self.store.discard(snapshot.version, snapshot.stage_index)
                await self._fetch(snapshot)

    async def _fetch(self, recorded: HeldSnapshot) -> None:
        """Fetch a snapshot from a server that took it, because another server sent a false copy."""
        index, version, order = recorded.stage_index, recorded.version, self._order_of(recorded.version)
        if order is None or index >= len(order.backups) or order.backups[index] != self._transport.peer_id:
            return
        sender = self._senders.pop((index, version), None)
        if sender is not None:
            reason = "the snapshot that it sent differs from its stage's snapshot in the record"
            self._events.note("unconfirmed", peer=sender, stage=index, step=version, reason=reason)
        request = SnapshotRequest(stage_index=index, version=version)
        timeout, max_bytes = self._limits.join_timeout, self._limits.max_message_bytes
        for peer in [member.peer_id for member in self._membership.run.rosters[index] if member.peer_id != sender]:
            try:
                head, tensors = await SNAPSHOT.ask(self._transport, peer, request, timeout=timeout, max_bytes=max_bytes)
                if await asyncio.to_thread(digest, tensors, encode(head)) == recorded.digest:
                    await self.store.put(head, tensors, wanted=lambda: self._order_of(version) is order)
                    return
            except (SwarmError, OSError) as error:
                _log.info("%s did not send its snapshot of stage %d: %s", peer, index, error)

    def _order_of(self, version: int | None) -> _SnapshotOrder | None:
        """Return the order for the kept snapshots of a version, if there is one."""
        return next((order for order in (self.ordered, self._older) if order and order.version == version), None)

    # ------------------------------------------------------------------ calls of other peers

    async def _handle_held(self, caller: PeerId, _: None) -> HeldSnapshots:
        """List the snapshots, and the states of the lead's loop, that this peer keeps."""
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
            raise ProtocolError(f"the copy of stage {head.stage_index} does not have the hash that its sender states")
        recorded = self._membership.run.digest_of(head.stage_index, head.version)
        if recorded is not None and await asyncio.to_thread(digest, message.tensors, encode(head)) != recorded:
            is_kept = any(kept.digest == recorded for kept in self.store.held)
            if self._membership.run.trusted and not is_kept:
                self._senders[head.stage_index, head.version] = caller
                self._spawn(
                    self._fetch(HeldSnapshot(stage_index=head.stage_index, version=head.version, digest=recorded))
                )
            raise ProtocolError(
                f"the copy of stage {head.stage_index} at version {head.version} must have the BLAKE3 digest in the "
                "record, but has another"
            )
        order = self._check_ordered(caller, head)  # a newer order may have come
        self._senders[head.stage_index, head.version] = caller
        if not await self._put(head, message.tensors, order):
            raise SwarmError(f"there is no room for a snapshot of stage {head.stage_index} here, or it is obsolete")

    def _check_ordered(self, caller: PeerId, head: Snapshot) -> _SnapshotOrder:
        """Return the order by which this server keeps a stage's copy; refuse a copy that was not ordered."""
        run = self._membership.run
        run.check_generation(head.generation)
        order = self.ordered
        if (
            order is None
            or head.version != order.version
            or head.stage_index >= min(len(order.backups), len(run.rosters))
            or order.backups[head.stage_index] != self._transport.peer_id
        ):
            raise ProtocolError(f"no record orders a copy of stage {head.stage_index} at version {head.version} here")
        if caller not in {member.peer_id for member in run.rosters[head.stage_index]}:
            raise ProtocolError(f"{caller} does not hold stage {head.stage_index}")
        names = [name for name, _, _ in run.manifest.stages[head.stage_index].parameters]
        if head.weights[: len(names)] != names:
            raise ProtocolError(f"stage {head.stage_index} has the weights {names[:5]}, got {head.weights[:5]}")
        return order

    async def _handle_snapshot(self, caller: PeerId, request: SnapshotRequest) -> WithTensors[Snapshot]:
        """Send a kept snapshot to the server that the order names as backup, or to a trainer."""
        order = self._order_of(request.version)
        backups = order.backups if order is not None else ()
        if request.stage_index >= len(backups) or backups[request.stage_index] != caller:
            self._membership.run.check_trainer(caller)
        head, tensors = await self.store.get(request.stage_index, request.version)
        return head, tensors
