"""The end of a step: freeze, average, decide, apply."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from lightning_swarm.events import EventLog
from lightning_swarm.run_state import RunState
from lightning_swarm.steps.gate import Gate
from lightning_swarm.steps.policy import OpenStep, clip_factor, next_rosters
from lightning_swarm.steps.proposer import Proposer
from lightning_swarm.steps.servers import Servers
from lightning_swarm.steps.snapshots import SnapshotOrders
from lightning_swarm.types.runs import Selection
from lightning_swarm.types.steps import Record


class Closer:
    """Ends steps, one after the other.

    Args:
        run: As its own server knows it.
        servers: All that hold a stage.
        gate: Who wants to join.
        proposer: Has the records decided.
        snapshots: When the servers take some.
        spawn: Runs work in a task that has an owner.
        lead_asks: Waits until the lead's loop asks for a step's record; with which hyperparameters to step.
        events: Of the coordinator.
    """

    def __init__(
        self,
        run: RunState,
        servers: Servers,
        gate: Gate,
        proposer: Proposer,
        snapshots: SnapshotOrders,
        *,
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
        lead_asks: Callable[[OpenStep], Awaitable[list[dict[str, Any]]]],
        events: EventLog,
    ) -> None:
        self._run = run
        self._servers = servers
        self._gate = gate
        self._proposer = proposer
        self._snapshots = snapshots
        self._spawn = spawn
        self._lead_asks = lead_asks
        self._events = events

    async def finish(self, step: OpenStep, selection: Selection | None, reselected: Selection | None) -> Record:
        """Decide a step's record and have it applied.

        Args:
            step: All of its batches are through.
            selection: What it trains.
            reselected: Likewise, if it is not what trained in the step before.

        Raises:
            SwarmError: It could not be decided.
        """
        await self._proposer.begin()
        closing, version_hashes = await self._servers.close(step, selection)
        begin_s = _now_s()
        listening = self._gate.listen(closing, reselected, version_hashes)
        hearing = [self._spawn(one) for one in listening]
        squared_norm = await self._servers.average(closing)
        await self._gate.heard(closing, hearing, averaging_s=_now_s() - begin_s)
        hyperparameters = await self._lead_asks(step)
        newcomers = await self._gate.newcomers(closing)
        next_roster = next_rosters(self._run.rosters, leaving=self._gate.leaving, newcomers=newcomers)
        record = Record(
            closing=closing,
            outcome="apply" if math.isfinite(squared_norm) else "skip",
            squared_norm=squared_norm,
            clip_factor=clip_factor(squared_norm, self._run.manifest.gradient_clip_norm),
            hyperparameters=hyperparameters,
            selection=reselected,
            next_roster=next_roster,
            next_voters=self._run.voters,
            next_trainers=self._run.trainers,
            newcomers=newcomers,
            snapshot=await self._snapshots.order(closing.step, next_roster),
        )
        await self._proposer.decide(record)
        await self._servers.apply(record)
        self._gate.let_in(newcomers)
        return record


def _now_s() -> float:
    return asyncio.get_running_loop().time()
