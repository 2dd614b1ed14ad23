"""Stages that a coordinator borrows: it fetches their weights from their servers, to settle contradictions."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final

from torch import Tensor

from lightning_swarm.core.errors import PeerError, SwarmError
from lightning_swarm.core.tasks import cancel_and_wait
from lightning_swarm.model.confirmation import Confirmation
from lightning_swarm.model.state_proof import parts_of_weights
from lightning_swarm.network import PeerId
from lightning_swarm.protocol.messages.state import StateRequest
from lightning_swarm.protocol.rpc import STATE
from lightning_swarm.protocol.run_state import RunState
from lightning_swarm.protocol.serialization import named
from lightning_swarm.server.context import ServerContext
from lightning_swarm.server.stage import Stage
from lightning_swarm.server.stage_builder import PeerModel
from lightning_swarm.server.step_handlers import StepHandlers

_log = logging.getLogger(__name__)

_ASKING: Final = 1 / 8  # share of a call's timeout within which all servers are asked, one after another
_PROVING: Final = 1 / 4  # share of a call's timeout for a proof of the received weights


class BorrowedStages:
    """Builds stages of the run that other servers hold, and fetches their weights."""

    def __init__(self, context: ServerContext, steps: StepHandlers, model: Callable[[], PeerModel]) -> None:
        self._context, self._transport, self._events = context, context.transport, context.events
        self._steps, self._model = steps, model
        # stage index -> ((generation, version) of its weights, stage)
        self._stages: dict[int, tuple[tuple[int, int], Stage]] = {}
        self._borrowing = asyncio.Lock()
        self._failures = Counter[PeerId]()  # server -> failed or late answers; servers with the fewest are asked first

    async def get(self, index: int, version: int) -> Stage:
        """Return a stage with the weights of a version: this server's own stage, or a borrowed one."""
        if index in self._steps.stages:
            return self._steps.stage(index)
        async with self._borrowing:
            run = self._context.membership.run
            wanted = (run.manifest.generation, version)
            loaded, stage = self._stages.get(index, (None, None))
            if stage is None:
                stage = await self._context.compute(lambda: self._model().build_borrowed(run.manifest, index))
            if loaded != wanted:
                await self._fetch(run, stage, version)
                self._stages = {index: (wanted, stage)}  # keep only one, because a stage takes much memory
            return stage

    async def _fetch(self, run: RunState, stage: Stage, version: int) -> None:
        """Load the weights of a version into a borrowed stage."""
        self._stages.pop(stage.index, None)  # until it is loaded, its weights belong to no version
        request = StateRequest(
            stage_index=stage.index, version=version, generation=run.manifest.generation, optimizer=False
        )
        peers = sorted((member.peer_id for member in run.rosters[stage.index]), key=self._failures.__getitem__)
        weights = await self._fetch_from_any(peers, request)

        def load() -> None:
            stage.enter_generation(version, run.selection)
            stage.load_weights(weights)

        await self._context.compute(load)

    async def _fetch_from_any(self, peers: Sequence[PeerId], request: StateRequest) -> dict[str, Tensor]:
        """Ask servers in turn until one sends confirmed weights, which are returned; raise `PeerError` if none does."""
        peers_left, running = list(peers), dict[asyncio.Task[dict[str, Tensor]], PeerId]()
        pause_s = self._context.limits.call_timeout * _ASKING / max(1, len(peers))
        try:
            while peers_left or running:
                if peers_left:
                    peer = peers_left.pop(0)
                    running[asyncio.create_task(self._fetch_from(peer, request))] = peer
                done, late = await asyncio.wait(
                    running, timeout=pause_s if peers_left else None, return_when=asyncio.FIRST_COMPLETED
                )
                self._failures.update(running[task] for task in late if not done)  # no answer in the pause
                for task in done:
                    peer = running.pop(task)
                    try:
                        return task.result()
                    except SwarmError as error:
                        self._failures[peer] += 1
                        _log.info("%s did not send confirmed weights of stage %d: %s", peer, request.stage_index, error)
        finally:
            await cancel_and_wait(running)
        raise PeerError(f"no server sent confirmed weights of stage {request.stage_index}, version {request.version}")

    async def _fetch_from(self, peer: PeerId, request: StateRequest) -> dict[str, Tensor]:
        """Fetch a server's weights, and have other servers confirm them."""
        limits = self._context.limits
        state, tensors = await STATE.ask(
            self._transport, peer, request, timeout=limits.call_timeout, max_bytes=limits.max_message_bytes
        )
        weights = named(state.names, tensors)
        # False weights from a malicious server would convict a server that computed with the true weights.
        timeout = limits.call_timeout * _PROVING
        confirmation = Confirmation(self._transport, self._context.membership.run, timeout, self._events)
        await confirmation.check(peer, request, lambda: parts_of_weights(weights))
        return weights
