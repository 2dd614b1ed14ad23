"""The passage of one microbatch through the stages: all calls sent at once, linked by tickets.

Every decision about the microbatch (which peers, what to send again) is made here, in one place.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from lightning_swarm import trees
from lightning_swarm.errors import (
    Busy,
    DeadlineExceeded,
    InputMissing,
    PeerError,
    ProtocolError,
    StepError,
    SwarmError,
    TicketGone,
)
from lightning_swarm.events import EventLog
from lightning_swarm.network import Message, PeerId, Transport
from lightning_swarm.pipeline.policy import Charge, StageRouter
from lightning_swarm.server import BACKWARD, CANCEL, FORWARD
from lightning_swarm.tasks import gather
from lightning_swarm.tickets import TicketStore
from lightning_swarm.types.calls import (
    BackwardRequest,
    CallKey,
    CallReport,
    CancelRequest,
    Computed,
    Direction,
    ForwardRequest,
    Mode,
    Recompute,
    Ticket,
)
from lightning_swarm.types.steps import Candidate, Record
from lightning_swarm.types.wire import Wire, decode, encode

_log = logging.getLogger(__name__)

_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 1.0
_MAX_REPEATS = 8
_CONNECT_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Link:
    """What passages share: the network and the routers, one for each stage."""

    transport: Transport
    tickets: TicketStore
    routers: Sequence[StageRouter]
    timeout: float
    events: EventLog
    count: Counter[str] = field(default_factory=Counter)  # of what went another way than straight on
    unreached: set[PeerId] = field(default_factory=set)  # servers that no microbatch goes to from here

    async def follow(self, record: Record) -> None:
        """From now on route as the record's roster says. Who joined is tried next, if it can be reached from here.

        A trainer that passes over records finds in the roster who joined by them. The lead passes over none; every
        other one serves, too, and a server met all of them before they came in.
        """
        await gather(self._meet(newcomer) for newcomer in record.newcomers)
        for router, roster in zip(self.routers, record.next_roster, strict=False):  # none leads to a stage on trainers
            router.set_peers(member.peer_id for member in roster if member.peer_id not in self.unreached)

    async def _meet(self, newcomer: Candidate) -> None:
        peer = newcomer.member.peer_id
        self.unreached.discard(peer)
        try:
            async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                await self.transport.connect(newcomer.addresses)
        except (SwarmError, TimeoutError) as error:
            self.unreached.add(peer)
            _log.warning("Server %s joined and cannot be reached: no microbatch goes there from here: %r", peer, error)

    async def send(self, peer: PeerId, method: str, request: Wire, tensors: Sequence[Tensor]) -> bytes:
        """A small call where there are no tensors, a stream where there are."""
        if not tensors:
            return await self.transport.call(peer, method, encode(request), timeout=self.timeout)
        message = Message(encode(request), tuple(tensors))
        return (await self.transport.stream(peer, method, message, timeout=self.timeout)).body


@dataclass
class Passage:
    """One microbatch on its way.

    Args:
        link: Network and routers.
        key: Names the microbatch.
        num_rows: Its size along dimension 0.
        inputs: Positional inputs of the first stage.
        extras: For each stage, the keyword arguments that it takes.
        mode: The trainer's mode.
        weight: Of its batch.
        first_trained: The stages before this one train nothing, and get no gradient unless the input wants one.
    """

    link: Link
    key: CallKey
    num_rows: int
    inputs: tuple[Any, ...]
    extras: Sequence[dict[str, Any]]
    mode: Mode
    weight: float
    first_trained: int = 0
    _route: list[Charge] = field(default_factory=list)

    # ------------------------------------------------------------------ forward

    async def forward(self) -> tuple[Computed, tuple[Tensor, ...]]:
        """The output of the last stage."""
        stages = range(len(self.extras))
        self._route = [router.choose(self.num_rows) for router in self.link.routers]
        await self._send_forwards(list(stages))
        message = await self.link.tickets.fetch(self._ticket(stages[-1], "forward"), timeout=self.link.timeout)
        return decode(message.body, Computed), message.tensors

    async def _send_forwards(self, stages: list[int]) -> None:
        """Send the calls of `stages`; a busy peer is replaced, and who was to fetch from it is told anew."""
        pause_s = _FIRST_PAUSE_S
        deadline = asyncio.get_running_loop().time() + self.link.timeout
        avoid: list[set[PeerId]] = [set() for _ in self.extras]
        while stages:
            accepted = await gather(self._send_forward(stage) for stage in stages)
            busy = [stage for stage, ok in zip(stages, accepted, strict=True) if not ok]
            if not busy:
                return
            self.link.count["busy"] += len(busy)
            for stage in busy:
                avoid[stage].add(self._route[stage].peer)
            if any(len(avoid[stage]) >= len(self.link.routers[stage].peers) for stage in busy):
                pause_s = await self._pause(pause_s, deadline)  # everyone is busy: wait for one
            stages = await self._reroute(busy, avoid)

    async def _pause(self, pause_s: float, deadline: float) -> float:
        """Wait for a busy peer; returns how long to wait the next time."""
        if asyncio.get_running_loop().time() >= deadline:
            raise DeadlineExceeded(f"all peers of a stage were busy for {self.link.timeout:g} s; {self.key} waits")
        await asyncio.sleep(pause_s)
        return min(2 * pause_s, _LONGEST_PAUSE_S)

    async def _reroute(self, busy: list[int], avoid: list[set[PeerId]]) -> list[int]:
        """Choose other peers for `busy`; returns all stages whose call must be sent (again)."""
        for stage in busy:
            self.link.routers[stage].refund(self._route[stage])
            charge = self.link.routers[stage].choose(self.num_rows, avoid=frozenset(avoid[stage]))
            self._route[stage] = charge
        followers = [stage + 1 for stage in busy if stage + 1 < len(self.extras) and stage + 1 not in busy]
        # They wait for a ticket at the old peer, and would take a second call for a repetition of the first.
        await gather(self._cancel(stage, "forward") for stage in followers)
        return sorted([*busy, *followers])

    async def _send_forward(self, stage: int) -> bool:
        source = self._ticket(stage - 1, "forward") if stage else None
        structure, tensors = trees.flatten((None if stage else self.inputs, self.extras[stage]))
        request = ForwardRequest(
            key=self.key,
            stage_index=stage,
            mode=self.mode,
            source=source,
            structure=structure,
            keep=stage >= self._end,
        )
        try:
            await self.link.send(self._route[stage].peer, FORWARD, request, tensors)
        except Busy:
            return False
        return True

    async def _cancel(self, stage: int, direction: Direction) -> None:
        request = CancelRequest(key=self.key, stage_index=stage, direction=direction)
        await self.link.send(self._route[stage].peer, CANCEL, request, ())

    # ------------------------------------------------------------------ backward

    async def backward(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None] | None:
        """Have every stage add its gradients; returns the input's gradients if the mode asks for them.

        Args:
            gradients: For each output tensor its gradient, or None.
        """
        last = len(self.extras) - 1
        await gather(self._send_backward(stage, gradients) for stage in range(last, self._end - 1, -1))
        for stage in range(last, self._end - 1, -1):
            await self._settle(stage, gradients)
        for stage in range(self._end):
            self._account(
                stage, await self.link.tickets.wait(self._ticket(stage, "forward"), timeout=self.link.timeout)
            )
        if not self.mode.input_grad:
            return None
        message = await self.link.tickets.fetch(self._ticket(0, "backward"), timeout=self.link.timeout)
        return trees.placed(decode(message.body, Computed).flags, message.tensors)[0]

    async def _settle(self, stage: int, gradients: Sequence[Tensor | None]) -> None:
        """Wait for a stage's receipt; send its call again when what it needs was dropped to save memory."""
        last: PeerError | None = None
        for _ in range(_MAX_REPEATS):
            try:
                body = await self.link.tickets.wait(self._ticket(stage, "backward"), timeout=self.link.timeout)
            except (TicketGone, InputMissing) as error:
                last = error
                self.link.count["repeated"] += 1
                await self._repeat_backward(stage, gradients, gradient_gone=isinstance(error, InputMissing))
                continue
            if self._account(stage, body).receipt != (stage >= self.first_trained):
                raise ProtocolError(f"{self._route[stage].peer} finished {self.key} with a receipt too few or too many")
            return
        raise StepError(f"stage {stage} did not finish {self.key} in {_MAX_REPEATS} attempts; the last: {last}")

    def _account(self, stage: int, body: bytes) -> CallReport:
        report = decode(body, CallReport)
        self.link.routers[stage].settle(self._route[stage], busy_s=report.busy_s, queued=report.queued)
        return report

    async def _repeat_backward(self, stage: int, gradients: Sequence[Tensor | None], *, gradient_gone: bool) -> None:
        """Send a stage's backward again with all it needs to start from nothing; nothing is added twice.

        Calls whose results are still there are known by their keys and do nothing.
        """
        later = len(self.extras) - 1 if gradient_gone else stage
        for earlier in range(later):
            await self._repeat_forward(earlier)
        for again in range(later, stage - 1, -1):
            await self._send_backward(again, gradients, recompute=True)

    async def _repeat_forward(self, stage: int) -> None:
        """Send a stage's forward again, to the same peer: another one would add the gradient a second time."""
        pause_s = _FIRST_PAUSE_S
        deadline = asyncio.get_running_loop().time() + self.link.timeout
        while not await self._send_forward(stage):
            self.link.count["busy"] += 1
            pause_s = await self._pause(pause_s, deadline)

    async def _send_backward(self, stage: int, gradients: Sequence[Tensor | None], *, recompute: bool = False) -> None:
        last = len(self.extras) - 1
        source = self._ticket(stage + 1, "backward") if stage < last else None
        tensors = [] if source else [gradient for gradient in gradients if gradient is not None]
        present = [] if source else [gradient is not None for gradient in gradients]
        again = None
        if recompute:
            structure, inputs = trees.flatten((None if stage else self.inputs, self.extras[stage]))
            again = Recompute(source=self._ticket(stage - 1, "forward") if stage else None, structure=structure)
            tensors += inputs
        request = BackwardRequest(
            key=self.key,
            stage_index=stage,
            mode=self.mode,
            weight=self.weight,
            accumulate=stage >= self.first_trained,
            source=source,
            present=present,
            recompute=again,
        )
        await self.link.send(self._route[stage].peer, BACKWARD, request, tensors)

    @property
    def _end(self) -> int:
        """The last stage that gets a gradient; behind the last one, if none does."""
        return 0 if self.mode.input_grad else self.first_trained

    def _ticket(self, stage: int, direction: Direction) -> Ticket:
        return Ticket(peer_id=self._route[stage].peer, name=self.key.name(stage, direction))
