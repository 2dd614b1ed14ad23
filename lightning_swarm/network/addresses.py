"""Where a peer can be reached, as people write it and as libp2p does."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from typing import Final

from lightning_swarm.errors import ConfigError
from lightning_swarm.network import PeerId

_SHORT: Final = re.compile(r"(?:\[(?P<ip6>[0-9A-Fa-f:.]+)\]|(?P<host>[^\s/:\[\]]+)):(?P<port>\d{1,5})/(?P<peer>\w+)")
_LONG: Final = re.compile(r"/(?:ip4|ip6|dns|dns4|dns6)/(?P<host>[^\s/]+)/tcp/(?P<port>\d{1,5})/p2p/(?P<peer>\w+)")
_PEER_ID: Final = re.compile(r"[1-9A-HJ-NP-Za-km-z]{40,64}")  # a hash in base58


@dataclass(frozen=True)
class Address:
    """One peer at one place.

    Args:
        host: An IP address or a name.
        port: TCP.
        peer_id: Who is to answer there.
    """

    host: str
    port: int
    peer_id: PeerId

    @classmethod
    def parse(cls, text: str) -> Address:
        """Read ``host:port/id``, or libp2p's ``/ip4/…/tcp/…/p2p/<id>``.

        Raises:
            ConfigError: It is neither.
        """
        found = _SHORT.fullmatch(text) or _LONG.fullmatch(text)
        if found is None or not 0 < int(found["port"]) < 1 << 16 or _PEER_ID.fullmatch(found["peer"]) is None:
            raise ConfigError(
                "an address must be host:port/id (or /ip4/…/tcp/…/p2p/<id>), as the peer itself prints it, "
                f"got {text!r}. Copy the whole of it, the id after the slash included."
            )
        host = found["host"] or found["ip6"]
        return cls(host, int(found["port"]), PeerId(found["peer"]))

    def __str__(self) -> str:
        return f"{self.place}/{self.peer_id}"

    @property
    def place(self) -> str:
        """Host and port."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def maddr(self) -> str:
        """As libp2p writes it."""
        try:
            kind = f"ip{ipaddress.ip_address(self.host).version}"
        except ValueError:
            kind = "dns"
        return f"/{kind}/{self.host}/tcp/{self.port}/p2p/{self.peer_id}"
