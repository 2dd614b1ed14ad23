"""Transport and directory over libp2p and a Kademlia DHT: the only place that imports hivemind."""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import logging
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Final

from lightning_swarm.core.clock import now_s
from lightning_swarm.core.errors import ConfigError, InitialPeersSilent, Unreachable
from lightning_swarm.core.tasks import gather
from lightning_swarm.network import MAX_STREAM_BYTES, PeerId
from lightning_swarm.network.access import Certify, Rpc
from lightning_swarm.network.addresses import Address, HostPort, host_of, listen_error
from lightning_swarm.network.hivemind._engine import P2P, ControlFailure, P2PDaemonError, PeerID
from lightning_swarm.network.hivemind.daemon import in_own_session, remove_dead_sockets
from lightning_swarm.network.hivemind.directory import HivemindDirectory
from lightning_swarm.network.hivemind.transport import HivemindTransport
from lightning_swarm.network.identity import Identity, load_identity
from lightning_swarm.network.transport import SILENCE_S

__all__ = ["HivemindDirectory", "HivemindTransport", "start"]

_log = logging.getLogger(__name__)

_NUM_ATTEMPTS: Final = 3
PORT_PATIENCE_S = 10.0  # longest wait for a port that a killed peer may still hold
_POLL_S: Final = 0.2
_PAUSE_S: Final = 0.5
_NO_PEERS_KNOWN: Final = "find any peer in table"  # part of a daemon's error until it has a connection
_NUM_SEARCHES: Final = 20
_SEARCH_PAUSE_S: Final = 0.1
_PEERS_SILENT: Final = "bootstrap peers"  # part of the daemon's last message if only the initial peers failed
_KEY_IN_USE: Final = "answers already"  # part of the error if a running peer has the same key
_LOOPBACK: Final = HostPort("127.0.0.1", 0)


async def start(
    *,
    listen: HostPort = _LOOPBACK,  # ``0.0.0.0`` for all addresses
    announce: Sequence[str] = (),  # multiaddresses that other peers use; empty: the addresses it listens on
    identity_path: str | None = None,  # file of the private key, created if missing; None: a new identity
    initial_peers: Sequence[str] = (),  # full addresses of peers to join; empty begins a new network
    startup_timeout: float = 60.0,  # seconds for each attempt to start the daemon
    silence_timeout: float = SILENCE_S,  # seconds without a sign of life after which exchanges with a peer end
    receive_bytes: int = MAX_STREAM_BYTES,  # tensor bytes that all peers together may have under way to this one
    certify: Certify | None = None,  # makes credentials before other peers can call; None: all peers may call
    rpcs: Iterable[Rpc] = (),  # methods that certified peers may call, by their roles
    neighbours: bool = True,  # bypass the daemons between peers of this machine; not for emulated networks
) -> tuple[HivemindTransport, HivemindDirectory]:
    """Start this process's peer on the running loop. The caller closes the directory first, the transport last."""
    try:
        ipaddress.ip_address(listen.host)
    except ValueError as error:
        raise ConfigError(f"`host` must be an IP address, got {listen.host!r}. 0.0.0.0 listens on all.") from error
    await _check_free(listen)
    remove_dead_sockets()
    is_local = listen.is_loopback and all(HostPort(host_of([maddr]), 0).is_loopback for maddr in announce)
    identity = _identity(identity_path, is_local=is_local)
    with nullcontext(identity_path) if identity_path is not None else identity.temporary_file() as key_path:
        existing_id = identity.peer_id if identity_path is not None else None
        p2p = await _start_daemon(listen.maddr, announce, str(key_path), existing_id, initial_peers, startup_timeout)
    transport = HivemindTransport(p2p, silence_s=silence_timeout, neighbours=neighbours, receive_bytes=receive_bytes)
    if certify is not None:
        transport.set_credentials(certify(transport.peer_id), rpcs)
    try:
        await transport.open()
        # Behind a router that does not loop its own address back, the check waits for its timeout, and passes.
        await gather(_check_answers(transport, maddr) for maddr in announce)
        return transport, await HivemindDirectory.join(transport, p2p, initial_peers, identity, is_local=is_local)
    except BaseException:
        await transport.close()
        raise


async def _check_answers(transport: HivemindTransport, maddr: str) -> None:
    """Refuse an announced address, ``/ip4/…/tcp/…``, at which another peer answers."""
    announced = Address.parse(f"{maddr}/p2p/{transport.peer_id}").host_port
    announced.check_answers_as(await transport.identify(maddr), transport.peer_id)


def _identity(path: str | None, *, is_local: bool) -> Identity:
    """Load or generate the key pair; refuse a key that cannot sign if other machines reach this peer."""
    identity = Identity.generate() if path is None else load_identity(Path(path))
    if not (identity.can_sign or is_local):
        raise ConfigError(
            "`identity_path` must hold an Ed25519 key if other machines reach this peer, because they verify its "
            f"announcements by its id; {path!r} holds an RSA key, of an earlier version. Move that file away: then a "
            "new key is made, with another id."
        )
    return identity


async def _check_free(listen: HostPort) -> None:
    """Refuse a port that stays in use: two daemons would share it, and each would receive the other's connections."""
    # The daemon of a recently killed peer may still be ending.
    end_s = now_s() + PORT_PATIENCE_S
    while (error := listen_error(listen.host, listen.port)) is not None:
        if isinstance(error, OSError) and error.errno == errno.EADDRINUSE and now_s() < end_s:
            await asyncio.sleep(_POLL_S)
            continue
        raise ConfigError(
            f"`listen` must be an address of this machine and a free port, got {listen.host} and {listen.port}: "
            f"{getattr(error, 'strerror', None) or error}. End the process that listens there, or name another port; "
            "without a port, the system chooses a free one."
        )


async def _start_daemon(
    listen: str,
    announce: Sequence[str],
    key_path: str,
    existing_id: PeerId | None,  # the id of an existing key, whose peer may be running; None: the key is new
    initial_peers: Sequence[str],
    startup_timeout: float,
) -> P2P:
    """Start libp2p's daemon and return its client; after a few failed attempts, raise an error with advice."""
    # The daemon is this process's only child process, and ends with it.
    problem: Exception | None = None
    for attempt in range(1, _NUM_ATTEMPTS + 1):
        try:
            # No relaying, hole punching or port mapping: peers are reached only at their announced addresses.
            with in_own_session():
                if existing_id is not None and initial_peers and await _is_running(existing_id, initial_peers):
                    raise P2PDaemonError(f"{existing_id} {_KEY_IN_USE}")
                return await P2P.create(
                    initial_peers=list(initial_peers) or None,
                    host_maddrs=[listen],
                    announce_maddrs=list(announce) or None,
                    identity_path=key_path,
                    check_if_identity_free=False,  # hivemind can check only RSA keys
                    startup_timeout=startup_timeout,
                    auto_nat=False,
                    nat_port_map=False,
                    use_relay=False,
                )
        except (P2PDaemonError, OSError) as error:
            problem = error
            if _PEERS_SILENT in str(error):
                _log.info("The initial peers did not answer (attempt %d of %d).", attempt, _NUM_ATTEMPTS)
                _log.debug("In full: %s", error)
            else:
                _log.warning("The libp2p daemon did not start (attempt %d of %d): %s", attempt, _NUM_ATTEMPTS, error)
            await asyncio.sleep(_PAUSE_S * attempt)
    error_type = InitialPeersSilent if _PEERS_SILENT in str(problem) else Unreachable
    raise error_type(_advice(str(problem), listen, initial_peers)) from problem


async def _is_running(peer: PeerId, initial_peers: Sequence[str]) -> bool:
    """Return whether a temporary second daemon finds a peer of this id in the network of `initial_peers`."""
    seeker = await P2P.create(
        initial_peers=list(initial_peers), dht_mode="client", auto_nat=False, nat_port_map=False, use_relay=False
    )
    try:
        for _ in range(_NUM_SEARCHES):
            try:
                await seeker._client.connect(PeerID.from_base58(peer), [])
            except ControlFailure as error:
                if _NO_PEERS_KNOWN not in str(error):
                    return False
                await asyncio.sleep(_SEARCH_PAUSE_S)
            else:
                return True
        return False
    finally:
        await seeker.shutdown()


def _advice(problem: str, listen: str, initial_peers: Sequence[str]) -> str:
    if _KEY_IN_USE in problem:
        return (
            f"`identity_path` must name a key that no other running peer has ({problem}). End that peer, or name "
            "another file for a new key."
        )
    if _PEERS_SILENT in problem:
        return (
            f"`initial_peers` must run and be reachable from here, and none of {', '.join(initial_peers)} answered. "
            "Copy address and id again from the output of that peer, check that it still runs, and find the cause with "
            "`lightning-swarm doctor --peer`."
        )
    return (
        f"The libp2p daemon did not start in {_NUM_ATTEMPTS} attempts: {problem}. Check that {listen} is free and an "
        "address of this machine, that the initial peers "
        f"({', '.join(initial_peers) or 'none'}) are up and reachable from here, and that /tmp can be written; "
        "on a busy machine raise `startup_timeout`."
    )
