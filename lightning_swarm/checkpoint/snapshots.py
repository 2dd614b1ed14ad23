"""A whole model out of the snapshots of its stages that the servers keep."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lightning_swarm import trees
from lightning_swarm.errors import ProtocolError, SwarmError, Unreachable
from lightning_swarm.network import Message, PeerId, Transport
from lightning_swarm.run_state import RunState
from lightning_swarm.server import SNAPSHOT
from lightning_swarm.server.fingerprint import fingerprint
from lightning_swarm.server.loading import named
from lightning_swarm.steps.snapshot_orders import Held, ask_held, holders_of, newest_complete
from lightning_swarm.tasks import gather
from lightning_swarm.types.snapshots import HeldSnapshots, Snapshot, SnapshotRequest
from lightning_swarm.types.wire import decode, encode

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Whole:
    """A model at a version.

    Args:
        version: Which.
        weights: Parameters and buffers by their names in the model's state dict.
        optimizer: Optimizer state by parameter name.
    """

    version: int
    weights: Mapping[str, Tensor]
    optimizer: Mapping[str, dict[str, Any]]


async def gather_snapshots(
    transport: Transport, run: RunState, versions: Collection[int], *, timeout: float, max_bytes: int
) -> Whole | None:
    """The newest of `versions` of which every stage is kept by somebody who answers; None: there is none.

    Raises:
        Unreachable: A stage that was there a moment ago could not be had from anybody.
    """
    held = {
        peer: HeldSnapshots(host=one.host, snapshots=[kept for kept in one.snapshots if kept.version in versions])
        for peer, one in (await ask_held(transport, run.servers, timeout=timeout)).items()
    }
    num_stages = len(run.rosters)
    version = newest_complete(held, num_stages)
    if version is None:
        return None
    weights: dict[str, Tensor] = {}
    optimizer: dict[str, dict[str, Any]] = {}
    generation = run.manifest.generation  # versions of an older one come again
    fetched = await gather(
        _fetch(transport, held, generation, version, index, timeout=timeout, max_bytes=max_bytes)
        for index in range(num_stages)
    )
    for own_weights, own_state in fetched:
        weights.update(own_weights)
        optimizer.update(own_state)
    return Whole(version=version, weights=weights, optimizer=optimizer)


async def _fetch(
    transport: Transport, held: Held, generation: int, version: int, stage_index: int, *, timeout: float, max_bytes: int
) -> tuple[dict[str, Tensor], dict[str, dict[str, Any]]]:
    request = SnapshotRequest(stage_index=stage_index, version=version)
    holders = holders_of(held, version, stage_index)
    # Its own costs nothing.
    for peer in sorted(holders, key=lambda peer: peer != transport.peer_id):
        try:
            return await _from(transport, peer, generation, request, timeout=timeout, max_bytes=max_bytes)
        except SwarmError as error:
            _log.warning("No snapshot of stage %d from %s: %s", stage_index, peer, error)
    raise Unreachable(f"the snapshot of stage {stage_index} at version {version} could not be had from {holders}")


async def _from(
    transport: Transport, peer: PeerId, generation: int, request: SnapshotRequest, *, timeout: float, max_bytes: int
) -> tuple[dict[str, Tensor], dict[str, dict[str, Any]]]:
    message = await transport.stream(peer, SNAPSHOT, Message(encode(request)), timeout=timeout, max_bytes=max_bytes)
    head = decode(message.body, Snapshot)
    asked = (generation, request.stage_index, request.version)
    if (head.generation, head.stage_index, head.version) != asked or fingerprint(message.tensors) != head.version_hash:
        raise ProtocolError(
            f"what {peer} sent is not the snapshot of generation, stage and version {asked}, or came damaged"
        )
    count = len(head.weights)
    weights = named(head.weights, message.tensors[:count])
    return weights, named(head.optimizer, trees.unflatten(head.structure, list(message.tensors[count:])))
