"""How a run begins: find the servers, give each its stages, let them check the manifest, hand out the weights."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping, Sequence

from msgspec import UNSET, UnsetType
from torch import Tensor

from lightning_swarm.coordinator import server_calls
from lightning_swarm.core.clock import now_s
from lightning_swarm.core.errors import DeadlineExceeded, PeerError, ProtocolError, SwarmError
from lightning_swarm.core.tasks import gather
from lightning_swarm.model.partition import StageModule
from lightning_swarm.network import Directory, Message, PeerId, Transport
from lightning_swarm.protocol.messages.run import Manifest, Member, RestartRequest
from lightning_swarm.protocol.messages.state import StageState
from lightning_swarm.protocol.messages.wire import WireMessage, decode, encode
from lightning_swarm.protocol.methods import ADMIT, LOAD, RESTART
from lightning_swarm.protocol.run_state import RunState

_log = logging.getLogger(__name__)
_POLL_S = 0.1
_ANNOUNCEMENT_TTL_S = 24 * 3600.0


class ServerAnnouncement(WireMessage, frozen=True):
    """A server that waits to be admitted."""

    boot_id: int
    addresses: list[str]
    trains: bool = False  # it reads data, too
    inherits: bool | UnsetType = UNSET  # it has data, and could lead the run if its lead died


def assign(num_stages: int, servers: Sequence[Member]) -> list[list[Member]]:
    """The roster of each stage. Pure.

    They go round from the last stage to the first, so that no stage has two more than another. With fewer servers than
    stages each takes neighbouring ones, so that as few boundaries as possible cross the network.

    The first server, which is the starter's own if it serves, gets the last stage: what that returns goes to the
    trainer, and its gradient comes back, while inputs that are data go one way only. Logits weigh most of all.
    """
    if len(servers) >= num_stages:
        rosters = [list(servers[index::num_stages]) for index in range(num_stages)]
    else:
        rosters = [[servers[index * len(servers) // num_stages]] for index in range(num_stages)]
    return rosters[::-1]


class RunAnnouncement(WireMessage, frozen=True):
    """A run that has begun, in the word of its lead."""

    coordinator: PeerId


async def announce_run(directory: Directory, run_id: str, coordinator: PeerId) -> None:
    """Say where servers that come later may ask to join."""
    value = encode(RunAnnouncement(coordinator=coordinator))
    try:
        await directory.announce(f"{run_id}.run", value, ttl_s=_ANNOUNCEMENT_TTL_S)
    except PeerError as error:
        _log.warning("Nobody will find this run in order to join it: %s", error)


async def claim(directory: Directory, transport: Transport, run_id: str, *, timeout: float) -> None:
    """Say that this program would begin a run."""
    addresses = list(await transport.addresses())
    value = encode(ServerAnnouncement(boot_id=0, addresses=addresses, trains=True))
    await _publish(directory, f"{run_id}.starters", value, timeout=timeout)


async def claimed(directory: Directory, transport: Transport, run_id: str) -> list[PeerId]:
    """Who said so and can be reached."""
    found = {}
    for peer, value in (await directory.read(f"{run_id}.starters")).items():
        try:
            found[peer] = decode(value, ServerAnnouncement)
        except ProtocolError as error:
            _log.warning("Left out what %s says of a run that it would begin: %s", peer, error)
    return sorted(await _connect(transport, found))


async def find_runs(directory: Directory, transport: Transport, run_id: str) -> list[PeerId]:
    """Coordinators of runs that were announced and may be under way. All servers are made reachable from here."""
    found = []
    for peer, value in (await directory.read(f"{run_id}.run")).items():
        try:
            found.append(decode(value, RunAnnouncement).coordinator)
        except ProtocolError as error:
            _log.warning("Left out the run that %s announced: %s", peer, error)
    if found:
        await connect_all(directory, transport, run_id)
    return sorted(set(found))


async def announce(
    directory: Directory,
    transport: Transport,
    run_id: str,
    boot_id: int,
    *,
    timeout: float,
    trains: bool = False,
    inherits: bool = False,
) -> None:
    """Say that this server waits for its run. Tries again for `timeout` seconds: the others may be busy starting."""
    addresses = list(await transport.addresses())
    value = encode(ServerAnnouncement(boot_id=boot_id, addresses=addresses, trains=trains, inherits=inherits or UNSET))
    await _publish(directory, f"{run_id}.servers", value, timeout=timeout)


async def say_prepared(directory: Directory, run_id: str, launch_id: str, *, timeout: float) -> None:
    """At the starter: `prepare_data` is through, so the other trainers may look for their data.

    Args:
        directory: Where to say it.
        run_id: Of the run; there may have been another one under it, on a directory that lived on.
        launch_id: Of the trainers that are told.
        timeout: Seconds.
    """
    await _publish(directory, _prepared(run_id, launch_id), b"yes", timeout=timeout)


async def await_prepared(directory: Directory, run_id: str, launch_id: str, *, timeout: float) -> None:
    """At another trainer: wait for `say_prepared`.

    Raises:
        DeadlineExceeded: It was not said.
    """
    deadline = now_s() + timeout
    while not await directory.read(_prepared(run_id, launch_id)):
        if now_s() > deadline:
            raise DeadlineExceeded(
                f"the run's starter did not finish `prepare_data` within {timeout:g} s. Raise `Limits.lead_timeout`."
            )
        await asyncio.sleep(_POLL_S)


def _prepared(run_id: str, launch_id: str) -> str:
    return f"{run_id}.prepared.{launch_id}"


async def _publish(directory: Directory, key: str, value: bytes, *, timeout: float) -> None:
    deadline = now_s() + timeout
    while True:
        try:
            await directory.announce(key, value, ttl_s=_ANNOUNCEMENT_TTL_S)
        except PeerError as error:
            if now_s() > deadline:
                raise
            _log.info("Nobody took the announcement, trying again: %s", error)
            await asyncio.sleep(_POLL_S)
        else:
            return


async def find_servers(
    directory: Directory,
    transport: Transport,
    run_id: str,
    num_servers: int,
    *,
    num_trainers: int,
    among: Collection[PeerId] | None = None,
    timeout: float,
    check: Callable[[], None],
) -> list[Member]:
    """Wait until `num_servers` have announced themselves; whoever else has is taken, too.

    Args:
        directory: Where to look.
        transport: Learns their addresses.
        run_id: Of the run.
        num_servers: How many to wait for.
        num_trainers: How many of them must read data, too.
        among: Take no others; None: there are no others.
        timeout: Seconds.
        check: Called again and again; raises when waiting has become pointless.

    Raises:
        DeadlineExceeded: Says how many came.
    """
    deadline = now_s() + timeout
    while True:
        check()
        found = await announced(directory, run_id)
        if among is not None:
            found = {peer: one for peer, one in found.items() if peer in among}
        if _suffice(found, num_servers, num_trainers):  # what is left of an earlier run may be among them
            found = await _connect(transport, found)
        if _suffice(found, num_servers, num_trainers):
            return [Member(peer_id=peer, boot_id=found[peer].boot_id) for peer in sorted(found)]
        if now_s() > deadline:
            trainers = f" and {_num_trainers(found)} of {num_trainers} trainers" if num_trainers > 1 else ""
            raise DeadlineExceeded(
                f"{len(found)} of {num_servers} servers{trainers} came within {timeout:g} s. Look above for their "
                "errors, or raise `Limits.start_timeout` if this machine needs longer to import torch."
            )
        await asyncio.sleep(_POLL_S)


def _suffice(found: Mapping[PeerId, ServerAnnouncement], num_servers: int, num_trainers: int) -> bool:
    """Servers that wait for any run are no substitute for a trainer: its share of the data would stay unread."""
    return len(found) >= num_servers and _num_trainers(found) >= num_trainers


def _num_trainers(found: Mapping[PeerId, ServerAnnouncement]) -> int:
    return sum(one.trains for one in found.values())


async def known_servers(directory: Directory, run_id: str) -> dict[PeerId, list[str]]:
    """All servers that announced themselves, with their addresses. Some may be gone."""
    return {peer: one.addresses for peer, one in (await announced(directory, run_id)).items()}


async def connect_all(directory: Directory, transport: Transport, run_id: str) -> None:
    """Make all servers that announced themselves reachable from this peer, as far as they are."""
    await _connect(transport, await announced(directory, run_id))


async def _connect(
    transport: Transport, servers: Mapping[PeerId, ServerAnnouncement]
) -> dict[PeerId, ServerAnnouncement]:
    """Make `servers` reachable; returns those that are."""

    async def reaches(peer: PeerId, one: ServerAnnouncement) -> bool:
        if peer == transport.peer_id:
            return True
        try:
            await transport.connect(one.addresses)
        except SwarmError as error:
            _log.warning("Left out server %s, which cannot be reached: %s", peer, error)
            return False
        return True

    reached = await gather(reaches(peer, one) for peer, one in servers.items())
    return {peer: one for (peer, one), ok in zip(servers.items(), reached, strict=True) if ok}


async def known_heirs(directory: Directory, run_id: str) -> set[PeerId]:
    """Servers that could lead the run if its lead died. Some may be gone."""
    return {peer for peer, one in (await announced(directory, run_id)).items() if one.inherits}


async def announced(directory: Directory, run_id: str) -> dict[PeerId, ServerAnnouncement]:
    """What all servers said of themselves. Some may be gone."""
    found = {}
    for peer, value in (await directory.read(f"{run_id}.servers")).items():
        try:
            found[peer] = decode(value, ServerAnnouncement)
        except ProtocolError as error:
            _log.warning("Left out the announcement of %s: %s", peer, error)
    return found


async def admit(transport: Transport, manifest: Manifest, stages: Sequence[StageModule], *, timeout: float) -> None:
    """Send record 0 to all servers, then the initial weights of `stages` to their rosters.

    Raises:
        ConfigError: Some server's model is not the starter's.
        PeerError: Some server left.
    """
    body = encode(manifest)
    run = RunState(manifest)
    await gather(transport.call(peer, ADMIT, body, timeout=timeout) for peer in run.servers)
    await hand_out(transport, run, stages, timeout=timeout)


async def restart(transport: Transport, run: RunState, request: RestartRequest, *, timeout: float) -> None:
    """Send the run back; then `hand_out` the weights of the step that `request` names.

    When this returns no server holds anything of an older generation, and calls of it are refused.

    Raises:
        PeerError: Some server left.
    """
    body = encode(request)
    await gather(transport.call(peer, RESTART, body, timeout=timeout) for peer in run.servers)


async def hand_out(
    transport: Transport,
    run: RunState,
    stages: Sequence[StageModule],
    origin: Callable[[StageModule], Mapping[str, Tensor]] = StageModule.named_stage_tensors,
    *,
    timeout: float,
) -> None:
    """Send each stage's weights at the first step to its roster.

    Args:
        transport: The lead's.
        run: Before the first step of its generation.
        stages: Some of the run's, as the lead has them.
        origin: Says what a stage's parameters and buffers are.
        timeout: Seconds.

    Raises:
        PeerError: Some server left.
    """
    await gather(
        transport.stream(member.peer_id, LOAD, message, timeout=timeout)
        for stage, message in [(stage, _weights(stage, origin(stage), run.manifest)) for stage in stages]
        for member in run.rosters[stage.spec.index]
    )


def _weights(stage: StageModule, tensors: Mapping[str, Tensor], manifest: Manifest) -> Message:
    state = StageState(
        stage_index=stage.spec.index,
        step=manifest.first_step,
        generation=manifest.generation,
        optimizer=False,
        names=list(tensors),
        structure=None,
    )
    return Message(encode(state), tuple(tensor.detach().cpu() for tensor in tensors.values()))


async def dismiss(transport: Transport, run: RunState, *, timeout: float) -> None:
    """Tell all others in the run that it is over, those too that were left out. One that is gone is no error."""
    await server_calls.dismiss(transport, {*run.servers, *run.trainers} - {transport.peer_id}, timeout=timeout)
