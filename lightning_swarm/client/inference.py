"""A client's inference sessions: the log of their steps, their routes, and other servers in the place of dead ones.

The client sends each step to the first stage's server; the last one's output comes back. It keeps what it has sent. If
a server dies, another one of its stage gets the steps so far from the server before it, or, where that has dropped its
outputs, from as far back as need be: in the end from the client.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from lightning_swarm.client.pipeline.context import PipelineContext, Refusal
from lightning_swarm.core.clock import now_s
from lightning_swarm.core.errors import (
    PeerError,
    ProtocolError,
    SessionLost,
    StageError,
    StageLost,
    SwarmError,
    Unreachable,
)
from lightning_swarm.core.tasks import gather
from lightning_swarm.network import Message, PeerId
from lightning_swarm.network.liveness import alive_among
from lightning_swarm.protocol import serialization
from lightning_swarm.protocol.messages.calls import ComputeMode
from lightning_swarm.protocol.messages.inference import (
    CacheOperation,
    CacheRecipe,
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

_LOOK_S: Final = 0.5  # without an output, after which the route's servers are asked whether they live
_MAX_CLOSING_S: Final = 5.0


@dataclass(frozen=True, kw_only=True)
class SessionInput:
    """What a step begins with at the first stage."""

    hidden: serialization.Tree  # of the new tokens, ``[rows, tokens, ...]``, as it travels
    extras: dict[str, Any]  # of all blocks
    operations: Sequence[CacheOperation]  # on the caches, before the step
    modes: Sequence[ComputeMode]  # of each stage


@dataclass(frozen=True, kw_only=True)
class SessionWeights:
    """The weights that a session computes with."""

    generation: int  # of the run
    version: int
    number: int  # of evaluation weights; 0: those of the version


class InferenceSession:
    """A text that grows, with its caches at one server of each stage; on the swarm's loop."""

    def __init__(self, context: PipelineContext, recipe: CacheRecipe, weights: SessionWeights) -> None:
        self.id = secrets.token_hex(16)
        self.weights = weights
        self._context, self._recipe = context, recipe
        self._log: list[SessionInput] = []
        self._route: list[PeerId] = []
        self._attempt = 0
        self._output: asyncio.Future[serialization.Tree] | None = None
        self._failures: asyncio.Queue[SessionFailed] = asyncio.Queue()
        self._refused: dict[int, set[PeerId]] = {}  # by stage, who answered with an error
        self.is_broken = False  # a step failed: the caches may have it or not

    @property
    def num_steps(self) -> int:
        """The number of steps so far."""
        return len(self._log)

    async def step(self, given: SessionInput) -> serialization.Tree:
        """Have all stages compute the next tokens; returns the last one's output, as it travels."""
        self._log.append(given)
        output = self._output = asyncio.get_running_loop().create_future()
        deadline_s = now_s() + self._context.timeout
        self.is_broken = True
        try:
            broken = await (self._send(self.num_steps, resume=self.num_steps) if self._route else self._begin())
            while not output.done():
                broken = await (self._rebuild(broken) if broken else self._wait(output))
                if not output.done() and now_s() >= deadline_s:
                    raise StageLost(
                        f"step {self.num_steps} of a session did not get through within {self._context.timeout:g} s "
                        f"on {self._route}. Raise `Limits.call_timeout` if it takes longer."
                    )
        finally:
            self._output = None
        self._refused.clear()
        self.is_broken = False
        return output.result()

    async def close(self) -> None:
        """Tell the servers that the session is over."""
        body = encode(SessionClose(session=self.id))
        await gather(self._tell(peer, body) for peer in dict.fromkeys(self._route))

    async def _tell(self, peer: PeerId, body: bytes) -> None:
        with contextlib.suppress(SwarmError):  # it forgets the session by itself
            await self._context.transport.call(peer, SESSION_CLOSE, body, timeout=_MAX_CLOSING_S)

    # ------------------------------------------------------------------ what comes

    def take_output(self, caller: PeerId, message: Message, said: SessionOutput) -> None:
        """Take in a step's output, from the last stage's server alone; that of an older step comes twice."""
        if not self._route or caller != self._route[-1]:
            raise ProtocolError(f"a session's output comes from its last server, not from {caller}")
        if said.number == self.num_steps and self._output is not None and not self._output.done():
            self._output.set_result(serialization.unflatten(said.structure, list(message.tensors)))

    def is_served_by(self, peer: PeerId) -> bool:
        """Return whether a peer is one of the session's servers."""
        return peer in self._route

    def take_failure(self, caller: PeerId, failed: SessionFailed) -> None:
        """Take in that a step did not get through."""
        if caller not in self._route:
            raise ProtocolError(f"{caller} is no server of the session")
        if failed.stage_index >= len(self._route):
            raise ProtocolError(f"a session of {len(self._route)} stages failed at stage {failed.stage_index}")
        if failed.attempt == self._attempt:
            self._failures.put_nowait(failed)

    async def _wait(self, output: asyncio.Future[serialization.Tree]) -> set[int]:
        """Wait for the output, or for bad news; returns the stages that need another server, or another replay."""
        failing = asyncio.ensure_future(self._failures.get())
        try:
            await asyncio.wait({output, failing}, timeout=_LOOK_S, return_when=asyncio.FIRST_COMPLETED)
            if output.done():
                return set()
            if not failing.done():
                return await self._silent(Unreachable("it does not answer"))
            failed = failing.result()
        finally:
            failing.cancel()
        if failed.kind == "refused":
            self._refuse(failed.stage_index, StageError(f"stage {failed.stage_index}: {failed.reason}"))
        elif failed.kind == "unreachable":
            self._ban(failed.stage_index, Unreachable(failed.reason))
        return {failed.stage_index}

    # ------------------------------------------------------------------ routes

    def _ban(self, stage: int, error: PeerError) -> None:
        self._context.ban(stage, self._route[stage], self.weights.version, error)

    def _refuse(self, stage: int, error: SwarmError) -> None:
        """Note that a stage's server answered with an error; raise it if all of them did, for then none is to blame."""
        refused = self._refused.setdefault(stage, set())
        refused.add(self._route[stage])
        if refused >= self._context.routers[stage].peers.keys():
            raise error
        self._ban(stage, Refusal(self._route[stage], error))

    async def _begin(self) -> set[int]:
        """Choose a server for each stage, and send the first step; returns the stages that need another one."""
        self._route = [self._choose(stage) for stage in range(len(self._context.routers))]
        return await self._send_all(resume=1)

    async def _rebuild(self, broken: set[int]) -> set[int]:
        """Choose servers for stages that need one, and bring them up to the newest step; returns what is broken now."""
        self._attempt += 1
        while not self._failures.empty():
            self._failures.get_nowait()
        for stage in broken:
            if self._context.is_banned(stage, self._route[stage]):
                self._route[stage] = self._choose(stage, avoid=frozenset({self._route[stage]}))
                if self._context.is_banned(stage, self._route[stage]):  # there is no other one
                    await asyncio.sleep(_LOOK_S)
        first = min(broken)
        # One stage gets the steps so far and hands on the newest; of several each hands on all.
        resume = self.num_steps if len(broken) == 1 else 1
        while first > 0:
            request = SessionReplay(
                session=self.id,
                stage_index=first - 1,
                attempt=self._attempt,
                resume=resume,
                route=self._route[first - 1 :],
            )
            before = self._route[first - 1]
            try:
                timeout = self._context.timeout
                await self._context.transport.call(before, SESSION_REPLAY, encode(request), timeout=timeout)
            except SessionLost:
                await self._tell(before, encode(SessionClose(session=self.id)))
                first, resume = first - 1, 1  # it has dropped what is needed, and computes it again
            except PeerError as error:
                return await self._silent(error) or {first}  # which of the two is gone
            else:
                # The step itself may not have come to the server before; it hands on what it computes.
                return await self._send(self.num_steps, resume=resume)
        return await self._send_all(resume=resume)

    async def _silent(self, error: PeerError) -> set[int]:
        """Ban the servers that answer no ping, for this error; returns their stages."""
        alive = await alive_among(self._context.transport, dict.fromkeys(self._route))
        silent = {stage for stage, peer in enumerate(self._route) if peer not in alive}
        for stage in silent:
            self._ban(stage, error)
        return silent

    def _choose(self, stage: int, avoid: frozenset[PeerId] = frozenset()) -> PeerId:
        router = self._context.routers[stage]
        rows = max((leaf.shape[0] for leaf in serialization.leaves(self._log[0].hidden)), default=1)
        charge = router.choose(rows, now_s=now_s(), avoid=avoid)
        router.release(charge)
        return charge.peer

    async def _send_all(self, *, resume: int) -> set[int]:
        """Send all steps so far to the first stage's server; returns that stage if it does not take them."""
        for number in range(1, self.num_steps + 1):
            if broken := await self._send(number, resume=resume):
                return broken
        return set()

    async def _send(self, number: int, *, resume: int) -> set[int]:
        """Send a step to the first stage's server; returns that stage if it does not take it.

        Servers hand on what comes of the steps from `resume` on.
        """
        given = self._log[number - 1]
        structure, tensors = serialization.flatten((given.hidden, given.extras))
        step = SessionStep(
            session=self.id,
            client=self._context.transport.peer_id,
            attempt=self._attempt,
            generation=self.weights.generation,
            version=self.weights.version,
            weights=self.weights.number,
            number=number,
            resume=resume,
            stage_index=0,
            route=self._route,
            modes=list(given.modes),
            recipe=self._recipe,
            operations=list(given.operations),
            structure=structure,
        )
        try:
            await self._context.send(self._route[0], SESSION_STEP, step, tensors)
        except SessionLost:
            return {0}
        except Refusal as refusal:
            self._refuse(0, refusal.error)
            return {0}
        except PeerError as error:
            self._ban(0, error)
            return {0}
        return set()


@dataclass(eq=False)
class InferenceSessions:
    """The sessions of one client, by id; takes in what servers say of them."""

    context: PipelineContext
    _open: dict[str, InferenceSession] = field(default_factory=dict)
    _closing: set[asyncio.Task[None]] = field(default_factory=set)

    def __post_init__(self) -> None:
        transport = self.context.transport
        transport.handle_stream(SESSION_OUTPUT, self._handle_output, admit=self._check_server)
        transport.handle_call(SESSION_FAILED, self._handle_failed)

    def open(self, recipe: CacheRecipe, weights: SessionWeights) -> InferenceSession:
        """Begin a session. Its servers are chosen with its first step."""
        session = InferenceSession(self.context, recipe, weights)
        self._open[session.id] = session
        return session

    def has(self, session: InferenceSession) -> bool:
        """Return whether a session is open here."""
        return session.id in self._open

    def close_soon(self, session: InferenceSession) -> None:
        """On the loop: end a session, and tell its servers."""
        if self._open.pop(session.id, None) is not None:
            task = asyncio.ensure_future(session.close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    def _find(self, session: str) -> InferenceSession:
        found = self._open.get(session)
        if found is None:
            raise SessionLost("this client has no such session")
        return found

    def _check_server(self, caller: PeerId) -> None:
        if not any(session.is_served_by(caller) for session in self._open.values()):
            raise ProtocolError(f"{caller} is no server of a session of this client")

    async def _handle_output(self, caller: PeerId, message: Message) -> Message:
        said = decode(message.body, SessionOutput)
        self._find(said.session).take_output(caller, message, said)
        return Message()

    async def _handle_failed(self, caller: PeerId, body: bytes) -> bytes:
        failed = decode(body, SessionFailed)
        self._find(failed.session).take_failure(caller, failed)
        return b""
