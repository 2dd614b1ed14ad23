"""How long who coordinates waits, and for whom: callers are held until something changes; the lead is waited for."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from lightning_swarm.clock import now_s
from lightning_swarm.errors import StepError, SwarmError
from lightning_swarm.network import Transport
from lightning_swarm.network.liveness import alive_among
from lightning_swarm.run_state import RunState
from lightning_swarm.steps.policy import OpenStep


class Changes:
    """What calls are held for.

    Args:
        timeout: Seconds that a caller waits for its answer.

    Attributes:
        failure: Why nothing goes on here: whoever asks is told.
    """

    def __init__(self, timeout: float) -> None:
        self._hold_s = timeout / 2  # shorter than the caller waits
        self._condition = asyncio.Condition()
        self.failure: SwarmError | None = None

    def check(self) -> None:
        """Raise what went wrong, if something did."""
        if self.failure is not None:
            raise self.failure

    async def fail(self, error: SwarmError) -> None:
        """Nothing goes on here; the first reason stays."""
        self.failure = self.failure or error
        await self.notify()

    async def end(self, error: SwarmError) -> None:
        """Nothing goes on here, whatever the reason was before."""
        self.failure = error
        await self.notify()

    async def go_back(self) -> None:
        """The run entered its next generation, where nothing went wrong yet."""
        self.failure = None
        await self.notify()

    async def notify(self) -> None:
        """Something changed."""
        async with self._condition:
            self._condition.notify_all()

    async def until(self, reached: Callable[[], bool], *, look_again_s: float | None = None) -> bool:
        """Wait for as long as a caller may be held; whether it was reached. Raises what the step failed with.

        Args:
            reached: Looked at when something changes.
            look_again_s: After so many seconds it is looked at though nothing changed.
        """
        try:
            async with asyncio.timeout(self._hold_s):
                if look_again_s is not None and look_again_s < self._hold_s:
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(look_again_s):
                            await self._until(reached)
                await self._until(reached)
        except TimeoutError:
            return False
        self.check()
        return True

    async def _until(self, reached: Callable[[], bool]) -> None:
        async with self._condition:
            await self._condition.wait_for(lambda: reached() or self.failure is not None)

    async def next(self, *, until_s: float) -> None:
        """Wait for the next change, or that time on the loop's clock."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(until_s), self._condition:
                await self._condition.wait()


async def _nobody() -> str:
    return "nobody may"


class LeadWatch:
    """Whether the lead is there, and which record its loop asks for.

    Args:
        run: As the coordinator's server knows it.
        changes: Also told when the lead asks.
        timeout: Seconds that it may be silent.
    """

    def __init__(self, run: RunState, changes: Changes, *, timeout: float) -> None:
        self._run = run
        self._changes = changes
        self._timeout = timeout
        self._heard_s = 0.0
        self._restarted = False
        self._stepped_with: dict[int, list[dict[str, Any]]] = {}  # hyperparameters, by steps that are not decided yet
        self._permits: int | None = None  # the newest step whose record its loop is ready for
        self._knows = 0  # the version that it does
        self.epoch: int | None = None  # of its loop, once it was told
        self.deciding: int | None = None  # the step whose record was let come, and is not there yet

    def heard(self) -> None:
        """It is there."""
        self._heard_s = now_s()

    def check(self) -> None:
        """Refuse to wait on.

        Raises:
            StepError: It was silent for too long.
        """
        if now_s() >= self._heard_s + self._timeout:
            raise StepError(
                f"the lead {self._run.manifest.lead} was not heard of for {self._timeout:g} s. Raise "
                "`Limits.lead_timeout` if what it does between two batches takes longer."
            )

    async def until_gone(
        self,
        transport: Transport,
        *,
        silence_s: float,
        appoint: Callable[[], Awaitable[str]] = _nobody,
        appoint_after_s: float = math.inf,
    ) -> str:
        """Wait until nothing was heard of it for its timeout, neither of its loop nor of its process; why to end then.

        One whose loop is busy answers pings, and is waited for as long as it does. Where this peer itself was frozen,
        that time does not count.

        Args:
            transport: Of who coordinates.
            silence_s: Seconds between two looks, and for an answer.
            appoint: Has another peer lead; why none does, in words.
            appoint_after_s: Seconds of silence before that.

        Returns:
            Nothing, if another peer leads by now.
        """
        lead, silent_s, tried_s, why = self._run.manifest.lead, 0.0, 0.0, ""
        while True:
            asked_s = now_s()
            is_heard = not self._restarted and (
                self._heard_s + silence_s > asked_s or bool(await alive_among(transport, [lead], timeout=silence_s))
            )
            is_over = not is_heard and (self._restarted or silent_s >= self._timeout)
            if is_over or (not is_heard and silent_s >= tried_s + min(appoint_after_s, self._timeout)):
                tried_s, why = silent_s, await appoint()
                if not why:
                    self._heard_s, self._restarted = 0.0, False
                    return ""
            if is_over:
                break
            await asyncio.sleep(silence_s)
            silent_s = 0.0 if is_heard else silent_s + min(now_s() - asked_s, 2 * silence_s)
            tried_s = min(tried_s, silent_s)
        gone = "was started again" if self._restarted else f"was not heard of for {self._timeout:g} s"
        return (
            f"the lead {lead} {gone}, and nobody takes it over: {why}. Start the run again with `ckpt_path`. A peer "
            "that was started by a program with data can take a run over. Raise `Limits.lead_timeout` to wait longer "
            "for a lead that may come back."
        )

    def note_restart(self) -> None:
        """Its process is another one, which knows nothing of the run."""
        self._restarted = True

    async def ask(
        self, step: int, stepped_with: Mapping[int, list[dict[str, Any]]], *, version: int, epoch: int
    ) -> None:
        """Its loop waits for the end of a step.

        Args:
            step: Which.
            stepped_with: Hyperparameters, of this step and perhaps of the one before.
            version: The newest that it knows.
            epoch: That it is in.
        """
        self.epoch = epoch
        self._stepped_with.update(stepped_with)
        await self.permit(step, version=version)

    async def permit(self, step: int, *, version: int) -> None:
        """Its loop is ready for the record of a step, and of those before."""
        self._permits = step
        self.note_version(version)
        await self._changes.notify()

    def go_on(self) -> None:
        """Its loop waits for no record: it validates, perhaps, until it asks again."""
        self._permits = None

    def said_how(self, step: int) -> bool:
        """Whether it gave the hyperparameters of a step."""
        return step in self._stepped_with

    def note_version(self, version: int) -> None:
        """It knows of a version."""
        self._knows = max(self._knows, version)

    def has_news(self, step: int) -> bool:
        """Whether a record came that it does not know."""
        return step >= self._knows

    def go_back(self) -> None:
        """The run entered its next generation."""
        self._stepped_with, self._permits, self._knows, self.deciding = {}, None, 0, None

    def decided(self, step: int) -> None:
        """A record is applied."""
        self.deciding = None
        self._stepped_with = {of: values for of, values in self._stepped_with.items() if of > step}

    async def asks_for(self, step: OpenStep) -> list[dict[str, Any]]:
        """Wait until its loop is ready for the record, so that it sees every step and validates frozen weights.

        Returns:
            The hyperparameters to step with, for each parameter group.

        Raises:
            StepError: It was silent for too long.
        """
        while not self._is_ready(step.step):
            self.check()
            await self._changes.next(until_s=self._heard_s + self._timeout)
        self.deciding = step.step
        return self._stepped_with[step.step]

    def _is_ready(self, step: int) -> bool:
        permits = self._permits is not None and self._permits >= step
        return permits and self._knows >= step and step in self._stepped_with
