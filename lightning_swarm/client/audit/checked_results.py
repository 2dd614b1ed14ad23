"""Checks results that a trainer receives from servers of an audited run, which may be false."""

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
from lightning_swarm.client.pipeline.replay_buffer import Microbatch, ResultEvidence
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

_FormAndContents: TypeAlias = tuple[object, Opened | None]
"""An output's form, None if it has not one row for each sample, and the opened result; both None if malformed."""

_MAX_ROUNDS: Final = 8  # rounds in which other servers recompute outputs of a wrong form


class CheckedResults(ResultCheck):
    """Checks results in an audited run. The coordinator is the referee: its own computation decides."""

    def __init__(self, coordinator: Callable[[], PeerId]) -> None:
        self._coordinator = coordinator

    @property
    @override
    def by_referee(self) -> Forwards:
        """The function that has the coordinator compute forwards."""
        return partial(_forwards_by, self._coordinator)

    @override
    def expected(self, router: StageRouter, charge: PeerCharge) -> tuple[float, float]:
        """Return expected seconds and the peer's queue; medians bound both, so that false reports delay little."""
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
    async def evidence_of(
        self, server: PeerId, direction: Direction, result: Result, microbatch: Microbatch
    ) -> ResultEvidence | None:
        """Return a result's server and digest, which only the trainer can report; None if no step counts the result."""
        if direction == "backward" and not _fit(result[0], microbatch.inputs):
            raise PeerError("its gradients differ from the inputs in number, shape or dtype")
        if not microbatch.key.adds:
            return None
        return ResultEvidence(server, await asyncio.to_thread(tree_digest, *result))

    @override
    def opened_all(self, results: list[Result], call: CallMicrobatches, factory: CallFactory) -> list[Opened]:
        """Open results, which must all have the same form (structure, dtypes, row shapes)."""
        # If their forms differ, the referee computes the first microbatch, and other servers recompute each result of
        # another form than the referee's.
        outputs = [_read_form(*pair, factory) for pair in zip(results, call.sizes, strict=True)]
        if any(form is None or form != outputs[0][0] for form, _ in outputs):
            self._recompute(results, outputs, call, factory)
        pairs = zip(results, outputs, strict=True)
        return [opened(result, factory.config) if contents is None else contents for result, (_, contents) in pairs]

    def _recompute(
        self, results: list[Result], outputs: list[_FormAndContents], call: CallMicrobatches, factory: CallFactory
    ) -> None:
        """Have other servers recompute results whose form is not the referee's; replace them in both lists."""
        size = call.sizes[0]
        probe = take_rows(call.arguments, torch.arange(size), factory.config.shared), 0  # arguments, number
        mode = replace_fields(call.modes[0], grad=False, input_grad=False)
        try:
            ((structure, tensors),) = factory.evaluate([probe], mode, forwards=self.by_referee)
        except PeerError:  # the right form stays unknown
            return
        expected = _form_of(structure, tensors, size)
        error = PeerError("its output has another form than the coordinator's, or not one row for each sample")
        first_inputs, limit = call.runs[0].microbatch.inputs, factory.config.max_in_flight
        for _ in range(_MAX_ROUNDS):
            wrong = [index for index, (form, _) in enumerate(outputs) if form != expected]
            works = [_forward_anew(call.runs[index], error) for index in wrong]
            if not works:
                break
            for index, result in zip(wrong, run_all(factory.runtime, works, first_inputs, limit=limit), strict=True):
                results[index], outputs[index] = result, _read_form(result, call.sizes[index], factory)


async def _forwards_by(coordinator: Callable[[], PeerId], runs: Sequence[MicrobatchRun]) -> list[Result]:
    """Have the coordinator compute forwards that change nothing at servers; raise its error."""
    # Stage by stage, because the coordinator must load each stage that it does not hold, and loads one at a time. No
    # router is charged, because no router chose the coordinator.
    referee, all_calls = coordinator(), [run.calls for run in runs]
    for calls in all_calls:
        calls.route = [PeerCharge(referee, 0, 0.0) for _ in calls.context.routers]
    try:
        for stage in range(all_calls[0].last_stage + 1):
            await gather(send_until_accepted(calls, stage) for calls in all_calls)
            await gather(calls.wait(stage, "forward", timeout=calls.context.timeout) for calls in all_calls)
        return [result for result, _ in await gather(calls.fetch(calls.last_stage, "forward") for calls in all_calls)]
    except StageCallFailed as failure:
        raise failure.error from failure


async def _forward_anew(run: MicrobatchRun, error: PeerError) -> Result:
    """Compute an output again, and eject its whole route, because any server of it may have been wrong."""
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
    plain = [(grad, leaf) for grad, leaf in pairs if isinstance(grad, Tensor) and isinstance(leaf, Tensor)]
    return all((grad.shape, grad.dtype) == (leaf.shape, leaf.dtype) for grad, leaf in plain)


def _read_form(result: Result, size: int, factory: CallFactory) -> _FormAndContents:
    """Open a result, and return its form with the contents; both None for a malformed result."""
    try:
        contents = opened(result, factory.config)
        return _form_of(*serialization.flatten(contents[0]), size), contents
    except (SwarmError, RuntimeError, TypeError, ValueError):  # a server may send anything
        return None, None


def _form_of(structure: serialization.Structure, tensors: Sequence[Tensor], size: int) -> object:
    """Return an output's structure, and each tensor's dtype and row shape; None unless all have `size` rows."""
    if any(tensor.ndim == 0 or len(tensor) != size for tensor in tensors):
        return None
    return structure, [(tensor.dtype, tensor.shape[1:]) for tensor in tensors]
