"""The policy by which a trainer opens servers' results, and decides which server to doubt."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from lightning_swarm.client.pipeline.replay_buffer import Microbatch, ResultEvidence
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
"""A microbatch's decoded output, and the values that its forward left on modules."""

Forwards: TypeAlias = "Callable[[Sequence[MicrobatchRun]], Coroutine[Any, Any, list[Result]]]"
"""Computes the forwards of microbatches, and returns their results in order."""


class ResultCheck:
    """Trusts all servers. Audited runs use the subclass `CheckedResults`, because their servers may send false results.

    Calls of a microbatch (`StageCalls`) record evidence of results, for audits, and name the stage to blame if servers
    refuse a call. `PipelineContext` bounds the reported times, and `PipelineCall` opens all results of a call.
    """

    @property
    def by_referee(self) -> Forwards | None:
        """Computes forwards on the peer that decides if results are doubtful; None if all servers are trusted."""
        return None

    def expected(self, router: StageRouter, charge: PeerCharge) -> tuple[float, float]:
        """Return a microbatch's expected seconds at its peer, and the peer's queue, as far as reports are trusted."""
        return charge.expected_s, router.peers[charge.peer].queued

    def suspect(self, stage: int, direction: Direction, last_stage: int) -> int | None:
        """Return the stage whose result is to blame if all servers of `stage` refuse a call; None blames the call."""
        return None

    async def evidence_of(
        self, server: PeerId, direction: Direction, result: Result, microbatch: Microbatch
    ) -> ResultEvidence | None:
        """Return the evidence of a result that only this trainer received; None if no audit needs any.

        A subclass may raise `PeerError` for gradients that do not fit the microbatch's inputs.
        """
        return None

    def opened_all(self, results: list[Result], call: CallMicrobatches, factory: CallFactory) -> list[Opened]:
        """Open the results of a call's forwards. A subclass may have results of a wrong form computed again."""
        return [opened(result, factory.config) for result in results]


def opened(result: Result, config: PipelineConfig) -> Opened:
    """Return a microbatch's output, and the values that its forward left on modules."""
    output, left = split_left(decoded(result[0], config.codecs.activations, config.device))
    left.take_aliases()  # no later stage does it
    return output, left
