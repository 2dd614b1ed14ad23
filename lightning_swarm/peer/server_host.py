"""A peer's server: started when there is something to serve, at home in one run after the other, there to the end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Sequence
from functools import partial
from typing import Final, Literal

from lightning_swarm.client.pipeline.local_layers import LocalLayers
from lightning_swarm.core.clock import now_s
from lightning_swarm.core.errors import Busy, DeadlineExceeded, PeerError, StepError, SwarmError, Unreachable
from lightning_swarm.core.event_loop import Runtime, UntilRunEnds
from lightning_swarm.core.limits import Limits
from lightning_swarm.core.tasks import TaskOwner, ended, first_of, gather
from lightning_swarm.model.partition import StageModule
from lightning_swarm.network import Directory, PeerId, Transport
from lightning_swarm.peer import discovery
from lightning_swarm.peer.config import SwarmConfig
from lightning_swarm.protocol import handshake
from lightning_swarm.protocol.events import EventLog
from lightning_swarm.protocol.messages.membership import DrainReply, DrainRequest
from lightning_swarm.protocol.messages.run import Manifest, Member, RunView
from lightning_swarm.protocol.messages.wire import decode, encode
from lightning_swarm.protocol.methods import DRAIN, VIEW
from lightning_swarm.protocol.run_state import RunState
from lightning_swarm.protocol.tickets import TicketStore
from lightning_swarm.server.admission import Admission
from lightning_swarm.server.context import ServerContext
from lightning_swarm.server.executor import Executor
from lightning_swarm.server.machine import describe_peak
from lightning_swarm.server.server import Server
from lightning_swarm.server.stage_builder import PeerModel

_log = logging.getLogger(__name__)

_LOOK_S: Final = 20.0
"""How often it looks whether the run goes on, and with it, if it has no reason to look at once."""

_SILENCE_S: Final = 600.0
"""Nobody of the run answered for so long: it is over, and nobody said so."""

_ASK_S: Final = 5.0
"""How often it asks to be let go: another peer may coordinate by now."""

_LINGER_S: Final = 1.0
"""What was asked of it in its last step is answered before it goes."""

_MAX_ASKED: Final = 8
_MAX_RETURNS: Final = 5
_SOON_S: Final = 600.0
"""Left out again so soon after it came back, it counts as one that cannot stay."""


# A server that did not answer for a while, because its machine slept or its link was down, is left out by a record. It
# is no member any more, and comes back as any joiner does.
class MembershipLifecycle:
    """One server's.

    Args:
        transport: Its network.
        server: It.
        find: Names coordinators of runs that may be under way, and makes their servers reachable.
        run_id: Of the run.
        limits: Bounds.
        events: Of this peer.
        hosts: Whom this peer was told of. Others may be told of this one, so without any it waits as long as it takes.
        known: Names servers that announced themselves, and makes them reachable.
    """

    def __init__(
        self,
        transport: Transport,
        server: Server,
        find: Callable[[], Awaitable[Sequence[PeerId]]],
        *,
        run_id: str,
        limits: Limits,
        events: EventLog,
        hosts: Collection[PeerId] = (),
        known: Callable[[], Awaitable[Collection[PeerId]]] | None = None,
    ) -> None:
        self._transport = transport
        self._server = server
        self._find = find
        self._run_id = run_id
        self._limits = limits
        self._events = events
        self._hosts = hosts
        self._known = known
        self._leaving = asyncio.Event()
        self._seen: RunView | None = None  # the newest that others showed of this server's run
        self._heard_s = 0.0  # of anyone of the run
        self._led_s = 0.0  # of its coordinator, or its lead: one of them would end it

    def leave(self) -> None:
        """Be let go by one of the next records, then end. Twice is fine."""
        self._leaving.set()

    async def serve_beside_trainer(self) -> None:
        """As `serve_run`, of a peer that trains, too: its loop goes on whatever becomes of its server."""
        try:
            await self.serve_run(_log.info)
        except StepError as error:  # so does its loop
            _log.warning("This peer's server ends: %s", error)
        except SwarmError as error:
            _log.warning("This peer trains on, and serves no more: %s", error)

    async def serve_run(self, say: Callable[[str], None]) -> None:
        """Enter a run; return when it is over, when it let this server go, or when this peer is to lead it.

        Args:
            say: Tells the user what came of it.

        Raises:
            ConfigError: This peer's model or version is not the run's.
            PeerError: The run does not let this peer in, or go, or it broke off, and nobody said so.
            StepError: It broke off, as its coordinator says.
        """
        num_returns, admission = 0, self._server.admission
        while await self._entered():
            begin_s = now_s()
            if admission.is_member and (report := self._server.report()) is not None:
                say(f"In run {self._run_id!r} from step {report.step} on, with {_stages(report.stages)}.")
            how = await self._until_out(say)
            if how == "moves":
                await self._move(say)
                continue
            if how == "inherits":
                say(f"The lead of run {self._run_id!r} is gone. This peer takes the run over.")
                return
            if how == "released":  # its lead goes back with it, and begins again from an earlier step
                continue
            if how != "left out":
                if how == "over" and isinstance(admission.ending_error, StepError):
                    raise admission.ending_error
                took = describe_peak(admission.model.device)
                say(f"Run {self._run_id!r} {'is over' if how == 'over' else 'has let this peer go'}.{took}")
                return
            num_returns = num_returns + 1 if now_s() < begin_s + _SOON_S else 1
            reason = "a record left this peer out, which did not answer; it joins again"
            self._events.note("left", peer=self._transport.peer_id, step=admission.run.version, reason=reason)
            if num_returns > _MAX_RETURNS:
                raise Unreachable(
                    f"run {self._run_id!r} has left this peer out {num_returns} times, each time soon "
                    "after it had come back. Look at its network and its load, then join again."
                )
            await self._server.step_out()
        say(f"This peer goes before run {self._run_id!r} has let it in.")

    # ------------------------------------------------------------------ in

    async def _entered(self) -> bool:
        """Whether this server is in a run, or was told that it is over; it may be told to leave before."""
        entering = asyncio.ensure_future(self._server.joiner.enter(self._found))
        told = asyncio.ensure_future(self._leaving.wait())
        alone = asyncio.ensure_future(self._alone())
        try:
            await asyncio.wait({entering, told, alone}, return_when=asyncio.FIRST_COMPLETED)
            if alone.done() and not entering.done():
                await alone
            while not entering.done() and not await self._gave_up():
                await asyncio.wait({entering}, timeout=_ASK_S)
            if not entering.done():
                return False
            entering.result()
            return True
        finally:
            await ended([entering, told, alone])

    async def _alone(self) -> None:
        """While there is no run, raise when nobody is left who could name one.

        Raises:
            Unreachable: Nobody has answered for long.
        """
        heard_s = now_s()
        while self._hosts:
            await asyncio.sleep(_LOOK_S)
            if self._server.membership.joining is not None or self._server.admission.has_run or await self._is_heard():
                heard_s = now_s()
            elif now_s() >= heard_s + _SILENCE_S:
                raise Unreachable(
                    f"no run {self._run_id!r} has begun, and nobody who could name one has answered for "
                    f"{_SILENCE_S:g} s: neither {', '.join(sorted(self._hosts))} nor another server that waits. "
                    "Start this peer again with the address of one that runs."
                )
        await asyncio.Event().wait()

    async def _is_heard(self) -> bool:
        if any(await gather(self._answers(peer) for peer in list(self._hosts)[:_MAX_ASKED])):
            return True
        known = set(await self._known()) if self._known is not None else set()
        others = sorted(known - {self._transport.peer_id, *self._hosts})[:_MAX_ASKED]
        return any(await gather(self._answers(peer) for peer in others))

    async def _found(self) -> Sequence[PeerId]:
        """Coordinators to ask: whom others named last, before those that were announced when the run began."""
        found = list(await self._find())
        if self._seen is not None:
            found = [PeerId(self._seen.term[1]), *found]
        return list(dict.fromkeys(found))

    async def _gave_up(self) -> bool:
        """Tell the coordinator that this server joins no more. False: a record that is being decided lets it in."""
        coordinator = self._server.membership.joining
        if coordinator is None:
            return not self._server.admission.is_member
        try:
            await self._drain(coordinator)
        except Busy:
            return False
        except SwarmError as error:
            _log.info("The coordinator was not told that this peer does not join: %s", error)
        return not self._server.admission.is_member

    # ------------------------------------------------------------------ along

    async def _until_out(
        self, say: Callable[[str], None]
    ) -> Literal["over", "left", "left out", "moves", "released", "inherits"]:
        admission = self._server.admission
        self._heard_s = self._led_s = now_s()
        while not admission.left.is_set():
            if admission.inherits.is_set():
                return "inherits"
            if not admission.has_run:
                return "left" if self._leaving.is_set() else "released"
            if not admission.is_member:
                if self._leaving.is_set():
                    return "left"
                return "moves" if admission.moves.is_set() else "left out"
            if self._leaving.is_set():
                if await self._leave(say):
                    return "left"
                continue
            behind = admission.leadership.behind
            told = (admission.left, self._leaving, admission.moves, admission.inherits)
            await first_of(*(event.wait() for event in told), behind.wait(), timeout=_LOOK_S)
            behind.clear()
            if any(event.is_set() for event in told) or not admission.has_run:
                continue
            if await self._is_left_out():
                return "left out"
            self._check_heard()
        return "over"

    async def _move(self, say: Callable[[str], None]) -> None:
        """A record has let this server go, for it is of more use elsewhere."""
        admission = self._server.admission
        run, target = admission.run, admission.target
        assert target is not None
        (former,) = self._server.stepping.stages  # who holds several does not move
        say(f"Leaving stage {former} of run {self._run_id!r} for stage {target}.")
        await first_of(admission.left.wait(), timeout=_LINGER_S)
        if admission.has_run and admission.run is run and admission.moves.is_set():  # else it was taken into another
            await self._server.step_out(keeps_snapshots=True)
            self._server.joiner.move_to(target, former=former)

    def _check_heard(self) -> None:
        """Raise if the run is over, and nobody is left who would say so."""
        unled_s = max(_SILENCE_S, self._limits.lead_timeout)
        for who, since_s, timeout in (
            ("none of its peers", self._heard_s, _SILENCE_S),
            ("neither its lead nor a coordinator", self._led_s, unled_s),
        ):
            if now_s() >= since_s + timeout:
                raise Unreachable(
                    f"run {self._run_id!r} is over or broke off, and nobody said so: {who} "
                    f"answered for {timeout:g} s. Start this peer again when the run goes on. In the place of its lead "
                    "another peer goes on only where most of the voters live: of two servers one is too few."
                )

    async def _is_left_out(self) -> bool:
        """Whether the others have gone on without this server, as far as anyone answers."""
        run, own = self._server.admission.run, self._transport.peer_id
        others = [peer for peer in run.servers if peer != own]
        first = [run.coordinator] if run.coordinator in others else []
        views = await self._views(first)
        is_led = bool(views) or own in (run.manifest.lead, run.coordinator)
        views = views or await self._views([peer for peer in others if peer not in first])
        if is_led or await self._answers(run.manifest.lead):
            self._heard_s = self._led_s = now_s()
        if not views:
            return False
        self._heard_s = now_s()
        newest = max(views, key=lambda view: (view.manifest.generation, view.version))
        if (newest.manifest.generation, newest.version) <= (run.manifest.generation, run.version):
            return False
        self._seen = newest
        return not any(self._server.admission.me in roster for roster in newest.seats.rosters)

    async def _views(self, peers: Sequence[PeerId]) -> list[RunView]:
        async def ask(peer: PeerId) -> RunView | None:
            try:
                return decode(await self._transport.call(peer, VIEW, b"", timeout=_LOOK_S), RunView)
            except SwarmError as error:
                _log.warning("%s does not answer: %s", peer, error)
                return None

        found = await gather(ask(peer) for peer in peers[:_MAX_ASKED])
        return [view for view in found if view is not None and view.manifest.run_id == self._run_id]

    async def _answers(self, peer: PeerId) -> bool:
        """The lead may hold no stage: then it shows no run, and says no more than that it lives."""
        try:
            await handshake.meet(self._transport, peer, timeout=_LOOK_S)
        except SwarmError as error:
            _log.warning("%s does not answer: %s", peer, error)
            return False
        return True

    # ------------------------------------------------------------------ out

    async def _leave(self, say: Callable[[str], None]) -> bool:
        """Serve until a record that leaves this server out is applied, or the run is over. Whether it is out.

        Raises:
            DeadlineExceeded: No record let it go in time.
        """
        admission = self._server.admission
        end_s = now_s() + self._limits.drain_timeout
        why = "no record came"
        said: list[int] = []
        say(f"Leaving run {self._run_id!r} with one of its next records, and serving until then.")
        while admission.is_member and not admission.left.is_set():
            if now_s() >= end_s:
                raise DeadlineExceeded(
                    f"the run did not let this peer go within {self._limits.drain_timeout:g} s: {why}. It goes all the "
                    "same, as if it had died. Raise `Limits.drain_timeout` to wait longer."
                )
            try:
                await admission.leadership.abdicate()  # if it coordinates
                alone = await self._drain(admission.run.coordinator)
            except SwarmError as error:  # another peer may take over; or the record was not told here
                why = str(error)
                if not isinstance(error, PeerError) and await self._is_left_out():
                    return True
            else:
                why = f"nobody else holds {_stages(alone)}" if alone else "no record came"
                if alone and alone != said:
                    say(f"This peer has the only copy of {_stages(alone)}: waiting for another one to join.")
                said = alone
            within_s = min(_ASK_S, max(end_s - now_s(), 0.0))
            version = self._server.stepping.version
            await first_of(admission.left.wait(), self._server.stepping.passed(version, within_s=within_s))
        await first_of(admission.left.wait(), timeout=_LINGER_S)
        return not admission.left.is_set()

    async def _drain(self, coordinator: PeerId) -> list[int]:
        """Ask to be let go. Returns the stages that need another holder first."""
        admission = self._server.admission
        generation = admission.run.manifest.generation if admission.has_run else 0
        request = encode(DrainRequest(generation=generation, boot_id=admission.me.boot_id))
        return decode(await self._transport.call(coordinator, DRAIN, request, timeout=_LOOK_S), DrainReply).alone


def _stages(held: Sequence[int]) -> str:
    return f"stage{'s' if len(held) != 1 else ''} {', '.join(map(str, held)) or 'none'}"


class ServerHost:
    """Of one peer. Its coroutines run on the loop.

    Args:
        transport: The peer's network.
        directory: Where peers find each other.
        tickets: What the peer holds for others, and asks of them.
        executor: Makes the thing that computes; called on the loop.
        config: The user's settings.
        events: Of the peer.
        boot_id: Tells this life of the peer from others.

    Attributes:
        server: None: it holds no stage.
        announced: Whether it may be found.
        could_lead: Whether this peer could, in the place of the lead.
    """

    def __init__(
        self,
        transport: Transport,
        directory: Directory,
        tickets: TicketStore,
        *,
        executor: Callable[[], Executor],
        config: SwarmConfig,
        events: EventLog,
        boot_id: int,
    ) -> None:
        self._transport = transport
        self._directory = directory
        self._tickets = tickets
        self._executor = executor
        self._config = config
        self._events = events
        self.me = Member(peer_id=transport.peer_id, boot_id=boot_id)
        self.server: Server | None = None
        self.announced = self.could_lead = False
        self._stay: MembershipLifecycle | None = None
        self._tasks = TaskOwner()
        self._remaining: asyncio.Task[None] | None = None  # it comes back whenever a record leaves it out

    @property
    def admission(self) -> Admission:
        """Of the server that was started."""
        assert self.server is not None
        return self.server.admission

    async def serve(self, model: PeerModel, *, trains: bool = False, inherits: bool = False) -> None:
        """Hold stages from now on, as soon as a run wants this peer.

        Args:
            model: This peer's copy.
            trains: It has data for the run, too.
            inherits: It has data, and leads the run when its lead is gone.
        """
        await self.start(model)
        self.announced, self.could_lead = True, inherits
        await discovery.announce(
            self._directory,
            self._transport,
            self._config.run_id,
            self.me.boot_id,
            trains=trains,
            inherits=inherits,
            timeout=self._config.limits.start_timeout,
        )

    async def start(self, model: PeerModel) -> None:
        """Unannounced."""
        if self.server is not None:  # the run went back, and this peer begins another one, or comes to it
            if not self.admission.has_run:
                self.server.serve_with(model)
            return
        context = ServerContext(
            self._transport,
            self._tickets,
            self._executor(),
            boot_id=self.me.boot_id,
            limits=self._config.limits,
            events=self._events,
            connect=self.connect,
            announce=partial(discovery.announce_run, self._directory, self._config.run_id),
            hosts={address.peer_id for address in self._config.initial_peers},
        )
        self.server = Server(context, model)
        self.server.snapshots.loops.unfit = self._unfit
        await self.server.start()
        self._stay = MembershipLifecycle(
            self._transport,
            self.server,
            partial(discovery.find_runs, self._directory, self._transport, self._config.run_id),
            run_id=self._config.run_id,
            limits=self._config.limits,
            events=self._events,
            hosts={address.peer_id for address in self._config.initial_peers},
            known=self._known,
        )

    async def connect(self) -> None:
        """Make the run's servers reachable."""
        await discovery.connect_all(self._directory, self._transport, self._config.run_id)

    async def _known(self) -> Collection[PeerId]:
        await self.connect()
        return (await discovery.known_servers(self._directory, self._config.run_id)).keys()

    def _unfit(self, manifest: Manifest) -> str:
        """Why this peer could not lead a run; nothing, if it could."""
        if not self.could_lead:
            return "it was not started with data and the whole model"
        settings = ("target_batch_size", "delay_optimizer_step", "deterministic")
        other = next((name for name in settings if getattr(self._config, name) != getattr(manifest, name)), "")
        return f"its program has another `{other}`" if other else ""

    async def serve_run(self, say: Callable[[str], None]) -> None:
        """Enter a run, and return when it is over or has let this peer go."""
        assert self._stay is not None
        await self._stay.serve_run(say)

    def leave(self) -> None:
        """Have `serve_run` ask the run to let this peer go."""
        if self._stay is not None:
            self._stay.leave()

    async def close(self) -> None:
        """End it. Raises what a task raised."""
        try:
            await self._tasks.close()
        finally:
            server, self.server = self.server, None
            if server is not None:
                await server.close()

    # ------------------------------------------------------------------ beside a trainer of the same peer

    async def keep_joined(self, run: RunState) -> None:
        """While this peer trains, have its server join again when it was left out; not with layers on the trainers."""
        serves = self._stay is not None and self.announced and run.manifest.selection is not None
        if not serves or run.manifest.stages[-1].on_trainers:
            return
        if self._remaining is not None and not self._remaining.done():  # the run went back, and it is there still
            return
        assert self._stay is not None
        await self._tasks.start()
        self._remaining = self._tasks.spawn(self._stay.serve_beside_trainer())

    async def until_let_go(self) -> None:
        """For as long as the run may take to let it go, if it is in one."""
        if self._remaining is not None:
            await asyncio.wait({self._remaining}, timeout=self._config.limits.drain_timeout)

    async def until_dismissed(self) -> None:
        """Until the run is over. A server that would join again notices, too, if nobody says so."""
        if self._remaining is None:
            await self.admission.left.wait()
        else:
            await asyncio.wait({self._remaining})

    def until_over(self, runtime: Runtime, back: asyncio.Event | None = None, *, grace_s: float = 0.0) -> UntilRunEnds:
        """The way to the loop until the run is over, as this server is told.

        Args:
            runtime: That way.
            back: Set when the run goes back. None: at the lead, which is told that by nobody, but may be told that it
                came too late.
            grace_s: As in `UntilRunEnds`.
        """
        admission = self.admission
        return UntilRunEnds(
            runtime,
            admission.left,
            back or asyncio.Event(),
            end=lambda: admission.ending_error,
            deaf=lambda: self._transport.closed,
            grace_s=grace_s,
        )

    def around(self, last: StageModule, run: RunState, runtime: Runtime) -> LocalLayers | None:
        """What the trainer computes itself, if there is anything outside of the pipeline."""
        if not last.spec.on_trainers:
            return None
        assert self.server is not None
        index = last.spec.index
        return LocalLayers(last, self.server.stepping, runtime, lambda: self.me in run.rosters[index])
