"""The copy of a stage's state that a joiner downloads: made by a donor, sent in pieces, assembled by the joiner."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from lightning_swarm.core.errors import Busy, DeadlineExceeded, PeerError, ProtocolError, SwarmError
from lightning_swarm.core.limits import Limits
from lightning_swarm.core.progress import Progress, Report
from lightning_swarm.core.readable import shorten
from lightning_swarm.core.tasks import cancel_and_wait, gather
from lightning_swarm.network import PeerId, Transport
from lightning_swarm.network.tensors import dtype_name
from lightning_swarm.protocol import serialization
from lightning_swarm.protocol.messages.membership import FollowReply, FollowRequest, PieceRequest, TensorLayout
from lightning_swarm.protocol.rpc import FOLLOW, PIECE
from lightning_swarm.protocol.serialization import named
from lightning_swarm.server.stage import Stage
from lightning_swarm.server.state_transfer.snapshots import copy_stage

_log = logging.getLogger(__name__)

PIECE_BYTES: Final = 4 << 20  # bytes requested at once; a donor may send less
_PULLS: Final = 2  # concurrent requests to each donor, so that its link is never idle
_MAX_HELPERS: Final = 3  # most servers that send pieces beside the donor
_BUSY_S: Final = 1.0  # pause after a donor was busy
_HOLD_S: Final = 15.0  # seconds to wait for a slot in one round over all donors
_RELEASE_S: Final = 2.0  # timeout of the notice that the download is done


@dataclass(frozen=True, eq=False)
class StageCopy:
    """A copy of a stage's whole state at one version."""

    head: FollowReply  # describes the tensors
    tensors: tuple[Tensor, ...]  # contiguous, on the CPU

    @classmethod
    def of(cls, stage: Stage, generation: int) -> StageCopy:
        """Copy a stage's current state. Runs on the compute thread, so that the copy falls between two records."""
        snapshot, copies = copy_stage(stage, generation)
        tensors = tuple(tensor.contiguous() for tensor in copies)
        layouts = [TensorLayout(shape=list(tensor.shape), dtype=dtype_name(tensor.dtype)) for tensor in tensors]
        return cls(FollowReply(snapshot=snapshot, layouts=layouts), tensors)

    @property
    def version(self) -> int:
        """The version of the weights."""
        return self.head.snapshot.version

    @property
    def num_bytes(self) -> int:
        """The bytes of all tensors together."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def piece(self, start: int, stop: int) -> tuple[Tensor, ...]:
        """Return the bytes from `start` to `stop` of all concatenated tensors, in shared memory instead of copies."""
        return tuple(_overlaps(self.tensors, start, stop))


class IncomingSnapshot:
    """A snapshot of a stage that is assembled from pieces."""

    def __init__(self, head: FollowReply, stage: Stage, *, max_bytes: int) -> None:
        expected = [(list(tensor.shape), dtype_name(tensor.dtype)) for tensor in stage.weights().values()]
        if [(layout.shape, layout.dtype) for layout in head.layouts[: len(head.snapshot.weights)]] != expected:
            raise ProtocolError(f"a snapshot of stage {stage.index} must have weights of the stage's shapes and dtypes")
        sizes = [math.prod(layout.shape) * _dtype(layout).itemsize for layout in head.layouts]
        self.num_bytes = sum(sizes)
        if self.num_bytes > max_bytes:
            raise ProtocolError(
                f"a stage's state is at most `Limits.max_message_bytes` = {max_bytes} bytes, got {self.num_bytes}. "
                "Raise it, or cut the model into more stages."
            )
        self.head = head
        # Memory is allocated only after the shapes and the size were checked.
        self._tensors = [torch.empty(layout.shape, dtype=_dtype(layout)) for layout in head.layouts]

    def fill(self, start: int, parts: Sequence[Tensor], *, at_most: int) -> int:
        """Write a piece, and return its number of bytes. `ProtocolError` if it is invalid; then nothing has changed."""
        num_bytes = sum(part.numel() for part in parts)
        if not 0 < num_bytes <= at_most or any(part.dtype != torch.uint8 or part.ndim != 1 for part in parts):
            raise ProtocolError(f"a piece has 1 to {at_most} bytes, got {num_bytes} elements in {len(parts)} tensors")
        # The memory in this snapshot's tensors to which the piece belongs.
        views = list(_overlaps(self._tensors, start, start + num_bytes))
        if [view.numel() for view in views] != [part.numel() for part in parts]:
            raise ProtocolError(f"a piece must be cut where tensors end, but the piece at byte {start} is not")
        for view, part in zip(views, parts, strict=True):
            view.copy_(part)
        return num_bytes

    def values(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the weights and the optimizer's state by name; raise `ProtocolError` if they are malformed."""
        for tensor in self._tensors:
            # torch computes nonsense with a bool that is neither 0 nor 1.
            if tensor.dtype is torch.bool and tensor.numel() and int(_flat(tensor).max()) > 1:
                raise ProtocolError("a bool tensor of a snapshot holds a byte that is neither 0 nor 1")
        snapshot, count = self.head.snapshot, len(self.head.snapshot.weights)
        state = serialization.unflatten(snapshot.structure, self._tensors[count:])
        return named(snapshot.weights, self._tensors[:count]), named(snapshot.optimizer, state)


def _overlaps(tensors: Sequence[Tensor], start: int, stop: int) -> Iterator[Tensor]:
    """Yield, for each tensor that has any, its bytes from `start` to `stop` of all concatenated tensors."""
    first = 0
    for tensor in tensors:
        end = first + tensor.nbytes
        if first < stop and start < end:
            yield _flat(tensor)[max(start - first, 0) : min(stop, end) - first]
        first = end


def _flat(tensor: Tensor) -> Tensor:
    # Not `reshape`: one element of a column counts as contiguous, but keeps its stride, which no view of bytes allows.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _dtype(layout: TensorLayout) -> torch.dtype:
    """Return a layout's dtype. Raises `ProtocolError` for an unknown name, or an alias such as `cfloat`."""
    dtype = getattr(torch, layout.dtype, None)
    if not isinstance(dtype, torch.dtype) or dtype.is_complex != layout.dtype.startswith("complex"):
        raise ProtocolError(f"a tensor of a snapshot must have a dtype of torch, got {layout.dtype!r}")
    return dtype


class StageDownload:
    """The download of one stage. The `stage` of the joiner's own model defines the expected tensors."""

    def __init__(self, transport: Transport, stage: Stage, *, limits: Limits, report: Report = _log.info) -> None:
        self._transport = transport
        self._stage = stage
        self._limits = limits
        self._report = report
        self._state = ""  # describes the download to the user
        self._num_bytes = 0  # bytes received
        self._missing: dict[int, int] = {}  # missing pieces: start -> stop
        self._asked: dict[int, set[PeerId]] = {}  # start of a piece -> peers with an open request for it
        self.donor: PeerId | None = None  # the last peer that was asked for a copy and all later records
        self.helpers: set[PeerId] = set()  # peers that sent a piece beside the donor
        self._copied: list[PeerId] = []  # peers beside the donor that keep a copy for this peer

    async def download(self, donors: Sequence[PeerId], *, one_donor: bool) -> tuple[PeerId, IncomingSnapshot]:
        """Download a stage; return the donor, which keeps the later records for this peer, and the stage's snapshot.

        The first of `donors` that has a slot becomes the donor. Further peers help it by sending pieces, unless
        `one_donor`. Raises `PeerError` if the donor is gone, or no longer keeps the copy.
        """
        try:
            async with asyncio.timeout(self._limits.join_timeout):
                donor, head = await self._follow_first(donors)
                incoming = IncomingSnapshot(head, self._stage, max_bytes=self._limits.max_message_bytes)
                self._missing = {
                    start: min(start + PIECE_BYTES, incoming.num_bytes)
                    for start in range(0, incoming.num_bytes, PIECE_BYTES)
                }
                helpers = [] if one_donor else [peer for peer in donors if peer != donor][:_MAX_HELPERS]
                donors_text = f"{1 + len(helpers)} peer{'s' if helpers else ''}"
                self._state = f"Downloading stage {self._stage.index} from {donors_text}"
                self._report(Progress(self._state, total_bytes=incoming.num_bytes))
                await self._pull_all(donor, helpers, incoming)
                return donor, incoming
        except TimeoutError:
            raise DeadlineExceeded(
                f"stage {self._stage.index} must be downloaded within `Limits.join_timeout` = "
                f"{self._limits.join_timeout:g} s, but was not. Raise it for a slow link."
            ) from None

    async def _follow_first(self, donors: Sequence[PeerId]) -> tuple[PeerId, FollowReply]:
        """Ask donors in turn to copy the stage for this peer, until one has a slot, because each donor has few."""
        hold_s = 0.0
        while True:
            for donor in donors:
                self.donor = donor
                try:
                    return donor, await self._follow(donor, None, hold_s=hold_s / len(donors))
                except Busy as error:
                    self._report(Progress(f"Waiting to download stage {self._stage.index}", shorten(str(error))))
            await asyncio.sleep(_BUSY_S if hold_s else 0.0)  # a donor may answer `Busy` at once, without waiting
            hold_s = _HOLD_S

    async def _follow(self, donor: PeerId, version: int | None, *, hold_s: float = 0.0) -> FollowReply:
        """Ask a donor to copy the stage, at a version or (None) the newest, for this peer; return the copy's head."""
        request = FollowRequest(stage_index=self._stage.index, version=version, hold_s=hold_s)
        timeout = hold_s + self._limits.call_timeout
        head, _ = await FOLLOW.ask(self._transport, donor, request, timeout=timeout, max_bytes=0)
        snapshot = head.snapshot
        if snapshot.stage_index != self._stage.index or version not in (None, snapshot.version):
            raise ProtocolError(
                f"{donor} must copy stage {self._stage.index} at version {'any' if version is None else version}, "
                f"but copied stage {snapshot.stage_index} at version {snapshot.version}"
            )
        return head

    async def _pull_all(self, donor: PeerId, helpers: Sequence[PeerId], incoming: IncomingSnapshot) -> None:
        """Fetch all pieces from the donor and helpers; the donor alone must suffice. Release the helpers' copies."""
        helping = asyncio.ensure_future(gather(self._pull_from_helper(peer, incoming) for peer in helpers))
        try:
            await gather(self._pull(donor, incoming, is_donor=True) for _ in range(_PULLS))
        finally:
            await cancel_and_wait([helping])
        if not helping.cancelled():
            helping.result()
        await gather(self._release(peer, incoming) for peer in self._copied)

    async def _pull_from_helper(self, peer: PeerId, incoming: IncomingSnapshot) -> None:
        """Fetch pieces from a helper; if it fails, other peers send its pieces."""
        try:
            head = await self._follow(peer, incoming.head.snapshot.version)
            self._copied.append(peer)
            if head != incoming.head:
                raise ProtocolError(f"the copy of stage {self._stage.index} at {peer} differs from the donor's")
            await gather(self._pull(peer, incoming, is_donor=False) for _ in range(_PULLS))
        except SwarmError as error:
            _log.info("%s does not help with the download: %s", peer, error)

    async def _pull(self, peer: PeerId, incoming: IncomingSnapshot, *, is_donor: bool) -> None:
        """Request pieces, one after the other; from the donor also pieces that helpers were asked for."""
        while (start := self._next_piece(peer, is_donor=is_donor)) is not None:
            asked = self._asked.setdefault(start, set())
            asked.add(peer)
            stop = self._missing[start]
            try:
                tensors = await self._piece(peer, incoming, start, stop)
            except Busy:
                if not is_donor:  # the donor alone suffices
                    return
                await asyncio.sleep(_BUSY_S)
                continue
            finally:
                asked.discard(peer)
            if self._missing.get(start) != stop:
                continue  # another peer sent the piece first
            num_bytes = incoming.fill(start, tensors, at_most=stop - start)
            del self._missing[start]
            if start + num_bytes < stop:  # the donor sent less, so the rest is a piece of its own
                self._missing[start + num_bytes] = stop
            self._num_bytes += num_bytes
            self._report(Progress(self._state, num_bytes=self._num_bytes, total_bytes=incoming.num_bytes))
            if not is_donor:
                self.helpers.add(peer)

    def _next_piece(self, peer: PeerId, *, is_donor: bool) -> int | None:
        """Return the start of the piece to request from a peer; None if it can send nothing more."""
        free = (start for start in self._missing if not self._asked.get(start))
        shared = (start for start in self._missing if is_donor and peer not in self._asked.get(start, ()))
        return next(free, next(shared, None))

    async def _piece(self, peer: PeerId, incoming: IncomingSnapshot, start: int, stop: int) -> tuple[Tensor, ...]:
        request = PieceRequest(
            stage_index=self._stage.index, version=incoming.head.snapshot.version, start=start, stop=stop
        )
        timeout = self._limits.call_timeout if stop > start else _RELEASE_S
        return (await PIECE.ask(self._transport, peer, request, timeout=timeout, max_bytes=stop - start))[1]

    async def _release(self, peer: PeerId, incoming: IncomingSnapshot) -> None:
        """Notify a helper, by a request for an empty piece, that its copy is not needed any more."""
        try:
            await self._piece(peer, incoming, 0, 0)
        except PeerError as error:
            _log.info("%s was not notified that the download is done: %s", peer, error)
