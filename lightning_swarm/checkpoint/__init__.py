"""Whole-model snapshots out of a swarm's parts, and back into them."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from lightning_swarm import trees
from lightning_swarm.errors import PeerError
from lightning_swarm.network import MAX_STREAM_BYTES, Message, Transport
from lightning_swarm.partition import StageModule
from lightning_swarm.run_state import RunState
from lightning_swarm.server import LEND, LOAD, STATE
from lightning_swarm.tasks import gather
from lightning_swarm.types.runs import Member
from lightning_swarm.types.state import LentWeights, StageState, StateRequest
from lightning_swarm.types.wire import decode, encode

_log = logging.getLogger(__name__)


async def gather_weights(
    transport: Transport,
    run: RunState,
    step: int,
    *,
    timeout: float,
    max_bytes: int = MAX_STREAM_BYTES,
    without: Collection[str] = (),
    stages: Collection[int] | None = None,
) -> dict[str, Tensor]:
    """Parameters and buffers of all stages at version `step`, by their names in the model's state dict.

    Args:
        transport: Of who asks.
        run: The run.
        step: The version.
        timeout: Seconds for each exchange.
        max_bytes: Of a stage.
        without: Names that are left out. A stage whose parameters are all among them is not asked for.
        stages: Only these; None: all.
    """
    parameters = [{name for name, _, _ in stage.parameters} for stage in run.manifest.stages]
    asked = range(len(parameters)) if stages is None else stages
    wanted = [index for index in asked if not parameters[index] or not parameters[index].issubset(without)]
    requests = [_request(run, index, step, optimizer=False) for index in wanted]
    weights: dict[str, Tensor] = {}
    for state, tensors in await _states(transport, run, requests, timeout=timeout, max_bytes=max_bytes):
        named = zip(state.names, tensors, strict=True)
        # What this process serves itself came without a copy, and goes on changing.
        weights.update((name, tensor.clone()) for name, tensor in named if name not in without)
    return weights


async def gather_optimizer(
    transport: Transport,
    run: RunState,
    step: int,
    *,
    timeout: float,
    max_bytes: int = MAX_STREAM_BYTES,
    stages: Collection[int] | None = None,
) -> dict[str, dict[str, Any]]:
    """Optimizer state at version `step`, by parameter name: of all stages, or of these."""
    asked = range(len(run.rosters)) if stages is None else stages
    requests = [_request(run, index, step, optimizer=True) for index in asked]
    found: dict[str, dict[str, Any]] = {}
    for state, tensors in await _states(transport, run, requests, timeout=timeout, max_bytes=max_bytes):
        found.update(zip(state.names, trees.unflatten(state.structure, list(tensors)), strict=True))
    return found


def first_names(module: nn.Module) -> dict[str, str]:
    """For each name of a parameter or buffer the first one of the same tensor: tied ones have several."""
    first: dict[int, str] = {}
    tensors = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    return {name: first.setdefault(id(tensor), name) for name, tensor in tensors}


async def scatter_optimizer(
    transport: Transport,
    run: RunState,
    state: Mapping[str, dict[str, Any]],
    *,
    timeout: float,
    stages: Collection[int] | None = None,
) -> None:
    """Hand the optimizer's state to the servers of its stages, before their first step.

    Args:
        transport: The lead's.
        run: Before the first step of its generation.
        state: Optimizer state by parameter name; of all these stages.
        timeout: Seconds.
        stages: Which; None: all of them.

    Raises:
        ConfigError: It holds something other than tensors and numbers.
    """
    manifest = run.manifest

    def message(index: int) -> Message:
        names = [name for name, _, _ in manifest.stages[index].parameters if name in state]
        structure, tensors = trees.flatten([dict(state[name]) for name in names])
        head = StageState(
            stage_index=index,
            step=manifest.first_step,
            generation=manifest.generation,
            optimizer=True,
            names=names,
            structure=structure,
        )
        return Message(encode(head), tuple(tensor.detach().cpu() for tensor in tensors))

    messages = {index: message(index) for index in (range(len(manifest.stages)) if stages is None else stages)}
    await _to_rosters(transport, run.rosters, LOAD, messages, timeout=timeout)


async def lend_weights(
    transport: Transport, run: RunState, stages: Sequence[StageModule], number: int, *, timeout: float
) -> None:
    """Lend the servers what the lead's module holds, to evaluate with. Their own weights stay as they are.

    Args:
        transport: The lead's.
        run: The run.
        stages: The lead's own.
        number: By which calls mean them.
        timeout: Seconds.
    """
    messages = {}
    for stage in stages:
        if not stage.spec.on_trainers:  # the lead evaluates with that one itself
            tensors = stage.named_stage_tensors()
            head = LentWeights(
                stage_index=stage.spec.index, generation=run.manifest.generation, number=number, names=list(tensors)
            )
            values = tuple(tensor.detach().cpu() for tensor in tensors.values())
            messages[stage.spec.index] = Message(encode(head), values)
    await _to_rosters(transport, run.rosters, LEND, messages, timeout=timeout)


async def take_weights_back(transport: Transport, run: RunState, number: int, *, timeout: float) -> None:
    """Have the servers drop the weights that were lent by `number`."""
    served = [index for index, stage in enumerate(run.manifest.stages) if not stage.on_trainers]
    generation = run.manifest.generation
    heads = (LentWeights(stage_index=index, generation=generation, number=number, names=[]) for index in served)
    messages = {head.stage_index: Message(encode(head)) for head in heads}
    await _to_rosters(transport, run.rosters, LEND, messages, timeout=timeout)


async def _to_rosters(
    transport: Transport,
    rosters: Sequence[Sequence[Member]],
    method: str,
    messages: Mapping[int, Message],
    *,
    timeout: float,
) -> None:
    await gather(
        transport.stream(member.peer_id, method, message, timeout=timeout)
        for index, message in messages.items()
        for member in rosters[index]
    )


def _request(run: RunState, index: int, step: int, *, optimizer: bool) -> StateRequest:
    return StateRequest(stage_index=index, step=step, generation=run.manifest.generation, optimizer=optimizer)


async def _states(
    transport: Transport, run: RunState, requests: Sequence[StateRequest], *, timeout: float, max_bytes: int
) -> Sequence[tuple[StageState, tuple[Tensor, ...]]]:
    async def one(request: StateRequest) -> tuple[StageState, tuple[Tensor, ...]]:
        # Its own copy costs nothing.
        members = sorted(run.rosters[request.stage_index], key=lambda member: member.peer_id != transport.peer_id)
        for member in members:
            try:
                message = await transport.stream(
                    member.peer_id, STATE, Message(encode(request)), timeout=timeout, max_bytes=max_bytes
                )
                return decode(message.body, StageState), message.tensors
            except PeerError as error:  # it may have died since the record
                if member is members[-1]:
                    raise
                _log.info("Stage %d is asked for at another of its peers: %s", request.stage_index, error)
        raise AssertionError("a stage has members")

    return await gather(map(one, requests))
