"""Watches the lead: appoints another one if it is gone, and holds a record until the lead's loop is ready for it."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Any

from lightning_swarm.coordinator.context import CoordinatorContext
from lightning_swarm.coordinator.step.open_step import OpenStep
from lightning_swarm.coordinator.takeover import appoint
from lightning_swarm.core.clock import now_s
from lightning_swarm.core.errors import StepError
from lightning_swarm.network import PeerId
from lightning_swarm.network.liveness import alive_among


class LeadLiveness:
    """Tracks whether the lead is alive, for which records its loop is ready, and the hyperparameters that it sent."""

    # The permit. A record changes the weights, so it is decided only while the lead's loop is ready for it: while the
    # lead waits for a record or, with delayed steps, trains. A permit names the last step that it covers. The
    # coordinator withdraws it when it answers the lead, because the lead's loop then continues, and may validate.
    # Without delayed steps, a permit covers one record only.

    def __init__(self, context: CoordinatorContext) -> None:
        self._transport, self._run, self._changes = context.transport, context.run, context.changes
        limits = context.limits
        self._timeout, self._silence_s = limits.lead_timeout, limits.silence_timeout  # seconds
        self._appoint_after_s = min(limits.revive_timeout, limits.lead_timeout)  # silence before an attempt to appoint
        self._alive_s = 0.0  # time of the newest sign of life
        self._restarted = False  # the lead's process is new, and knows nothing of the run
        self._appointed: PeerId | None = None  # the next lead, once it has answered this coordinator
        self._permitted_until: int | None = None  # the newest step that the permit covers; None: there is no permit
        self.hyperparameters: dict[int, list[dict[str, Any]]] = {}  # undecided step -> a dict for each parameter group
        self.known_version = 0  # the newest version that the lead knows
        self.epoch: int | None = None  # epoch of the lead's loop, once it is known
        self.resumable: Collection[int] | None = None  # snapshots from which its loop could continue, if reported
        self.deciding_step: int | None = None  # the step whose record was permitted, and is not applied yet

    def note_alive(self) -> None:
        """Record a sign of life."""
        self._alive_s = now_s()

    def note_restart(self) -> None:
        """Record that the lead was restarted, and knows nothing of the run."""
        self._restarted = True

    def check(self) -> None:
        """Raise StepError if the lead was silent for too long."""
        if now_s() >= self._alive_s + self._timeout:
            raise StepError(
                f"the lead {self._run.manifest.lead} was silent for {self._timeout:g} s. Raise `Limits.lead_timeout` "
                "if its work between two batches takes longer."
            )

    # ------------------------------------------------------------------ a lead that is gone

    async def watch_and_replace(self) -> str:
        """Watch the lead until another one is appointed, and return ""; or return why the run must end instead."""
        # While the lead answers, nothing happens. If it does not, another lead is appointed:
        # - at once if servers already follow a next lead that has not answered this coordinator (`is_unconfirmed`);
        # - again whenever the silence has lasted another `_appoint_after_s` (`is_due`);
        # - for the last time if the lead was restarted, or was silent for `_timeout` (`is_last`). If that fails,
        #   the run ends.
        lead = self._run.manifest.lead
        silent_s = attempt_s = 0.0  # length of the silence: now, and at the newest attempt
        while True:
            asked_s, is_unconfirmed = now_s(), self._is_unconfirmed  # `asked_s`: time of this round
            is_alive = not (self._restarted or is_unconfirmed) and await self._is_alive(lead)
            is_last = not is_alive and (self._restarted or silent_s >= self._timeout)
            is_due = not is_alive and silent_s >= attempt_s + self._appoint_after_s
            if is_last or is_unconfirmed or is_due:
                attempt_s, why_not = silent_s, await self._appoint(is_last=is_last)
                if not why_not:
                    return ""
                if is_last:
                    return self._why_lost(lead, why_not)
            await asyncio.sleep(self._silence_s)
            # Time during which this peer itself was frozen does not count.
            silent_s = 0.0 if is_alive else silent_s + min(now_s() - asked_s, 2 * self._silence_s)
            attempt_s = min(attempt_s, silent_s)

    @property
    def _is_unconfirmed(self) -> bool:
        """Whether servers already follow a next lead that has not answered this coordinator yet."""
        return self._run.is_rolling_back and self._run.manifest.lead != self._appointed

    async def _is_alive(self, lead: PeerId) -> bool:
        """Return whether the lead called just now, or answers a ping, as a lead whose loop is busy does."""
        if self._alive_s + self._silence_s > now_s():
            return True
        return bool(await alive_among(self._transport, [lead], timeout=self._silence_s))

    async def _appoint(self, *, is_last: bool) -> str:
        """Try to appoint another lead; return why there is none, or ""."""
        why_not = await appoint(self._transport, self._run, timeout=self._silence_s, is_last=is_last)
        if not why_not:
            # The new lead has given no sign of life yet, so it is pinged next. Calls that wait for the former lead may
            # fail meanwhile (`check`), but the rollback ends them anyway.
            self._alive_s, self._restarted, self._appointed = 0.0, False, self._run.manifest.lead
        return why_not

    def _why_lost(self, lead: PeerId, why_not: str) -> str:
        gone = "was restarted" if self._restarted else f"was silent for {self._timeout:g} s"
        return (
            f"the lead {lead} {gone}, and no peer takes the run over: {why_not}. Start the run again with `ckpt_path`. "
            "Only a peer whose program has the data can take a run over. Raise `Limits.lead_timeout` to wait longer "
            "for a lead that may come back."
        )

    # ------------------------------------------------------------------ the permit

    async def permit(self, step: int, *, version: int) -> None:
        """Permit the records of all steps up to `step`: the lead's loop, which knows `version`, is ready for them."""
        self._permitted_until = step
        self.known_version = max(self.known_version, version)
        await self._changes.notify()

    def withdraw_permit(self) -> None:
        """Permit no record until the lead asks again, because its loop continues and may validate."""
        self._permitted_until = None

    def note_decided(self, step: int) -> None:
        """Record that a step's record is applied."""
        self.deciding_step = None
        self.hyperparameters = {later: values for later, values in self.hyperparameters.items() if later > step}

    async def wait_until_ready(self, step: OpenStep) -> list[dict[str, Any]]:
        """Wait until the lead's loop is ready for the record; return the hyperparameters of each parameter group."""
        while not self._is_ready(step.step):
            self.check()
            await self._changes.next(until_s=self._alive_s + self._timeout)
        self.deciding_step = step.step
        return self.hyperparameters[step.step]

    def _is_ready(self, step: int) -> bool:
        """Return whether a step's record is permitted and has hyperparameters, and the lead has all earlier records."""
        is_permitted = self._permitted_until is not None and self._permitted_until >= step
        return is_permitted and self.known_version >= step and step in self.hyperparameters
