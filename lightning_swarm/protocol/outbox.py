"""Sends records that are due to a peer at the same moment, such as several texts' steps, in one message."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from torch import Tensor

from lightning_swarm.core.errors import from_wire
from lightning_swarm.network import MAX_CALL_BYTES, SMALL_BYTES, PeerId
from lightning_swarm.protocol.messages.inference import (
    MAX_TOGETHER,
    SessionOutput,
    SessionStep,
    SessionSteps,
    SessionStepsReply,
    StepRefusal,
)
from lightning_swarm.protocol.messages.wire import encode

_R = TypeVar("_R", SessionStep, SessionOutput)  # type of the records
_A = TypeVar("_A")  # type of an answer for one record

# Limits of a message with several records. A record with more than `SMALL_BYTES` of tensors is sent alone.
_MAX_BYTES: Final = 1 << 20
_MAX_BODY_BYTES: Final = MAX_CALL_BYTES // 2


@dataclass(eq=False)
class _Parcel(Generic[_R, _A]):
    record: _R
    tensors: Sequence[Tensor]
    num_bytes: int  # of the tensors
    body_bytes: int  # of the encoded record
    answer: asyncio.Future[_A]


class Outbox(Generic[_R, _A]):
    """Collects records in a tick of the event loop, and sends all records of a peer in one message."""

    def __init__(self, send: Callable[[PeerId, list[_R], list[Tensor]], Awaitable[Sequence[_A]]]) -> None:
        self._send: Callable[[PeerId, list[_R], list[Tensor]], Awaitable[Sequence[_A]]] = send  # an answer for each
        self._waiting: dict[tuple[PeerId, str], list[_Parcel[_R, _A]]] = {}
        self._sending: set[asyncio.Task[None]] = set()

    async def put(self, peer: PeerId, record: _R, tensors: Sequence[Tensor], *, lane: str = "") -> _A:
        """Send a record with its tensors, only beside records of the same lane; return its answer."""
        loop, num_bytes = asyncio.get_running_loop(), sum(tensor.nbytes for tensor in tensors)
        # Encoded here, because a record that cannot be encoded concerns only its sender.
        parcel = _Parcel[_R, _A](record, tensors, num_bytes, len(encode(record)), loop.create_future())
        if num_bytes > SMALL_BYTES:
            lane = f"{lane} alone {id(record)}"
        if not self._waiting:
            loop.call_soon(self._flush)
        self._waiting.setdefault((peer, lane), []).append(parcel)
        return await parcel.answer

    def _flush(self) -> None:
        waiting, self._waiting = self._waiting, {}
        for (peer, _), parcels in waiting.items():
            for together in _messages(parcels):
                task = asyncio.ensure_future(self._deliver(peer, together))
                self._sending.add(task)
                task.add_done_callback(self._sending.discard)

    async def _deliver(self, peer: PeerId, parcels: Sequence[_Parcel[_R, _A]]) -> None:
        """Send records in one message; each sender gets its answer, or the error."""
        tensors = [tensor for parcel in parcels for tensor in parcel.tensors]
        try:
            answers = await self._send(peer, [parcel.record for parcel in parcels], tensors)
        except Exception as error:  # noqa: BLE001 - each sender raises it
            for parcel in parcels:
                if not parcel.answer.done():
                    parcel.answer.set_exception(error)
            return
        for parcel, answer in zip(parcels, answers, strict=True):
            if not parcel.answer.done():  # its sender may have been cancelled
                parcel.answer.set_result(answer)


def _messages(parcels: Sequence[_Parcel[_R, _A]]) -> Iterator[list[_Parcel[_R, _A]]]:
    """Cut records into messages within the limits of their bytes and their number."""
    together: list[_Parcel[_R, _A]] = []
    num_bytes = body_bytes = 0
    for parcel in parcels:
        num_bytes, body_bytes = num_bytes + parcel.num_bytes, body_bytes + parcel.body_bytes
        if together and (len(together) == MAX_TOGETHER or num_bytes > _MAX_BYTES or body_bytes > _MAX_BODY_BYTES):
            yield together
            together, num_bytes, body_bytes = [], parcel.num_bytes, parcel.body_bytes
        together.append(parcel)
    yield together


class StepOutbox:
    """Sends steps to servers. An error in a server's answer concerns only the step that it names."""

    def __init__(self, ask: Callable[[PeerId, SessionSteps, Sequence[Tensor]], Awaitable[SessionStepsReply]]) -> None:
        self._ask = ask
        self._outbox = Outbox[SessionStep, StepRefusal | None](self._send)

    async def send(self, peer: PeerId, step: SessionStep, tensors: Sequence[Tensor], *, alone: bool = False) -> None:
        """Send a step; raise the error that the server answers. If `alone`, send it without other sessions' steps.

        A server that needs earlier steps first waits for them only if this delays no other session.
        """
        while True:
            refusal = await self._outbox.put(peer, step, tensors, lane=step.session if alone else "")
            if refusal is None:
                return
            if not refusal.is_early or alone:
                raise from_wire(refusal.error, refusal.reason)
            alone = True

    async def _send(
        self, peer: PeerId, steps: list[SessionStep], tensors: list[Tensor]
    ) -> Sequence[StepRefusal | None]:
        reply = await self._ask(peer, SessionSteps(steps=steps), tensors)
        refusals = {refusal.index: refusal for refusal in reply.refused}
        return [refusals.get(index) for index in range(len(steps))]
