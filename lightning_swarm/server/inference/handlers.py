"""Inference sessions on a server: computes steps with the sessions' caches, and sends outputs to the next stage.

A step comes from the client or from the previous stage's server. Its output goes to the next stage's server, or to the
client. Each server keeps its outputs while it has room. If the next server dies, the client asks for a replay: the
replacement receives all of them in order, and then has the same cache. With each change of its route, the client raises
the session's `attempt`, and sets `resume` to the first step whose output it lacks. Apart from replays, servers do not
send the outputs before that step, because the later servers and the client have them.
"""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from itertools import accumulate
from typing import Any, Final

from msgspec.structs import replace
from torch import Tensor

from lightning_swarm.core.clock import now_s
from lightning_swarm.core.errors import AdapterMissing, Busy, PeerError, ProtocolError, SessionLost, SwarmError, to_wire
from lightning_swarm.core.limits import Limits
from lightning_swarm.core.moving_average import MovingAverage
from lightning_swarm.core.tasks import TaskOwner, gather
from lightning_swarm.model.inference import attention_cache
from lightning_swarm.model.inference.prefix_digest import PrefixDigests
from lightning_swarm.network import SMALL_BYTES, Message, PeerId, Transport
from lightning_swarm.protocol import rpc, serialization
from lightning_swarm.protocol.messages.inference import (
    WINDOW,
    FailureKind,
    SessionBranch,
    SessionBranched,
    SessionClose,
    SessionFailed,
    SessionOutput,
    SessionOutputs,
    SessionReplay,
    SessionStep,
    SessionSteps,
    SessionStepsReply,
    StepRefusal,
)
from lightning_swarm.protocol.outbox import Outbox, StepOutbox
from lightning_swarm.server.executor import Executor
from lightning_swarm.server.inference.batching import JointSteps, WaitingStep
from lightning_swarm.server.inference.host import SessionHost, SessionStage
from lightning_swarm.server.inference.prefixes import PrefixPolicy, PrefixStore, SessionKey, onward, record
from lightning_swarm.server.inference.session_compute import SessionPart
from lightning_swarm.server.inference.stage_session import KeptOutput, StageSession
from lightning_swarm.server.inference.step_checks import check_tokens, checked_tree
from lightning_swarm.server.sample_costs import num_bytes

_log = logging.getLogger(__name__)

_MAX_REASON: Final = 2048  # characters of an error; errors of `MAX_TOGETHER` steps fit into one message
_SMOOTHING: Final = 0.05  # weight of the newest step in the mean
_MAX_SESSIONS: Final = 4096  # summed over stages; a limit, because sessions take memory beside their tensors
_BRANCHING_S: Final = 5.0  # seconds to find a prefix at all servers of a route; later, the client sends the whole text
_RESERVE: Final = 4  # after there was no room, sessions begin when a fourth of the memory is free
_FAILURE_KINDS: Final[dict[Any, FailureKind]] = {SessionLost: "lost", AdapterMissing: "adapter", Busy: "busy"}


class SessionHandlers:
    """Answers the steps of inference sessions at the stages of this server."""

    def __init__(
        self,
        transport: Transport,
        executor: Executor,
        limits: Limits,
        tasks: TaskOwner,
        host: SessionHost,
        *,
        prefixes: PrefixPolicy = PrefixPolicy(),  # noqa: B008 - frozen
        on_dropped: Callable[[int], None] = lambda _: None,  # called with the number of bytes freed
    ) -> None:
        self._transport, self._limits = transport, limits
        self._steps = JointSteps[KeptOutput](executor)
        self._step_outbox = StepOutbox(self._deliver_steps)
        self._output_outbox = Outbox[SessionOutput, None](self._deliver_outputs)
        self._spawn = tasks.spawn
        self._host, self._on_dropped = host, on_dropped
        self._sessions: OrderedDict[SessionKey, StageSession] = OrderedDict()  # least recently used first
        self._prefixes = PrefixStore(prefixes)
        # The bytes of sessions that grew and found no room. Then sessions begin only with some memory free, and these
        # with as much as they had: each computes its whole text, and would be dropped again after a few steps.
        self._wanted_bytes: dict[SessionKey, int] = {}
        self._watches_idle = False  # true while `_end_idle` runs
        self.num_steps = 0  # steps computed so far
        self.num_tokens = 0  # tokens of these steps, in all rows
        self._busy_s = MovingAverage(_SMOOTHING)
        max_bytes, admit = limits.max_message_bytes, self._check_caller
        rpc.SESSION_STEPS.serve(transport, self._handle_steps, max_bytes=max_bytes, admit=admit)
        rpc.SESSION_REPLAY.serve(transport, self._handle_replay, admit=host.check_client)
        rpc.SESSION_CLOSE.serve(transport, self._handle_close, admit=host.check_client)
        if prefixes.keeps:
            rpc.SESSION_BRANCH.serve(transport, self._handle_branch, admit=admit)

    def discard(self) -> None:
        """Drop all sessions, because their weights are gone."""
        self._sessions.clear()
        self._prefixes.clear()

    async def end_all(self) -> None:
        """End all sessions here; clients continue them at other servers."""
        freed, sessions = self._used_bytes(), list(self._sessions.values())
        self.discard()
        self._on_dropped(freed)
        for session in sessions:  # their waiting steps must end
            await session.notify()

    @property
    def num_open(self) -> int:
        """The number of sessions, summed over the stages here."""
        return len(self._sessions)

    @property
    def num_prefixes(self) -> int:
        """The number of ended sessions whose caches are kept, summed over the stages here."""
        return len(self._prefixes)

    def num_under_way(self, quiet_s: float) -> int:
        """Return the number of sessions that are active, or had a step in the last `quiet_s` seconds."""
        return sum(session.is_active or now_s() < session.used_s + quiet_s for session in self._sessions.values())

    @property
    def num_joint(self) -> int:
        """The number of steps that shared a forward with steps of other sessions."""
        return self._steps.num_joint

    @property
    def step_s(self) -> float:
        """The mean seconds of a step at a stage here, without prompts; 0 before the first."""
        return self._busy_s.value or 0.0

    @property
    def free_bytes(self) -> int:
        """The bytes left for sessions; kept outputs and prefixes count as free, because they can be dropped."""
        return max(0, self._limits.session_bytes - sum(session.cache_bytes for session in self._sessions.values()))

    # ------------------------------------------------------------------ steps

    def _check_caller(self, caller: PeerId) -> None:
        if not self._host.is_server(caller):
            self._host.check_client(caller)

    async def _handle_steps(
        self, caller: PeerId, request: SessionSteps, message: Message
    ) -> tuple[SessionStepsReply, Sequence[Tensor]]:
        """Accept steps of one or several sessions; report the error of each that is refused."""
        steps, ends = request.steps, list(accumulate(step.num_tensors for step in request.steps))
        if ends[-1] != len(message.tensors):
            raise ProtocolError(
                f"the steps of a message must have {ends[-1]} tensors in all, got {len(message.tensors)}"
            )
        are_one_session = len({step.session for step in steps}) == 1
        refused = []
        for index, (step, end) in enumerate(zip(steps, ends, strict=True)):
            tensors = message.tensors[end - step.num_tensors : end]
            try:
                if await self._accept(caller, step, tensors, waits=are_one_session):
                    continue
                is_early, (name, reason) = True, ("", "")
            except Exception as error:  # noqa: BLE001 - it concerns this step alone
                if not isinstance(error, SwarmError):
                    _log.exception("A step of a session could not be read.")
                is_early, (name, reason) = False, to_wire(error)
            refused.append(StepRefusal(index=index, is_early=is_early, error=name, reason=reason[:_MAX_REASON]))
        return SessionStepsReply(refused=refused), ()

    async def _accept(self, caller: PeerId, step: SessionStep, tensors: Sequence[Tensor], *, waits: bool) -> bool:
        """Accept the next step of a session, or send the kept output of a repeated step again.

        Return False if the step would have to wait for earlier steps and `waits` is false.
        """
        stage = self._stage_of(step, caller)
        hidden, extras = checked_tree(step, tensors)
        check_tokens(hidden, stage)
        session = self._session_for(step, stage)
        if step.attempt >= session.attempt:
            session.follow(step.attempt, step.route, step.resume)
        if not session.accepts(step.number):
            if not waits:
                return False
            if session.waiting[step.number] > 1:  # the step and a repetition wait already; a third would add nothing
                return True
            await self._wait_for_turn(session, step, stage)
        if step.number == session.accepted + 1:
            session.accepted = step.number
            self._spawn(self._advance(session, stage, step, hidden, extras, num_bytes(tensors)))
            await session.notify()
        elif step.number >= session.resume and (kept := session.kept.get(step.number)) is not None:
            # The step was repeated after a change of servers, or because its output was lost.
            self._spawn(self._resend(session, kept))
        return True

    async def _wait_for_turn(self, session: StageSession, step: SessionStep, stage: SessionStage) -> None:
        """Wait until earlier steps, which this step may have overtaken, have arrived and enough are computed."""
        gap = f"stage {stage.index} has steps 1 to {session.accepted} of this session, got step {step.number}"
        if step.number > session.accepted + WINDOW:
            raise SessionLost(gap)
        session.waiting[step.number] += 1
        try:
            # Computing may take long, but an overtaken step must arrive soon.
            async with asyncio.timeout(self._limits.silence_timeout if step.number > session.accepted + 1 else None):
                async with session.changed:
                    await session.changed.wait_for(lambda: session.accepts(step.number) or not self._is_open(session))
        except TimeoutError:
            raise SessionLost(gap) from None
        finally:
            session.waiting -= Counter((step.number,))
        if not self._is_open(session):
            raise SessionLost(f"the session ended at stage {stage.index} before step {step.number} was accepted")

    def _is_open(self, session: StageSession) -> bool:
        return session in self._sessions.values()

    def _stage_of(self, step: SessionStep, caller: PeerId) -> SessionStage:
        """Return the stage of a step; refuse a step from a wrong sender, or for another server."""
        self._check_sender(step, caller)
        if any(mode.grad for mode in step.modes):
            raise ProtocolError("a session computes without gradients")
        return self._host.stage_of(step)

    def _check_sender(self, step: SessionStep | SessionBranch, caller: PeerId) -> None:
        me = self._transport.peer_id
        self._host.check_client(step.client)
        if caller != step.client and not self._host.is_server(caller):
            raise ProtocolError(f"a step must come from its client {step.client} or from a server, got {caller}")
        if step.stage_index == 0 and caller != step.client:
            raise ProtocolError(f"steps for the first stage must come from their client {step.client}, got {caller}")
        if step.route[0] != me:
            raise ProtocolError(f"a step's route must begin with the server that receives it, {me}, got {step.route}")

    def _session_for(self, step: SessionStep, stage: SessionStage) -> StageSession:
        """Return the session of a step at a stage; the first step begins the session if there is room."""
        key = (step.session, stage.index)
        session = self._sessions.get(key)
        if session is None:
            if step.number != 1:
                raise SessionLost(f"stage {stage.index} has no steps of this session, got step {step.number}")
            excess = self._make_room(num_more=1, reserve=self._reserve_for(key))
            if len(self._sessions) >= _MAX_SESSIONS:
                raise Busy(f"this server has {_MAX_SESSIONS} open sessions, the most that it accepts")
            if excess > 0:
                raise Busy(
                    f"sessions may have {self._limits.session_bytes} bytes here (`Limits.session_bytes`), and active "
                    f"sessions have {self._used_bytes()}"
                )
            if 2 * self._used_bytes() <= self._limits.session_bytes:
                self._wanted_bytes.clear()
            session = StageSession(step.client, step.attempt, step.route, step.resume, step.adapter)
            self._sessions[key] = session
            session.digests = PrefixDigests() if self._prefixes.policy.shares else None
            self._watch_idle()
        elif session.client != step.client:
            raise ProtocolError(f"this session belongs to {session.client}, not to {step.client}")
        elif session.adapter != step.adapter:
            raise ProtocolError("all steps of a session must have the same adapter")
        session.used_s = now_s()
        self._sessions.move_to_end(key)
        return session

    async def _advance(
        self,
        session: StageSession,
        stage: SessionStage,
        step: SessionStep,
        hidden: Any,
        extras: dict[str, Any],
        received_bytes: int,
    ) -> None:
        """Compute a step after the steps before it, then keep and send its output; report a failure."""
        max_bytes = self._limits.session_bytes

        def prepare() -> Any:
            if step.number == 1 and step.recipe is not None:
                session.cache = attention_cache.build(step.recipe)
            if session.cache is None and step.recipe is not None:
                raise SessionLost(f"the cache of this session was dropped at stage {stage.index}")
            stage.prepare(step, session.cache, max_bytes=max_bytes)
            return session.cache

        def finish(output: serialization.Tree) -> KeptOutput:
            session.cache_bytes = 0 if session.cache is None else attention_cache.num_bytes(session.cache)
            if session.cache_bytes > max_bytes:
                raise ProtocolError(
                    f"a text's keys and values may have {max_bytes} bytes at stage {stage.index}, got "
                    f"{session.cache_bytes}. Raise `Limits.session_bytes` there, or write shorter texts."
                )
            structure, tensors = serialization.flatten((output, stage.left_of(extras)))
            length = None if session.cache is None else attention_cache.length_of(session.cache)
            return KeptOutput(step, tuple(tensors), structure, num_bytes(tensors) + received_bytes, length)

        async with session.computing:  # steps run in the order of their arrival
            if session.computed != step.number - 1:
                return  # the previous step failed
            try:
                await stage.ready()
                own_extras = stage.module.extras_for(extras)  # within `try`, because a client may send anything
                part = SessionPart(hidden, own_extras, cache=session.cache, adapter=stage.adapter)
                kept, busy_s = await self._steps.compute(
                    WaitingStep(stage, step, part, prepare, finish, lambda: self._is_open(session))
                )
            except Exception as error:  # noqa: BLE001 - the model's code may raise anything; the client gets the error
                await self._end(session)
                kind: FailureKind = "lost" if isinstance(error, SessionLost) else "refused"
                await self._report_failure(session, step, kind, _reason(error))
                return
            record(session, step, (hidden, extras), kept)
            session.keep(step.number, kept)
            if len(session.route) == 1:  # this is the last stage
                session.drop_older_outputs()
            session.computed = step.number
            self.num_steps += 1
            self.num_tokens += part.rows * part.tokens
            if step.number > 1 and busy_s:
                self._busy_s.measure(busy_s)
        await session.notify()
        if not await self._make_room_for(session):
            await self._report_failure(session, step, "busy", "active sessions leave no room for this one")
        elif step.number >= session.resume:
            await self._send_output(session, kept)

    async def _end(self, session: StageSession) -> None:
        """Drop a session, and end its waiting steps."""
        for key in [key for key, known in self._sessions.items() if known is session]:
            self._drop(key)
        await session.notify()

    def _drop(self, key: SessionKey) -> int:
        """Drop a session at a stage; return the number of bytes freed."""
        session = self._sessions.pop(key)
        num_bytes = session.num_bytes
        self._steps.release(session.cache)
        session.cache = None  # a task that still refers to the session must not keep its tensors
        session.kept.clear()
        session.cache_bytes = session.kept_bytes = 0
        self._on_dropped(num_bytes)
        return num_bytes

    async def _send_output(self, session: StageSession, kept: KeptOutput) -> None:
        """Send a step's output to the next stage's server, or to the client; report a failure to the client."""
        async with session.replaying:  # the replay must send the earlier outputs first
            attempt = session.attempt
        try:  # concurrently with other steps; the receiver restores their order
            if len(session.route) == 1:
                await self._send_to_client(session, kept)
            else:
                await self._send_to_server(session, kept)
        except Exception as error:  # noqa: BLE001 - any error concerns this session alone
            if len(session.route) == 1:
                _log.info("Client %s did not receive output %d: %r", session.client, kept.step.number, error)
            elif session.attempt == attempt:  # otherwise it was sent along a new route
                stage_index = kept.step.stage_index + 1
                await self._report_failure(session, kept.step, _kind_of(error), _reason(error), stage_index=stage_index)

    async def _resend(self, session: StageSession, kept: KeptOutput) -> None:
        """Send an output again, unless many are being sent again, because a client may repeat any number of steps."""
        if session.num_repeated < 2 * WINDOW:
            session.num_repeated += 1
            try:
                await self._send_output(session, kept)
            finally:
                session.num_repeated -= 1

    async def _send_to_client(self, session: StageSession, kept: KeptOutput) -> None:
        """Send the last stage's output of a step to the client."""
        output, _ = serialization.unflatten(kept.structure, kept.tensors)
        structure, tensors = serialization.flatten(output)
        message = SessionOutput(
            session=kept.step.session,
            number=kept.step.number,
            length=kept.length,
            structure=structure,
            num_tensors=len(tensors),
        )
        await self._output_outbox.put(session.client, message, tensors)

    async def _deliver_outputs(
        self, client: PeerId, outputs: list[SessionOutput], tensors: list[Tensor]
    ) -> Sequence[None]:
        request, timeout = SessionOutputs(outputs=outputs), self._limits.call_timeout
        await rpc.SESSION_OUTPUTS.ask(self._transport, client, request, tensors, timeout=timeout, max_bytes=0)
        return [None] * len(outputs)

    async def _send_to_server(self, session: StageSession, kept: KeptOutput, *, alone: bool = False) -> None:
        """Send the output of a step to the next stage's server."""
        step = replace(
            onward(kept.step),
            attempt=session.attempt,
            resume=session.resume,
            route=session.route[1:],
            structure=kept.structure,
            num_tensors=len(kept.tensors),
        )
        await self._step_outbox.send(session.route[1], step, kept.tensors, alone=alone)

    async def _deliver_steps(self, peer: PeerId, request: SessionSteps, tensors: Sequence[Tensor]) -> SessionStepsReply:
        timeout = self._limits.call_timeout
        reply, _ = await rpc.SESSION_STEPS.ask(self._transport, peer, request, tensors, timeout=timeout, max_bytes=0)
        return reply

    async def _report_failure(
        self, session: StageSession, step: SessionStep, kind: FailureKind, reason: str, *, stage_index: int = -1
    ) -> None:
        """Report a failed step to the client, with the stage at fault; -1: the stage of this step."""
        failed = SessionFailed(
            session=step.session,
            number=step.number,
            attempt=session.attempt,
            stage_index=step.stage_index if stage_index < 0 else stage_index,
            kind=kind,
            reason=reason,
        )
        try:
            await rpc.SESSION_FAILED.ask(self._transport, session.client, failed, timeout=self._limits.call_timeout)
        except SwarmError as error:
            _log.info("Client %s did not receive the report of a failed step: %s", session.client, error)

    # ------------------------------------------------------------------ replacement servers

    async def _handle_replay(self, caller: PeerId, request: SessionReplay) -> None:
        """Send the outputs of all steps, in order, to a replacement server of the next stage."""
        session = self._sessions.get((request.session, request.stage_index))
        if session is None or session.client != caller:
            raise SessionLost(f"stage {request.stage_index} has no session of {caller} with this id")
        if request.route[0] != self._transport.peer_id:
            raise ProtocolError(f"a route must begin with the server that receives it, got {request.route}")
        async with session.replaying:
            session.follow(request.attempt, request.route, request.resume)
            number = 1
            while number <= session.computed:
                outputs = [session.kept.get(each) for each in self._numbers_sent_together(session, number)]
                if None in outputs:
                    raise SessionLost(f"the output of step {number} of this session was dropped here")
                await gather(self._send_to_server(session, kept, alone=True) for kept in outputs if kept is not None)
                number += len(outputs)

    def _numbers_sent_together(self, session: StageSession, number: int) -> range:
        """Return the numbers of steps to send at once: the first alone, then as many small ones as fit on a stream."""
        end = number + 1
        if number > 1:
            max_end = min(number + WINDOW, session.computed + 1)
            while end < max_end and (kept := session.kept.get(end)) is not None and kept.num_bytes <= SMALL_BYTES:
                end += 1
        return range(number, end)

    async def _handle_close(self, caller: PeerId, request: SessionClose) -> None:
        for key, session in [*self._sessions.items()]:
            if key[0] != request.session or session.client != caller:
                continue
            if not request.keeps or (freed := self._prefixes.keep(key, session)) is None:
                self._drop(key)
            else:
                del self._sessions[key]
                self._steps.release(session.cache)
                self._on_dropped(freed)
            await session.notify()

    # ------------------------------------------------------------------ prefixes

    async def _handle_branch(self, caller: PeerId, request: SessionBranch) -> SessionBranched:
        """Begin a session with the longest of these prefixes that all servers of the route keep."""
        self._check_sender(request, caller)
        self._host.stage_of(request)
        key, timeout = (request.session, request.stage_index), _BRANCHING_S
        if key in self._sessions:
            raise ProtocolError("only a new session may begin with a prefix, got a session that has begun")

        def ask(onward: SessionBranch) -> Awaitable[SessionBranched]:
            return rpc.SESSION_BRANCH.ask(self._transport, onward.route[0], onward, timeout=timeout)

        branch = await self._prefixes.branch(request, [*self._sessions.items()], ask)
        if branch is None or key in self._sessions:
            return SessionBranched(number=0)
        self._sessions[key] = branch
        if self._make_room(but=branch) > 0 or len(self._sessions) > _MAX_SESSIONS:
            self._drop(key)
            return SessionBranched(number=0)
        self._watch_idle()
        return SessionBranched(number=branch.computed)

    # ------------------------------------------------------------------ memory

    def _used_bytes(self) -> int:
        return sum(session.num_bytes for session in self._sessions.values()) + self._prefixes.num_bytes

    async def _make_room_for(self, session: StageSession) -> bool:
        """Make room for a session that has grown; if there is none, drop that session and return False."""
        if self._make_room(but=session) <= 0 or len(self._sessions) == 1:
            return True
        if len(self._wanted_bytes) < _MAX_SESSIONS:
            self._wanted_bytes |= {key: session.num_bytes for key, known in self._sessions.items() if known is session}
        await self._end(session)
        return False

    def _reserve_for(self, key: SessionKey) -> int:
        """Return the bytes that must be free for a session to begin."""
        if not self._wanted_bytes or not self._sessions:
            return 0
        return max(self._limits.session_bytes // _RESERVE, self._wanted_bytes.get(key, 0))

    def _make_room(self, *, but: StageSession | None = None, num_more: int = 0, reserve: int = 0) -> int:
        """Drop prefixes, then old outputs, then inactive sessions except `but`, until the rest and `num_more` fit.

        `reserve` bytes more must be free. Each time, begin with the least recently used; but drop sessions first of the
        client whose sessions take most memory. Return the bytes that are still too many; at most 0 if all fit.
        """
        excess = self._used_bytes() + reserve - self._limits.session_bytes
        num_sessions = len(self._sessions) + num_more
        while len(self._prefixes) and (excess > 0 or len(self._prefixes) + num_sessions > _MAX_SESSIONS):
            freed = self._prefixes.drop_oldest()
            self._on_dropped(freed)
            excess -= freed
        if excess <= 0 and num_sessions <= _MAX_SESSIONS:
            return excess
        for session in [*self._sessions.values()] if excess > 0 else ():
            if freed := session.drop_older_outputs():
                self._on_dropped(freed)
            excess -= freed
            if excess <= 0:
                break
        shares = Counter[PeerId]()
        for session in self._sessions.values():  # an empty session takes memory, too
            shares[session.client] += session.num_bytes + self._limits.session_bytes // _MAX_SESSIONS
        for key, session in sorted(self._sessions.items(), key=lambda item: -shares[item[1].client]):
            if excess <= 0 and len(self._sessions) + num_more <= _MAX_SESSIONS:
                break
            if session is not but and not session.is_active:
                excess -= self._drop(key)
        return excess

    def _watch_idle(self) -> None:
        if not self._watches_idle:
            self._watches_idle = True
            self._spawn(self._end_idle())

    async def _end_idle(self) -> None:
        """Drop sessions without a step for `Limits.session_idle` seconds, and unused prefixes, until none are left."""
        idle_s = self._limits.session_idle
        while self._sessions or len(self._prefixes):
            await asyncio.sleep(idle_s / 4)
            if freed := self._prefixes.drop_unused():
                self._on_dropped(freed)
            for session in [session for session in self._sessions.values() if now_s() >= session.used_s + idle_s]:
                await self._end(session)
        self._watches_idle = False


def _kind_of(error: Exception) -> FailureKind:
    """Return the kind of failure to report to the client if the next stage's server did not accept a step."""
    return _FAILURE_KINDS.get(type(error), "unreachable" if isinstance(error, PeerError) else "refused")


def _reason(error: Exception) -> str:
    if isinstance(error, SwarmError):
        return str(error)[:_MAX_REASON]
    return ("".join(traceback.format_exception(error)))[-_MAX_REASON:]
