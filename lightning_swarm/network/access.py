"""Access to a run: the roles of its peers, and what a certificate permits."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Protocol

from lightning_swarm.network import PeerId


class Role(enum.StrEnum):
    """What a peer may do in a run. A role may do what those above it may."""

    OBSERVER = "observer"  # look
    SERVER = "server"  # compute, average, vote and coordinate
    TRAINER = "trainer"  # and read data, and lead
    KEEPER = "keeper"  # and issue what the owner's key would: the starter of the run


@dataclass(frozen=True)
class Permit:
    """What a verified certificate permits its peer."""

    role: Role
    expires_at_s: float  # since the epoch
    invitation: bytes  # its number, 16 bytes
    uses: int  # so many peers may come by this invitation


class Credentials(Protocol):
    """This peer's own certificate, and the means to verify those of others. Pure: no network, no clock."""

    @property
    def certificate(self) -> bytes:
        """This peer's certificate, to be presented to others; at most 1 KiB."""
        ...

    def verify(self, peer: PeerId, certificate: bytes, *, now_s: float) -> Permit:
        """Return what a certificate permits a peer now (seconds since the epoch); else `AccessDenied` says why."""
        ...
