"""Who is left of a run that cannot go on, and how they come to be free for the next one.

The lead decides that a run goes back, and to which version. It asks the other trainers at which of the versions that
it could go back to their loops could go on, too (`LOOP`), and tells all servers which it is when it releases them. A
trainer is in the same process as its server, and hears of it there. The next run begins when the trainers that were
released wait for it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from typing import Final

from torch import Tensor

from lightning_swarm.coordinator.takeover import seniority
from lightning_swarm.core.clock import now_s
from lightning_swarm.core.errors import DeadlineExceeded, PeerError, ProtocolError, SwarmError
from lightning_swarm.core.limits import Limits
from lightning_swarm.core.tasks import first_of, gather
from lightning_swarm.network import Message, PeerId, Transport
from lightning_swarm.network.liveness import alive_among
from lightning_swarm.protocol.messages.run import LoopReply, LoopRequest, Manifest, ReleaseRequest, RunView
from lightning_swarm.protocol.messages.state import KeptLoop
from lightning_swarm.protocol.messages.wire import decode, encode
from lightning_swarm.protocol.methods import KEEP_LOOP, RELEASE, VIEW
from lightning_swarm.protocol.queries import ask_held
from lightning_swarm.protocol.run_state import RunState
from lightning_swarm.server.admission import Admission

_log = logging.getLogger(__name__)

_NUM_HEIRS: Final = 3
"""Of those that are there. One that dies takes what it has along."""

_MAX_TRIED: Final = 4 * _NUM_HEIRS
"""For one snapshot; those that did not take it are tried after all others for the next."""

PackLoop = Callable[[], Sequence[Tensor]]
"""What travels of a loop's state; called if there is somebody to send it to. Raises `NotPlain` where it cannot."""


class StandbyLeads:
    """Those of a run, as its lead knows them.

    Args:
        transport: The lead's.
        known: Names the peers that announced that they could take a run over.
        limits: Bounds.

    Attributes:
        holding: Who was sent the newest state.
    """

    def __init__(
        self, transport: Transport, known: Callable[[], Awaitable[Collection[PeerId]]], *, limits: Limits
    ) -> None:
        self._transport = transport
        self._known = known
        self._limits = limits
        self._warned = False
        self._deaf: set[PeerId] = set()  # did not take what they were sent last
        self.holding: Collection[PeerId] = ()

    async def send(self, run: RunState, version: int, pack: PackLoop) -> None:
        """Send what the loop was at when the weights had this version. Who does not take it is no heir."""
        generation, known = run.manifest.generation, set(await self._known()) - {self._transport.peer_id}
        chosen = sorted((peer for peer in seniority(run) if peer in known), key=self._deaf.__contains__)
        if not chosen:
            self.holding = ()
            return
        try:
            tensors = pack()
        except SwarmError as error:
            self._warn(str(error))
            return
        size = sum(tensor.nbytes for tensor in tensors)
        if size > self._limits.loop_bytes:
            self._warn(f"it has {size} bytes, and `Limits.loop_bytes` are {self._limits.loop_bytes}: raise that")
            return
        message = Message(encode(KeptLoop(generation=generation, version=version)), tuple(tensors))
        self.holding = await self._keep_at_some(chosen[:_MAX_TRIED], message) or self.holding

    async def _keep_at_some(self, peers: Sequence[PeerId], message: Message) -> list[PeerId]:
        """Those that keep it: as many as there shall be, the first of these peers that do."""
        kept: list[PeerId] = []
        while peers and len(kept) < _NUM_HEIRS:
            missing = _NUM_HEIRS - len(kept)
            tried, peers = peers[:missing], peers[missing:]
            there = await gather(self._keeps(peer, message) for peer in tried)
            kept += [peer for peer, keeps in zip(tried, there, strict=True) if keeps]
        return kept

    async def _keeps(self, peer: PeerId, message: Message) -> bool:
        self._deaf.add(peer)  # until it answers: the next snapshot's state breaks this off
        try:
            await self._transport.stream(peer, KEEP_LOOP, message, timeout=self._limits.call_timeout, max_bytes=0)
        except SwarmError as error:
            _log.info("%s does not keep the state of this trainer's loop: %s", peer, error)
            return False
        self._deaf.discard(peer)
        return True

    def _warn(self, reason: str) -> None:
        if not self._warned:
            self._warned = True
            _log.warning(
                "Nobody could take this run over if this process died, for its loop's state stays here: %s", reason
            )


LOOP: Final = "trainer.loop"

CouldGoOn = Callable[[int, Callable[[int, Collection[int]], bool]], bool]
"""Whether a loop could go on at a version. Gets what tells whether a step's record counts batches, by their places."""

_POLL_S: Final = 1.0
_POLL_START_S: Final = 0.1


async def release(transport: Transport, run: RunState, first_step: int, *, timeout: float) -> list[PeerId]:
    """Have all servers be in no run any more, and wait for the next. Returns those that do; the others are gone.

    Args:
        transport: The lead's.
        run: Which is void.
        first_step: Where the next one begins.
        timeout: Seconds for each.
    """
    body = encode(ReleaseRequest(generation=run.manifest.generation, first_step=first_step))

    async def one(peer: PeerId) -> bool:
        try:
            await transport.call(peer, RELEASE, body, timeout=timeout)
        except SwarmError as error:
            _log.info("Server %s was not released: %s", peer, error)
            return False
        return True

    servers = run.servers
    released = await gather(one(peer) for peer in servers)
    return [peer for peer, there in zip(servers, released, strict=True) if there]


async def what_is_lost(
    transport: Transport, run: RunState, num_known_dead: Callable[[], int], *, timeout: float, silence_s: float
) -> str:
    """What the run cannot go on without, after a while in which it might come back: a stage, or a majority of voters.

    Args:
        transport: The lead's.
        run: As the lead knows it.
        num_known_dead: Peers of this machine whose processes have ended: for them nobody waits.
        timeout: Seconds of that while.
        silence_s: For each question.

    Returns:
        In words; nothing if it can go on.
    """
    deadline = now_s() + timeout
    while True:
        servers = sorted({*run.servers, *(voter.peer_id for voter in run.voters)})
        # One that was started again answers, too, but is in no run.
        alive = set(await ask_held(transport, servers, timeout=silence_s))
        found = lost(run, alive)
        if not found or now_s() >= deadline or num_known_dead() >= len(servers) - len(alive):
            return found
        await asyncio.sleep(_POLL_S)


def lost(run: RunState, alive: Collection[PeerId]) -> str:
    """What a run cannot go on without. Pure."""
    empty = [index for index, roster in enumerate(run.rosters) if not any(one.peer_id in alive for one in roster)]
    if empty:
        return f"nobody of stage{'s' if len(empty) > 1 else ''} {', '.join(map(str, empty))} answers"
    num_voters, num_left = len(run.voters), sum(voter.peer_id in alive for voter in run.voters)
    return f"only {num_left} of {num_voters} voters answer" if num_left * 2 <= num_voters else ""


async def newer_run(transport: Transport, run: RunState, *, timeout: float) -> Manifest | None:
    """What the run has become without its lead, as one of its servers shows it."""

    async def ask(peer: PeerId) -> Manifest | None:
        try:
            return decode(await transport.call(peer, VIEW, b"", timeout=timeout), RunView).manifest
        except SwarmError as error:
            _log.info("%s shows no run: %s", peer, error)
            return None

    found = [one for one in await gather(ask(peer) for peer in run.servers if peer != transport.peer_id) if one]
    newest = max(found, key=lambda one: one.generation, default=None)
    others = run.manifest.generation, transport.peer_id
    return newest if newest is not None and newest.generation >= others[0] and newest.lead != others[1] else None


# ---------------------------------------------------------------------- trainers beside the lead


async def loops_at(
    transport: Transport, trainers: Iterable[PeerId], versions: Collection[int], *, timeout: float
) -> set[int]:
    """Those of `versions` at which the loops of all these trainers could go on. Who does not answer is gone."""
    request = encode(LoopRequest(versions=sorted(versions)))

    async def ask(trainer: PeerId) -> set[int] | None:
        try:
            return set(decode(await transport.call(trainer, LOOP, request, timeout=timeout), LoopReply).versions)
        except PeerError as error:
            _log.info("Trainer %s does not say where it could go on: %s", trainer, error)
            return None

    found = [one for one in await gather(map(ask, trainers)) if one is not None]
    return set(versions).intersection(*found)


async def await_loops(
    transport: Transport, trainers: Iterable[PeerId], *, timeout: float, check: Callable[[], None]
) -> None:
    """Wait until all these trainers wait for the next run.

    Args:
        transport: The lead's.
        trainers: They were released.
        timeout: Seconds.
        check: Called again and again; raises when waiting has become pointless.

    Raises:
        PeerError: One is gone, or does not come.
    """
    deadline_s = now_s() + timeout
    late = list(trainers)
    while late:
        check()
        trainer, request = late[-1], encode(LoopRequest(versions=[]))
        if decode(await transport.call(trainer, LOOP, request, timeout=timeout), LoopReply).waits:
            late.pop()
        elif now_s() >= deadline_s:
            raise DeadlineExceeded(
                f"trainer {trainer} was told that the run goes back, and did not come back to it within {timeout:g} s. "
                "Raise `Limits.start_timeout` if its batches, or its data's beginning, take longer."
            )
        else:
            await asyncio.sleep(_POLL_START_S)


class StandbyLead:
    """What a trainer beside the lead says of its loop, and hears of the run's.

    Args:
        transport: Its network.
        admission: Its server's place in the run.
        limits: Bounds.

    Attributes:
        could_go_on: Whether its loop can go on at a version of the weights. Called on the swarm's loop.
        waits: For a run to begin.
        run: As this trainer knows it; None: it was in none as yet.
    """

    def __init__(self, transport: Transport, admission: Admission, *, limits: Limits) -> None:
        self._transport = transport
        self._admission = admission
        self._limits = limits
        self._lead: PeerId | None = None
        self.could_go_on: CouldGoOn = lambda *_: False
        self.waits = False
        self.run: RunState | None = None
        transport.handle_call(LOOP, self._handle_loop)

    def enter_run(self, run: RunState) -> None:
        """It is in a run."""
        self.run, self._lead, self.waits = run, run.manifest.lead, False

    def come(self) -> None:
        """It is about to ask to be let into one. Its server may be in that one, and released, before it is."""
        self.run = self._lead = None
        self.could_go_on = lambda *_: False

    async def _handle_loop(self, caller: PeerId, body: bytes) -> bytes:
        request = decode(body, LoopRequest)
        lead = self._admission.membership.lead or self._lead  # another one, if it inherited the run
        if caller != lead:
            raise ProtocolError(f"the lead {lead} sends a run back, not {caller}")
        versions = [version for version in request.versions if self.could_go_on(version, self._counts)]
        return encode(LoopReply(versions=versions, waits=self.waits))

    def _counts(self, step: int, firsts: Collection[int]) -> bool:
        """Its server knows all records in order, its loop may not have come to ask for them."""
        return self._admission.has_run and self._admission.run.counts(step, firsts)

    @property
    def is_led_anew(self) -> bool:
        """Whether who released it leads in the place of another one."""
        return self._admission.membership.lead not in (None, self._lead)

    async def told_to_go_back(self) -> int | None:
        """After an error: the step from which the run goes on. None: it goes on as it is, or is over."""
        if self._transport.closed:  # nobody can tell it anything
            return None
        released, left = self._admission.released, self._admission.left
        if self.run is not None:
            await first_of(released.wait(), left.wait(), self._while_the_lead_may_say_so())
        return self._admission.goes_on_at if released.is_set() else None

    async def _while_the_lead_may_say_so(self) -> None:
        """Returns when the run is not lost, or its lead is, or has gone back without this trainer."""
        limits = self._limits
        assert self.run is not None
        if not await what_is_lost(
            self._transport, self.run, lambda: 0, timeout=limits.revive_timeout, silence_s=limits.silence_timeout
        ):
            return
        deadline_s = now_s() + limits.lead_timeout
        lead = self.run.manifest.lead
        while now_s() < deadline_s and await alive_among(self._transport, [lead], timeout=limits.silence_timeout):
            if await self._is_behind(lead):
                return
            await asyncio.sleep(_POLL_S)

    async def _is_behind(self, lead: PeerId) -> bool:
        assert self.run is not None
        try:
            view = decode(await self._transport.call(lead, VIEW, b"", timeout=self._limits.silence_timeout), RunView)
        except SwarmError:  # it is in no run at this moment
            return False
        return view.manifest.generation > self.run.manifest.generation
