"""An inference session of a client: logs its steps, chooses its route, and replaces servers that fail.

The client sends each step to the first stage's server, and receives the output from the last stage's server. Several
steps may be under way at once. The client keeps all steps that it has sent. If a server dies, the server before it
sends the steps so far to the replacement. If that server has dropped its outputs, the replay begins at an earlier
stage, in the end at the client. Each such rebuild of the route is a new *attempt*, and reports of older attempts are
ignored. A replay's number `resume` is the first step whose output servers pass on again; earlier steps only fill
caches.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from torch import Tensor

from lightning_swarm.client.inference.adapters import PackedAdapter, names_of
from lightning_swarm.client.inference.routes import SessionRoutes
from lightning_swarm.client.pipeline.context import Refusal
from lightning_swarm.core.clock import now_s
from lightning_swarm.core.errors import (
    AdapterMissing,
    Busy,
    DeadlineExceeded,
    PeerError,
    ProtocolError,
    SessionLost,
    StageError,
    StageLost,
    SwarmError,
    Unreachable,
)
from lightning_swarm.core.tasks import gather
from lightning_swarm.network import PeerId
from lightning_swarm.network.liveness import alive_among
from lightning_swarm.protocol import rpc, serialization
from lightning_swarm.protocol.messages.calls import ComputeMode
from lightning_swarm.protocol.messages.inference import (
    WINDOW,
    CacheOperation,
    CacheRecipe,
    SessionClose,
    SessionFailed,
    SessionOutput,
    SessionReplay,
    SessionStep,
)
from lightning_swarm.protocol.outbox import StepOutbox

_QUIET_S: Final = 0.5  # seconds without output before a liveness check of the route's servers
_MAX_CLOSING_S: Final = 5.0
_FIRST_RESEND: Final = 4  # liveness checks before the first resend of the steps under way; doubles each time
_MAX_TIMEOUTS: Final = 10  # call timeouts that a step may take if servers must be replaced
_MAX_FAILURES: Final = 64  # failure reports that wait to be handled; further reports replace the oldest
_MAX_HASTY: Final = 2  # rebuilds per stage in one step; the following ones wait, because each replays the whole text
_MAX_MISSING: Final = 3  # a server that lacks its adapter more often than this in one step is replaced


@dataclass(frozen=True, kw_only=True)
class SessionInput:
    """A step's input for the first stage."""

    hidden: serialization.Tree  # new tokens, ``[rows, tokens, ...]``, in wire form
    extras: dict[str, Any]  # extra arguments of all blocks
    operations: Sequence[CacheOperation]  # applied to the caches before the step
    modes: Sequence[ComputeMode]  # one for each stage
    drops: Sequence[bool] = ()  # one for each stage: its adapter's dropout is on; empty: all off

    @property
    def num_rows(self) -> int:
        """The number of rows."""
        return max((leaf.shape[0] for leaf in serialization.leaves(self.hidden)), default=1)

    @property
    def num_tokens(self) -> int:
        """The number of tokens in each row."""
        return serialization.leaves(self.hidden)[0].shape[1]

    @property
    def draws(self) -> bool:
        """Whether any part is in train mode, so that the blocks may draw random numbers."""
        return any(self.drops) or any(mode.training for mode in self.modes)


@dataclass(frozen=True, kw_only=True)
class SessionWeights:
    """The weights that a session computes with."""

    generation: int  # generation of the run
    version: int
    number: int  # number of the evaluation weights; 0: the weights of the version


@dataclass(frozen=True)
class SessionResult:
    """Result of a step."""

    output: serialization.Tree  # output of the last stage, in wire form
    length: int | None  # tokens in the last server's cache; None: no cache


class InferenceSession:
    """A growing text, with its caches at one server of each stage. Runs on the swarm's event loop."""

    def __init__(
        self,
        routes: SessionRoutes,
        outbox: StepOutbox,
        recipe: CacheRecipe | None,
        weights: SessionWeights,
        adapters: Sequence[PackedAdapter | None] = (),  # one for each stage; empty: none
        *,
        seed: int = 0,  # key of all random draws in train mode
        exact: bool = False,  # servers compute each step alone, so that rounding is independent of other texts
        prefix: Sequence[SessionInput] = (),  # steps with which the session begins
    ) -> None:
        self.id = secrets.token_hex(16)
        self._seed = seed
        self.weights, self.adapters = weights, adapters
        self._routes, self._outbox, self._recipe, self.exact = routes, outbox, recipe, exact
        self._log = [*prefix]  # all steps so far, kept for replays to new servers
        self._route: list[PeerId] = []  # server of each stage; empty before the first step
        self._has_begun = False
        self.is_kept = False  # servers should keep its steps, because later sessions may begin with them
        self._attempt = 0  # counts the rebuilds of the route
        self._attempt_step = 1  # the newest step when the attempt began
        self._newest_output = 0  # newest step whose output has arrived; all stages have the steps before
        self._results: dict[int, asyncio.Future[SessionResult]] = {}  # step number -> result that is not collected yet
        self._sends: set[asyncio.Task[set[int]]] = set()  # steps that are being sent
        self._broken: set[int] = set()  # stages that did not accept a step
        self._error: BaseException | None = None  # ends the session
        self._failures: deque[tuple[PeerId, SessionFailed]] = deque(maxlen=_MAX_FAILURES)  # (reporter, report)
        self._news = asyncio.Event()  # set by an output, a failure or the end of a liveness check
        self._liveness: asyncio.Task[set[PeerId]] | None = None  # check that returns the living servers of the route
        self._num_checks = 0  # liveness checks in this step
        self._num_rebuilds = 0  # rebuilds of the route in this step
        self._has_replaced_all = False  # in this step all servers were replaced, because no output arrived
        self._busy: set[PeerId] = set()  # servers that had no room in this step
        self._to_replace: set[int] = set()  # stages whose server must be replaced
        self._num_missing: Counter[int] = Counter()  # stage -> times that its server lacked the adapter in this step
        self._needs_adapter: set[int] = set()  # stages whose server must get the adapter again
        self._refused: dict[int, set[PeerId]] = {}  # stage -> servers that answered with an error
        self._closings: set[asyncio.Task[None]] = set()  # notifications of replaced servers
        self.is_delayed = False  # servers were replaced in this step
        self.on_delay: Callable[[], None] = lambda: None  # called when a step becomes delayed

    @property
    def num_steps(self) -> int:
        """The number of steps so far."""
        return len(self._log)

    @property
    def log(self) -> Sequence[SessionInput]:
        """The steps so far."""
        return self._log

    @property
    def route(self) -> tuple[PeerId, ...]:
        """The server of each stage; empty before the first step."""
        return tuple(self._route)

    @property
    def recipe(self) -> CacheRecipe | None:
        """The recipe of the caches; None if the blocks take none."""
        return self._recipe

    def adopt(self, route: list[PeerId], num_kept: int) -> None:
        """Begin with the first `num_kept` steps of the log, whose caches the servers of `route` have."""
        self._route, self._newest_output = route, num_kept
        del self._log[num_kept:]

    @property
    def _first_missing(self) -> int:
        """The first step whose output is still missing, or may be lost."""
        missing = [number for number, result in self._results.items() if not result.done()]
        return min([*missing, self._newest_output + 1])

    def has_result(self, number: int) -> bool:
        """Return whether a step's result has arrived and was not collected yet. Safe from any thread."""
        return (result := self._results.get(number)) is not None and result.done()

    async def step(self, session_input: SessionInput) -> SessionResult:
        """Compute the next tokens in all stages. After an error the session cannot be used any more."""
        return await self.result(self.begin(session_input))

    def begin(self, session_input: SessionInput) -> int:
        """Send a step after the steps under way, of which there should be fewer than `WINDOW`; return its number."""
        self._log.append(session_input)
        number = self.num_steps
        self._results[number] = asyncio.get_running_loop().create_future()
        if self._has_begun:  # otherwise `result` sends it
            task = asyncio.ensure_future(self._send(number, resume=self._first_missing))
            self._sends.add(task)
            task.add_done_callback(self._on_sent)
        return number

    def _on_sent(self, task: asyncio.Task[set[int]]) -> None:
        self._sends.discard(task)
        if task.cancelled():
            return
        error = task.exception()
        self._error = self._error or error
        if error is None:
            self._broken |= task.result()
        if self._error is not None or self._broken:
            self._news.set()

    async def result(self, number: int) -> SessionResult:
        """Wait for a step's result, which can be collected once, and drop the results of earlier steps."""
        for earlier in [step for step in self._results if step < number]:
            del self._results[earlier]
        output = self._results[number]
        self._num_checks, self._num_rebuilds = 0, 0
        self._has_replaced_all, self.is_delayed = False, False
        timeout = self._routes.timeout
        max_deadline_s = now_s() + _MAX_TIMEOUTS * timeout
        deadline_s = now_s() + timeout
        try:
            # `broken` are the stages that need another server, or a replay of the steps so far.
            broken = set() if self._has_begun else await self._begin()
            while not output.done():
                if self._error is not None:
                    raise self._error
                if broken:
                    broken = await self._rebuild(broken)
                    if not broken:  # replays take time, so extend the deadline
                        deadline_s = min(max_deadline_s, now_s() + timeout)
                else:
                    broken = await self._wait(output)
                if not output.done() and now_s() >= deadline_s:
                    if broken := self._replace_all_once():
                        deadline_s = min(max_deadline_s, now_s() + timeout)
                        continue
                    raise StageLost(
                        f"step {number} of a session had no output within {timeout:g} s on "
                        f"{self._route}. Raise `Limits.call_timeout` if steps take longer."
                    )
        finally:
            if self._liveness is not None:
                self._liveness.cancel()
                self._liveness = None
        self._refused.clear()
        self._busy.clear()
        self._num_missing.clear()
        if not self._broken:
            self._to_replace.clear()
            self._needs_adapter.clear()
        return self._results.pop(number).result()

    async def close(self) -> None:
        """Close the session and notify its servers; pending waits for results fail. Call it at most once."""
        self._error = self._error or SessionLost("this session was closed")
        self._news.set()
        for task in self._sends:
            task.cancel()
        if self._route:
            self._routes.end(self._route)
        await gather(self._close_at(peer, keeps=self.is_kept) for peer in dict.fromkeys(self._route))

    def _close_soon(self, peer: PeerId) -> None:
        task = asyncio.ensure_future(self._close_at(peer))
        self._closings.add(task)
        task.add_done_callback(self._closings.discard)

    async def _close_at(self, peer: PeerId, *, keeps: bool = False) -> None:
        """Notify a server that the session is over there; `keeps`: later sessions may begin with its steps."""
        request = SessionClose(session=self.id, keeps=keeps)
        with contextlib.suppress(SwarmError):  # best effort: servers also drop sessions by themselves
            await rpc.SESSION_CLOSE.ask(self._routes.transport, peer, request, timeout=_MAX_CLOSING_S)

    # ------------------------------------------------------------------ incoming messages

    def accept_output(self, caller: PeerId, head: SessionOutput, tensors: Sequence[Tensor]) -> None:
        """Accept a step's output from the last stage's server; ignore repeated outputs of older steps."""
        if not self._route or caller != self._route[-1]:
            raise ProtocolError(f"a session's output must come from its last server, got one from {caller}")
        if head.number > self.num_steps:
            raise ProtocolError(f"a session of {self.num_steps} steps has no output of step {head.number}")
        output = self._results.get(head.number)
        if output is not None and not output.done():
            num_rows = self._log[head.number - 1].num_rows
            try:
                tree = serialization.unflatten(head.structure, tensors)
                if self._recipe is not None and serialization.leaves(tree)[0].shape[0] != num_rows:
                    raise ProtocolError(f"the output of a step of {num_rows} rows must have as many rows")
            except (ProtocolError, IndexError) as error:
                last, reason = len(self._route) - 1, f"its output is malformed: {error}"
                failed = SessionFailed(self.id, head.number, self._attempt, last, kind="refused", reason=reason)
                self.accept_failure(caller, failed)
                raise
            output.set_result(SessionResult(tree, head.length))
            self._news.set()
        self._newest_output = max(self._newest_output, head.number)

    def is_served_by(self, peer: PeerId) -> bool:
        """Return whether a peer is one of the session's servers."""
        return peer in self._route

    def accept_failure(self, caller: PeerId, failed: SessionFailed) -> None:
        """Accept a server's report that a step failed."""
        # A server knows its own failures, and those of the next server, which may not accept its output.
        reporters = self._route[max(0, failed.stage_index - 1) : failed.stage_index + 1]
        if failed.stage_index >= len(self._route) or caller not in reporters:
            raise ProtocolError(f"{caller} may not report failures of stage {failed.stage_index} on {self._route}")
        if not self._is_old(failed):
            self._failures.append((caller, failed))
            self._news.set()

    def _is_old(self, failed: SessionFailed) -> bool:
        """Return whether the step that failed has succeeded since, or another attempt has begun."""
        # `_newest_output` does not show it, because outputs may arrive out of order.
        has_succeeded = max(failed.number, self._attempt_step) < self._first_missing
        return has_succeeded or failed.attempt != self._attempt

    async def _wait(self, output: asyncio.Future[SessionResult]) -> set[int]:
        """Wait for the output or a failure; return the stages that need another server or a replay."""
        while not output.done() and self._error is None:
            if reported := self._reported_stages():
                return reported
            if self._broken:
                broken, self._broken = self._broken, set()
                return broken
            if self._liveness is not None and self._liveness.done():
                alive, self._liveness = self._liveness.result(), None
                if silent := self._eject_all_but(alive, Unreachable("it does not answer")):
                    return silent
                self._num_checks += 1
                # All servers are alive, so a message may be lost. If it is resent, servers pass on their outputs again.
                if self._num_checks >= _FIRST_RESEND and self._num_checks.bit_count() == 1:
                    return await self._send_all()
            await self._until_news()
        return set()

    async def _until_news(self) -> None:
        """Wait until `_news` is set; after `_QUIET_S`, begin a liveness check, whose end sets it."""
        self._news.clear()
        try:
            async with asyncio.timeout(_QUIET_S if self._liveness is None else None):
                await self._news.wait()
        except TimeoutError:
            check = alive_among(self._routes.transport, dict.fromkeys(self._route))
            self._liveness = asyncio.ensure_future(check)
            self._liveness.add_done_callback(lambda _: self._news.set())

    def _reported_stages(self) -> set[int]:
        """Choose the remedies for all reports that wait; return their stages.

        A server that has dropped a session for want of room reports it, but refuses the next steps as steps of an
        unknown session. Without the report, the client would replay the text to it again and again, without a pause.
        """
        stages = set[int]()
        while self._failures:
            caller, failed = self._failures.popleft()
            if not self._is_old(failed) and failed.stage_index not in self._to_replace:
                stages |= self._choose_remedy(caller, failed)
        return stages

    def _choose_remedy(self, caller: PeerId, failed: SessionFailed) -> set[int]:
        """Choose the remedy for a failure, and return its stage. A server that has lost steps only gets a replay."""
        stage = failed.stage_index
        if failed.kind in ("refused", "unreachable"):
            stage = self._suspect(caller, stage)
        if failed.kind == "refused":
            self._refuse(stage, StageError(f"stage {stage}: {failed.reason}"))
        elif failed.kind == "unreachable":
            self._eject(stage, Unreachable(failed.reason))
        elif failed.kind == "busy":
            self._note_busy(stage)
        elif failed.kind == "adapter":
            self._note_adapter_missing(stage)
        return {stage}

    def _replace_all_once(self) -> set[int]:
        """Eject all servers that can be replaced, because one of them answers pings but does not compute.

        Return their stages; the empty set if this has already happened in this step.
        """
        if self._has_replaced_all:
            return set()
        self._has_replaced_all = True
        stages = {stage for stage in range(len(self._route)) if self._has_other(stage)}
        for stage in stages:
            self._eject(stage, DeadlineExceeded("a step on its route had no output"))
        return stages

    def _suspect(self, caller: PeerId, stage: int) -> int:
        """Return the stage whose server to replace if `caller` reports that the server of `stage` has failed.

        The report may be false. So if the stage has no other server left to try, replace the caller.
        """
        return stage if caller == self._route[stage] or self._has_other(stage) else stage - 1

    def _has_other(self, stage: int) -> bool:
        """Return whether a stage has another server that is not ejected, and not refused in this step."""
        tried = self._refused.get(stage, set()) | {self._route[stage]}
        untried = set(self._routes.servers(stage)) - tried
        return any(not self._routes.is_ejected(stage, server) for server in untried)

    def _note_busy(self, stage: int) -> None:
        self._to_replace.add(stage)
        self._busy.add(self._route[stage])

    def _note_adapter_missing(self, stage: int) -> None:
        self._num_missing[stage] += 1
        self._needs_adapter.add(stage)

    async def _send_adapter(self, stage: int, *, again: bool) -> None:
        """Send a stage's server its adapter; replace a server that refuses it or drops it repeatedly."""
        adapter, peer = (self.adapters[stage] if self.adapters else None), self._route[stage]
        try:
            if adapter is None:
                raise ProtocolError(f"{peer} reports a missing adapter, but no step has named one")
            await self._routes.send_adapter(peer, adapter, again=again)
        except Busy:
            self._note_busy(stage)
        except PeerError as error:
            self._eject(stage, error)
        except SwarmError as error:
            self._refuse(stage, error)
        if self._num_missing[stage] > _MAX_MISSING:
            self._to_replace.add(stage)

    # ------------------------------------------------------------------ routes

    def _eject(self, stage: int, error: PeerError) -> None:
        self._to_replace.add(stage)
        self._routes.eject(stage, self._route[stage], version=self.weights.version, error=error)

    def _refuse(self, stage: int, error: SwarmError) -> None:
        """Eject a stage's server that answered with an error; raise the error if all servers of the stage did."""
        refused = self._refused.setdefault(stage, set())
        refused.add(self._route[stage])
        if refused >= set(self._routes.servers(stage)):
            raise error
        self._eject(stage, Refusal(self._route[stage], error))

    async def _begin(self) -> set[int]:
        """Choose a server for each stage and send the first step; return the stages that need another server."""
        self._route = self._route or self._routes.begin(self._num_rows)
        self._has_begun = True
        stages = [stage for stage, adapter in enumerate(self.adapters) if adapter is not None]
        await gather(self._send_adapter(stage, again=False) for stage in stages)
        return set(self._to_replace) or await self._send_all()

    async def _rebuild(self, broken: set[int]) -> set[int]:
        """Replace servers and replay the steps to broken stages; return the stages that are still broken."""
        self.is_delayed = True
        self.on_delay()
        broken = broken | self._reported_stages()
        self._attempt += 1
        self._attempt_step = self.num_steps
        self._broken.clear()
        self._num_rebuilds += 1
        if self._num_rebuilds > _MAX_HASTY * len(self._route):
            await asyncio.sleep(_QUIET_S)
        await gather(self._send_adapter(stage, again=True) for stage in broken & self._needs_adapter)
        self._needs_adapter.clear()
        for stage in broken & self._to_replace:
            former = self._route[stage]
            server = self._route[stage] = self._routes.replace(stage, self._route, self._num_rows)
            self._num_missing[stage] = 0
            # If the stage has no other server, or only busy servers, pause, so as not to flood them with requests.
            if server in self._busy | {former} or self._routes.is_ejected(stage, server):
                await asyncio.sleep(_QUIET_S)
            if former not in self._route:
                self._close_soon(former)
        self._to_replace.clear()
        first = min(broken)
        # A single broken stage passes on only the missing outputs. If several are broken, each must pass on all.
        resume = self._first_missing if len(broken) == 1 else 1
        # The server before the first broken stage resends its outputs. If it has dropped them, an earlier server
        # resends its own, and in the end the client sends all steps.
        while first > 0:
            request = SessionReplay(
                session=self.id,
                stage_index=first - 1,
                attempt=self._attempt,
                resume=resume,
                route=self._route[first - 1 :],
            )
            sender = self._route[first - 1]
            try:
                timeout = self._routes.timeout
                await rpc.SESSION_REPLAY.ask(self._routes.transport, sender, request, timeout=timeout)
            except SessionLost:
                await self._close_at(sender)
                first, resume = first - 1, 1  # `sender` has dropped its outputs, so it must compute them again
            except AdapterMissing:  # raised by the server of stage `first`, which is new to the session
                self._note_adapter_missing(first)
                return {first}
            except Busy:  # raised by the same server
                self._note_busy(first)
                return {first}
            except PeerError as error:
                alive = await alive_among(self._routes.transport, dict.fromkeys(self._route))
                return self._eject_all_but(alive, error) or {first}  # `sender` or the server of `first` may be gone
            except SwarmError as error:  # raised by `sender`, or passed on from the server of `first`
                stage = self._suspect(sender, first)
                self._refuse(stage, error)
                return {stage}
            else:
                # `sender` may lack the steps under way, so send them through all stages.
                return await self._send_all(resume=resume)
        return await self._send_all(resume=resume, first=1)

    def _eject_all_but(self, alive: set[PeerId], error: PeerError) -> set[int]:
        """Eject the route's servers outside of `alive` for this error; return their stages."""
        silent = {stage for stage, peer in enumerate(self._route) if peer not in alive}
        for stage in silent:
            self._eject(stage, error)
        return silent

    @property
    def _num_rows(self) -> int:
        return self._log[0].num_rows

    async def _send_all(self, *, resume: int | None = None, first: int | None = None) -> set[int]:
        """Send all steps from `first` on to the first stage's server; return that stage if it does not accept them.

        By default, `first` and `resume` are the first step under way. See `_send` for `resume`.
        """
        first = self._first_missing if first is None else first
        resume = self._first_missing if resume is None else resume
        while first <= self.num_steps:  # step 1 goes alone, because it begins the session at the server
            numbers = range(first, 2 if first == 1 else min(first + WINDOW, self.num_steps + 1))
            for broken in await gather(self._send(number, resume=resume, alone=True) for number in numbers):
                if broken:
                    return broken
            first = numbers.stop
        return set()

    async def _send(self, number: int, *, resume: int, alone: bool = False) -> set[int]:
        """Send a step to the first stage's server; return that stage if the server does not accept it.

        Servers pass on their outputs of the steps from `resume` on. `alone`: without other sessions' steps.
        """
        session_input = self._log[number - 1]
        structure, tensors = serialization.flatten((session_input.hidden, session_input.extras))
        attempt = self._attempt
        step = SessionStep(
            session=self.id,
            client=self._routes.transport.peer_id,
            attempt=self._attempt,
            generation=self.weights.generation,
            version=self.weights.version,
            weights=self.weights.number,
            number=number,
            resume=resume,
            stage_index=0,
            route=self._route,
            modes=list(session_input.modes),
            adapters=names_of(self.adapters),
            drops=list(session_input.drops),
            seed=self._seed if session_input.draws else None,
            recipe=self._recipe,
            operations=list(session_input.operations),
            exact=self.exact,
            structure=structure,
            num_tensors=len(tensors),
        )
        peer = self._route[0]
        try:
            await self._outbox.send(peer, step, tensors, alone=alone)
        except SwarmError as error:
            is_done = not alone and number < self._first_missing  # with `alone`, a new server needs each step
            if self._attempt != attempt or is_done:
                return set()
            if isinstance(error, AdapterMissing):
                self._note_adapter_missing(0)
            elif isinstance(error, Busy):
                self._note_busy(0)
            elif isinstance(error, Refusal):
                self._refuse(0, error.error)
            elif not isinstance(error, PeerError):  # even `LeaseRevoked`, because a session has no lease
                self._refuse(0, error)
            elif not isinstance(error, SessionLost):
                self._eject(0, error)
            return {0}
        return set()
