"""A trainer's side of the steps: ask for a place, report what is through, wait for records."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeAlias

from torch import Tensor

from lightning_swarm.errors import DeadlineExceeded, ProtocolError, RunOver
from lightning_swarm.network import MAX_STREAM_BYTES, Message, Transport
from lightning_swarm.run_state import RunState
from lightning_swarm.steps import ARMED, DONE, GRANT, METRICS, QUIT, RECORD, RENEW, SELECT, TAKE_METRICS
from lightning_swarm.types.batches import (
    BatchArmed,
    BatchDone,
    BatchDoneReply,
    BatchMetrics,
    Grant,
    GrantReply,
    GrantRequest,
    Logged,
    MetricsRequest,
    MetricState,
    Quit,
    RecordReply,
    RecordRequest,
    SelectRequest,
)
from lightning_swarm.types.calls import Receipt
from lightning_swarm.types.runs import RestartRequest, Selection
from lightning_swarm.types.steps import Record
from lightning_swarm.types.wire import decode, encode

Metrics: TypeAlias = tuple[Sequence[MetricState], Sequence[Tensor]]
"""What a batch added to metrics: each one's states, and the tensors of all of them."""


class StepClient:
    """Talks to the coordinator.

    Args:
        transport: This trainer's network.
        run: The run as this trainer knows it.
        timeout: Seconds for the coordinator to answer.
        on_record: Takes note of a record, before anything is sent for the step after it.

    Attributes:
        newest: The newest record that this trainer knows of.
        logs: What other trainers logged of the batches in records that came since these were taken; for the lead.
        metrics: Likewise, what their batches added to torchmetrics objects.
        hyperparameters: At the lead: tells with which ones to step.
    """

    def __init__(
        self, transport: Transport, run: RunState, *, timeout: float, on_record: Callable[[Record], Awaitable[None]]
    ) -> None:
        self._transport = transport
        self._coordinator = run.manifest.coordinator
        self._timeout = timeout
        self._on_record = on_record
        self.run = run
        self._places: dict[int, int] = {}  # of the batches that are under way, by lease
        self.newest: Record | None = None
        self.logs: list[Logged] = []
        self.metrics: list[Metrics] = []
        self.hyperparameters: Callable[[], list[dict[str, Any]]] | None = None

    @property
    def version(self) -> int:
        """Of the newest weights that this trainer knows of."""
        return self.run.version

    def go_back(self, request: RestartRequest) -> None:
        """Take part in the run's next generation."""
        self.run.go_back(request)
        self.newest, self.logs, self.metrics = None, [], []
        self._places.clear()

    async def select(self, selection: Selection) -> None:
        """Train what `selection` says, from the open step on; nothing may be granted in it yet."""
        await self._ask(
            SELECT,
            encode(SelectRequest(generation=self.run.manifest.generation, step=self.version, selection=selection)),
        )

    async def grant(self, num_samples: int, gradient_scale: float = 1.0) -> Grant:
        """A place in the open step; waits for the next step when this one is full.

        Raises:
            RunOver: The run's last step is decided.
        """
        while True:
            request = GrantRequest(
                step=self.version,
                num_samples=num_samples,
                generation=self.run.manifest.generation,
                gradient_scale=gradient_scale,
            )
            reply = decode(await self._ask(GRANT, encode(request)), GrantReply)
            if reply.grant is not None:
                self._places[reply.grant.lease] = reply.grant.first
                return reply.grant
            if reply.over:
                raise RunOver(f"the run's last step is {self.version - 1}: there is no place for another batch")
            if reply.wait is None:
                raise ProtocolError("a coordinator grants, says wait or says that the run is over; it did none of it")
            if reply.wait.step is not None:
                await self.record(reply.wait.step)

    async def send_metrics(self, lease: int, metrics: Metrics) -> None:
        """Leave what a batch added to metrics where the lead finds it if the batch counts. Before `done`."""
        states, tensors = metrics
        generation = self.run.manifest.generation
        head = BatchMetrics(generation=generation, step=self.version, lease=lease, metrics=list(states))
        message = Message(encode(head), tuple(tensors))
        await self._transport.stream(self._coordinator, METRICS, message, timeout=self._timeout, max_bytes=0)

    async def _take_metrics(self, step: int, index: int) -> Metrics:
        request = MetricsRequest(generation=self.run.manifest.generation, step=step, index=index)
        message = await self._transport.stream(
            self._coordinator, TAKE_METRICS, Message(encode(request)), timeout=self._timeout, max_bytes=MAX_STREAM_BYTES
        )
        return decode(message.body, BatchMetrics).metrics, message.tensors

    async def armed(self, lease: int, receipts: Sequence[Receipt], logs: Sequence[Logged] = ()) -> None:
        """From now on the batch counts without this trainer, too. See `BatchArmed` for the arguments.

        Raises:
            LeaseRevoked: As in `done`.
        """
        request = BatchArmed(
            generation=self.run.manifest.generation,
            step=self.version,
            lease=lease,
            receipts=list(receipts),
            logs=list(logs),
        )
        await self._ask(ARMED, encode(request))

    async def done(
        self,
        lease: int | None,
        completed: Sequence[Receipt],
        *,
        withdrawn: bool = False,
        begun: bool = False,
        close: bool = False,
        total_weight: float | None = None,
        logs: Sequence[Logged] = (),
    ) -> bool:
        """Report a batch; True when its step closes now. See `BatchDone` for the arguments.

        Raises:
            LeaseRevoked: It was struck from its step, for nothing was heard of this trainer. It may run again.
        """
        request = BatchDone(
            step=self.version,
            lease=lease,
            completed=list(completed),
            withdrawn=withdrawn,
            close=close,
            total_weight=total_weight,
            generation=self.run.manifest.generation,
            first=self._places.get(lease, 0) if lease is not None else 0,
            begun=begun,
            logs=list(logs),
        )
        closing = decode(await self._ask(DONE, encode(request)), BatchDoneReply).closing
        if lease is not None:
            self._places.pop(lease, None)
        return closing

    async def record(self, step: int) -> Record | None:
        """The record of `step` or a newer one, when it is decided and applied; None: the step takes batches again.

        Raises:
            StepError: It could not be decided.
        """
        while True:
            hyperparameters = self.hyperparameters() if self.hyperparameters is not None else None
            request = RecordRequest(step=step, generation=self.run.manifest.generation, hyperparameters=hyperparameters)
            # Each poll is answered in time; how long they go on is the coordinator's to bound.
            reply = decode(await self._ask(RECORD, encode(request)), RecordReply)
            if reply.record is not None:
                self.newest = reply.record
                if reply.record.step >= self.version:
                    self.run.check(reply.record)
                    await self._on_record(reply.record)
                    self.run.apply(reply.record)
                    self.logs += reply.logs
                    self.metrics += [await self._take_metrics(reply.record.step, i) for i in range(reply.num_metrics)]
                return reply.record
            if not reply.closing:
                return None

    async def renew(self) -> None:
        """The lead validates or saves: the record goes on waiting for it."""
        await self._ask(RENEW, b"")

    async def quit(self, reason: str) -> None:
        """This trainer's loop ended by an error."""
        await self._ask(QUIT, encode(Quit(reason=reason[:2000])))

    async def _ask(self, method: str, body: bytes) -> bytes:
        try:
            return await self._transport.call(self._coordinator, method, body, timeout=self._timeout)
        except asyncio.CancelledError:
            raise
        except DeadlineExceeded as error:
            raise DeadlineExceeded(
                f"the coordinator {self._coordinator} did not answer {method} in {self._timeout:g} s: {error}"
            ) from error
