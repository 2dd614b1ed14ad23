"""The beginning of a run: finds servers, assigns stages, and sends the manifest for checking."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeVar

from msgspec import UNSET, UnsetType

from lightning_swarm.client.model_state import scatter_weights
from lightning_swarm.core.clock import now_s
from lightning_swarm.core.errors import DeadlineExceeded, PeerError, ProtocolError, SwarmError
from lightning_swarm.core.readable import printable, short_name, shorten
from lightning_swarm.core.tasks import gather
from lightning_swarm.model.partition import StageModule
from lightning_swarm.monitor import survey
from lightning_swarm.network import Directory, PeerId, Transport
from lightning_swarm.network.access import Role
from lightning_swarm.protocol.messages.run import Manifest, Member, RestartRequest
from lightning_swarm.protocol.messages.wire import ShortText, WireMessage, decode, encode
from lightning_swarm.protocol.rpc import ADMIT, RESTART
from lightning_swarm.protocol.run_state import RunState

_log = logging.getLogger(__name__)
_POLL_S: Final = 0.1
# Lifetime of an announcement. Living peers renew theirs, because the peers that store it may leave at any time.
ANNOUNCEMENT_TTL_S: Final = 3600.0
_RENEW_EVERY_S: Final = ANNOUNCEMENT_TTL_S / 6
_NO_TIME_S: Final = 0.001  # lifetime of an announcement that replaces a withdrawn one
_LIST_S: Final = 5.0  # timeout of a coordinator's list of servers


class ServerAnnouncement(WireMessage, frozen=True):
    """A server's announcement that it waits to be admitted to a run."""

    boot_id: int
    addresses: list[str]
    trains: bool = False  # its peer also reads data
    inherits: bool | UnsetType = UNSET  # its peer has data, and could lead the run if the lead died
    arithmetic: ShortText = ""  # the kind of machine; servers of one kind compute the same bits


class RunAnnouncement(WireMessage, frozen=True):
    """The lead's announcement of a run that has begun."""

    coordinator: PeerId


_Announcement = TypeVar("_Announcement", ServerAnnouncement, RunAnnouncement)


def assign(num_stages: int, servers: Sequence[Member]) -> list[list[Member]]:
    """Assign servers to stages, and return the roster of each stage. Pure."""
    if not num_stages:  # nothing is cut
        return []
    if len(servers) >= num_stages:  # round robin, so that no stage has two servers more than another
        rosters = [list(servers[index::num_stages]) for index in range(num_stages)]
    else:  # neighbouring stages for each server, so that few boundaries cross the network
        rosters = [[servers[index * len(servers) // num_stages]] for index in range(num_stages)]
    # The first server is the starter's own if it serves. It gets the last stage, whose outputs travel to the trainer
    # and whose gradients travel back; the inputs of the first stage are data, and travel one way only.
    return rosters[::-1]


def _num_trainers(servers: Mapping[PeerId, ServerAnnouncement]) -> int:
    return sum(server.trains for server in servers.values())


@dataclass(frozen=True, kw_only=True)
class WantedServers:
    """The servers that a run waits for before it begins."""

    num_servers: int
    num_trainers: int  # how many of these servers must also read data
    among: Collection[PeerId] | None = None  # the only servers to accept; None accepts any

    def suffice(self, servers: Mapping[PeerId, ServerAnnouncement]) -> bool:
        """Return whether these servers are enough; a server without data is no substitute for a trainer."""
        return len(servers) >= self.num_servers and _num_trainers(servers) >= self.num_trainers


# Selects from announced servers those that may be first members of the run.
Invited = Callable[[Mapping[PeerId, ServerAnnouncement]], Awaitable[dict[PeerId, ServerAnnouncement]]]


@dataclass(frozen=True, eq=False)
class RunDirectory:
    """The directory as the peers of one run use it: to announce themselves, and to find each other."""

    directory: Directory
    transport: Transport  # this peer's
    run_id: str
    only_keepers: bool = False  # accept only keepers as coordinators
    # Warnings already logged, because the same announcements are read again and again, even after a peer is gone.
    _warned_of: set[tuple[PeerId, int | str]] = field(default_factory=set, init=False)
    _renewed: dict[str, bytes] = field(default_factory=dict, init=False)  # key -> this peer's announcement

    async def renew(self) -> None:
        """Announce the run and the server again, before they expire, for as long as this peer lives."""
        while True:
            await asyncio.sleep(_RENEW_EVERY_S)
            for key in list(self._renewed):
                value = self._renewed.get(key)  # may have changed or been withdrawn while another one was renewed
                if value is None:
                    continue
                try:
                    await self._announce(key, value)
                except PeerError as error:
                    _log.info("No peer stored the announcement, which will be renewed later: %s", shorten(str(error)))

    async def announce_run(self, coordinator: PeerId) -> None:
        """Announce the coordinator, which later servers ask to join the run."""
        key, value = f"{self.run_id}.run", encode(RunAnnouncement(coordinator=coordinator))
        self._renewed[key] = value
        try:
            await self._announce(key, value)
        except PeerError as error:
            text = "No peer can find this run in order to join it until it is announced again, in %g minutes: %s"
            _log.warning(text, _RENEW_EVERY_S / 60, shorten(str(error)))
            _log.debug("The full error: %s", printable(str(error)))

    async def announce_starter(self, *, timeout: float) -> None:
        """Announce that this program would begin a run."""
        await self.announce(0, timeout=timeout, trains=True, among="starters")

    async def find_starters(self) -> list[PeerId]:
        """Return the programs that announced that they would begin a run, and can be reached."""
        return sorted(await self._connect(await self._servers("starters")))

    async def find_runs(self) -> list[PeerId]:
        """Return the coordinators of announced runs, which may be over by now; connect this peer to their servers."""
        announcements = await self._read(f"{self.run_id}.run", RunAnnouncement)
        coordinators = {run.coordinator for run in announcements.values()}
        if coordinators:
            await self._connect_to_living(coordinators)
        return await self._keepers_among(sorted(coordinators)) if self.only_keepers else sorted(coordinators)

    async def _connect_to_living(self, coordinators: Collection[PeerId]) -> None:
        """Connect to coordinators and to the servers that they list, or to all servers if no coordinator answers."""
        # Announcements outlive peers by up to an hour, and a joiner must not wait for dead peers.
        announced = await self.announced()
        first = {peer: server for peer, server in announced.items() if peer in coordinators}
        reached = await self._connect(first, warns=False)

        async def list_others(peer: PeerId) -> set[PeerId] | None:
            try:
                return set(await survey.others_of(self.transport, peer, timeout=_LIST_S))
            except SwarmError as error:
                _log.info("%s lists no servers: %s", short_name(peer), shorten(str(error)))
                return None

        lists = [listed for listed in await gather(map(list_others, reached)) if listed is not None]
        living = set().union(*lists) if lists else announced.keys()
        rest = {peer: server for peer, server in announced.items() if peer in living and peer not in first}
        await self._connect(rest, warns=False)

    async def withdraw(self) -> None:
        """Withdraw this server's announcements, so that other peers forget them before they expire."""
        own = dict(self._renewed)
        self._renewed.clear()  # stops the renewal
        for key, value in own.items():
            try:
                await self.directory.announce(key, value, ttl_s=_NO_TIME_S)
            except PeerError as error:
                _log.info("The announcement could not be withdrawn: %s", shorten(str(error)))

    async def _keepers_among(self, peers: Sequence[PeerId]) -> list[PeerId]:
        """Return the peers that show a keeper's certificate, or all peers if this peer has no certificate itself."""
        if self.transport.permit_of(self.transport.peer_id) is None:
            return list(peers)

        async def is_keeper(peer: PeerId) -> bool:
            try:
                permit = await self.transport.certify(peer)
            except SwarmError as error:
                self._warn_once("Ignored the run that %s is said to coordinate: %s", peer, "certificate", error)
                return False
            return permit is not None and permit.role.includes(Role.KEEPER)

        are_keepers = await gather(map(is_keeper, peers))
        return [peer for peer, keeps in zip(peers, are_keepers, strict=True) if keeps]

    async def announce(
        self,
        boot_id: int,
        *,
        timeout: float,
        trains: bool = False,
        inherits: bool = False,
        arithmetic: str = "",
        among: str = "servers",
    ) -> None:
        """Announce under `among` that this server waits for its run.

        Retries for `timeout` seconds, because the peers that store announcements may still be starting.
        """
        addresses = list(await self.transport.addresses())
        peer = ServerAnnouncement(
            boot_id=boot_id, addresses=addresses, trains=trains, inherits=inherits or UNSET, arithmetic=arithmetic
        )
        key, value = f"{self.run_id}.{among}", encode(peer)
        await self._publish(key, value, timeout=timeout)
        self._renewed[key] = value

    async def announce_event(self, launch_id: str, event: str, value: bytes, *, timeout: float) -> None:
        """At the starter: announce an event to the launch's other trainers, such as that `prepare_data` is done."""
        await self._publish(self._event_key(launch_id, event), value, timeout=timeout)

    async def await_event(self, launch_id: str, event: str, *, timeout: float, starter: PeerId | None = None) -> bytes:
        """At another trainer: wait for an event that the starter, or any peer if it is not known, announces."""
        deadline = now_s() + timeout
        while True:
            values = await self.directory.read(self._event_key(launch_id, event))
            value = values.get(starter) if starter is not None else next(iter(values.values()), None)
            if value is not None:
                return value
            if now_s() > deadline:
                raise DeadlineExceeded(
                    f"the run's starter did not announce `{event}` within {timeout:g} s. Raise `Limits.lead_timeout`."
                )
            await asyncio.sleep(_POLL_S)

    def _event_key(self, launch_id: str, event: str) -> str:
        """Return the directory's key for an event of this launch; an earlier run may have had the same run id."""
        return f"{self.run_id}.{event}.{launch_id}"

    async def _announce(self, key: str, value: bytes) -> None:
        await self.directory.announce(key, value, ttl_s=ANNOUNCEMENT_TTL_S)

    async def _publish(self, key: str, value: bytes, *, timeout: float) -> None:
        """Announce a value; retry for `timeout` seconds as long as no peer stores the announcement."""
        deadline = now_s() + timeout
        while True:
            try:
                await self._announce(key, value)
            except PeerError as error:
                if now_s() > deadline:
                    raise
                _log.info("No peer stored the announcement, trying again: %s", shorten(str(error)))
                await asyncio.sleep(_POLL_S)
            else:
                return

    async def find_servers(
        self, wanted: WantedServers, *, timeout: float, check: Callable[[], None], invited: Invited
    ) -> list[Member]:
        """Wait until enough servers have announced themselves, and return all of them that are `invited`."""
        deadline = now_s() + timeout
        while True:
            check()  # raises when waiting has become pointless
            servers = await self.announced()
            if wanted.among is not None:
                servers = {peer: server for peer, server in servers.items() if peer in wanted.among}
            if wanted.suffice(servers):
                servers = await invited(await self._connect(servers))  # drops peers that are gone, and uninvited peers
            if wanted.suffice(servers):
                return [Member(peer_id=peer, boot_id=servers[peer].boot_id) for peer in sorted(servers)]
            if now_s() > deadline:
                num_trainers = wanted.num_trainers
                trainers = f" and {_num_trainers(servers)} of {num_trainers} trainers" if num_trainers > 1 else ""
                raise DeadlineExceeded(
                    f"{len(servers)} of {wanted.num_servers} servers{trainers} came within {timeout:g} s. Look above "
                    "for their errors, or raise `Limits.start_timeout` if this machine needs longer to import torch."
                )
            await asyncio.sleep(_POLL_S)

    async def known_servers(self) -> dict[PeerId, list[str]]:
        """Return the addresses of all servers that announced themselves; some may be gone."""
        return {peer: server.addresses for peer, server in (await self.announced()).items()}

    async def connect_all(self) -> None:
        """Connect this peer to all servers that announced themselves, as far as they can be reached."""
        await self._connect(await self.announced(), warns=False)

    async def _connect(
        self, servers: Mapping[PeerId, ServerAnnouncement], *, warns: bool = True
    ) -> dict[PeerId, ServerAnnouncement]:
        """Connect to `servers` and return the reachable servers; with `warns`, log a warning for each failure."""

        async def reaches(peer: PeerId, server: ServerAnnouncement) -> bool:
            if peer == self.transport.peer_id:
                return True
            try:
                await self.transport.connect(server.addresses)
            except SwarmError as error:
                text = "Cannot reach server %s, which announced itself and may be gone: %s"
                if warns:
                    self._warn_once(text, peer, server.boot_id, error)
                else:
                    _log.info(text, short_name(peer), shorten(str(error)))
                return False
            return True

        reached = await gather(reaches(peer, server) for peer, server in servers.items())
        return {peer: servers[peer] for peer, is_reached in zip(servers, reached, strict=True) if is_reached}

    async def known_standbys(self) -> set[PeerId]:
        """Return the servers that could lead the run if the lead died; some may be gone."""
        return {peer for peer, server in (await self.announced()).items() if server.inherits}

    async def announced(self) -> dict[PeerId, ServerAnnouncement]:
        """Return the announcements of all servers; some may be gone."""
        return await self._servers("servers")

    async def _servers(self, among: str) -> dict[PeerId, ServerAnnouncement]:
        """Return the announcements of servers, without those that name an address of another peer."""
        valid = {}
        for peer, server in (await self._read(f"{self.run_id}.{among}", ServerAnnouncement)).items():
            ids = {address.rpartition("/p2p/")[2] for address in server.addresses if "/p2p/" in address}
            if ids <= {peer}:
                valid[peer] = server
            else:
                error = ProtocolError(f"a peer may announce only its own addresses, got one of {min(ids - {peer})}")
                self._warn_once("Ignored the announcement of %s: %s", peer, server.boot_id, error)
        return valid

    async def _read(self, key: str, announcement_type: type[_Announcement]) -> dict[PeerId, _Announcement]:
        """Return the well-formed announcements under a key, where any peer may publish anything."""
        announcements = {}
        for peer, value in (await self.directory.read(key)).items():
            try:
                announcements[peer] = decode(value, announcement_type)
            except ProtocolError as error:
                self._warn_once("Ignored the announcement of %s: %s", peer, key, error)
        return announcements

    def _warn_once(self, text: str, peer: PeerId, source: int | str, error: SwarmError) -> None:
        """Warn of a peer once per `source`: its boot id, or the key of an announcement without boot id."""
        if (peer, source) not in self._warned_of:
            self._warned_of.add((peer, source))
            _log.warning(text, short_name(peer), shorten(str(error)))
        _log.debug("The full error of %s: %s", printable(peer), printable(str(error)))


async def admit(transport: Transport, manifest: Manifest, stages: Sequence[StageModule], *, timeout: float) -> None:
    """Send record 0 to all servers, which check it against their models, then the weights of `stages`."""
    run = RunState(manifest)
    await gather(ADMIT.ask(transport, peer, manifest, timeout=timeout) for peer in run.servers)
    await scatter_weights(transport, run, stages, timeout=timeout)


async def restart(transport: Transport, run: RunState, request: RestartRequest, *, timeout: float) -> None:
    """Order all servers to roll back to the step of `request`, whose weights `scatter_weights` sends next."""
    # Afterwards no server holds state of an older generation, and all servers refuse that generation's calls.
    await gather(RESTART.ask(transport, peer, request, timeout=timeout) for peer in run.servers)
