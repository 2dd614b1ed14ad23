"""A whole model out of the snapshots of its stages that the servers keep."""

from __future__ import annotations

import asyncio
import logging
import tempfile
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_swarm import trees
from lightning_swarm.errors import ProtocolError, SwarmError, Unreachable
from lightning_swarm.network import Message, PeerId, Transport
from lightning_swarm.run_state import RunState
from lightning_swarm.server import SNAPSHOT
from lightning_swarm.server.fingerprint import fingerprint
from lightning_swarm.server.loading import named
from lightning_swarm.steps.snapshot_orders import Held, ask_held, holders_of, newest_complete
from lightning_swarm.types.snapshots import HeldSnapshots, Snapshot, SnapshotRequest
from lightning_swarm.types.wire import decode, encode

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Whole:
    """A model at a version.

    Args:
        version: Which.
        weights: Parameters and buffers by their names in the model's state dict, in files.
        optimizer: Optimizer state by parameter name, likewise.
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
    for index in range(num_stages):  # one after the other: there may be no room for two
        fetched = await _fetch(transport, held, generation, version, index, timeout=timeout, max_bytes=max_bytes)
        try:
            own_weights, own_state = await asyncio.to_thread(_on_disk, fetched)
        except (OSError, RuntimeError) as error:  # torch's own, of a full disk
            raise no_room(error) from error
        del fetched
        weights.update(own_weights)
        optimizer.update(own_state)
    return Whole(version=version, weights=weights, optimizer=optimizer)


_Tensors = tuple[dict[str, Tensor], dict[str, dict[str, Any]]]


def _on_disk(fetched: _Tensors) -> _Tensors:
    """The same, mapped from a file that goes with it."""
    with tempfile.TemporaryDirectory(prefix="lightning-swarm-", ignore_cleanup_errors=True) as folder:
        path = Path(folder, "stage.pt")
        torch.save(fetched, path)
        mapped: _Tensors = torch.load(path, mmap=True, weights_only=True)
        return mapped


def no_room(error: Exception) -> SwarmError:
    """What to say where a file on the way back cannot be written."""
    return SwarmError(
        "the way back leads through a checkpoint, which must be written to the folder for temporary files: "
        f"{error}. Make room in {tempfile.gettempdir()}, or name another folder in the variable TMPDIR."
    )


async def _fetch(
    transport: Transport, held: Held, generation: int, version: int, stage_index: int, *, timeout: float, max_bytes: int
) -> _Tensors:
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
) -> _Tensors:
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
