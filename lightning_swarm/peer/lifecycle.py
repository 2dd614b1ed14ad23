"""Keeps a server in a run: the server joins, stays, leaves, and joins again after a record left it out."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeVar

from lightning_swarm.core.clock import now_s
from lightning_swarm.core.errors import (
    Busy,
    ConfigError,
    DeadlineExceeded,
    PeerError,
    StepError,
    SwarmError,
    Unreachable,
)
from lightning_swarm.core.limits import Limits
from lightning_swarm.core.progress import ProgressLines, Report
from lightning_swarm.core.readable import printable, short_name, shorten
from lightning_swarm.core.tasks import cancel_and_wait, first_of, gather
from lightning_swarm.network import PeerId, Transport
from lightning_swarm.protocol import queries
from lightning_swarm.protocol.events import EventLog
from lightning_swarm.protocol.messages.membership import DrainRequest
from lightning_swarm.protocol.messages.run import RunView
from lightning_swarm.protocol.rpc import DRAIN, VIEW
from lightning_swarm.server.server import Server, describe_peak

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

_LOOK_S: Final = 20.0  # interval of checks that the run continues with this server, if no event prompts a check
_SILENCE_S: Final = 600.0  # after this time without an answer from any of its peers, a run counts as over
_ASK_S: Final = 5.0  # interval of requests to leave, because the coordinator may change
_LINGER_S: Final = 1.0  # time in which a server that has left still answers requests of its last step
_SOON_S: Final = 600.0  # a return is counted in `_MAX_RETURNS` if the server is left out again within this time
_MAX_ASKED: Final = 8
_MAX_RETURNS: Final = 5
_MAX_SHORT: Final = 3  # records within which the coordinator may move a server that lacks memory to another stage
_LACKS_MEMORY: Final = (
    "a server must have memory for one microbatch of its stage, and this machine has too little: the run continues "
    "without it. The log above shows how much was requested. End other programs on the device, join with a machine "
    "that has more memory, or have the lead lower `microbatch_size` or cut the model into more stages."
)
_COMPUTES_NOTHING: Final = (
    "The run is not cut: its trainers compute the whole model, and this peer keeps a copy of it, which outlives them. "
    "To help compute, bring data with `role='both'`, or start a run that is cut, with `pipeline` or `num_stages`."
)

# Why a server is no longer in its run.
Outcome = Literal["over", "left", "left out", "moves", "released", "inherits"]


@dataclass(frozen=True, kw_only=True)
class RunContacts:
    """The ways for a server to find its run, and the peers that may know the run."""

    run_id: str
    find_runs: Callable[[], Awaitable[Sequence[PeerId]]]  # returns possible coordinators, and connects to their servers
    # The peers in `initial_peers`. If there are none, other peers may have this peer as theirs, so it waits forever.
    hosts: Collection[PeerId] = ()
    # Returns the announced servers, and connects to them.
    find_servers: Callable[[], Awaitable[Collection[PeerId]]] | None = None


@dataclass(eq=False)
class MembershipLifecycle:
    """Keeps one server in a run: joins, stays, moves, leaves, and joins again after a record left the server out."""

    _transport: Transport
    _server: Server
    _contacts: RunContacts
    _limits: Limits
    _events: EventLog

    def __post_init__(self) -> None:
        self._run_id = self._contacts.run_id
        self._leaving = asyncio.Event()
        self._newest_view: RunView | None = None  # the newest view of this server's run from other peers
        self._answered_s = 0.0  # when any peer of the run answered last
        self._led_s = 0.0  # when its coordinator or lead answered last; only these can end the run
        self._short_since = math.inf  # the version since which memory has not sufficed for a microbatch
        self._silent: set[PeerId] = set()  # peers that did not answer the last request

    def leave(self) -> None:
        """Make `serve_run` ask to leave by one of the next records, and then return. May be called twice."""
        self._leaving.set()

    async def serve_beside_trainer(self) -> None:
        """Like `serve_run`, but only log errors, because this peer's training loop continues without its server."""
        try:
            await self.serve_run(ProgressLines(_log.info))
        except StepError as error:  # the loop gets the same error
            _log.warning("This peer's server ends: %s", shorten(str(error)))
        except SwarmError as error:
            _log.warning("This peer continues to train, but no longer serves: %s", shorten(str(error)))

    async def serve_run(self, say: Report) -> None:
        """Enter a run; return when it is over, when it has released this server, or when this peer must lead it."""
        num_returns, admission = 0, self._server.admission
        while await self._entered(say):
            begin_s = now_s()
            if admission.membership.is_member and (report := self._server.report()) is not None:
                say(f"In run {self._run_id!r} from step {report.step} on, with {_stages(report.stages)}.")
                if admission.membership.run.manifest.is_whole and admission.membership.trains_in is None:
                    say(_COMPUTES_NOTHING)
            outcome = await self._serve_until_out(say)
            if outcome == "moves":
                await self._move(say)
            elif outcome == "left out":  # this server joins again, like any new server
                num_returns = num_returns + 1 if now_s() < begin_s + _SOON_S else 1
                self._check_returns(num_returns, say)
                await self._server.step_out()
            elif outcome != "released":  # a lead that rolls back releases its servers, and begins again with them
                self._report_end(outcome, say)
                return
        say(f"This peer leaves before run {self._run_id!r} has admitted it.")

    def _report_end(self, outcome: Outcome, say: Callable[[str], None]) -> None:
        """Report to the user how the run ended for this server; raise an error if it broke off."""
        admission = self._server.admission
        if outcome == "inherits":
            say(f"The lead of run {self._run_id!r} is gone. This peer takes the run over.")
            return
        if outcome == "over" and isinstance(admission.ending_error, StepError):
            raise admission.ending_error
        peak = describe_peak(admission.model.device)
        say(f"Run {self._run_id!r} {'is over' if outcome == 'over' else 'has released this peer'}.{peak}")

    def _check_returns(self, num_returns: int, say: Callable[[str], None]) -> None:
        """Report that a record left this server out; raise `Unreachable` if that has happened too often."""
        reason = "a record left this peer out, which did not answer; it joins again"
        step = self._server.membership.run.version
        if difference := printable(self._server.admission.election.left_out_because):
            reason = f"a record left this peer out, whose weights differ; it joins again: {difference}"
            say(
                f"Run {self._run_id!r} continues without this peer from step {step} on. {difference} This peer "
                "downloads the stage anew and joins again, once. If its weights differ again, use the run's version of "
                "torch here, or another machine."
            )
        self._events.note("left", peer=self._transport.peer_id, step=step, reason=reason)
        if num_returns > _MAX_RETURNS:
            raise Unreachable(
                f"run {self._run_id!r} has left this peer out {num_returns} times, each time soon after its return. "
                "Check this machine's network and load, then join again."
            )

    # ------------------------------------------------------------------ joining

    async def _entered(self, say: Report) -> bool:
        """Wait until this server is in a run or the run is over; return False if `leave` was called before that."""
        entering = asyncio.ensure_future(self._server.joiner.enter(self._find_coordinators, say))
        leaving = asyncio.ensure_future(self._leaving.wait())
        alone = asyncio.ensure_future(self._raise_when_alone())
        try:
            await asyncio.wait({entering, leaving, alone}, return_when=asyncio.FIRST_COMPLETED)
            if alone.done() and not entering.done():
                await alone
            while not entering.done() and not await self._withdraw():
                await asyncio.wait({entering}, timeout=_ASK_S)
            if not entering.done():
                return False
            entering.result()
            return True
        finally:
            await cancel_and_wait([entering, leaving, alone])

    async def _raise_when_alone(self) -> None:
        """Raise `Unreachable` if there is no run, and no peer that could name one has answered for a long time."""
        answered_s, membership = now_s(), self._server.membership
        while self._contacts.hosts:
            await asyncio.sleep(_LOOK_S)
            if membership.joining is not None or membership.has_run or await self._any_contact_answers():
                answered_s = now_s()
            elif now_s() >= answered_s + _SILENCE_S:
                hosts = ", ".join(sorted(self._contacts.hosts))
                raise Unreachable(
                    f"no run {self._run_id!r} has begun, and no peer that could name one has answered for "
                    f"{_SILENCE_S:g} s: neither {hosts} nor another waiting server. Start this peer again with the "
                    "address of a running peer."
                )
        await asyncio.Event().wait()

    async def _any_contact_answers(self) -> bool:
        """Return whether a peer in `initial_peers`, or else an announced server, answers."""
        hosts = self._contacts.hosts
        if any(await gather(map(self._answers, list(hosts)[:_MAX_ASKED]))):
            return True
        servers = set(await self._contacts.find_servers()) if self._contacts.find_servers is not None else set()
        others = sorted(servers - {self._transport.peer_id, *hosts})[:_MAX_ASKED]
        return any(await gather(map(self._answers, others)))

    async def _find_coordinators(self) -> Sequence[PeerId]:
        """Return the coordinators to ask: first the one in the newest view, then all announced coordinators."""
        coordinators = list(await self._contacts.find_runs())
        if self._newest_view is not None:
            coordinators = [PeerId(self._newest_view.term[1]), *coordinators]
        return list(dict.fromkeys(coordinators))

    async def _withdraw(self) -> bool:
        """Withdraw the request to join; return False as long as a record under decision may still admit this server."""
        coordinator = self._server.membership.joining
        if coordinator is None:
            return not self._server.membership.is_member
        try:
            await self._drain(coordinator)
        except Busy:
            return False
        except SwarmError as error:
            _log.info("The coordinator could not be notified that this peer no longer joins: %s", error)
        return not self._server.membership.is_member

    # ------------------------------------------------------------------ staying

    async def _serve_until_out(self, say: Callable[[str], None]) -> Outcome:
        """Serve until this server is no longer in the run, and return the reason."""
        admission, membership = self._server.admission, self._server.membership
        self._answered_s = self._led_s = now_s()
        while not admission.left.is_set():
            if admission.failure is not None:
                raise admission.failure
            if admission.inherits.is_set():
                return "inherits"
            if not membership.has_run:
                return "left" if self._leaving.is_set() else "released"
            if not membership.is_member:
                if self._leaving.is_set():
                    return "left"
                return "moves" if admission.moves.is_set() else "left out"
            if self._leaving.is_set():
                if await self._leave(say):
                    return "left"
                continue
            behind = admission.election.behind
            changes = (admission.left, self._leaving, admission.moves, admission.inherits)
            await first_of(*(event.wait() for event in changes), behind.wait(), timeout=_LOOK_S)
            behind.clear()
            if any(event.is_set() for event in changes) or not membership.has_run:
                continue
            if await self._ask_whether_left_out():
                return "left out"
            self._check_silence()
            if self._note_memory():
                await self._leave(say)
                raise ConfigError(_LACKS_MEMORY)
        return "over"

    async def _move(self, say: Callable[[str], None]) -> None:
        """Leave a stage for another one, after a record has ordered the move."""
        admission, membership = self._server.admission, self._server.membership
        run, target = membership.run, admission.target
        assert target is not None
        (former,) = self._server.steps.stages  # a server that holds several stages does not move
        say(f"Leaving stage {former} of run {self._run_id!r} for stage {target}.")
        await first_of(admission.left.wait(), timeout=_LINGER_S)
        if membership.has_run and membership.run is run and admission.moves.is_set():  # it may be in another run now
            await self._server.step_out(keeps_snapshots=True)
            self._server.joiner.move_to(target, former=former)

    def _note_memory(self) -> bool:
        """Record whether the stages lack memory; return True after some records if other servers hold all of them."""
        steps, rosters = self._server.steps, self._server.membership.run.rosters
        stages = [steps.stage(index) for index in steps.stages]
        if not stages or not all(stage.load.lacks_memory and len(rosters[stage.index]) > 1 for stage in stages):
            self._short_since = math.inf
            return False
        self._short_since = min(self._short_since, steps.version)
        return steps.version >= self._short_since + _MAX_SHORT

    def _check_silence(self) -> None:
        """Raise `Unreachable` if the run's peers have been silent for so long that it must be over."""
        unled_s = max(_SILENCE_S, self._limits.lead_timeout)
        for who, since_s, timeout in (
            ("none of its peers", self._answered_s, _SILENCE_S),
            ("neither its lead nor a coordinator", self._led_s, unled_s),
        ):
            if now_s() >= since_s + timeout:
                raise Unreachable(
                    f"run {self._run_id!r} is over or broke off, and this peer was not notified: {who} answered for "
                    f"{timeout:g} s. Start this peer again when the run continues. Another peer can replace a dead "
                    "lead only while a majority of the voters lives; one of two servers is no "
                    f"majority{self._server.membership.run.electorate.remedy}."
                )

    async def _ask_whether_left_out(self) -> bool:
        """Ask whether the run has continued without this server, and record which peers answer, and the newest view."""
        run, me = self._server.membership.run, self._transport.peer_id
        others = [peer for peer in run.servers if peer != me]
        first = [run.coordinator] if run.coordinator in others else []
        views = await self._ask_views(first)
        is_led = bool(views) or me in (run.manifest.lead, run.coordinator)
        views = views or await self._ask_views([peer for peer in others if peer not in first])
        if is_led or await self._answers(run.manifest.lead):
            self._answered_s = self._led_s = now_s()
        if not views:
            return False
        self._answered_s = now_s()
        decisive = [view for peer, view in views.items() if run.decides(peer)]
        if not decisive:
            return False
        newest = max(decisive, key=lambda view: (view.manifest.generation, view.version))
        if (newest.manifest.generation, newest.version) <= (run.manifest.generation, run.version):
            return False
        self._newest_view = newest
        return not any(self._server.membership.me in roster for roster in newest.seats.rosters)

    async def _ask_views(self, peers: Sequence[PeerId]) -> dict[PeerId, RunView]:
        """Ask at most `_MAX_ASKED` of the peers, keepers first, for their views of the run; return the answers."""

        async def ask(peer: PeerId) -> RunView:
            return await VIEW.ask(self._transport, peer, None, timeout=_LOOK_S)

        asked = sorted(peers, key=self._server.membership.run.decides, reverse=True)[:_MAX_ASKED]
        answers = await gather(self._warn_when_silent(peer, ask(peer)) for peer in asked)
        views = {peer: view for peer, view in zip(asked, answers, strict=True) if view is not None}
        return {peer: view for peer, view in views.items() if view.manifest.run_id == self._run_id}

    async def _answers(self, peer: PeerId) -> bool:
        """Return whether a peer answers a handshake; a lead that holds no stage answers no request for a view."""
        return await self._warn_when_silent(peer, queries.greet(self._transport, peer, timeout=_LOOK_S)) is not None

    async def _warn_when_silent(self, peer: PeerId, answer: Awaitable[_T]) -> _T | None:
        """Return a peer's answer, or None; warn when the peer falls silent, but not again until it has answered."""
        try:
            received = await answer
        except SwarmError as error:
            if peer not in self._silent:
                self._silent.add(peer)
                _log.warning("%s does not answer: %s", short_name(peer), shorten(str(error)))
            _log.debug("The full error of %s: %s", peer, error)
            return None
        self._silent.discard(peer)
        return received

    # ------------------------------------------------------------------ leaving

    async def _leave(self, say: Callable[[str], None]) -> bool:
        """Serve until a record removes this server (True) or the run is over (False); raise if neither happens."""
        admission = self._server.admission
        end_s = now_s() + self._limits.drain_timeout
        why = "no record came"
        announced: list[int] = []
        say(f"Leaving run {self._run_id!r} with one of its next records, and serving until then.")
        while admission.membership.is_member and not admission.left.is_set():
            if now_s() >= end_s:
                raise DeadlineExceeded(
                    f"the run did not release this peer within {self._limits.drain_timeout:g} s: {why}. The peer "
                    "leaves nevertheless, as if it had died. Raise `Limits.drain_timeout` to wait longer."
                )
            try:
                await admission.election.abdicate()  # no effect unless this server coordinates
                only_here = await self._drain(admission.membership.run.coordinator)
            # The coordinator may be gone, so that another peer takes over. Or it may have removed this server by a
            # record that has not arrived here.
            except SwarmError as error:
                why = str(error)
                if not isinstance(error, PeerError) and await self._ask_whether_left_out():
                    return True
            else:
                why = f"no other server holds {_stages(only_here)}" if only_here else "no record came"
                if only_here and only_here != announced:
                    say(f"This peer has the only copy of {_stages(only_here)}: waiting for another server to join.")
                announced = only_here
            within_s = min(_ASK_S, max(end_s - now_s(), 0.0))
            version = self._server.steps.version
            await first_of(admission.left.wait(), self._server.steps.wait_for_later(version, within_s=within_s))
        await first_of(admission.left.wait(), timeout=_LINGER_S)
        return not admission.left.is_set()

    async def _drain(self, coordinator: PeerId) -> list[int]:
        """Ask to leave the run; return the stages that need another holder first."""
        membership = self._server.membership
        generation = membership.run.manifest.generation if membership.has_run else 0
        request = DrainRequest(generation=generation, boot_id=membership.me.boot_id)
        return (await DRAIN.ask(self._transport, coordinator, request, timeout=_LOOK_S)).alone


def _stages(indices: Sequence[int]) -> str:
    return f"stage{'s' if len(indices) != 1 else ''} {', '.join(map(str, indices)) or 'none'}"
