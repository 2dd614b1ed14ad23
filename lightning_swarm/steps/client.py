"""A trainer's side of the steps: ask for a place, report what is through, wait for records."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from lightning_swarm.errors import DeadlineExceeded, ProtocolError
from lightning_swarm.network import Transport
from lightning_swarm.steps import DONE, GRANT, RECORD, SELECT
from lightning_swarm.types import (
    BatchDone,
    BatchDoneReply,
    Grant,
    GrantReply,
    GrantRequest,
    Manifest,
    Receipt,
    Record,
    RecordRequest,
    Selection,
    SelectRequest,
    decode,
    encode,
)


class StepClient:
    """Talks to the coordinator.

    Args:
        transport: This trainer's network.
        manifest: Of the run.
        timeout: Seconds for a step to be decided once it closes.
    """

    def __init__(self, transport: Transport, manifest: Manifest, *, timeout: float) -> None:
        self._transport = transport
        self._coordinator = manifest.coordinator
        self._timeout = timeout
        self.version = manifest.first_step  # of the newest weights that this trainer knows of

    async def select(self, selection: Selection) -> None:
        """Train what `selection` says, from the open step on; nothing may be granted in it yet."""
        await self._ask(SELECT, encode(SelectRequest(step=self.version, selection=selection)))

    async def grant(self, num_samples: int, gradient_scale: float = 1.0) -> Grant:
        """A place in the open step; waits for the next step when this one is full."""
        while True:
            request = encode(GrantRequest(step=self.version, num_samples=num_samples, gradient_scale=gradient_scale))
            reply = decode(await self._ask(GRANT, request), GrantReply)
            if reply.grant is not None:
                return reply.grant
            if reply.wait is None:
                raise ProtocolError("a coordinator grants or says wait; it did neither")
            await self.record(reply.wait.step)

    async def done(
        self,
        lease: int | None,
        completed: Sequence[Receipt],
        *,
        withdrawn: bool = False,
        close: bool = False,
        total_weight: float | None = None,
        hyperparameters: list[dict[str, Any]] | None = None,
    ) -> bool:
        """Report a batch; True when its step closes now. See `BatchDone` for the arguments."""
        request = BatchDone(
            step=self.version,
            lease=lease,
            completed=list(completed),
            withdrawn=withdrawn,
            close=close,
            total_weight=total_weight,
            hyperparameters=hyperparameters,
        )
        return decode(await self._ask(DONE, encode(request)), BatchDoneReply).closing

    async def record(self, step: int) -> Record:
        """The record of `step`, when it is decided and applied.

        Raises:
            StepError: It could not be decided.
        """
        record = decode(await self._ask(RECORD, encode(RecordRequest(step=step))), Record)
        self.version = max(self.version, record.step + 1)
        return record

    async def _ask(self, method: str, body: bytes) -> bytes:
        try:
            return await self._transport.call(self._coordinator, method, body, timeout=self._timeout)
        except asyncio.CancelledError:
            raise
        except DeadlineExceeded as error:
            raise DeadlineExceeded(
                f"the coordinator {self._coordinator} did not answer {method} in {self._timeout:g} s: {error}"
            ) from error
