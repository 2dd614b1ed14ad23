"""A butterfly all-reduce over tickets: each peer reduces one part and hands the same bytes to all.

A round is complete or it raises: there are no partial results. The sums are only read; the mean has its own memory.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from lightning_swarm.core.errors import DeadlineExceeded, PeerError, ProtocolError, SwarmError, TicketGone, Unreachable
from lightning_swarm.core.tasks import gather
from lightning_swarm.model.fingerprint import digest
from lightning_swarm.network import Message, PeerId
from lightning_swarm.network.framing import BufferPool
from lightning_swarm.network.tensors import parse_spec, spec_of
from lightning_swarm.protocol.compression import Codec, decoded, encoded, from_message, to_message
from lightning_swarm.protocol.messages.calls import Ticket
from lightning_swarm.protocol.messages.parts import part_bounds
from lightning_swarm.protocol.serialization import Encoded
from lightning_swarm.protocol.tickets import Readers, TicketStore

# Elements whose squares torch adds up at once: so few that it does so in one thread, so in one order; and that its copy
# of them in float64 is no memory that Linux has to clear first.
_BLOCK: Final = 1 << 14


def squared_norm(vector: Tensor) -> float:
    """The squared norm in float64, the same on machines with other numbers of threads."""
    # A GPU adds up in one order by itself, and a launch for each block would take longer than the sum.
    blocks = vector.split(_BLOCK) if vector.device.type == "cpu" else [vector]
    norms = torch.stack([torch.linalg.vector_norm(block, dtype=torch.float64) for block in blocks])
    return add_up(norm * norm for norm in norms.tolist())


def add_up(squares: Iterable[float]) -> float:
    """Add up squares in any order to the same bits."""
    try:
        return math.fsum(squares)
    except OverflowError:  # where floats would become infinite
        return math.inf


_T = TypeVar("_T")


class Compute(Protocol):
    """Runs long work elsewhere than on the loop."""

    def __call__(self, run: Callable[[], _T], /) -> Awaitable[_T]:
        """Return what `run` returns."""


@dataclass(frozen=True)
class GroupParts:
    """Encodes and decodes the parts of a round, and brings them from and to a GPU."""

    codec: Codec | None  # None: parts travel as they are
    compute: Compute | None  # runs both, where they take time; None: there is no codec, and both run here

    async def to_message(self, part: Tensor) -> Message:
        """Encode a part for its way."""
        if self.compute is None or self._is_ready(part):
            return to_message(part)
        return await self.compute(lambda: to_message(encoded(part, self.codec)))

    def _is_ready(self, like: Tensor) -> bool:
        return self.codec is None and like.device.type == "cpu"

    async def from_message(self, message: Message, *, like: Tensor, length: int) -> Tensor:
        """Decode a part of this length, and the dtype of `like`, to its device: the same bits at each peer."""
        tree: Any = from_message(message)[0]
        found = tree.spec if isinstance(tree, Encoded) else spec_of(tree) if isinstance(tree, Tensor) else None
        if found is None or parse_spec(found) != (like.dtype, (length,)):
            raise ProtocolError(f"{found} came for a part of shape {(length,)} and {like.dtype}")
        if self.compute is None or self._is_ready(like):
            whole: Tensor = tree
            return whole
        part: Tensor = await self.compute(lambda: decoded(tree, self.codec, like.device))
        return part


AS_THEY_ARE: Final = GroupParts(None, None)

_MEANS: Final = BufferPool(2, max_bytes=65 << 20)  # those of one step are gone before the next one's are made
_SLICE: Final = 1 << 20  # elements added before anything else may happen on the loop: a millisecond's work


class AveragingFailed(PeerError):
    """A part did not come. Nobody may use the round."""

    def __init__(self, text: str, missed: PeerId | None, refusing: PeerId | None = None) -> None:
        super().__init__(text)
        self.missed = missed  # the peer that is to blame; None: that peer has not got all parts itself
        self.refusing = refusing  # or so it says


@dataclass(frozen=True)
class Group:
    """The peers that average with each other in one round."""

    roster: Sequence[PeerId]  # of the stage, the same list on each peer
    prefix: str  # names the round; unique to generation, step, round and stage
    tickets: TicketStore  # carry the parts
    timeout: float  # seconds for each exchange
    shares_with: Callable[[PeerId], bool] = lambda _: False  # whether another peer may have what the group finds
    is_audited: bool = False  # note what each peer gave

    def offer(self, name: str, message: Message | Callable[[], Message], to: int | None = None) -> None:
        """Give something in this round: to the peer at one place of the roster, or to all that may have it."""
        self.tickets.offer(f"{self.prefix}/{name}", message, self._readers(to))

    def withhold(self, names: Iterable[str], reason: str) -> None:
        """Give nothing by these names, unless it was given by now."""
        for name in names:
            self.tickets.promise(f"{self.prefix}/{name}", self._readers(None))
            self.tickets.fail(f"{self.prefix}/{name}", TicketGone(reason))

    def _readers(self, to: int | None) -> Readers:
        if to is not None:
            return lambda caller, _: caller == self.roster[to]
        return lambda caller, _: caller in self.roster or self.shares_with(caller)

    def bounds(self, length: int) -> list[slice]:
        """The bounds of a vector's parts; each peer reduces one."""
        return part_bounds(length, len(self.roster))


class GroupMean(NamedTuple):
    """The result of a round."""

    mean: Tensor  # ``[n]``, the same bits on every peer
    squared_norm: float  # of the part that this peer reduced
    lost: Tensor | None = None  # ``[n]``, what a codec lost of the mean in what this peer sent; None: not asked for
    given: Sequence[bytes] = ()  # digests of what each peer gave for that part; only in audited groups


async def average(
    vector: Tensor,
    total_weight: float,
    group: Group,
    place: int,
    *,
    parts: GroupParts = AS_THEY_ARE,
    carried: Tensor | None = None,
) -> GroupMean:
    """Sum `vector` ``[n]`` over the roster, in its order, and divide once by `total_weight`, of all peers together.

    The vector must not change until the round's record is applied; `place` is this peer's in the roster. `carried`
    ``[n]`` is what an earlier round lost: it is added, and what this one loses is found. If it raises, call `refuse`.
    """
    roster = group.roster
    bounds = group.bounds(len(vector))
    lost = None if carried is None else torch.zeros_like(vector)
    others = [i for i in range(len(roster)) if i != place]

    async def take(i: int, name: str, part: slice) -> Tensor:
        return await taken(group, i, name, like=vector, length=part.stop - part.start, parts=parts)

    for i in others:
        part, left_over = vector[bounds[i]], None
        if carried is not None and lost is not None:
            part, left_over = torch.add(part, carried[bounds[i]], alpha=total_weight), lost[bounds[i]]
        await _send(group, f"part{i}", part, parts, left_over, to=i)
    if lost is not None:
        lost /= total_weight
    pieces = dict(zip(others, await gather(take(i, f"part{place}", bounds[place]) for i in others), strict=True))
    pieces[place] = vector[bounds[place]]
    given: Sequence[bytes] = ()
    if group.is_audited:
        given = await digests([[pieces[i]] for i in range(len(roster))], parts.compute)
    mean = _new(vector)
    reduced = mean[bounds[place]]
    norm = await _reduce(reduced, [pieces.pop(i) for i in range(len(roster))], total_weight)
    if carried is not None:
        reduced += carried[bounds[place]]
    received = await _send(group, f"reduced{place}", reduced, parts, None if lost is None else lost[bounds[place]])
    if received is not reduced:  # encoded: all peers decode it, this one, too, so that they have the same bits
        reduced.copy_(received)
        norm = squared_norm(reduced)

    for i, part in zip(others, await gather(take(i, f"reduced{i}", bounds[i]) for i in others), strict=True):
        mean[bounds[i]] = part
    return GroupMean(mean, norm, lost, given)


def part_digest(part: Sequence[Tensor]) -> bytes:
    """BLAKE3 of a part of a sum or a mean."""
    return digest(part, b"part;")


async def digests(parts: Sequence[Sequence[Tensor]], compute: Compute | None) -> list[bytes]:
    """Digest each part; by `compute`, where there is one."""

    def run() -> list[bytes]:
        return [part_digest(part) for part in parts]

    return run() if compute is None else await compute(run)


def for_joiners(part: Tensor) -> Message | Callable[[], Message]:
    """Make a message that perhaps nobody will fetch; from a GPU only once somebody does."""
    return to_message(part) if part.device.type == "cpu" else partial(to_message, part)


async def _send(
    group: Group, name: str, part: Tensor, parts: GroupParts, lost: Tensor | None, *, to: int | None = None
) -> Tensor:
    """Send a part `to` one place or to all; note its codec's loss in `lost`; return the part as other peers get it."""
    if len(group.roster) == 1 and parts.codec is None:
        group.offer(name, for_joiners(part))
        return part
    message = await parts.to_message(part)
    group.offer(name, message, to)
    if parts.codec is None:
        return part
    received = await parts.from_message(message, like=part, length=len(part))
    if lost is not None:
        torch.sub(part, received, out=lost)
    return received


async def taken(
    group: Group, place: int, name: str, *, like: Tensor, length: int, parts: GroupParts = AS_THEY_ARE
) -> Tensor:
    """Fetch a part, of the dtype and to the device of `like`; see `fetched`."""
    return await fetched(group, place, name, lambda message: parts.from_message(message, like=like, length=length))


async def fetched(group: Group, place: int, name: str, read: Callable[[Message], Awaitable[_T]]) -> _T:
    """Fetch and `read` what another peer of the group has to give in a round; `AveragingFailed` if it does not come."""
    peer = group.roster[place]
    ticket = Ticket(peer_id=peer, name=f"{group.prefix}/{name}", key=None)
    try:
        return await read(await group.tickets.fetch(ticket, timeout=group.timeout))
    except SwarmError as error:
        # A peer that answers, and has nothing to give, waits for another one itself; and damage is the link's.
        blameless = isinstance(error, PeerError) and not isinstance(error, (Unreachable, DeadlineExceeded))
        missed, refusing = (None, peer) if blameless else (peer, None)
        raise AveragingFailed(f"{ticket.name} did not come from {peer}: {error}", missed, refusing) from error


def refuse(group: Group, place: int, reason: str) -> None:
    """Give nothing more in a round, so that no peer waits for this one, or takes it for gone; what it gave stays."""
    group.withhold([f"part{i}" if i != place else f"reduced{place}" for i in range(len(group.roster))], reason)


async def collect(like: Tensor, group: Group, *, parts: GroupParts = AS_THEY_ARE) -> Tensor:
    """The mean of a round without this peer, as every member of the roster has it; `like` as their sums ``[n]``."""

    async def take(i: int, part: slice) -> Tensor:
        ticket = Ticket(peer_id=group.roster[i], name=f"{group.prefix}/reduced{i}", key=None)
        message = await group.tickets.fetch(ticket, timeout=group.timeout)
        return await parts.from_message(message, like=like, length=part.stop - part.start)

    mean = _new(like)
    bounds = group.bounds(len(like))
    for part, found in zip(bounds, await gather(take(i, part) for i, part in enumerate(bounds)), strict=True):
        mean[part] = found
    return mean


async def _reduce(into: Tensor, pieces: Sequence[Tensor], total_weight: float) -> float:
    """Add the pieces in their order, and divide once; returns the squared norm of the mean."""
    total_norm = 0.0
    for begin in range(0, len(into), _SLICE):
        reduced = into[begin : begin + _SLICE]
        total, *others = (piece[begin : begin + _SLICE].to(into.device) for piece in pieces)
        for other in others:
            total = torch.add(total, other, out=reduced)
        torch.div(total, total_weight, out=reduced)
        total_norm += squared_norm(reduced)
        await asyncio.sleep(0)  # let the loop answer other peers meanwhile
    return total_norm


def _new(like: Tensor) -> Tensor:
    if like.device.type != "cpu":
        return torch.empty_like(like)
    return _MEANS.new_bytes(like.nbytes).view(like.dtype)
