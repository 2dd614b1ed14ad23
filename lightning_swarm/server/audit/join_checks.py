"""Checks what a joiner receives in an audited run, where any server but the coordinator's may send false state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from typing_extensions import override

from lightning_swarm.core.errors import PeerError, ProtocolError, Unconfirmed
from lightning_swarm.network import PeerId
from lightning_swarm.protocol.messages.run import SeatedMembers, StepRequest
from lightning_swarm.protocol.messages.step import Closing, Record
from lightning_swarm.protocol.rpc import RECORD_DIGEST, VIEW
from lightning_swarm.protocol.run_state import record_digest
from lightning_swarm.server.audit.projection import part_digests
from lightning_swarm.server.context import ServerContext
from lightning_swarm.server.oversight import JoinChecks
from lightning_swarm.server.step_handlers import StepHandlers


class AuditedJoinChecks(JoinChecks):
    """Has the coordinator confirm state, records and members that a joiner receives."""

    one_donor = True  # so that the sender of unconfirmed state is known

    def __init__(self, context: ServerContext, steps: StepHandlers) -> None:
        self._context, self._rounds = context, steps.rounds
        self._unconfirmed: set[PeerId] = set()  # donors whose state the coordinator did not confirm

    @override
    def donors(self, servers: Sequence[PeerId], coordinator: PeerId) -> Sequence[PeerId]:
        left = [peer for peer in servers if peer not in self._unconfirmed]
        if not left:
            raise Unconfirmed(
                f"a joiner needs a server of its stage whose state the coordinator confirms, and {len(servers)} sent "
                "another one. Join when others hold the stage."
            )
        # After a false state, ask the coordinator first.
        return sorted(left, key=lambda peer: peer != coordinator) if self._unconfirmed else left

    @override
    def blame(self, error: Exception, donor: PeerId | None, coordinator: PeerId, stage_index: int) -> None:
        is_fault = isinstance(error, PeerError) and not isinstance(error, Unconfirmed)
        if is_fault or donor in (None, coordinator):
            return
        # Any error counts, because a donor may cause it on purpose, to end this peer.
        self._unconfirmed.add(donor)
        self._context.events.note("unconfirmed", peer=donor, stage=stage_index, reason=str(error))
        raise Unconfirmed(f"the state that {donor} sent is not confirmed: {error}") from error

    @override
    async def check_record(self, record: Record) -> None:
        run, timeout = self._context.membership.run, self._context.limits.call_timeout
        request = StepRequest(generation=run.manifest.generation, step=record.step)
        try:
            answer = await RECORD_DIGEST.ask(self._context.transport, run.coordinator, request, timeout=timeout)
        except ProtocolError as error:  # the run may have rolled back
            raise PeerError(f"{run.coordinator} does not tell the record of step {record.step}: {error}") from error
        if answer.digest != record_digest(record):
            raise Unconfirmed(f"its record of step {record.step} is not the one that was decided")

    @override
    async def confirm_members(self, version: int, adopt: Callable[[SeatedMembers], object]) -> bool:
        run, timeout = self._context.membership.run, min(self._context.limits.call_timeout, 30.0)
        view = await VIEW.ask(self._context.transport, run.coordinator, None, timeout=timeout)
        if (view.manifest.generation, view.version) != (run.manifest.generation, version):
            return False  # a record is on its way
        adopt(view.seats)
        return True

    @override
    async def mean_digests(self, closing: Closing, stage_index: int, num_parts: int) -> list[bytes]:
        mean = self._rounds.held(closing).gradients[stage_index]
        return await self._context.compute(partial(part_digests, mean, num_parts))
