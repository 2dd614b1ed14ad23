"""How far a trainer trusts the results and reports of servers."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from lightning_swarm.client.pipeline.replay_buffer import GivenResult, Microbatch
from lightning_swarm.client.pipeline.router import PeerCharge, StageRouter
from lightning_swarm.model.fidelity.leftovers import Left, split_left
from lightning_swarm.network import PeerId
from lightning_swarm.protocol import serialization
from lightning_swarm.protocol.compression import decoded
from lightning_swarm.protocol.messages.calls import Direction

if TYPE_CHECKING:
    from lightning_swarm.client.pipeline.call_factory import CallFactory, CallMicrobatches, PipelineConfig
    from lightning_swarm.client.pipeline.microbatch_run import MicrobatchRun

Result: TypeAlias = tuple[serialization.Tree, list[bool]]
"""A result in wire form, and which of its tensors require grad; no flags after a backward."""

Opened: TypeAlias = tuple[Any, Left]
"""A microbatch's output, decoded, and the values that its forward left."""

Forwards: TypeAlias = "Callable[[Sequence[MicrobatchRun]], Coroutine[Any, Any, list[Result]]]"
"""Computes the forwards of microbatches, and returns their results in order."""


class ResultCheck:
    """Trusts all servers; a subclass trusts them less.

    A pipeline asks it for the peer that decides in doubt, the times to route by, the stage to blame for a refused call,
    the evidence of a result for the coordinator, and the contents of results.
    """

    @property
    def by_referee(self) -> Forwards | None:
        """Forwards by the peer whose own computation decides in doubt; None if no server is doubted."""
        return None

    def expected(self, router: StageRouter, charge: PeerCharge) -> tuple[float, float]:
        """Return the seconds of a microbatch at its peer, and the peer's queue, as far as its reports are trusted."""
        return charge.expected_s, router.peers[charge.peer].queued

    def suspect(self, stage: int, direction: Direction, last_stage: int) -> int | None:
        """Return the stage whose result is to blame if all servers of `stage` refuse a call; None: the call is."""
        return None

    async def received(
        self, server: PeerId, direction: Direction, result: Result, microbatch: Microbatch
    ) -> GivenResult | None:
        """Return the evidence of a result that only this trainer received; None: it reports none.

        A subclass may refuse gradients of a microbatch's inputs, by `PeerError`.
        """
        return None

    def opened_all(self, results: list[Result], call: CallMicrobatches, factory: CallFactory) -> list[Opened]:
        """Open the results of a call's forwards. A subclass may replace results of wrong forms."""
        return [opened(result, factory.config) for result in results]


def opened(result: Result, config: PipelineConfig) -> Opened:
    """Return a microbatch's output, and the values that its forward left."""
    output, left = split_left(decoded(result[0], config.codecs.activations, config.device))
    left.take_aliases()  # there is no next stage
    return output, left
