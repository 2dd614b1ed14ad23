"""Checks results that this trainer receives from servers that may send false ones."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, TypeAlias

import torch
from msgspec.structs import replace as replace_fields
from torch import Tensor
from typing_extensions import override

from lightning_swarm.client.pipeline.call_factory import CallFactory, CallMicrobatches
from lightning_swarm.client.pipeline.microbatch_run import MicrobatchRun, run_all, send_until_accepted
from lightning_swarm.client.pipeline.microbatches import take_rows
from lightning_swarm.client.pipeline.replay_buffer import GivenResult, Microbatch
from lightning_swarm.client.pipeline.result_check import Forwards, Opened, Result, ResultCheck, opened
from lightning_swarm.client.pipeline.router import PeerCharge, StageRouter
from lightning_swarm.client.pipeline.stage_calls import StageCallFailed
from lightning_swarm.core.errors import PeerError, SwarmError
from lightning_swarm.core.tasks import gather
from lightning_swarm.model.fingerprint import tree_digest
from lightning_swarm.network import PeerId
from lightning_swarm.protocol import serialization
from lightning_swarm.protocol.messages.calls import Direction
from lightning_swarm.protocol.patience import MAX_SLOWDOWN

_Formed: TypeAlias = tuple[object, Opened | None]
"""Structure, dtypes and row shapes of a microbatch's output, and the opened result; None for a malformed result."""

_MAX_OTHER_FORMS: Final = 8  # rounds in which other servers compute outputs of a wrong form again


class CheckedResults(ResultCheck):
    """Checks results in an audited run. The coordinator is the referee: its own computation decides in doubt."""

    def __init__(self, coordinator: Callable[[], PeerId]) -> None:
        self._coordinator = coordinator

    @property
    @override
    def by_referee(self) -> Forwards:
        """Forwards by the coordinator."""
        return partial(_forwards_by, self._coordinator)

    @override
    def expected(self, router: StageRouter, charge: PeerCharge) -> tuple[float, float]:
        """Bound a peer's reported seconds and queue by the medians, so that false reports gain it little time."""
        rate, load = router.median_rate(), router.peers[charge.peer]
        queued = min(load.queued, MAX_SLOWDOWN * (1 + router.median_queued()))
        if rate is None:
            return charge.expected_s, queued
        return min(charge.expected_s, MAX_SLOWDOWN * charge.num_samples / rate), queued

    @override
    def suspect(self, stage: int, direction: Direction, last_stage: int) -> int | None:
        """Return the stage that sent the input, which may be wrong if all servers of `stage` refuse it."""
        sender = stage - 1 if direction == "forward" else stage + 1
        return sender if 0 <= sender <= last_stage else None

    @override
    async def received(
        self, server: PeerId, direction: Direction, result: Result, microbatch: Microbatch
    ) -> GivenResult | None:
        """Return a result's server and digest, which only the trainer can report; None if no step counts it."""
        if direction == "backward" and not _fit(result[0], microbatch.inputs):
            raise PeerError("its gradients are not like the inputs")
        if not microbatch.key.adds:
            return None
        return GivenResult(server, await asyncio.to_thread(tree_digest, *result))

    @override
    def opened_all(self, results: list[Result], call: CallMicrobatches, factory: CallFactory) -> list[Opened]:
        """Open results, which must have one form."""
        # If their forms differ, the referee computes the first microbatch. Other servers recompute the results of other
        # forms than the referee's, which replace these in `results`.
        found = [_formed(*pair, factory) for pair in zip(results, call.sizes, strict=True)]
        if any(form is None or form != found[0][0] for form, _ in found):
            self._recompute(results, found, call, factory)
        pairs = zip(results, found, strict=True)
        return [opened(result, factory.config) if one is None else one for result, (_, one) in pairs]

    def _recompute(
        self, results: list[Result], found: list[_Formed], call: CallMicrobatches, factory: CallFactory
    ) -> None:
        """Have other servers recompute results of other forms than the referee's; replace them in both lists."""
        size = call.sizes[0]
        cut = take_rows(call.arguments, torch.arange(size), factory.config.shared)
        mode = replace_fields(call.modes[0], grad=False, input_grad=False)
        try:
            ((structure, tensors),) = factory.evaluate([(cut, 0)], mode, forwards=self.by_referee)
        except PeerError:  # the right form stays unknown
            return
        expected = _form_of(structure, tensors, size)
        error = PeerError("its output has another form than the coordinator's, or no row for each sample")
        for _ in range(_MAX_OTHER_FORMS):
            wrong = [index for index, (form, _) in enumerate(found) if form != expected]
            works = [_forward_anew(call.runs[index], error) for index in wrong]
            if not works:
                break
            first, limit = call.runs[0].microbatch.inputs, factory.config.max_in_flight
            for index, result in zip(wrong, run_all(factory.runtime, works, first, limit=limit), strict=True):
                results[index], found[index] = result, _formed(result, call.sizes[index], factory)


async def _forwards_by(coordinator: Callable[[], PeerId], runs: Sequence[MicrobatchRun]) -> list[Result]:
    """Have the coordinator compute forwards that change nothing at servers; raise its error."""
    # Stage by stage, because the coordinator loads one at a time of the stages that it does not hold. No router has
    # booked these charges, because no router chose the coordinator.
    referee, calls = coordinator(), [run.calls for run in runs]
    for one in calls:
        one.route = [PeerCharge(referee, 0, 0.0) for _ in one.context.routers]
    try:
        for stage in range(calls[0].last_stage + 1):
            await gather(send_until_accepted(one, stage) for one in calls)
            await gather(one.wait(stage, "forward", timeout=one.context.timeout) for one in calls)
        return [found for found, _ in await gather(one.fetch(one.last_stage, "forward") for one in calls)]
    except StageCallFailed as failure:
        raise failure.error from failure


async def _forward_anew(run: MicrobatchRun, error: PeerError) -> Result:
    """Compute a microbatch's output on another route, because one of the servers sent a wrong result."""
    run.calls.release()
    for stage, charge in enumerate(run.calls.route):
        run.context.eject(stage, charge.peer, run.microbatch.key.step, error)
    return await run.forward()


def _fit(gradients: serialization.Tree, inputs: serialization.Tree) -> bool:
    """Return whether there is a gradient or None for each input, of its shape and dtype if neither is compressed."""
    leaves = serialization.leaves(inputs)
    if not isinstance(gradients, list) or len(gradients) != len(leaves):
        return False
    pairs = zip(gradients, leaves, strict=True)
    plain = [(one, leaf) for one, leaf in pairs if isinstance(one, Tensor) and isinstance(leaf, Tensor)]
    return all((one.shape, one.dtype) == (leaf.shape, leaf.dtype) for one, leaf in plain)


def _formed(result: Result, size: int, factory: CallFactory) -> _Formed:
    """Return a result's form, and the opened result; None for a malformed result."""
    try:
        found = opened(result, factory.config)
        return _form_of(*serialization.flatten(found[0]), size), found
    except (SwarmError, RuntimeError, TypeError, ValueError):  # a server may send anything
        return None, None


def _form_of(structure: serialization.Structure, tensors: Sequence[Tensor], size: int) -> object:
    """Return an output's structure, and each tensor's dtype and row shape; None if a tensor has not `size` rows."""
    if any(tensor.ndim == 0 or len(tensor) != size for tensor in tensors):
        return None
    return structure, [(tensor.dtype, tensor.shape[1:]) for tensor in tensors]
