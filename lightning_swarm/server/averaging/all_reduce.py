"""A butterfly all-reduce over tickets: each peer reduces one part and sends the same bytes to all.

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
from lightning_swarm.network import Message, PeerId
from lightning_swarm.network.framing import BufferPool
from lightning_swarm.network.tensors import parse_spec, spec_of
from lightning_swarm.protocol.compression import Codec, decoded, encoded, from_message, to_message
from lightning_swarm.protocol.messages.calls import Ticket
from lightning_swarm.protocol.messages.parts import part_bounds
from lightning_swarm.protocol.serialization import Encoded
from lightning_swarm.protocol.tickets import Readers, TicketStore

# Elements whose squares torch adds up at once: so few that torch adds them in one thread, and thus in one order, and
# that their float64 copy fits into memory that this process already has.
_BLOCK: Final = 1 << 14


def squared_norm(vector: Tensor) -> float:
    """Return the squared norm in float64, the same with any number of threads."""
    # A GPU always adds up in the same order, and one launch for each block would take longer than the sum.
    blocks = vector.split(_BLOCK) if vector.device.type == "cpu" else [vector]
    norms = torch.stack([torch.linalg.vector_norm(block, dtype=torch.float64) for block in blocks])
    return add_up(norm * norm for norm in norms.tolist())


def add_up(squares: Iterable[float]) -> float:
    """Add up squares; any order gives the same bits."""
    try:
        return math.fsum(squares)
    except OverflowError:  # `fsum` raises where a sum of floats becomes infinite
        return math.inf


_T = TypeVar("_T")


class Compute(Protocol):
    """Runs long computations outside of the event loop."""

    def __call__(self, run: Callable[[], _T], /) -> Awaitable[_T]:
        """Return the result of `run`."""


@dataclass(frozen=True)
class PartEncoder:
    """Converts the parts of a round to messages and back, and copies them from and to a GPU."""

    codec: Codec | None  # None: parts are sent unencoded
    compute: Compute | None  # runs slow conversions off the loop; None only without a codec

    async def to_message(self, part: Tensor) -> Message:
        """Encode a part to be sent."""
        if self.compute is None or self._is_ready(part):
            return to_message(part)
        return await self.compute(lambda: to_message(encoded(part, self.codec)))

    def _is_ready(self, part: Tensor) -> bool:
        """Return whether parts on the device of this part are sent without any conversion."""
        return self.codec is None and part.device.type == "cpu"

    async def from_message(self, message: Message, *, like: Tensor, length: int) -> Tensor:
        """Decode a part of this length to the dtype and device of `like`, with the same bits at each peer."""
        tree: Any = from_message(message)[0]
        spec = tree.spec if isinstance(tree, Encoded) else spec_of(tree) if isinstance(tree, Tensor) else None
        if spec is None or parse_spec(spec) != (like.dtype, (length,)):
            raise ProtocolError(f"a part must have the shape {(length,)} and the dtype {like.dtype}, got {spec}")
        if self.compute is None or self._is_ready(like):
            whole: Tensor = tree
            return whole
        part: Tensor = await self.compute(lambda: decoded(tree, self.codec, like.device))
        return part


UNENCODED: Final = PartEncoder(None, None)

# Memory of means. A step's means are freed before the next step's means are made.
_MEANS: Final = BufferPool(2, max_bytes=65 << 20)
_SLICE: Final = 1 << 20  # elements added before the loop may run other tasks: about a millisecond


class AveragingFailed(PeerError):
    """A part was not received, so no peer may use the result of the round."""

    def __init__(self, text: str, missed: PeerId | None, refusing: PeerId | None = None) -> None:
        super().__init__(text)
        self.missed = missed  # the asked peer, if it failed to send; None: it is not at fault
        self.refusing = refusing  # the asked peer, if it answered with an error of its own


Digests = Callable[[Sequence[Sequence[Tensor]], Compute | None], Awaitable[Sequence[bytes]]]


async def _no_digests(parts: Sequence[Sequence[Tensor]], compute: Compute | None) -> Sequence[bytes]:
    return ()


@dataclass(frozen=True)
class Group:
    """The peers that average with each other in one round."""

    roster: Sequence[PeerId]  # servers of the stage, in the same order on each peer
    prefix: str  # names the round; unique to generation, step, round and stage
    tickets: TicketStore  # where parts are offered and fetched
    timeout: float  # seconds for each exchange
    shares_with: Callable[[PeerId], bool] = lambda _: False  # whether a peer outside of the group may fetch results
    digests: Digests = _no_digests  # returns digests of each peer's contribution to the part that this peer reduces

    def offer(self, name: str, message: Message | Callable[[], Message], to: int | None = None) -> None:
        """Offer a message in this round to the peer at one roster index, or to all permitted readers."""
        self.tickets.offer(f"{self.prefix}/{name}", message, self._readers(to))

    def withhold(self, names: Iterable[str], reason: str) -> None:
        """Fail the tickets of these names, unless they are offered already."""
        for name in names:
            self.tickets.promise(f"{self.prefix}/{name}", self._readers(None))
            self.tickets.fail(f"{self.prefix}/{name}", TicketGone(reason))

    def _readers(self, to: int | None) -> Readers:
        if to is not None:
            return lambda caller, _: caller == self.roster[to]
        return lambda caller, _: caller in self.roster or self.shares_with(caller)

    def others(self, rank: int | None) -> list[int]:
        """Return the roster's indices without `rank`, this peer's own; None: it is not in the roster."""
        return [index for index in range(len(self.roster)) if index != rank]

    def bounds(self, length: int) -> list[slice]:
        """Return the bounds of a vector's parts; each peer reduces one."""
        return part_bounds(length, len(self.roster))


class AveragingState(NamedTuple):
    """The state that a peer carries from step to step; a step's record applies all of it or none."""

    lost: Tensor | None = None  # ``[n]``, this peer's compression error, to be added to the next mean
    basis: Tensor | None = None  # ``[right_length]`` of `LowRank`; None: unknown yet, or not used

    def times(self, factor: float) -> AveragingState:
        """Return the state for gradients that are `factor` times as large."""
        return self if self.lost is None or factor == 1.0 else self._replace(lost=self.lost * factor)


class AveragingResult(NamedTuple):
    """The result of a round at one peer."""

    mean: Tensor  # ``[n]``, the same bits on every peer
    squared_norm: float  # of the part that this peer reduced
    carried: AveragingState  # state for the next step
    given: Sequence[bytes] = ()  # digest of each peer's contribution to that part; see `Group.digests`


async def average(
    vector: Tensor,
    total_weight: float,
    group: Group,
    rank: int,
    *,
    encoder: PartEncoder = UNENCODED,
    carried: Tensor | None = None,
) -> AveragingResult:
    """Sum `vector` ``[n]`` in the roster's order, and divide once by `total_weight`, the weight of all peers.

    The vector must not change until the round's record is applied; `rank` is this peer's roster index. `carried`
    ``[n]`` is `lost` of an earlier round's state: it is added, and this round's error is returned. If this raises, call
    `refuse`.
    """
    bounds, others = group.bounds(len(vector)), group.others(rank)
    lost = None if carried is None else torch.zeros_like(vector)
    for i in others:
        part, lost_part = vector[bounds[i]], None
        if carried is not None and lost is not None:
            part, lost_part = torch.add(part, carried[bounds[i]], alpha=total_weight), lost[bounds[i]]
        await _send(group, f"part{i}", part, encoder, lost_part, to=i)
    if lost is not None:
        lost /= total_weight
    mean = _new(vector)
    reduced = mean[bounds[rank]]
    name, length = f"part{rank}", len(reduced)
    fetched = await gather(fetch_part(group, i, name, like=vector, length=length, encoder=encoder) for i in others)
    pieces = [*fetched[:rank], vector[bounds[rank]], *fetched[rank:]]
    given = await group.digests([[piece] for piece in pieces], encoder.compute)
    squared = await _reduce(reduced, pieces, total_weight)
    del fetched, pieces  # frees their memory for the next messages
    if carried is not None:
        reduced += carried[bounds[rank]]
    received = await _send(group, f"reduced{rank}", reduced, encoder, None if lost is None else lost[bounds[rank]])
    if received is not reduced:  # encoded; this peer uses the decoded part, to have the same bits as all others
        reduced.copy_(received)
        squared = squared_norm(reduced)
    await fetch_reduced(mean, group, rank, encoder=encoder)
    return AveragingResult(mean, squared, AveragingState(lost), given)


async def fetch_reduced(mean: Tensor, group: Group, rank: int | None, *, encoder: PartEncoder = UNENCODED) -> None:
    """Fetch the parts of a round's mean that the other peers have reduced; None: this peer has reduced none."""

    async def fetch_into(part: Tensor, i: int) -> None:
        part.copy_(await fetch_part(group, i, f"reduced{i}", like=part, length=len(part), encoder=encoder))

    bounds = group.bounds(len(mean))
    await gather(fetch_into(mean[bounds[i]], i) for i in group.others(rank))


def message_for_joiners(part: Tensor) -> Message | Callable[[], Message]:
    """Make a message for joiners, of which there may be none: a part on a GPU is copied only when it is fetched."""
    return to_message(part) if part.device.type == "cpu" else partial(to_message, part)


async def _send(
    group: Group, name: str, part: Tensor, encoder: PartEncoder, lost: Tensor | None, *, to: int | None = None
) -> Tensor:
    """Offer a part to roster index `to`, or to all; store the codec's error in `lost`; return the part as received."""
    if len(group.roster) == 1 and encoder.codec is None:
        group.offer(name, message_for_joiners(part))
        return part
    message = await encoder.to_message(part)
    group.offer(name, message, to)
    if encoder.codec is None:
        return part
    received = await encoder.from_message(message, like=part, length=len(part))
    if lost is not None:
        torch.sub(part, received, out=lost)
    return received


async def fetch_part(
    group: Group, rank: int, name: str, *, like: Tensor, length: int, encoder: PartEncoder = UNENCODED
) -> Tensor:
    """Fetch a part of this length, with the dtype and device of `like`; see `fetch`."""
    return await fetch(group, rank, name, lambda message: encoder.from_message(message, like=like, length=length))


async def fetch(group: Group, rank: int, name: str, read: Callable[[Message], Awaitable[_T]]) -> _T:
    """Fetch and `read` another peer's message in a round; raise `AveragingFailed` if it does not come."""
    peer = group.roster[rank]
    ticket = Ticket(peer_id=peer, name=f"{group.prefix}/{name}", key=None)
    try:
        return await read(await group.tickets.fetch(ticket, timeout=group.timeout))
    except SwarmError as error:
        # A peer that sends an error of its own lacks the part itself, and a damaged message is the fault of the link.
        blameless = isinstance(error, PeerError) and not isinstance(error, (Unreachable, DeadlineExceeded))
        missed, refusing = (None, peer) if blameless else (peer, None)
        raise AveragingFailed(f"{ticket.name} did not come from {peer}: {error}", missed, refusing) from error


def refuse(group: Group, rank: int, reason: str) -> None:
    """Withhold all parts not yet offered in a round, so that peers neither wait for this peer nor exclude it."""
    group.withhold([f"part{i}" if i != rank else f"reduced{rank}" for i in range(len(group.roster))], reason)


async def collect(like: Tensor, group: Group, *, encoder: PartEncoder = UNENCODED) -> Tensor:
    """Fetch the mean of a round in which this peer is not a member; `like` is shaped like the sums, ``[n]``."""
    mean = _new(like)
    await fetch_reduced(mean, group, None, encoder=encoder)
    return mean


async def _reduce(into: Tensor, pieces: Sequence[Tensor], total_weight: float) -> float:
    """Add the pieces in their order, and divide once; return the mean's squared norm."""
    squared = 0.0
    for begin in range(0, len(into), _SLICE):
        reduced = into[begin : begin + _SLICE]
        total, *addends = (piece[begin : begin + _SLICE].to(into.device) for piece in pieces)
        for addend in addends:
            total = torch.add(total, addend, out=reduced)
        torch.div(total, total_weight, out=reduced)
        squared += squared_norm(reduced)
        await asyncio.sleep(0)  # let the loop answer other peers meanwhile
    return squared


def _new(like: Tensor) -> Tensor:
    """Allocate a mean, on the CPU in memory of former means, because Linux would have to clear new pages."""
    if like.device.type != "cpu":
        return torch.empty_like(like)
    return _MEANS.new_bytes(like.nbytes).view(like.dtype)
