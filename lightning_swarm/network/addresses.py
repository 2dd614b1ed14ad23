"""Addresses of peers, as people write them and as libp2p writes them."""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from lightning_swarm.core.errors import ConfigError
from lightning_swarm.network import PeerId

_SHORT: Final = re.compile(r"(?:\[(?P<ip6>[0-9A-Fa-f:.]+)\]|(?P<host>[^\s/:\[\]]+)):(?P<port>\d{1,5})/(?P<peer>\w+)")
_HOST_PORT: Final = re.compile(r"(?:\[(?P<ip6>[0-9A-Fa-f:.]+)\]|(?P<host>[^\s/:\[\]]+)):(?P<port>\d{1,5})")
_LONG: Final = re.compile(r"/(?:ip4|ip6|dns|dns4|dns6)/(?P<host>[^\s/]+)/tcp/(?P<port>\d{1,5})/p2p/(?P<peer>\w+)")
# Loopback, link-local and private addresses, which several machines may share.
_AMBIGUOUS: Final = tuple(
    map(
        ipaddress.ip_network,
        (
            *("127.0.0.0/8", "169.254.0.0/16", "10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10"),
            *("::1/128", "fe80::/10", "fc00::/7"),
        ),
    )
)
_PEER_ID: Final = re.compile(r"[1-9A-HJ-NP-Za-km-z]{40,64}")  # a key, or its hash, in base58


@dataclass(frozen=True)
class HostPort:
    """A host and TCP port where a peer listens, or where other peers reach it."""

    host: str  # an IP address, or a name that other machines resolve
    port: int  # 0 lets the system choose

    @classmethod
    def to_listen(cls, text: str) -> HostPort:
        """Read an IP address, or ``address:port``."""
        match = _HOST_PORT.fullmatch(text)
        host, port = (match["ip6"] or match["host"], int(match["port"])) if match else (text.strip("[]"), 0)
        if _ip_version(host) is None or port >= 1 << 16:
            raise ConfigError(
                f"`listen` must be an IP address of this machine, with a port or without, got {text!r}. "
                "0.0.0.0:31337 listens on all of the machine's addresses."
            )
        return cls(host, port)

    @classmethod
    def to_announce(cls, text: str) -> HostPort:
        """Read ``host:port``."""
        match = _HOST_PORT.fullmatch(text)
        if match is None or not 0 < int(match["port"]) < 1 << 16:
            raise ConfigError(
                f"`announce` must be the address and the port at which others reach this peer, got {text!r}. "
                "Write them like 203.0.113.7:31337."
            )
        return cls(match["ip6"] or match["host"], int(match["port"]))

    def for_rank(self, rank: int) -> HostPort:
        """Return the address of the machine's peer number `rank`, whose port is higher by `rank`."""
        return HostPort(self.host, self.port + rank if self.port else 0)

    @property
    def listen_option_elsewhere(self) -> str:
        """The value of `--listen` that makes another machine listen on all of its addresses, at the same port."""
        everywhere = HostPort("::" if ":" in self.host else "0.0.0.0", self.port)
        return str(everywhere) if self.port else everywhere.host

    @property
    def is_loopback(self) -> bool:
        """Return whether no other machine can use this address."""
        return self.host == "localhost" or (
            _ip_version(self.host) is not None and ipaddress.ip_address(self.host).is_loopback
        )

    @property
    def is_unique(self) -> bool:
        """Return whether the address means the same machine everywhere, unlike names and private addresses."""
        return _ip_version(self.host) is not None and not any(
            ipaddress.ip_address(self.host) in network for network in _AMBIGUOUS
        )

    def check_answers_as(self, answering: PeerId | None, own: PeerId) -> None:
        """Raise a ConfigError if another peer than `own`, which announces this address, is `answering` there."""
        if answering not in (None, own):
            raise ConfigError(
                f"`announce` must name an address at which this peer answers: {self} answers as {answering}, this "
                f"peer is {own}. Announce this machine's own address (`--announce HOST:PORT` of `join` and `serve`), "
                "or leave it out."
            )

    @property
    def maddr(self) -> str:
        """The multiaddress that libp2p uses."""
        version = _ip_version(self.host)
        return f"/{f'ip{version}' if version else 'dns'}/{self.host}/tcp/{self.port}"

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True)
class Address:
    """A full address: host, TCP port, and the id of the peer that must answer there."""

    host: str  # an IP address or a name
    port: int
    peer_id: PeerId

    @classmethod
    def parse_all(cls, texts: Iterable[str]) -> list[Address]:
        """Read the texts that are addresses, and skip all other texts."""
        addresses = []
        for text in texts:
            with suppress(ConfigError):
                addresses.append(cls.parse(text))
        return addresses

    @classmethod
    def parse(cls, text: str) -> Address:
        """Read ``host:port/id``, or libp2p's ``/ip4/…/tcp/…/p2p/<id>``."""
        match = _SHORT.fullmatch(text) or _LONG.fullmatch(text)
        if match is None or not 0 < int(match["port"]) < 1 << 16 or _PEER_ID.fullmatch(match["peer"]) is None:
            raise ConfigError(
                "an address must be host:port/id (or /ip4/…/tcp/…/p2p/<id>), as the peer itself prints it, "
                f"got {text!r}. Copy the whole address, including the id after the slash."
            )
        host = match["host"] or match["ip6"]
        return cls(host, int(match["port"]), PeerId(match["peer"]))

    def __str__(self) -> str:
        return f"{self.host_port}/{self.peer_id}"

    @property
    def host_port(self) -> HostPort:
        """The host and port."""
        return HostPort(self.host, self.port)

    @property
    def maddr(self) -> str:
        """The multiaddress that libp2p uses."""
        return f"{self.host_port.maddr}/p2p/{self.peer_id}"


def listen_error(host: str, port: int) -> OSError | OverflowError | None:
    """Try to listen at an IP address and port (0: any port). Return the error if that fails, otherwise None."""
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # closed connections may linger
            probe.bind((host, port))
            probe.listen()
    except (OSError, OverflowError) as error:
        return error
    return None


def most_reachable(addresses: Sequence[Address]) -> Address:
    """Choose one of a peer's addresses, preferably one that other machines can use."""
    return min(addresses, key=lambda address: address.host_port.is_loopback)


def host_of(maddrs: Sequence[str]) -> str:
    """Return the host of a peer's full addresses, preferably one that other machines can use; "" if there is none."""
    hosts = [parts[2] for parts in (maddr.split("/") for maddr in maddrs) if len(parts) > 2]
    return min(hosts, key=lambda host: HostPort(host, 0).is_loopback, default="")


def _ip_version(host: str) -> int | None:
    try:
        return ipaddress.ip_address(host).version
    except ValueError:
        return None
