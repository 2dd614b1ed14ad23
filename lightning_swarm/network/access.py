"""Access to a run: the roles of its peers, the rights that certificates give, and the roles that methods require."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import Final, Protocol, TypeAlias

from lightning_swarm.network import PeerId


class Role(enum.StrEnum):
    """A peer's role in a run. Each role has the rights of the roles that are listed before it."""

    OBSERVER = "observer"  # may only read
    SERVER = "server"  # may compute, average, and, unless only keepers decide, vote and coordinate
    TRAINER = "trainer"  # may read data and, unless only keepers decide, begin and lead the run
    KEEPER = "keeper"  # may decide in any run: the owner's own peers, and equally trusted peers

    def includes(self, other: Role) -> bool:
        """Return whether this role has all rights of the other role."""
        return _RANKS[self] >= _RANKS[other]


_RANKS: Final = {role: rank for rank, role in enumerate(Role)}


INVITATION_BYTES: Final = 16  # length of an invitation's number


@dataclass(frozen=True)
class Permit:
    """A peer's rights by a verified certificate."""

    role: Role
    expires_at_s: float  # seconds since the epoch
    invitation: bytes  # its number, `INVITATION_BYTES` long
    uses: int  # number of peers that may join by this invitation
    come_by_s: float = math.inf  # latest time to join, in seconds since the epoch


@dataclass(frozen=True)
class Ban:
    """The owner's verified ban of a peer, or of all peers of an invitation; or the end of such a ban."""

    subject: str  # a peer's id, or the number of an invitation in hex
    is_lifted: bool
    decided_at_ns: int  # nanoseconds since the epoch
    reason: str
    signed: bytes  # the signed form, which any peer can verify

    @property
    def is_of_invitation(self) -> bool:
        """Return whether the ban is of an invitation, not of a single peer."""
        return len(self.subject) == 2 * INVITATION_BYTES  # a peer's id is longer


class Credentials(Protocol):
    """This peer's certificate, and the means to verify other peers' certificates. Pure: no network, no clock."""

    @property
    def certificate(self) -> bytes:
        """This peer's certificate, to present to other peers; at most 1 KiB."""
        ...

    def verify(self, peer: PeerId, certificate: bytes, *, now_s: float) -> Permit:
        """Return a peer's permit by its certificate at `now_s` (seconds since the epoch), or raise `AccessDenied`."""
        ...

    def verify_ban(self, signed: bytes) -> Ban:
        """Return the ban that the run's owner has signed; `AccessDenied` if it is not the owner's."""
        ...


Certify: TypeAlias = Callable[[PeerId], Credentials]
"""Makes the credentials of this process's peer, whose id is known once its network has started."""


@dataclass(frozen=True, eq=False)
class Rpc:
    """A method that peers call on each other, and the roles of both sides."""

    name: str
    _: KW_ONLY
    by: Role  # least role that may call it
    of: Role = Role.SERVER  # least role of a peer that answers it
    only_coordinator: bool = False  # of all servers, only the coordinator answers it


# Methods of the transport itself, by which two peers identify each other. Any peer may call them.
PING: Final = "transport.ping"
CERTIFY: Final = "transport.certify"  # exchanges certificates
INTRODUCE: Final = "transport.introduce"  # returns secrets by which peers of one machine identify each other
OPEN_METHODS: Final = frozenset((PING, CERTIFY, INTRODUCE))
