"""Gathers the whole model's state from a run's servers, distributes it to them, and saves it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_swarm.core.errors import PeerError, ProtocolError, SwarmError, Unreachable
from lightning_swarm.core.limits import Limits
from lightning_swarm.core.tasks import gather
from lightning_swarm.model import sharded_format
from lightning_swarm.model.confirmation import Confirmation
from lightning_swarm.model.fingerprint import digest
from lightning_swarm.model.partition import StageModule
from lightning_swarm.model.sharded_format import REST
from lightning_swarm.model.state_proof import StatePart, parts_of_optimizer, parts_of_weights
from lightning_swarm.network import MAX_STREAM_BYTES, Message, PeerId, Transport
from lightning_swarm.protocol import serialization
from lightning_swarm.protocol.events import EventLog
from lightning_swarm.protocol.messages.run import Manifest, Member
from lightning_swarm.protocol.messages.state import (
    EvaluationWeights,
    SnapshotRequest,
    StageState,
    StateRequest,
    WriteRequest,
    WrittenValue,
)
from lightning_swarm.protocol.messages.wire import encode
from lightning_swarm.protocol.queries import Held, agreed_digest, ask_held, holders_of, newest_complete, only_versions
from lightning_swarm.protocol.rpc import LOAD, SET_EVALUATION_WEIGHTS, SNAPSHOT, STATE, WRITE, Q, StreamRpc, WithTensors
from lightning_swarm.protocol.run_state import RunState
from lightning_swarm.protocol.serialization import Structure, named

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ModelState:
    """A model's state at a version, in tensors mapped from files."""

    version: int
    weights: Mapping[str, Tensor]  # parameters and buffers by their names in the model's state dict
    optimizer: Mapping[str, dict[str, Any]]  # optimizer state by parameter name


async def gather_snapshots(
    transport: Transport,
    run: RunState,
    versions: Collection[int],
    *,
    timeout: float,
    max_bytes: int,
    events: EventLog | None = None,
    sound: int | None = None,
) -> ModelState | None:
    """Fetch the newest of `versions` of which answering peers keep all stages; None if there is none.

    Versions after `sound` may contain false work, so they are tried last, beginning with the oldest. Raises
    `Unreachable` if peers report complete versions, but none of these can be fetched.
    """
    answers, untried = await ask_held(transport, run.servers, timeout=timeout), set(versions)
    confirmation = Confirmation(transport, run, timeout, events)
    failure: Unreachable | None = None
    while True:
        held = only_versions(answers, untried)
        version = newest_complete(held, len(run.rosters), sound)
        if version is None:
            if failure is not None:
                raise failure
            return None
        try:
            return await _gather(confirmation, held, version, max_bytes=max_bytes)
        except Unreachable as error:  # a server may report a snapshot that it does not have
            _log.warning("%s", error)
            failure = failure or error
            untried.discard(version)


async def _gather(confirmation: Confirmation, held: Held, version: int, *, max_bytes: int) -> ModelState:
    weights: dict[str, Tensor] = {}
    optimizer: dict[str, dict[str, Any]] = {}
    for index in range(len(confirmation.run.rosters)):  # in turn, because memory may not hold two stages at once
        fetched = await _fetch(confirmation, held, version, index, max_bytes=max_bytes)
        try:
            stage_weights, stage_optimizer = await asyncio.to_thread(_on_disk, fetched)
        except (OSError, RuntimeError) as error:  # torch raises its own error for a full disk
            raise no_room(error) from error
        del fetched
        weights.update(stage_weights)
        optimizer.update(stage_optimizer)
    return ModelState(version=version, weights=weights, optimizer=optimizer)


_Tensors = tuple[dict[str, Tensor], dict[str, dict[str, Any]]]  # weights, optimizer state


def _on_disk(fetched: _Tensors) -> _Tensors:
    """Write tensors to a temporary file, and return them mapped from it. Its space is freed with the tensors."""
    with tempfile.TemporaryDirectory(prefix="lightning-swarm-", ignore_cleanup_errors=True) as folder:
        path = Path(folder, "stage.pt")
        torch.save(fetched, path)
        mapped: _Tensors = torch.load(path, mmap=True, weights_only=True)
        return mapped


def no_room(error: Exception) -> SwarmError:
    """Return the error for a rollback that cannot write its checkpoint."""
    return SwarmError(
        f"a rollback must write a checkpoint into {tempfile.gettempdir()}, the folder for temporary files, and could "
        f"not: {error}. Free space there, or set the environment variable TMPDIR to another folder."
    )


async def _fetch(confirmation: Confirmation, held: Held, version: int, stage_index: int, *, max_bytes: int) -> _Tensors:
    """Fetch a stage's snapshot from one of its holders, and check its digest."""
    # The digest must be the recorded digest. Without a record, if states need a confirmation, it must be the digest on
    # which the servers that took the snapshot agree. Otherwise it must be the digest that the holder has reported.
    transport, run = confirmation.transport, confirmation.run
    request = Message(encode(SnapshotRequest(stage_index=stage_index, version=version)))
    holders = holders_of(held, version, stage_index)
    generation = run.manifest.generation  # an older generation may have had the same version
    claimed = {
        peer: snapshot.digest
        for peer in holders
        for snapshot in held[peer].snapshots
        if (snapshot.version, snapshot.stage_index) == (version, stage_index)
    }
    expected, num_holders = run.digest_of(stage_index, version), Counter(claimed.values())  # digest -> its holders
    if expected is None and confirmation.is_needed:
        expected = agreed_digest(claimed, run.takers_of(stage_index, version), trusted=run.trusted)
        if expected is None:
            raise Unreachable(
                f"no record has a digest of stage {stage_index} at version {version}, and too few of the servers that "
                "took this snapshot agree on its digest. An older snapshot is tried."
            )
    if expected is None and len(num_holders) > 1:
        text = "No record has a digest of stage %d at version %d, and the digests of %s differ."
        _log.warning(text, stage_index, version, holders)
    # This peer's own snapshot needs no download. Then begin with the digest that most holders report.
    for peer in sorted(holders, key=lambda peer: (peer != transport.peer_id, -num_holders[claimed[peer]])):
        try:
            message = await transport.stream(
                peer, SNAPSHOT.name, request, timeout=confirmation.timeout, max_bytes=max_bytes
            )
            actual = await asyncio.to_thread(digest, message.tensors, message.body)
            if expected is not None and actual != expected and confirmation.is_needed:
                confirmation.note(peer, stage_index, version, "its snapshot is not the snapshot of the stage's servers")
            return _read(message, (generation, stage_index, version), actual, expected or claimed[peer])
        except SwarmError as error:
            _log.warning("No snapshot of stage %d from %s: %s", stage_index, peer, error)
    raise Unreachable(f"no holder sent the snapshot of stage {stage_index} at version {version}: {holders}")


def _read(message: Message, requested: tuple[int, int, int], actual: bytes, expected: bytes) -> _Tensors:
    """Return the weights and the optimizer state in a snapshot; refuse another snapshot, or another digest."""
    head = SNAPSHOT.read_reply(message.body)
    if (head.generation, head.stage_index, head.version) != requested or actual != expected:
        raise ProtocolError(
            f"it is not the snapshot that the stage's servers took at generation, stage and version {requested}: the "
            f"digest must be {expected.hex()}, got {actual.hex()}"
        )
    count = len(head.weights)
    weights = named(head.weights, message.tensors[:count])
    return weights, named(head.optimizer, serialization.unflatten(head.structure, list(message.tensors[count:])))


async def gather_weights(
    transport: Transport,
    run: RunState,
    version: int,
    *,
    timeout: float,  # seconds per exchange
    max_bytes: int = MAX_STREAM_BYTES,  # limit per stage
    stages: Collection[int] | None = None,
    events: EventLog | None = None,
) -> dict[str, Tensor]:
    """Fetch parameters and buffers of stages (None: all) at a version, by names of the model's state dict."""
    confirmation = Confirmation(transport, run, timeout, events)
    weights: dict[str, Tensor] = {}
    for state, tensors in await _states(confirmation, version, stages, optimizer=False, max_bytes=max_bytes):
        # Copied, because tensors of this process's own server are not copies, and change later.
        weights.update((name, tensor.clone()) for name, tensor in zip(state.names, tensors, strict=True))
    return weights


async def gather_optimizer(
    transport: Transport,
    run: RunState,
    version: int,
    *,
    timeout: float,
    max_bytes: int = MAX_STREAM_BYTES,
    stages: Collection[int] | None = None,
    events: EventLog | None = None,
) -> dict[str, dict[str, Any]]:
    """Fetch the optimizer state of stages (None: all) at a version, by parameter name."""
    confirmation = Confirmation(transport, run, timeout, events)
    optimizer: dict[str, dict[str, Any]] = {}
    for state, tensors in await _states(confirmation, version, stages, optimizer=True, max_bytes=max_bytes):
        optimizer.update(zip(state.names, serialization.unflatten(state.structure, list(tensors)), strict=True))
    return optimizer


def first_names(module: nn.Module) -> dict[str, str]:
    """Map each name of a parameter or buffer to the first name of the same tensor. Tied tensors have several names."""
    first: dict[int, str] = {}
    tensors = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    return {name: first.setdefault(id(tensor), name) for name, tensor in tensors}


def names_of(module: nn.Module, state: Mapping[str, Any]) -> dict[str, str]:
    """Map each key of a state dict to its tensor's first name in the module, if any. Keys may be renamed."""
    first = first_names(module)
    tensors = [*module.named_parameters(), *module.named_buffers()]
    by_memory = {_memory_of(tensor): first[name] for name, tensor in tensors if _memory_of(tensor) is not None}
    names = {}
    for key, value in state.items():
        if isinstance(value, Tensor):
            memory = _memory_of(value)
            name = first.get(key) if memory is None else by_memory.get(memory)
            if name is not None:
                names[key] = name
    return names


def _memory_of(tensor: Tensor) -> tuple[object, ...] | None:
    """Return a key that is equal only for tensors of the same elements in memory; None if the tensor has no memory."""
    if tensor.is_meta or tensor.layout != torch.strided or not tensor.numel():
        return None
    return tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


async def scatter_optimizer(
    transport: Transport,
    run: RunState,
    state: Mapping[str, dict[str, Any]],
    *,
    timeout: float,
    stages: Collection[int] | None = None,
) -> None:
    """Send optimizer state, by parameter name, to the servers of stages (None: all), before their first step."""
    states = {}
    for index in range(len(run.manifest.stages)) if stages is None else stages:
        names = [name for name, _, _ in run.manifest.stages[index].parameters if name in state]
        structure, tensors = serialization.flatten([dict(state[name]) for name in names])
        states[index] = _first_state(run.manifest, index, names, tensors, structure)
    await _to_rosters(transport, run.rosters, LOAD, states, timeout=timeout)


async def scatter_weights(
    transport: Transport,
    run: RunState,
    stages: Sequence[StageModule],
    weights: Callable[[StageModule], Mapping[str, Tensor]] = StageModule.named_stage_tensors,
    *,
    timeout: float,
) -> None:
    """Send the `weights` and buffers of some stages to their rosters, before the first step of a generation."""
    states = {}
    for stage in stages:
        index, tensors = stage.spec.index, weights(stage)
        states[index] = _first_state(run.manifest, index, [*tensors], tensors.values())
    await _to_rosters(transport, run.rosters, LOAD, states, timeout=timeout)


def _first_state(
    manifest: Manifest, index: int, names: list[str], tensors: Iterable[Tensor], structure: Structure | None = None
) -> WithTensors[StageState]:
    """Return the request that sets a stage's weights or, with a `structure`, the state of its optimizer."""
    head = StageState(
        stage_index=index,
        version=manifest.first_step,
        generation=manifest.generation,
        optimizer=structure is not None,
        names=names,
        structure=structure,
    )
    return head, [tensor.detach().cpu() for tensor in tensors]


async def set_evaluation_weights(
    transport: Transport, run: RunState, stages: Sequence[StageModule], number: int, *, timeout: float
) -> None:
    """Send servers the weights of the lead's `stages`, for calls and sessions' steps that name `number`."""
    weights = {}
    for stage in stages:
        tensors = stage.named_stage_tensors()
        head = EvaluationWeights(
            stage_index=stage.spec.index, generation=run.manifest.generation, number=number, names=list(tensors)
        )
        weights[stage.spec.index] = head, [tensor.detach().cpu() for tensor in tensors.values()]

    async def send(stage_index: int, peer: PeerId) -> PeerError | None:
        try:
            await SET_EVALUATION_WEIGHTS.ask(transport, peer, *weights[stage_index], timeout=timeout)
        # The first call will find a dead server. A living server without these weights refuses calls that name them.
        except PeerError as error:
            return error
        return None

    for index in weights:
        failed = await gather(send(index, member.peer_id) for member in run.rosters[index])
        if all(failed):
            raise next(error for error in failed if error is not None)


async def drop_evaluation_weights(transport: Transport, run: RunState, number: int, *, timeout: float) -> None:
    """Make the servers drop the evaluation weights with this number."""
    served = [index for index, stage in enumerate(run.manifest.stages) if not stage.on_trainers]
    generation = run.manifest.generation
    heads = (EvaluationWeights(stage_index=index, generation=generation, number=number, names=[]) for index in served)
    requests = {head.stage_index: (head, ()) for head in heads}
    await _to_rosters(transport, run.rosters, SET_EVALUATION_WEIGHTS, requests, timeout=timeout)


async def _to_rosters(
    transport: Transport,
    rosters: Sequence[Sequence[Member]],
    method: StreamRpc[Q, None],
    requests: Mapping[int, tuple[Q, Sequence[Tensor]]],  # stage -> request and tensors
    *,
    timeout: float,
) -> None:
    await gather(
        method.ask(transport, member.peer_id, *request, timeout=timeout)
        for index, request in requests.items()
        for member in rosters[index]
    )


async def _states(
    confirmation: Confirmation, version: int, stages: Collection[int] | None, *, optimizer: bool, max_bytes: int
) -> Sequence[tuple[StageState, tuple[Tensor, ...]]]:
    """Ask the servers of each of `stages` (None: all) in turn until one sends a confirmed state; return the states."""
    transport, run = confirmation.transport, confirmation.run
    generation = run.manifest.generation
    # After these errors the next server is asked. If states need a confirmation, any error may be a server's fault.
    retried_errors = SwarmError if confirmation.is_needed else PeerError

    async def fetch(index: int) -> tuple[StageState, tuple[Tensor, ...]]:
        request = StateRequest(stage_index=index, version=version, generation=generation, optimizer=optimizer)
        # This peer's own copy needs no download.
        members = sorted(run.rosters[index], key=lambda member: member.peer_id != transport.peer_id)
        for member in members:
            try:
                state, tensors = await STATE.ask(
                    transport, member.peer_id, request, timeout=confirmation.timeout, max_bytes=max_bytes
                )
                await confirmation.check(member.peer_id, request, partial(_parts, state, tensors))
                return state, tensors
            except retried_errors as error:  # the server may have died since the newest record
                if member is members[-1]:
                    raise
                _log.info("Stage %d is requested from another server: %s", index, error)
        raise AssertionError("a stage has members")

    return await gather(map(fetch, range(len(run.rosters)) if stages is None else stages))


def _parts(state: StageState, tensors: Sequence[Tensor]) -> list[StatePart]:
    if state.optimizer:
        return parts_of_optimizer(named(state.names, serialization.unflatten(state.structure, list(tensors))))
    return parts_of_weights(named(state.names, tensors))


_State = Mapping[str, dict[str, Any]]


def save(
    path: Path,
    checkpoint: Mapping[str, Any],  # Lightning's checkpoint, with parameter names in place of the optimizer's numbers
    write_stages: Callable[[Path], list[WrittenValue]],  # makes the stages write their parts into a folder
    *,
    part: int,  # file number of the weights outside the stages; differs from all stages' numbers
    also: Mapping[str, str],  # further name of a stage's weight -> name under which the stage writes it
) -> None:
    """Write a checkpoint's folder, and replace an older folder of its name only when all of it is written."""
    rest = dict(checkpoint)
    tensors: dict[str, Any] = {sharded_format.WEIGHTS: rest.pop("state_dict")}
    for state in rest.pop("optimizer_states", ()):  # a run has at most one optimizer
        tensors[sharded_format.OPTIMIZER] = state
    with _replacing(path) as folder:
        written = [*write_stages(folder), *sharded_format.write(folder, part, tensors)]
        torch.save(rest, folder / REST)
        sharded_format.finish(folder, written, also)  # without this file the folder is no checkpoint


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """Yield a new folder to write to, and rename it to `path` in the end."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # No peer can guess the number, so a server that finds a folder of this name sees the same file system.
    hidden = path.parent.resolve() / f".{path.name}.{secrets.token_hex(16)}"
    partial, former = (hidden.with_name(f"{hidden.name}.{suffix}") for suffix in ("partial", "former"))
    partial.mkdir()
    try:
        yield partial
        if path.exists():
            path.rename(former)
        partial.rename(path)
    except BaseException:
        if former.exists() and not path.exists():
            former.rename(path)
        raise
    finally:
        for leftover in (partial, former):
            if leftover.is_dir():
                shutil.rmtree(leftover, ignore_errors=True)
            else:
                leftover.unlink(missing_ok=True)


async def write_stages(
    transport: Transport,
    run: RunState,
    version: int,  # version of all stages; no record is applied meanwhile
    folder: Path,
    names: Sequence[Collection[str]],  # for each stage, the parameters and buffers that it writes; no name twice
    as_saved: Callable[[_State], _State] | None,  # converts optimizer state to its saved form; None omits the state
    *,
    limits: Limits,
    events: EventLog | None = None,  # for events of servers that fail a confirmation
) -> list[WrittenValue]:
    """Let each stage be written by a server that sees the folder, or else by the lead, one stage at a time."""
    timeout = limits.join_timeout
    writing_here = asyncio.Lock()
    # If only some servers are trusted, a trusted server writes the file, or this peer with confirmed weights.
    trusted = {transport.peer_id, *run.trusted} if run.trusted else set(run.servers)

    def writers(roster: Sequence[Member]) -> list[Member]:
        return [member for member in roster if member.peer_id in trusted]

    async def write(index: int) -> list[WrittenValue]:
        request = WriteRequest(
            stage_index=index,
            version=version,
            generation=run.manifest.generation,
            folder=str(folder),
            optimizer=as_saved is not None,
            without=sorted(set().union(*names[:index])),  # tied tensors, which an earlier stage writes
        )
        written = await _by_server(transport, writers(run.rosters[index]), request, timeout=timeout)
        if written is not None:
            sharded_format.check(written, index, names[index])
            return written
        async with writing_here:
            _log.info("No server of stage %d sees %s, so this peer writes the stage.", index, folder)
            options: dict[str, Any] = {"timeout": timeout, "max_bytes": limits.max_message_bytes, "stages": [index]}
            options["events"] = events
            weights = await gather_weights(transport, run, version, **options)
            content: dict[str, Any] = {sharded_format.WEIGHTS: {name: weights[name] for name in names[index]}}
            if as_saved is not None:
                state = as_saved(await gather_optimizer(transport, run, version, **options))
                content[sharded_format.OPTIMIZER] = {
                    "state": {name: value for name, value in state.items() if name in names[index]}
                }
            return await asyncio.to_thread(sharded_format.write, folder, index, content)

    return [written for part in await gather(map(write, range(len(run.rosters)))) for written in part]


async def _by_server(
    transport: Transport, roster: Sequence[Member], request: WriteRequest, *, timeout: float
) -> list[WrittenValue] | None:
    """Let a member write its stage; None if no member that answers sees the folder."""
    for member in sorted(roster, key=lambda member: member.peer_id != transport.peer_id):
        try:
            reply, _ = await WRITE.ask(transport, member.peer_id, request, timeout=timeout, max_bytes=0)
        except PeerError as error:  # the server may have died since the newest record
            _log.info("Another server, or this peer, writes stage %d: %s", request.stage_index, error)
            continue
        if reply.here:
            return reply.written
    return None
