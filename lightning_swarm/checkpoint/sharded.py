"""A checkpoint as a folder: each stage writes its part of it, and takes it back, and nobody holds the whole."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch

from lightning_swarm import shards
from lightning_swarm.checkpoint import gather_optimizer, gather_weights
from lightning_swarm.errors import PeerError
from lightning_swarm.network import Message, Transport
from lightning_swarm.run_state import RunState
from lightning_swarm.server import WRITE
from lightning_swarm.tasks import gather
from lightning_swarm.types.runs import Member
from lightning_swarm.types.shards import WriteReply, WriteRequest, Written
from lightning_swarm.types.wire import decode, encode

_log = logging.getLogger(__name__)

REST: Final = "meta.pt"
"""What a checkpoint holds beside weights and the optimizer's state. The name is Lightning's."""

_State = Mapping[str, dict[str, Any]]


def save(
    path: Path,
    checkpoint: Mapping[str, Any],
    write_stages: Callable[[Path], list[Written]],
    *,
    part: int,
    also: Mapping[str, str],
) -> None:
    """Write a checkpoint. What was there under its name is replaced when all of it is written.

    Args:
        path: Its name.
        checkpoint: As Lightning has it, with what the stages do not write themselves, and names in the place of the
            optimizer's numbers.
        write_stages: Has them write the rest into the folder that it is called with.
        part: A number that no stage has.
        also: Further names of weights that stages write, and the names under which they do.

    Raises:
        OSError: It cannot be written.
        SwarmError: A stage cannot be.
    """
    rest = dict(checkpoint)
    own: dict[str, Any] = {shards.WEIGHTS: rest.pop("state_dict")}
    for state in rest.pop("optimizer_states", ()):
        own[shards.OPTIMIZER] = state
    with _replacing(path) as folder:
        written = [*write_stages(folder), *shards.write(folder, part, own)]
        torch.save(rest, folder / REST)
        shards.finish(folder, written, also)  # without which it is no checkpoint


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """A folder to write to, which gets the name of `path` in the end."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # Nobody guesses the number, so whoever finds the folder under this name looks at the same file system.
    hidden = path.parent.resolve() / f".{path.name}.{secrets.token_hex(16)}"
    partial, former = (hidden.with_name(f"{hidden.name}.{what}") for what in ("partial", "former"))
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
        for left in (partial, former):
            if left.is_dir():
                shutil.rmtree(left, ignore_errors=True)
            else:
                left.unlink(missing_ok=True)


async def write_stages(
    transport: Transport,
    run: RunState,
    step: int,
    folder: Path,
    names: Sequence[Collection[str]],
    as_saved: Callable[[_State], _State] | None,
    *,
    timeout: float,
    max_bytes: int,
) -> list[Written]:
    """Have each stage written by a server of it that sees the folder. Of others the lead writes it, one at a time.

    Args:
        transport: The lead's.
        run: The run.
        step: The version that is meant. No record is applied meanwhile.
        folder: Where.
        names: What each stage writes, parameters and buffers: all that is saved, and each once.
        as_saved: Puts optimizer state into the form in which the optimizer saves it. None: it is left out.
        timeout: Seconds for each exchange.
        max_bytes: Of a stage.

    Raises:
        PeerError: Nobody of a stage answers.
        OSError: The lead itself cannot write.
        SwarmError: A server cannot.
    """
    here = asyncio.Lock()

    async def one(index: int) -> list[Written]:
        request = WriteRequest(
            stage_index=index,
            step=step,
            generation=run.manifest.generation,
            folder=str(folder),
            optimizer=as_saved is not None,
            without=sorted(set().union(*names[:index])),
        )
        written = await _by_server(transport, run.rosters[index], request, timeout=timeout)
        if written is not None:
            shards.check(written, index, names[index])
            return written
        async with here:
            _log.info("No server of stage %d sees %s: it is written here.", index, folder)
            options: dict[str, Any] = {"timeout": timeout, "max_bytes": max_bytes, "stages": [index]}
            weights = await gather_weights(transport, run, step, **options)
            content: dict[str, Any] = {shards.WEIGHTS: {name: weights[name] for name in names[index]}}
            if as_saved is not None:
                state = as_saved(await gather_optimizer(transport, run, step, **options))
                content[shards.OPTIMIZER] = {
                    "state": {name: one for name, one in state.items() if name in names[index]}
                }
            return await asyncio.to_thread(shards.write, folder, index, content)

    return [written for part in await gather(map(one, range(len(run.rosters)))) for written in part]


async def _by_server(
    transport: Transport, roster: Sequence[Member], request: WriteRequest, *, timeout: float
) -> list[Written] | None:
    """None: no member that answers sees the folder."""
    for member in sorted(roster, key=lambda member: member.peer_id != transport.peer_id):
        try:
            message = await transport.stream(
                member.peer_id, WRITE, Message(encode(request)), timeout=timeout, max_bytes=0
            )
        except PeerError as error:  # it may have died since the record
            _log.info("Stage %d is written by another of its peers, or by this one: %s", request.stage_index, error)
            continue
        reply = decode(message.body, WriteReply)
        if reply.here:
            return reply.written
    return None
