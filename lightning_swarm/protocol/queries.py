"""Queries to other peers about their snapshots, their run and its coordinator, and their versions and clocks."""

from __future__ import annotations

import asyncio
import importlib.metadata
import logging
import platform
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Final

from msgspec import structs

from lightning_swarm.core.clock import now_s
from lightning_swarm.core.errors import Damaged, DeadlineExceeded, SwarmError, Unreachable
from lightning_swarm.core.tasks import gather
from lightning_swarm.network import PeerId, Transport
from lightning_swarm.network.liveness import alive_among
from lightning_swarm.protocol.messages.reports import Greeting
from lightning_swarm.protocol.messages.run import HeldSnapshot, Member, RunView, Term, WatchReply, WatchRequest
from lightning_swarm.protocol.messages.state import HeldSnapshots
from lightning_swarm.protocol.messages.wire import PROTOCOL_VERSION
from lightning_swarm.protocol.rpc import HELD, HELLO, VIEW, WATCH, A, Call, Q
from lightning_swarm.protocol.run_state import RunState

_log = logging.getLogger(__name__)

ASK_TIMEOUT_S: Final = 10.0
MAX_TRIES: Final = 3
"""Most attempts of an idempotent call that must reach every living peer."""
GRACE_S: Final = 2.0  # longest wait for peers that may be gone and are not needed, in seconds

Held = Mapping[PeerId, HeldSnapshots]  # the snapshots that each server reports to hold


async def ask_each(
    transport: Transport,
    peers: Iterable[PeerId],
    method: Call[Q, A],
    request: Q,
    *,
    timeout: float,
    tries: int = 1,  # attempts per peer while it answers pings, because a call or its answer may be lost
    check: Callable[[A], object] = lambda _: None,  # raises for a malformed answer, which is then omitted
) -> dict[PeerId, A]:
    """Call peers in parallel, `timeout` seconds each; return the answers in the peers' order, and log failures."""
    answers: dict[PeerId, A] = {}

    async def ask(peer: PeerId, tries: int) -> None:
        try:
            answer = await method.ask(transport, peer, request, timeout=timeout)
            check(answer)
            answers[peer] = answer
        except SwarmError as error:
            _log.info("%s did not answer %s: %s", peer, method.name, error)
            is_lost = isinstance(error, (Unreachable, DeadlineExceeded, Damaged))
            if is_lost and tries > 1 and await alive_among(transport, [peer], timeout=timeout):
                await ask(peer, tries - 1)

    asked = list(peers)
    await gather(ask(peer, tries) for peer in asked)
    return {peer: answers[peer] for peer in asked if peer in answers}


def newest_safe(held: Held, rosters: Sequence[Sequence[Member]], on_trainers: Sequence[bool]) -> int | None:
    """Return the newest version of which each stage has a copy that survives the death of the stage's servers. Pure."""
    # A copy at the stage's own servers suffices if there are no other servers. It also suffices if the trainers hold
    # the stage, because without trainers the run could not continue anyway.
    servers = {member.peer_id for roster in rosters for member in roster}

    def is_safe(version: int, index: int) -> bool:
        own = {member.peer_id for member in rosters[index]}
        holders = set(holders_of(held, version, index))
        return bool(holders - own) or (bool(holders) and (on_trainers[index] or own >= servers))

    return max((v for v in _held_versions(held) if all(is_safe(v, i) for i in range(len(rosters)))), default=None)


def newest_complete(held: Held, num_stages: int, sound: int | None = None) -> int | None:
    """Return the most preferred version, see `by_preference`, of which servers hold every stage. Pure."""
    complete = (v for v in _held_versions(held) if all(holders_of(held, v, index) for index in range(num_stages)))
    return next(iter(by_preference(complete, sound)), None)


def by_preference(versions: Iterable[int], sound: int | None) -> list[int]:
    """Order versions by preference for a rollback: the newest first. Pure."""
    # Versions after `sound` may contain false work, so they come last, the oldest of them first.
    known = set(versions)
    later = {version for version in known if sound is not None and version > sound}
    return [*sorted(known - later, reverse=True), *sorted(later)]


def version_to_keep(
    held: Held,
    rosters: Sequence[Sequence[Member]],
    on_trainers: Sequence[bool],
    resumable: Collection[int] | None = None,
) -> int | None:
    """Return the version to keep until the next snapshot is safe: `newest_safe`, else `newest_complete`. Pure."""
    # A version that is not `resumable` is the last choice, because the lead's loop could not continue from it.
    if resumable is not None:
        kept = version_to_keep(only_versions(held, resumable), rosters, on_trainers)
        if kept is not None:
            return kept
    # Servers with copies may have died, so that no version is safe. A complete version may still be needed.
    safe = newest_safe(held, rosters, on_trainers)
    return safe if safe is not None else newest_complete(held, len(rosters))


def holders_of(held: Held, version: int, stage_index: int) -> list[PeerId]:
    """Return the servers that hold a stage at a version. Pure."""
    return sorted(
        peer
        for peer, own in held.items()
        if any((snapshot.version, snapshot.stage_index) == (version, stage_index) for snapshot in own.snapshots)
    )


def agreed_digest(
    claimed: Mapping[PeerId, bytes], takers: Collection[PeerId], *, trusted: Sequence[PeerId]
) -> bytes | None:
    """Return the digest of a snapshot that its takers agree on; None: they do not agree yet. Pure.

    The first of `trusted` among the takers decides. Without a trusted taker, a majority of the takers must agree.
    """
    arbiter = next((peer for peer in trusted if peer in takers), None)
    if arbiter is not None:
        return claimed.get(arbiter)
    votes = Counter(claimed[peer] for peer in takers if peer in claimed)
    return next((digest for digest, count in votes.most_common(1) if 2 * count > len(takers)), None)


def only_recorded(held: Held, recorded: Iterable[HeldSnapshot]) -> dict[PeerId, HeldSnapshots]:
    """Return only the snapshots that records list. Pure."""
    return _only(held, set(recorded).__contains__)


def only_versions(held: Held, versions: Collection[int]) -> dict[PeerId, HeldSnapshots]:
    """Return only the snapshots of these versions. Pure."""
    return _only(held, lambda snapshot: snapshot.version in versions)


def _only(held: Held, wanted: Callable[[HeldSnapshot], bool]) -> dict[PeerId, HeldSnapshots]:
    return {peer: structs.replace(own, snapshots=list(filter(wanted, own.snapshots))) for peer, own in held.items()}


def _held_versions(held: Held) -> set[int]:
    return {snapshot.version for own in held.values() for snapshot in own.snapshots}


async def ask_view(transport: Transport, peer: PeerId, *, timeout: float) -> RunView | None:
    """Ask a peer for a view of its run; None: the peer is in no run, or does not answer."""
    try:
        return await VIEW.ask(transport, peer, None, timeout=timeout)
    except SwarmError as error:
        _log.debug("%s shows no run: %s", peer, error)
        return None


async def ask_held(transport: Transport, servers: Sequence[PeerId], *, timeout: float) -> dict[PeerId, HeldSnapshots]:
    """Ask servers for the list of their snapshots, and return the answers that come in time."""
    return await ask_each(transport, servers, HELD, None, timeout=timeout)


async def ask_servers(transport: Transport, run: RunState) -> dict[PeerId, WatchReply]:
    """Send `WATCH` to all other servers; return the answers that come within `GRACE_S` of the first answer.

    The first answer, too, must come within `GRACE_S`.
    """
    servers = [peer for peer in run.servers if peer != transport.peer_id]
    return await _ask_watch(transport, run, servers, lambda _: False, GRACE_S)


# Promises are not signed, so neither a coordinator nor another server can prove them. A peer that learns of a higher
# term therefore asks the voters, which takes one call to each of them whenever the coordinator changes. If voters
# notified all peers instead, they would do so after failed elections, too, and again for peers that missed the call.
async def find_promised(
    transport: Transport,
    run: RunState,
    received: Iterable[Term],
    *,
    timeout: float,
    own: Callable[[Term], bool] | None = None,  # term -> whether this peer promised it; None: ask it like all voters
) -> Term | None:
    """Return the highest of these terms that is above the run's and promised by a majority of the voters."""
    # Voters that do not answer count as gone, so the majority is of the voters that answer.
    above = sorted({term for term in received if term > run.term and run.decides(PeerId(term[1]))}, reverse=True)
    if not above:
        return None

    def agrees(peer: PeerId, promised: Term, term: Term) -> bool:
        return own(term) if own is not None and peer == transport.peer_id else promised == term

    def highest(answers: Mapping[PeerId, WatchReply], num_voters: int) -> Term | None:
        votes = {term: sum(agrees(peer, reply.promised, term) for peer, reply in answers.items()) for term in above}
        return next((term for term, count in votes.items() if 2 * count > num_voters), None)

    voters = [voter.peer_id for voter in run.voters]
    answers = await _ask_watch(transport, run, voters, lambda known: highest(known, len(voters)) is not None, GRACE_S)
    if not answers:  # all voters that this peer knows may be gone, and any server may be a newer voter
        electorate = [peer for peer in run.servers if run.decides(peer)]
        answers = await _ask_watch(transport, run, electorate, lambda _: False, timeout)
    return highest(answers, len(answers))


async def is_superseded(transport: Transport, run: RunState, term: Term, *, timeout: float) -> bool:
    """Return whether so many voters promised higher terms that the coordinator of `term` has lost its majority."""
    voters = [voter.peer_id for voter in run.voters]

    def is_certain(known: Mapping[PeerId, WatchReply]) -> bool:
        lost = sum(reply.promised > term for reply in known.values())
        return 2 * max(lost, len(known) - lost) > len(voters)

    answers = await _ask_watch(transport, run, voters, is_certain, timeout)
    # Half of the answers suffices, because the other half is no majority. Voters that do not answer are ignored.
    lost = sum(reply.promised > term for reply in answers.values())
    return lost > 0 and 2 * lost >= len(answers)


async def _ask_watch(
    transport: Transport,
    run: RunState,
    peers: Iterable[PeerId],
    is_enough: Callable[[Mapping[PeerId, WatchReply]], bool],
    timeout: float,  # seconds until the first answer; later answers must come within `GRACE_S` of it
) -> dict[PeerId, WatchReply]:
    """Ask peers which terms they follow and have promised, until the answers are enough."""
    found: dict[PeerId, WatchReply] = {}
    request = WatchRequest(term=run.term, version=run.version, hold_s=0.0)

    async def ask(peer: PeerId) -> None:
        try:
            found[peer] = await WATCH.ask(transport, peer, request, timeout=timeout + GRACE_S)
        except SwarmError as error:
            _log.debug("%s does not report its terms: %s", peer, error)

    async with asyncio.TaskGroup() as group:
        asking = {group.create_task(ask(peer)) for peer in peers}
        deadline_s = now_s() + timeout
        while asking and now_s() < deadline_s and not is_enough(found):
            had_none = not found
            _, asking = await asyncio.wait(asking, timeout=deadline_s - now_s(), return_when=asyncio.FIRST_COMPLETED)
            if had_none and found:
                deadline_s = now_s() + GRACE_S
        for task in asking:
            task.cancel()
    return found


_PACKAGES: Final = ("torch", "lightning", "hivemind")
_NUM_GREETINGS: Final = 5


@dataclass(frozen=True, kw_only=True)
class GreetingResult:
    """A peer's greeting, the round trip of the call, and the difference of the clocks."""

    greeting: Greeting
    round_trip_s: float
    ahead_s: float  # lead of the peer's clock over this process's, exact to half a round trip


def own_greeting(now_s: float) -> Greeting:
    """Make this process's greeting; `now_s` is Unix time."""
    return Greeting(protocol_version=PROTOCOL_VERSION, versions=_installed_versions(), unix_time_s=now_s)


def answer_greetings(transport: Transport, *, now: Callable[[], float] = time.time) -> None:
    """Answer greetings of other peers."""

    async def handle(caller: PeerId, _: None) -> Greeting:
        return own_greeting(now())

    HELLO.serve(transport, handle)


async def greet(
    transport: Transport, peer: PeerId, *, timeout: float, now: Callable[[], float] = time.time
) -> GreetingResult:
    """Greet a peer several times, `timeout` seconds each; return the fastest result, whose clock comparison is best."""
    loop = asyncio.get_running_loop()
    results = []
    for _ in range(_NUM_GREETINGS):
        sent_s, begin_s = now(), loop.time()
        greeting = await HELLO.ask(transport, peer, None, timeout=timeout)
        round_trip_s = loop.time() - begin_s
        ahead_s = greeting.unix_time_s - (sent_s + round_trip_s / 2)
        results.append(GreetingResult(greeting=greeting, round_trip_s=round_trip_s, ahead_s=ahead_s))
    return min(results, key=lambda result: result.round_trip_s)


def installed_version(package: str) -> str | None:
    """Return the version of an installed package, without importing it."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


@cache
def _installed_versions() -> dict[str, str]:
    installed = {name: installed_version(name) for name in _PACKAGES}
    versions = {"Python": platform.python_version(), **{name: text for name, text in installed.items() if text}}
    return {**versions, "CPU": _kind_of_cpu()} if "torch" in versions else versions


def _kind_of_cpu() -> str:
    """Return this machine's architecture and torch's CPU capability, which decide how results are rounded."""
    import torch

    return f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}"
