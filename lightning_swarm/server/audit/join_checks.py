"""Checks the data that a joiner receives in an audited run, where any server but the coordinator may send false data.

The joiner downloads its stage from a single donor, then follows the donor's records. The coordinator confirms records
and members, and compares the joiner's state and means with those of other servers. A donor whose data it does not
confirm is not asked again.
"""

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
    """Has the coordinator confirm the state, records and members that a donor sent."""

    one_donor = True  # so that the sender of unconfirmed state is known

    def __init__(self, context: ServerContext, steps: StepHandlers) -> None:
        self._context, self._rounds = context, steps.rounds
        self._rejected_donors: set[PeerId] = set()  # donors whose state the coordinator did not confirm

    @override
    def donors(self, servers: Sequence[PeerId], coordinator: PeerId) -> Sequence[PeerId]:
        donors = [peer for peer in servers if peer not in self._rejected_donors]
        if not donors:
            raise Unconfirmed(
                "a joiner needs a server of its stage whose state the coordinator confirms; it confirmed the state of "
                f"none of {len(servers)} servers. Join again when other servers hold the stage."
            )
        # After false state from a server, ask the coordinator first, because it is trusted.
        return sorted(donors, key=lambda peer: peer != coordinator) if self._rejected_donors else donors

    @override
    def reject_donor(self, error: Exception, donor: PeerId | None, coordinator: PeerId, stage_index: int) -> None:
        is_outage = isinstance(error, PeerError) and not isinstance(error, Unconfirmed)
        if is_outage or donor in (None, coordinator):
            return  # the caller raises `error`
        # False state may cause any other error, even one that would end this peer.
        self._rejected_donors.add(donor)
        self._context.events.note("unconfirmed", peer=donor, stage=stage_index, reason=str(error))
        raise Unconfirmed(f"the coordinator did not confirm the state that {donor} sent: {error}") from error

    @override
    async def check_record(self, record: Record) -> None:
        run, timeout = self._context.membership.run, self._context.limits.call_timeout
        request = StepRequest(generation=run.manifest.generation, step=record.step)
        try:
            answer = await RECORD_DIGEST.ask(self._context.transport, run.coordinator, request, timeout=timeout)
        except ProtocolError as error:  # the run may have rolled back
            raise PeerError(f"{run.coordinator} sent no digest of record {record.step}: {error}") from error
        if answer.digest != record_digest(record):
            raise Unconfirmed(f"the donor's record {record.step} differs from the decided record")

    @override
    async def confirm_members(self, version: int, adopt: Callable[[SeatedMembers], object]) -> bool:
        run, timeout = self._context.membership.run, min(self._context.limits.call_timeout, 30.0)
        view = await VIEW.ask(self._context.transport, run.coordinator, None, timeout=timeout)
        if (view.manifest.generation, view.version) != (run.manifest.generation, version):
            return False  # the caller waits for the next record
        adopt(view.seats)
        return True

    @override
    async def mean_digests(self, closing: Closing, stage_index: int, num_parts: int) -> list[bytes]:
        mean = self._rounds.held(closing).gradients[stage_index]
        return await self._context.compute(partial(part_digests, mean, num_parts))
