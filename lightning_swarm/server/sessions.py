"""A server's part in inference sessions: its blocks' caches, step by step, and outputs for whoever comes behind it.

A step comes from the client or from the server of the stage before, and its output goes to the server of the next
stage, or to the client. Each server keeps its outputs while it has room: if the server behind it dies, another one gets
them all, in order, and has the same cache then.
"""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from msgspec.structs import replace
from torch import Tensor

from lightning_swarm.core.clock import now_s
from lightning_swarm.core.errors import Busy, NotMember, PeerError, ProtocolError, SessionLost, SwarmError
from lightning_swarm.model import attention_cache
from lightning_swarm.model.attention_cache import is_in_session
from lightning_swarm.network import Message, PeerId
from lightning_swarm.protocol import serialization
from lightning_swarm.protocol.messages.inference import (
    FailureKind,
    SessionClose,
    SessionFailed,
    SessionOutput,
    SessionReplay,
    SessionStep,
)
from lightning_swarm.protocol.messages.wire import decode, encode
from lightning_swarm.protocol.methods import (
    SESSION_CLOSE,
    SESSION_FAILED,
    SESSION_OUTPUT,
    SESSION_REPLAY,
    SESSION_STEP,
)
from lightning_swarm.server.compute import num_bytes
from lightning_swarm.server.context import ServerContext
from lightning_swarm.server.executor import TOKENS
from lightning_swarm.server.stage import Stage
from lightning_swarm.server.step_handlers import StepHandlers

_log = logging.getLogger(__name__)

_MAX_REASON: Final = 4096
_MAX_SESSIONS: Final = 4096  # at all stages here: small ones take more memory than their bytes
_Key = tuple[str, int]  # a session, and the stage


@dataclass(eq=False)
class _Kept:
    """A step as the server of the next stage gets it."""

    step: SessionStep  # as it came here; of the next one the route begins one later
    tensors: tuple[Tensor, ...]
    structure: Any
    num_bytes: int


@dataclass(eq=False)
class _StageSession:
    """A session at one stage here."""

    client: PeerId
    cache: Any
    attempt: int
    route: list[PeerId]  # from this server on
    resume: int
    taken: int = 0  # the newest step that is computed here, or will be
    done: int = 0
    kept: OrderedDict[int, _Kept] = field(default_factory=OrderedDict)  # by number
    cache_bytes: int = 0
    kept_bytes: int = 0
    used_s: float = field(default_factory=now_s)
    computing: asyncio.Lock = field(default_factory=asyncio.Lock)
    sending: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def num_bytes(self) -> int:
        """Bytes of its cache, and of the outputs."""
        return self.cache_bytes + self.kept_bytes

    def keep(self, number: int, kept: _Kept) -> None:
        """Keep the output of a step."""
        self.kept[number] = kept
        self.kept_bytes += kept.num_bytes

    def drop_older(self) -> int:
        """Drop all outputs but the newest, which may be on its way; returns the bytes that were freed."""
        before = self.kept_bytes
        while len(self.kept) > 1:
            self.kept_bytes -= self.kept.popitem(last=False)[1].num_bytes
        return before - self.kept_bytes


class SessionHandlers:
    """Answers steps of inference sessions at the stages of this server."""

    def __init__(self, context: ServerContext, steps: StepHandlers) -> None:
        self._transport, self._executor = context.transport, context.executor
        self._membership, self._limits = context.membership, context.limits
        self._spawn = context.tasks.spawn
        self._steps = steps
        self._held: OrderedDict[_Key, _StageSession] = OrderedDict()  # the one that was used last at the end
        self._forgetting = False
        self.num_steps = 0  # computed so far
        transport = context.transport
        transport.handle_stream(
            SESSION_STEP, self._handle_step, max_bytes=self._limits.max_message_bytes, admit=self._check_caller
        )
        transport.handle_call(SESSION_REPLAY, self._handle_replay)
        transport.handle_call(SESSION_CLOSE, self._handle_close)

    def discard(self) -> None:
        """Forget all sessions: their weights are gone."""
        self._held.clear()

    @property
    def num_open(self) -> int:
        """The number of sessions, counted at each stage here."""
        return len(self._held)

    # ------------------------------------------------------------------ steps

    def _check_caller(self, caller: PeerId) -> None:
        if not self._membership.knows_server(caller):
            self._membership.check_trainer(caller)

    async def _handle_step(self, caller: PeerId, message: Message) -> Message:
        step = decode(message.body, SessionStep)
        stage = self._checked_stage(step, caller)
        hidden, extras = _checked_tree(step, message.tensors)
        held = self._held_for(step, stage)
        if step.attempt >= held.attempt:
            held.attempt, held.route, held.resume = step.attempt, step.route, step.resume
        if step.number > held.taken + 1:
            raise SessionLost(f"stage {stage.index} has {held.taken} steps of this session here, got {step.number}")
        if step.number == held.taken + 1:
            held.taken = step.number
            self._spawn(self._advance(held, stage, step, hidden, extras))
        elif step.number == held.done:  # it comes again, for another server or a client that missed it
            self._spawn(self._send_on(held, held.kept[step.number]))
        return Message()

    def _checked_stage(self, step: SessionStep, caller: PeerId) -> Stage:
        membership, me = self._membership, self._transport.peer_id
        run = membership.run
        run.check_generation(step.generation)
        run.check_trainer(step.client)
        if caller != step.client and not membership.knows_server(caller):
            raise ProtocolError(f"a step comes from its client {step.client}, or from a server; not from {caller}")
        if step.route[0] != me or len(step.modes) != len(step.route):
            raise ProtocolError(f"a step names its servers, {me} first here, and a mode for each; got {step.route}")
        if any(mode.grad or mode.training for mode in step.modes):
            raise ProtocolError("a session computes without gradients, and in no train mode")
        stage = self._steps.stage(step.stage_index)
        if stage.on_trainers or step.stage_index not in membership.loaded:
            raise NotMember(f"stage {step.stage_index} has no weights here")
        stage.check_evaluation_weights(step.weights)
        return stage

    def _held_for(self, step: SessionStep, stage: Stage) -> _StageSession:
        key = (step.session, stage.index)
        held = self._held.get(key)
        if held is None:
            if step.number != 1:
                raise SessionLost(f"stage {stage.index} has no step of this session here, got step {step.number}")
            self._make_room(but=key, num_more=1)
            if len(self._held) >= _MAX_SESSIONS:
                raise Busy(f"{len(self._held)} sessions are open here, and no more may be")
            if self._used_bytes() > self._limits.session_bytes:
                raise Busy(
                    f"sessions hold {self._used_bytes()} bytes here, of at most {self._limits.session_bytes} by "
                    "`Limits.session_bytes`, and all of them go on"
                )
            cache = attention_cache.build(step.recipe)
            held = self._held[key] = _StageSession(step.client, cache, step.attempt, step.route, step.resume)
            if not self._forgetting:
                self._forgetting = True
                self._spawn(self._forget_idle())
        elif held.client != step.client:
            raise ProtocolError(f"this session is of {held.client}, not of {step.client}")
        held.used_s = now_s()
        self._held.move_to_end(key)
        return held

    async def _advance(
        self, held: _StageSession, stage: Stage, step: SessionStep, hidden: Any, extras: dict[str, Any]
    ) -> None:
        cache, mode, max_bytes = held.cache, step.modes[0], self._limits.session_bytes
        first_block = self._membership.run.manifest.stages[stage.index].first_block

        def compute() -> Any:
            own = stage.module.extras_for(extras)  # here: what comes may be anything
            for operation in step.operations:
                attention_cache.apply(cache, operation, max_bytes=max_bytes)
            with stage.at(step.version), stage.holding(step.weights):
                output = stage.computation.session_step(hidden, own, mode, cache, first_block)
            return output, attention_cache.num_bytes(cache)

        async with held.computing:  # in the order in which they came
            if held.done != step.number - 1:
                return  # the one before failed
            try:
                output, held.cache_bytes = (await self._executor.submit(TOKENS, compute))[0]
            except Exception as error:  # noqa: BLE001 - the model's code may raise anything; the client is told
                self._held.pop((step.session, stage.index), None)
                await self._blame(held, step, "refused", _reason(error))
                return
            structure, tensors = serialization.flatten((output, extras))
            kept = _Kept(step, tuple(tensors), structure, num_bytes(tensors))
            held.keep(step.number, kept)
            if len(held.route) == 1:  # nobody comes behind it
                held.drop_older()
            held.done = step.number
            self.num_steps += 1
        self._make_room(but=(step.session, stage.index))
        if step.number >= held.resume:
            await self._send_on(held, kept)

    async def _send_on(self, held: _StageSession, kept: _Kept) -> None:
        """Send a step's output to the server of the next stage, or to the client; tell the client if that fails."""
        async with held.sending:
            step = kept.step
            try:
                if len(held.route) == 1:
                    await self._give(held, kept)
                else:
                    await self._push(held, kept)
            except SwarmError as error:
                if len(held.route) == 1:
                    _log.info("The client %s of a session does not get step %d: %s", held.client, step.number, error)
                    return
                is_lost, may_do_elsewhere = isinstance(error, SessionLost), isinstance(error, PeerError)
                kind: FailureKind = "lost" if is_lost else "unreachable" if may_do_elsewhere else "refused"
                await self._blame(held, step, kind, _reason(error), stage_index=step.stage_index + 1)

    async def _give(self, held: _StageSession, kept: _Kept) -> None:
        output, _ = serialization.unflatten(kept.structure, kept.tensors)
        structure, tensors = serialization.flatten(output)
        body = encode(SessionOutput(session=kept.step.session, number=kept.step.number, structure=structure))
        message = Message(body, tuple(tensors))
        await self._transport.stream(
            held.client, SESSION_OUTPUT, message, timeout=self._limits.call_timeout, max_bytes=0
        )

    async def _push(self, held: _StageSession, kept: _Kept) -> None:
        step = replace(
            kept.step,
            attempt=held.attempt,
            resume=held.resume,
            stage_index=kept.step.stage_index + 1,
            route=held.route[1:],
            modes=kept.step.modes[1:],
            structure=kept.structure,
        )
        message = Message(encode(step), kept.tensors)
        await self._transport.stream(
            held.route[1], SESSION_STEP, message, timeout=self._limits.call_timeout, max_bytes=0
        )

    async def _blame(
        self, held: _StageSession, step: SessionStep, kind: FailureKind, reason: str, *, stage_index: int = -1
    ) -> None:
        failed = SessionFailed(
            session=step.session,
            number=step.number,
            attempt=held.attempt,
            stage_index=step.stage_index if stage_index < 0 else stage_index,
            kind=kind,
            reason=reason,
        )
        try:
            timeout = self._limits.call_timeout
            await self._transport.call(held.client, SESSION_FAILED, encode(failed), timeout=timeout)
        except SwarmError as error:
            _log.info("The client %s of a session is not told of a failure: %s", held.client, error)

    # ------------------------------------------------------------------ servers that come in the place of others

    async def _handle_replay(self, caller: PeerId, body: bytes) -> bytes:
        """Send all steps so far to another server of the next stage, in order; then the session goes on there."""
        self._membership.check_trainer(caller)
        request = decode(body, SessionReplay)
        held = self._held.get((request.session, request.stage_index))
        if held is None or held.client != caller:
            raise SessionLost(f"stage {request.stage_index} has no such session of {caller} here")
        if request.route[0] != self._transport.peer_id:
            raise ProtocolError(f"a route begins with the server that is asked, got {request.route}")
        async with held.sending:
            held.attempt, held.route, held.resume = request.attempt, request.route, request.resume
            for number in range(1, held.done + 1):
                kept = held.kept.get(number)
                if kept is None:
                    raise SessionLost(f"step {number} of this session is not kept here any more")
                await self._push(held, kept)
        return b""

    async def _handle_close(self, caller: PeerId, body: bytes) -> bytes:
        self._membership.check_trainer(caller)
        session = decode(body, SessionClose).session
        for key in [key for key, held in self._held.items() if key[0] == session and held.client == caller]:
            del self._held[key]
        return b""

    # ------------------------------------------------------------------ memory

    def _used_bytes(self) -> int:
        return sum(held.num_bytes for held in self._held.values())

    def _make_room(self, *, but: _Key, num_more: int = 0) -> None:
        """Drop outputs, the oldest sessions' first, then sessions that do not go on, until there is room for the rest.

        That is also room for so many new ones.
        """
        excess = self._used_bytes() - self._limits.session_bytes
        for held in [*self._held.values()] if excess > 0 else ():
            excess -= held.drop_older()
            if excess <= 0:
                break
        for key, held in [*self._held.items()]:
            if excess <= 0 and len(self._held) + num_more <= _MAX_SESSIONS:
                return
            if key != but and held.done == held.taken:
                excess -= held.num_bytes
                del self._held[key]

    async def _forget_idle(self) -> None:
        """Drop sessions that nobody continues."""
        idle_s = self._limits.session_idle
        while self._held:
            await asyncio.sleep(idle_s / 4)
            for key in [key for key, held in self._held.items() if now_s() >= held.used_s + idle_s]:
                del self._held[key]
        self._forgetting = False


def _checked_tree(step: SessionStep, tensors: Sequence[Tensor]) -> tuple[Any, dict[str, Any]]:
    tree = serialization.unflatten(step.structure, list(tensors))
    if not isinstance(tree, tuple) or len(tree) != 2 or not isinstance(tree[1], dict):
        raise ProtocolError("a step must bring a hidden state and the blocks' arguments")
    leaves = serialization.leaves(tree[0])
    if not leaves or leaves[0].ndim < 2 or 0 in leaves[0].shape[:2]:
        raise ProtocolError("a step's hidden state must be [rows, tokens, ...], and not empty")
    if not any(is_in_session(value) for value in tree[1].values()):
        raise ProtocolError("a step's blocks must take the session's cache")
    return tree


def _reason(error: Exception) -> str:
    if isinstance(error, SwarmError):
        return str(error)[:_MAX_REASON]
    return ("".join(traceback.format_exception(error)))[-_MAX_REASON:]
