"""Inference sessions on a server: computes steps with the sessions' caches, and sends outputs to the next stage.

A step comes from the client or from the previous stage's server. Its output goes to the next stage's server, or to the
client. Each server keeps its outputs while it has room. If the next server dies, its replacement receives all of them
in order, and then has the same cache.
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

_MAX_REASON: Final = 2048  # characters of an error; those of `MAX_TOGETHER` steps fit into one message
_SMOOTHING: Final = 0.05  # weight of the newest step
_MAX_SESSIONS: Final = 4096  # limit for all stages here, because small sessions take more memory than their tensors
_BRANCHING_S: Final = 5.0  # seconds to find a prefix at all servers of a route; then the client sends the whole text
_FAILURE_KINDS: Final[dict[Any, FailureKind]] = {SessionLost: "lost", AdapterMissing: "adapter", Busy: "busy"}


class SessionHandlers:
    """Answers steps of inference sessions at the stages of this server."""

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
        self._step_outbox = StepOutbox(self._push_steps)
        self._output_outbox = Outbox[SessionOutput, None](self._give_outputs)
        self._spawn = tasks.spawn
        self._host, self._on_dropped = host, on_dropped
        self._held: OrderedDict[SessionKey, StageSession] = OrderedDict()  # least recently used first
        self._prefixes = PrefixStore(prefixes)
        self._forgetting = False  # whether `_forget_idle` runs
        self.num_steps = 0  # computed so far
        self.num_tokens = 0  # likewise, in all rows of these steps
        self._busy_s = MovingAverage(_SMOOTHING)
        max_bytes, admit = limits.max_message_bytes, self._check_caller
        rpc.SESSION_STEPS.serve(transport, self._handle_steps, max_bytes=max_bytes, admit=admit)
        rpc.SESSION_REPLAY.serve(transport, self._handle_replay, admit=host.check_client)
        rpc.SESSION_CLOSE.serve(transport, self._handle_close, admit=host.check_client)
        if prefixes.keeps:
            rpc.SESSION_BRANCH.serve(transport, self._handle_branch, admit=admit)

    def discard(self) -> None:
        """Drop all sessions, because their weights are gone."""
        self._held.clear()
        self._prefixes.clear()

    async def end_all(self) -> None:
        """End all sessions here; they continue at other servers."""
        freed, ended = self._used_bytes(), list(self._held.values())
        self.discard()
        self._on_dropped(freed)
        for held in ended:  # wakes steps that wait for earlier steps
            await held.grow()

    @property
    def num_open(self) -> int:
        """The number of sessions, summed over the stages here."""
        return len(self._held)

    @property
    def num_prefixes(self) -> int:
        """The number of ended sessions whose caches are kept, summed over the stages here."""
        return len(self._prefixes)

    def num_under_way(self, quiet_s: float) -> int:
        """Return the number of sessions with a step in the last seconds; the rest may be idle chats."""
        return sum(held.goes_on or now_s() < held.used_s + quiet_s for held in self._held.values())

    @property
    def num_joint(self) -> int:
        """The number of steps that shared a forward with steps of other sessions."""
        return self._steps.num_joint

    @property
    def step_s(self) -> float:
        """The mean seconds of a step at a stage here, without prompts; 0 if not measured."""
        return self._busy_s.value or 0.0

    @property
    def free_bytes(self) -> int:
        """The bytes left for sessions; kept outputs and prefixes count as free, because they can be dropped."""
        return max(0, self._limits.session_bytes - sum(held.cache_bytes for held in self._held.values()))

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
            raise ProtocolError(f"steps with {ends[-1]} tensors came with {len(message.tensors)}")
        is_alone = len({step.session for step in steps}) == 1
        refused = []
        for index, (step, end) in enumerate(zip(steps, ends, strict=True)):
            tensors = message.tensors[end - step.num_tensors : end]
            try:
                if await self._accept(caller, step, tensors, waits=is_alone):
                    continue
                is_early, (name, reason) = True, ("", "")
            except Exception as error:  # noqa: BLE001 - it concerns this step alone
                if not isinstance(error, SwarmError):
                    _log.exception("A step of a session could not be read.")
                is_early, (name, reason) = False, to_wire(error)
            refused.append(StepRefusal(index=index, is_early=is_early, error=name, reason=reason[:_MAX_REASON]))
        return SessionStepsReply(refused=refused), ()

    async def _accept(self, caller: PeerId, step: SessionStep, tensors: Sequence[Tensor], *, waits: bool) -> bool:
        """Accept the next step of a session, or send on the output of the newest step again.

        Return False if the step must wait for earlier steps, and `waits` forbids that.
        """
        stage = self._stage_of(step, caller)
        hidden, extras = checked_tree(step, tensors)
        check_tokens(hidden, stage)
        held = self._held_for(step, stage)
        if step.attempt >= held.attempt:
            held.follow(step.attempt, step.route, step.resume)
        if not held.takes(step.number):
            if not waits:
                return False
            if held.waiting[step.number] > 1:  # the step and a repetition, so that another one adds nothing
                return True
            await self._until_taken(held, step, stage)
        if step.number == held.taken + 1:
            held.taken = step.number
            self._spawn(self._advance(held, stage, step, hidden, extras, num_bytes(tensors)))
            await held.grow()
        elif step.number >= held.resume and (kept := held.kept.get(step.number)) is not None:
            # Repeated for another server, or for a client that missed the output.
            self._spawn(self._send_again(held, kept))
        return True

    async def _until_taken(self, held: StageSession, step: SessionStep, stage: SessionStage) -> None:
        """Wait for earlier steps, which this step may have overtaken, or until enough of them are computed."""
        gap = f"stage {stage.index} has {held.taken} steps of this session here, got {step.number}"
        if step.number > held.taken + WINDOW:
            raise SessionLost(gap)
        held.waiting[step.number] += 1
        try:
            # Computing may take long, but a step that was overtaken must come soon.
            async with asyncio.timeout(self._limits.silence_timeout if step.number > held.taken + 1 else None):
                async with held.changed:
                    await held.changed.wait_for(lambda: held.takes(step.number) or not self._has(held))
        except TimeoutError:
            raise SessionLost(gap) from None
        finally:
            held.waiting -= Counter((step.number,))
        if not self._has(held):
            raise SessionLost(f"the session ended at stage {stage.index} before step {step.number} came to its turn")

    def _has(self, held: StageSession) -> bool:
        return held in self._held.values()

    def _stage_of(self, step: SessionStep, caller: PeerId) -> SessionStage:
        """Return the stage of a step; refuse a step that its sender may not send, or not to this server."""
        self._check_sender(step, caller)
        if any(mode.grad for mode in step.modes):
            raise ProtocolError("a session computes without gradients")
        return self._host.stage_of(step)

    def _check_sender(self, step: SessionStep | SessionBranch, caller: PeerId) -> None:
        me = self._transport.peer_id
        self._host.check_client(step.client)
        if caller != step.client and not self._host.is_server(caller):
            raise ProtocolError(f"a step comes from its client {step.client}, or from a server; not from {caller}")
        if step.stage_index == 0 and caller != step.client:
            raise ProtocolError(f"the first stage's steps come from their client {step.client}, not from {caller}")
        if step.route[0] != me:
            raise ProtocolError(f"a step names its servers, {me} first here, got {step.route}")

    def _held_for(self, step: SessionStep, stage: SessionStage) -> StageSession:
        """Return the session of a step at a stage; the first step begins it, if there is room."""
        key = (step.session, stage.index)
        held = self._held.get(key)
        if held is None:
            if step.number != 1:
                raise SessionLost(f"stage {stage.index} has no step of this session here, got step {step.number}")
            excess = self._make_room(num_more=1)
            if len(self._held) >= _MAX_SESSIONS:
                raise Busy(f"{len(self._held)} sessions are open here, and no more may be")
            if excess > 0:
                raise Busy(
                    f"sessions hold {self._used_bytes()} bytes here, of at most {self._limits.session_bytes} by "
                    "`Limits.session_bytes`, and all of them go on"
                )
            held = self._held[key] = StageSession(step.client, step.attempt, step.route, step.resume, step.adapter)
            held.digests = PrefixDigests() if self._prefixes.policy.shares else None
            self._forget_idle_soon()
        elif held.client != step.client:
            raise ProtocolError(f"this session is of {held.client}, not of {step.client}")
        elif held.adapter != step.adapter:
            raise ProtocolError("all steps of a session have the same adapter")
        held.used_s = now_s()
        self._held.move_to_end(key)
        return held

    async def _advance(
        self,
        held: StageSession,
        stage: SessionStage,
        step: SessionStep,
        hidden: Any,
        extras: dict[str, Any],
        size: int,  # bytes of the received tensors
    ) -> None:
        """Compute a step after the steps before it, keep its output, and send it on; report a failure."""
        max_bytes = self._limits.session_bytes

        def prepare() -> Any:
            if step.number == 1 and step.recipe is not None:
                held.cache = attention_cache.build(step.recipe)
            if held.cache is None and step.recipe is not None:
                raise SessionLost(f"the cache of this session is not at stage {stage.index} any more")
            stage.prepare(step, held.cache, max_bytes=max_bytes)
            return held.cache

        def finish(output: serialization.Tree) -> KeptOutput:
            held.cache_bytes = 0 if held.cache is None else attention_cache.num_bytes(held.cache)
            if held.cache_bytes > max_bytes:
                raise ProtocolError(
                    f"a text's keys and values have {held.cache_bytes} bytes at stage {stage.index}, and "
                    f"`Limits.session_bytes` there are {max_bytes}. Raise that, or write shorter texts."
                )
            structure, tensors = serialization.flatten((output, stage.left_of(extras)))
            length = None if held.cache is None else attention_cache.length_of(held.cache)
            return KeptOutput(step, tuple(tensors), structure, num_bytes(tensors) + size, length)

        async with held.computing:  # steps run in the order of their arrival
            if held.done != step.number - 1:
                return  # the previous step failed
            try:
                await stage.ready()
                own = stage.module.extras_for(extras)  # within `try`, because a client may send anything
                part = SessionPart(hidden, own, cache=held.cache, adapter=stage.adapter)
                kept, busy_s = await self._steps.compute(
                    WaitingStep(stage, step, part, prepare, finish, lambda: self._has(held))
                )
            except Exception as error:  # noqa: BLE001 - the model's code may raise anything; the client is told
                await self._forget(held)
                kind: FailureKind = "lost" if isinstance(error, SessionLost) else "refused"
                await self._blame(held, step, kind, _reason(error))
                return
            record(held, step, (hidden, extras), kept)
            held.keep(step.number, kept)
            if len(held.route) == 1:  # this is the last stage
                held.drop_older()
            held.done = step.number
            self.num_steps += 1
            self.num_tokens += part.rows * part.tokens
            if step.number > 1 and busy_s:
                self._busy_s.measure(busy_s)
        await held.grow()
        if not await self._make_room_for(held):
            await self._blame(held, step, "busy", "sessions that go on leave no room for this one")
        elif step.number >= held.resume:
            await self._send_on(held, kept)

    async def _forget(self, held: StageSession) -> None:
        """Drop a session, and wake its waiting steps, so that they end."""
        for key in [key for key, one in self._held.items() if one is held]:
            self._drop(key)
        await held.grow()

    def _drop(self, key: SessionKey) -> int:
        """Drop a session at a stage; return the number of bytes freed."""
        held = self._held.pop(key)
        num_bytes = held.num_bytes
        self._steps.release(held.cache)
        held.cache = None  # a task may still hold the session, and must not keep its tensors
        held.kept.clear()
        held.cache_bytes = held.kept_bytes = 0
        self._on_dropped(num_bytes)
        return num_bytes

    async def _send_on(self, held: StageSession, kept: KeptOutput) -> None:
        """Send a step's output to the next stage's server, or to the client; report a failure to the client."""
        async with held.replaying:
            attempt = held.attempt
        try:  # beside the outputs of other steps: their order is kept where they are received
            if len(held.route) == 1:
                await self._give(held, kept)
            else:
                await self._push(held, kept)
        except Exception as error:  # noqa: BLE001 - whatever it is, it concerns this session alone
            if len(held.route) == 1:
                _log.info("Client %s of a session lacks step %d: %r", held.client, kept.step.number, error)
            elif held.attempt == attempt:  # otherwise it was sent again
                stage_index = kept.step.stage_index + 1
                await self._blame(held, kept.step, _kind_of(error), _reason(error), stage_index=stage_index)

    async def _send_again(self, held: StageSession, kept: KeptOutput) -> None:
        """Send an output as `_send_on`, unless many are being sent again, as for a client that floods its server."""
        if held.num_repeated < 2 * WINDOW:
            held.num_repeated += 1
            try:
                await self._send_on(held, kept)
            finally:
                held.num_repeated -= 1

    async def _give(self, held: StageSession, kept: KeptOutput) -> None:
        """Send the last stage's output of a step to the client."""
        output, _ = serialization.unflatten(kept.structure, kept.tensors)
        structure, tensors = serialization.flatten(output)
        said = SessionOutput(
            session=kept.step.session,
            number=kept.step.number,
            length=kept.length,
            structure=structure,
            num_tensors=len(tensors),
        )
        await self._output_outbox.put(held.client, said, tensors)

    async def _give_outputs(
        self, client: PeerId, outputs: list[SessionOutput], tensors: list[Tensor]
    ) -> Sequence[None]:
        request, timeout = SessionOutputs(outputs=outputs), self._limits.call_timeout
        await rpc.SESSION_OUTPUTS.ask(self._transport, client, request, tensors, timeout=timeout, max_bytes=0)
        return [None] * len(outputs)

    async def _push(self, held: StageSession, kept: KeptOutput, *, alone: bool = False) -> None:
        """Send the output of a step to the next stage's server."""
        step = replace(
            onward(kept.step),
            attempt=held.attempt,
            resume=held.resume,
            route=held.route[1:],
            structure=kept.structure,
            num_tensors=len(kept.tensors),
        )
        await self._step_outbox.send(held.route[1], step, kept.tensors, alone=alone)

    async def _push_steps(self, peer: PeerId, request: SessionSteps, tensors: Sequence[Tensor]) -> SessionStepsReply:
        timeout = self._limits.call_timeout
        reply, _ = await rpc.SESSION_STEPS.ask(self._transport, peer, request, tensors, timeout=timeout, max_bytes=0)
        return reply

    async def _blame(
        self, held: StageSession, step: SessionStep, kind: FailureKind, reason: str, *, stage_index: int = -1
    ) -> None:
        """Report a failed step to the client, with the stage at fault; -1: the stage of this step."""
        failed = SessionFailed(
            session=step.session,
            number=step.number,
            attempt=held.attempt,
            stage_index=step.stage_index if stage_index < 0 else stage_index,
            kind=kind,
            reason=reason,
        )
        try:
            await rpc.SESSION_FAILED.ask(self._transport, held.client, failed, timeout=self._limits.call_timeout)
        except SwarmError as error:
            _log.info("The client %s of a session is not told of a failure: %s", held.client, error)

    # ------------------------------------------------------------------ replacement servers

    async def _handle_replay(self, caller: PeerId, request: SessionReplay) -> None:
        """Send all steps so far, in order, to another server of the next stage, where the session then continues."""
        held = self._held.get((request.session, request.stage_index))
        if held is None or held.client != caller:
            raise SessionLost(f"stage {request.stage_index} has no such session of {caller} here")
        if request.route[0] != self._transport.peer_id:
            raise ProtocolError(f"a route begins with the server that is asked, got {request.route}")
        async with held.replaying:
            held.follow(request.attempt, request.route, request.resume)
            number = 1
            while number <= held.done:
                steps = [held.kept.get(one) for one in self._pushed_together(held, number)]
                if None in steps:
                    raise SessionLost(f"step {number} of this session is not kept here any more")
                await gather(self._push(held, kept, alone=True) for kept in steps if kept is not None)
                number += len(steps)

    def _pushed_together(self, held: StageSession, number: int) -> range:
        """Return the steps to send at once: the first alone, then small steps, which share a stream."""
        end = number + 1
        if number > 1:
            most = min(number + WINDOW, held.done + 1)
            while end < most and (kept := held.kept.get(end)) is not None and kept.num_bytes <= SMALL_BYTES:
                end += 1
        return range(number, end)

    async def _handle_close(self, caller: PeerId, request: SessionClose) -> None:
        ended = [(key, held) for key, held in self._held.items() if key[0] == request.session and held.client == caller]
        for key, held in ended:
            if not request.keeps or (freed := self._prefixes.keep(key, held)) is None:
                self._drop(key)
            else:
                del self._held[key]
                self._steps.release(held.cache)
                self._on_dropped(freed)
            await held.grow()

    # ------------------------------------------------------------------ prefixes

    async def _handle_branch(self, caller: PeerId, request: SessionBranch) -> SessionBranched:
        """Begin a session with the longest of these prefixes that all servers of the route keep."""
        self._check_sender(request, caller)
        self._host.stage_of(request)
        key, timeout = (request.session, request.stage_index), _BRANCHING_S
        if key in self._held:
            raise ProtocolError("a session begins with a prefix, got one that has begun")

        def ask(onward: SessionBranch) -> Awaitable[SessionBranched]:
            return rpc.SESSION_BRANCH.ask(self._transport, onward.route[0], onward, timeout=timeout)

        branch = await self._prefixes.branch(request, [*self._held.items()], ask)
        if branch is None or key in self._held:
            return SessionBranched(number=0)
        self._held[key] = branch
        if self._make_room(but=branch) > 0 or len(self._held) > _MAX_SESSIONS:
            self._drop(key)
            return SessionBranched(number=0)
        self._forget_idle_soon()
        return SessionBranched(number=branch.done)

    # ------------------------------------------------------------------ memory

    def _used_bytes(self) -> int:
        return sum(held.num_bytes for held in self._held.values()) + self._prefixes.num_bytes

    async def _make_room_for(self, held: StageSession) -> bool:
        """Make room for a session that has grown; if there is none, drop that session and return False."""
        if self._make_room(but=held) <= 0 or len(self._held) == 1:
            return True
        await self._forget(held)
        return False

    def _make_room(self, *, but: StageSession | None = None, num_more: int = 0) -> int:
        """Drop prefixes, old outputs, and inactive sessions except `but`, until the rest and `num_more` sessions fit.

        Begin with the least recently used session each time; sessions are dropped of the client that holds most. Return
        the bytes that are still too many; at most 0 if none are.
        """
        excess = self._used_bytes() - self._limits.session_bytes
        while len(self._prefixes) and (excess > 0 or len(self._prefixes) + len(self._held) + num_more > _MAX_SESSIONS):
            freed = self._prefixes.drop_oldest()
            self._on_dropped(freed)
            excess -= freed
        if excess <= 0 and len(self._held) + num_more <= _MAX_SESSIONS:
            return excess
        for held in [*self._held.values()] if excess > 0 else ():
            if freed := held.drop_older():
                self._on_dropped(freed)
            excess -= freed
            if excess <= 0:
                break
        shares = Counter[PeerId]()
        for held in self._held.values():  # a session costs something even if it is empty
            shares[held.client] += held.num_bytes + self._limits.session_bytes // _MAX_SESSIONS
        for key, held in sorted(self._held.items(), key=lambda item: -shares[item[1].client]):
            if excess <= 0 and len(self._held) + num_more <= _MAX_SESSIONS:
                break
            if held is not but and not held.goes_on:
                excess -= self._drop(key)
        return excess

    def _forget_idle_soon(self) -> None:
        if not self._forgetting:
            self._forgetting = True
            self._spawn(self._forget_idle())

    async def _forget_idle(self) -> None:
        """Drop sessions without a step for `Limits.session_idle` seconds, and prefixes that are not used."""
        idle_s = self._limits.session_idle
        while self._held or len(self._prefixes):
            await asyncio.sleep(idle_s / 4)
            if freed := self._prefixes.drop_unused():
                self._on_dropped(freed)
            for held in [held for held in self._held.values() if now_s() >= held.used_s + idle_s]:
                await self._forget(held)
        self._forgetting = False


def _kind_of(error: Exception) -> FailureKind:
    """Return the kind of failure to report to the client if the next server did not accept a step."""
    return _FAILURE_KINDS.get(type(error), "unreachable" if isinstance(error, PeerError) else "refused")


def _reason(error: Exception) -> str:
    if isinstance(error, SwarmError):
        return str(error)[:_MAX_REASON]
    return ("".join(traceback.format_exception(error)))[-_MAX_REASON:]
