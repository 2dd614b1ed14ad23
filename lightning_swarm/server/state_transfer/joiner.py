"""Joins a run in progress: downloads a stage, and applies the run's records until a record admits this server.

The coordinator assigns a stage (JOIN). The joiner downloads it from a replica (see `Donor`) and requests that replica's
records (NEXT). Once it has caught up, it reports this to the coordinator (READY). The coordinator then has it hold the
mean gradient of a closing step (LISTEN), so that the step's record can admit it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Final

from msgspec.structs import replace
from torch import Tensor

from lightning_swarm.core.errors import AccessDenied, ConfigError, PeerError, ProtocolError, SwarmError
from lightning_swarm.core.progress import Progress, Report
from lightning_swarm.core.readable import printable, short_name
from lightning_swarm.core.tasks import first_result
from lightning_swarm.network import PeerId
from lightning_swarm.protocol import queries
from lightning_swarm.protocol.keepers import check_shown_by_keeper
from lightning_swarm.protocol.messages.membership import (
    JoinRequest,
    ListenReply,
    ListenRequest,
    NextRequest,
    ReadyRequest,
)
from lightning_swarm.protocol.messages.run import NO_CHANGE, RunView, SeatedMembers
from lightning_swarm.protocol.messages.step import Record
from lightning_swarm.protocol.messages.wire import PROTOCOL_VERSION
from lightning_swarm.protocol.rpc import JOIN, LISTEN, NEXT, READY, VIEW
from lightning_swarm.protocol.run_state import RunState, check_protocol_version
from lightning_swarm.protocol.serialization import named
from lightning_swarm.server.admission import Admission
from lightning_swarm.server.context import ServerContext
from lightning_swarm.server.stage import Stage
from lightning_swarm.server.state_transfer.stage_copy import StageDownload
from lightning_swarm.server.step_handlers import StepHandlers

_log = logging.getLogger(__name__)

_HOLD_S: Final = 15.0  # seconds to wait for the next record
_POLL_S: Final = 1.0  # pause between searches for a run, and between requests while members are unconfirmed
# All attempts and pauses take two minutes. After a restart, a record excludes this peer's former process in that time.
_MAX_ATTEMPTS: Final = 8
_MAX_TARGET_ATTEMPTS: Final = 3  # attempts to join the stage to which a server moves
_FIRST_PAUSE_S: Final = 1.0  # pause after the first attempt; doubles each time
_COMPARED: Final = ("Python", "torch", "lightning")  # packages whose versions are compared with the run's


class Joiner:
    """Brings a server into a run in progress."""

    def __init__(self, context: ServerContext, admission: Admission, steps: StepHandlers) -> None:
        self._transport, self._compute, self._limits = context.transport, context.compute, context.limits
        self._timeout = min(context.limits.call_timeout, 30.0)
        self._admission, self._membership, self._steps = admission, context.membership, steps
        self._stage: Stage | None = None
        self._joined_at = 0  # the run's version when the coordinator accepted the request to join
        self._target: int | None = None  # the stage to which a record moved this server
        self._former: int | None = None  # the stage that this server held before it moved
        self._is_unlike = False  # this machine's kind differs from that of the stage's servers
        self._has_warned = False  # about different versions
        self._one_donor = False  # send everything by one donor, because pieces of several did not match
        self._refused_by: set[PeerId] = set()  # announced peers whose refusal of this peer was logged as a warning
        self._report: Report = _log.info  # reports progress to the user
        LISTEN.serve(context.transport, self._handle_listen)

    def rejoin_with(self, stages: Sequence[Stage], holders: Sequence[int]) -> None:
        """Join with one of the `stages` that this server built for a former run: the one with the fewest `holders`."""
        self._target = self._former = None
        self._stage = min(stages, key=lambda stage: holders[stage.index], default=self._stage)

    def move_to(self, stage_index: int, *, former: int) -> None:
        """Join with another stage than `former`, which this server held, and fall back to `former` if that fails."""
        self._stage, self._target, self._former = None, stage_index, former

    async def enter(
        self, find_announced: Callable[[], Awaitable[Sequence[PeerId]]], report: Report = _log.info
    ) -> None:
        """Enter a run at its beginning, or join a run in progress; `find_announced` returns announced coordinators.

        Waits for a run without limit. Raises `ConfigError` if this peer's model or version is not the run's, and
        `PeerError` if the run refuses this peer.
        """
        self._report = report
        while not self._is_done:
            report(Progress(f"Asking for a run{self._certificate}"))
            coordinator = await self._find_coordinator(find_announced)
            if coordinator is not None:
                async with self._admission.joining_run(coordinator) as may_join:
                    if may_join:  # otherwise a run has admitted this peer meanwhile
                        await self._join(coordinator, find_announced)
                    return
            await asyncio.sleep(_POLL_S)

    @property
    def _certificate(self) -> str:
        """This peer's certificate, for the user; empty in a run that admits any peer."""
        permit = self._transport.permit_of(self._membership.me.peer_id)
        return "" if permit is None else f" by this peer's certificate as {permit.role}"

    async def _find_coordinator(self, find_announced: Callable[[], Awaitable[Sequence[PeerId]]]) -> PeerId | None:
        """Ask announced coordinators for the run's current coordinator, because announcements outlive runs."""
        other_versions: list[int] = []  # protocol versions of peers with which this peer cannot communicate

        async def ask(announced: PeerId) -> PeerId | None:
            try:
                handshake = await queries.greet(self._transport, announced, timeout=self._timeout)
                version = handshake.greeting.protocol_version
                if version == PROTOCOL_VERSION:
                    view = await self._ask_view(announced)
                    check_shown_by_keeper(self._transport, announced, view)
                    self._compare_versions(announced, handshake.greeting.versions)
                    return PeerId(view.term[1])
                other_versions.append(version)
            except SwarmError as error:
                # Only logged, because any peer may announce itself as a coordinator, and refuse.
                is_news = isinstance(error, AccessDenied) and announced not in self._refused_by
                self._refused_by |= {announced} if is_news else set()
                _log.log(logging.WARNING if is_news else logging.INFO, "No run at %s: %s", announced, error)
            return None

        # All at once, because silent peers would otherwise delay this peer one after the other.
        coordinator = await first_result(map(ask, await find_announced()))
        for version in other_versions if coordinator is None else ():
            check_protocol_version(version, place="in the run", own_place="here")  # raises, because it is another one
        return coordinator

    def _compare_versions(self, peer: PeerId, versions: Mapping[str, str]) -> None:
        """Warn once if Python, torch or Lightning have other versions in the run than here, which is allowed."""
        own_versions = queries.own_greeting(0.0).versions
        names = [name for name in _COMPARED if name in versions and own_versions.get(name) != versions[name]]
        if not names or self._has_warned:
            return
        self._has_warned = True
        differences = "; ".join(f"{name} {own_versions.get(name)} here, {versions[name]} there" for name in names)
        _log.warning(
            "Versions here and at %s differ: %s. This is allowed as long as both compute with the same model and "
            "optimizer state.",
            short_name(peer),
            printable(differences),
        )

    async def _ask_view(self, coordinator: PeerId) -> RunView:
        return await VIEW.ask(self._transport, coordinator, None, timeout=self._timeout)

    async def _join(self, coordinator: PeerId, find_announced: Callable[[], Awaitable[Sequence[PeerId]]]) -> None:
        """Try to join up to `_MAX_ATTEMPTS` times. The coordinator may change meanwhile."""
        for attempt in range(1, _MAX_ATTEMPTS + 1):
            try:
                if attempt > 1 and not self._membership.has_run:  # in a run, this server follows the run's coordinator
                    coordinator = await self._find_coordinator(find_announced) or coordinator
                    if not self._membership.has_run:  # a run may have begun here during the search
                        self._membership.joining = coordinator
                await self._attempt(coordinator, attempt)
            except SwarmError as error:
                if self._is_done:  # the coordinator sent the record that admits this server
                    return
                if not isinstance(error, PeerError) or isinstance(error, AccessDenied):
                    raise
                _log.warning("Could not join the run (attempt %d of %d): %s", attempt, _MAX_ATTEMPTS, error)
                if attempt == _MAX_ATTEMPTS:
                    raise PeerError(
                        f"a run must admit a server within {_MAX_ATTEMPTS} attempts; {coordinator} gave the last "
                        f"reason: {error} Find the cause with `lightning-swarm doctor --peer`, then join again."
                    ) from error
                await asyncio.sleep(_FIRST_PAUSE_S * 2 ** (attempt - 1))
            if self._is_done:
                return

    @property
    def _is_done(self) -> bool:
        """Return whether this server is a member, or the run is over."""
        return self._membership.is_member or self._admission.left.is_set()

    async def _attempt(self, coordinator: PeerId, attempt: int) -> None:
        """Ask for a stage, download it, and follow its records until one of them admits this server."""
        if self._membership.has_run:  # another peer may coordinate the run by now
            coordinator = self._membership.run.coordinator
        view = await self._ask_view(coordinator)
        if self._target != self._former and attempt > _MAX_TARGET_ATTEMPTS:
            _log.warning("Could not get stage %s; this peer returns to stage %s.", self._target, self._former)
            self._stage, self._target = None, self._former
        if self._stage is None:
            self._admission.model.check(view.manifest)  # before any peer is asked for anything
        accepted = ", which accepts the certificate" if self._certificate else ""
        self._report(Progress(f"Asking {short_name(coordinator)} for a stage{accepted}"))
        request = JoinRequest(
            protocol_version=PROTOCOL_VERSION,
            boot_id=self._membership.me.boot_id,
            addresses=list(await self._transport.addresses()),
            stage_index=self._stage.index if self._stage is not None else self._target,
            arithmetic=self._admission.model.arithmetic,
        )
        reply = await JOIN.ask(self._transport, coordinator, request, timeout=self._timeout)
        if self._stage is None or self._stage.index != reply.stage_index:  # the coordinator chooses the stage
            self._report(Progress(f"Building stage {reply.stage_index}"))
            stages = await self._compute(lambda: self._admission.model.build(view.manifest, [reply.stage_index]))
            self._stage = stages[reply.stage_index]
        self._is_unlike = reply.is_unlike
        roster = [member.peer_id for member in reply.view.seats.rosters[self._stage.index]]
        # Joiners, and the attempts of each, start at different replicas, because a replica may be gone.
        first = (self._membership.me.boot_id + attempt) % len(roster)
        checks = self._membership.oversee(view.manifest.settings).joining  # without effect unless the run is audited
        donors = checks.donors([*roster[first:], *roster[:first]], coordinator)
        download = StageDownload(self._transport, self._stage, limits=self._limits, report=self._report)
        try:
            one_donor = self._one_donor or checks.one_donor
            donor, version = await self._download(download, donors, self._stage, one_donor=one_donor)
            self._joined_at = reply.view.version
            await self._admission.follow(RunState.from_view(reply.view, version), self._stage)
            self._report(f"Stage {self._stage.index} is loaded, at step {version}. This peer enters when a step ends.")
            await self._follow(donor, self._stage)
        except SwarmError as error:
            checks.reject_donor(error, download.donor, coordinator, self._stage.index)
            raise

    async def _download(
        self, download: StageDownload, donors: Sequence[PeerId], stage: Stage, *, one_donor: bool
    ) -> tuple[PeerId, int]:
        """Download and load a stage's state; return the replica whose records to follow, and the state's version."""
        donor, incoming = await download.download(donors, one_donor=one_donor)
        self._report(Progress(f"Comparing stage {stage.index} with the run's"))
        snapshot = incoming.head.snapshot
        weights, state = incoming.values()

        def load() -> int:
            if self._is_done:  # loading would undo the record that admitted this peer
                raise PeerError("a record admitted this peer while it was downloading")
            stage.enter_generation(snapshot.version, snapshot.selection)
            stage.load_weights(weights)
            stage.load_optimizer_state(state)
            return stage.fingerprint()

        if await self._compute(load) == snapshot.version_hash:
            return donor, snapshot.version
        if download.helpers:
            self._one_donor = True
            raise PeerError(f"the pieces that {donor} and {download.helpers} sent are not the state of one version")
        raise ConfigError(
            f"a stage must have the same state once it is loaded; stage {stage.index} differs from the state that "
            f"{donor} sent. Use the run's precision, optimizer and versions here."
        )

    async def _follow(self, donor: PeerId, stage: Stage) -> None:
        """Request records from the donor and apply them, until a record makes this server a member."""
        checks = self._membership.oversight.joining  # without effect unless the run is audited
        hold_s, has_members = 0.0, False  # longest wait for the next record; whether the run's members are known
        generation = self._membership.run.manifest.generation
        while not self._is_done:
            version = self._steps.version
            request = NextRequest(
                generation=generation,
                stage_index=stage.index,
                version=version,
                hold_s=hold_s,
                seated=has_members,  # False asks for the members
                written=self._steps.sums.next.change.number,  # the written weights that this server has
            )
            reply, tensors = await NEXT.ask(
                self._transport,
                donor,
                request,
                timeout=hold_s + self._limits.call_timeout,  # not a download's timeout, because the donor may freeze
                max_bytes=self._limits.max_message_bytes,
            )
            record = reply.record
            if not has_members and reply.seats is not None:
                has_members = self._adopt_members(version, reply.seats)
            gradient, written_weights = (tensors[:1], tensors[1:]) if record else ((), tensors)
            change = record.change if record is not None else reply.change  # user code's, made before the step
            # Apply the change once, before the record of the step that it begins.
            if change not in (NO_CHANGE, self._steps.sums.next.change) and version == self._steps.version:
                await self._steps.follow_change(version, change, named(reply.names, written_weights))
                hold_s = 0.0
            elif record is None:  # this server has caught up
                is_ready = (
                    await checks.confirm_members(version, partial(self._adopt_members, version)) and not self._is_done
                )
                if is_ready:
                    await self._report_ready(generation, version)
                hold_s = _HOLD_S if is_ready else _POLL_S
            if record is not None and record.step >= self._steps.version:  # unless the coordinator sent it first
                await checks.check_record(record)
                self._check_portable(record, stage)
                await self._steps.commit(record, {stage.index: _checked_gradient(gradient, stage)})
                if not hold_s:  # the donor had the record before the request
                    self._report(Progress("Catching up with the run", f"at step {self._steps.version}"))
                hold_s = 0.0

    def _check_portable(self, record: Record, stage: Stage) -> None:
        """Refuse a record without portable arithmetic if this machine is of another kind than the stage's servers."""
        if self._is_unlike and record.outcome == "apply" and stage.index not in (record.portable or ()):
            raise PeerError(
                f"record {record.step} was decided before the run knew that this machine is of another kind"
            )

    async def _report_ready(self, generation: int, version: int) -> None:
        """Report to the coordinator that this server has caught up, so that a record may admit it."""
        coordinator = self._membership.run.coordinator
        ready = ReadyRequest(generation=generation, version=version)
        try:
            reply = await READY.ask(self._transport, coordinator, ready, timeout=self._timeout)
        except ProtocolError as error:  # another joiner may have received its slot meanwhile
            raise PeerError(f"{coordinator} does not expect this peer (any more): {error}") from error
        turn = f", {reply.num_before} wait before this peer" if reply.num_before else ""
        self._report(Progress("Waiting for a step to end", f"step {version} is open{turn}"))

    def _adopt_members(self, version: int, seats: SeatedMembers) -> bool:
        """Adopt the run's members at a version; return False if the run is past that version."""
        if self._is_done or version != self._steps.version:
            return False
        self._membership.run.check_seats(seats)
        rosters = seats.rosters
        if version <= self._joined_at:  # a roster may still name this peer as a former member
            rosters = [[member for member in roster if member != self._membership.me] for roster in rosters]
        self._membership.run.set_members(replace(seats, rosters=rosters))
        return True

    async def _handle_listen(self, caller: PeerId, request: ListenRequest) -> ListenReply:
        """Collect and hold a round's mean gradient, so that its record may admit this server."""
        closing = request.closing
        stage = self._stage
        if stage is None or self._membership.is_member or not self._membership.coordinated_by(caller):
            raise ProtocolError(f"this peer is not joining a run of {caller}")
        await self._steps.wait_for_version(closing.step)
        self._steps.sums.check(caller, closing.generation, closing.step)
        rosters = self._membership.run.present(closing.absent)
        if not all(rosters[: self._membership.run.num_pipeline_stages]):
            raise ProtocolError(f"a round of stage {stage.index} must have members")
        is_held = self._steps.rounds.holds(closing)  # true if the coordinator asks again, before it decides the record
        if not is_held:
            if request.change.written is not None and stage.index in request.change.written.stages:
                await self._steps.wait_for_written(closing.step, request.change.number)  # sent by the donor
            await self._steps.follow_change(closing.step, request.change, {})
            mean, carried = await self._steps.rounds.collect(closing, stage, rosters)  # `carried`: averaging state
        version_hash = await self._compute(partial(stage.fingerprint, request.challenge))
        self._steps.sums.check(caller, closing.generation, closing.step)
        if not is_held:
            self._steps.rounds.hold(closing, {stage.index: mean}, {stage.index: carried})
        checks = self._membership.oversight.joining
        parts = await checks.mean_digests(closing, stage.index, len(rosters[stage.index]))
        boot_id = self._membership.me.boot_id
        return ListenReply(boot_id=boot_id, version_hash=version_hash, parts=parts)


def _checked_gradient(tensors: Sequence[Tensor], stage: Stage) -> Tensor:
    """Return a received mean gradient, on the stage's device; refuse tensors of another number, shape or dtype."""
    like = stage.next_sum.like
    expected = (stage.mean_length,), like.dtype
    received = [(tuple(tensor.shape), tensor.dtype) for tensor in tensors]
    if received != [expected]:
        raise ProtocolError(f"a mean gradient of stage {stage.index} must be one tensor {expected}, got {received}")
    return tensors[0].to(like.device)
