"""Certificates for tests of the gate: as small as possible, and unforgeable without the run's secret."""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import Callable, Collection, Coroutine
from dataclasses import dataclass
from typing import Any

from typing_extensions import override

from lightning_swarm.core.errors import AccessDenied
from lightning_swarm.network import PeerId
from lightning_swarm.network.access import Ban, Permit, Role
from lightning_swarm.network.identity import Identity
from lightning_swarm.network.memory import MemoryNetwork, MemoryTransport
from lightning_swarm.protocol.bans import answer_bans
from lightning_swarm.protocol.messages.run import UsedInvitation
from lightning_swarm.protocol.rpc import RPCS
from lightning_swarm.trust.certificates import SecretInvitation, encode
from lightning_swarm.trust.credentials import RunCredentials
from lightning_swarm.trust.owner import Owner

HOUR_S = 3600.0
INVITATION = b"invitation of 16"


def certificate_of(
    peer: PeerId,
    role: Role = Role.KEEPER,
    *,
    run: bytes = b"run",
    expires_at_s: float | None = None,
    invitation: bytes = INVITATION,
    uses: int = 100,
) -> bytes:
    """Return a certificate that is valid for an hour from now, unless `expires_at_s` is given."""
    expires_at_s = time.time() + HOUR_S if expires_at_s is None else expires_at_s
    text = f"{peer} {role} {expires_at_s!r} {invitation.hex()} {uses}".encode()
    return hmac.digest(run, text, "sha256") + text


def ban_of(subject: str, run: bytes = b"run") -> bytes:
    """Return the owner's ban of a peer or an invitation."""
    return hmac.digest(run, subject.encode(), "sha256") + subject.encode()


@dataclass
class FakeCredentials:
    """Credentials of a peer; `run` stands for the owner's key."""

    certificate: bytes
    run: bytes = b"run"
    num_verified: int = 0

    def verify_ban(self, signed: bytes) -> Ban:
        signature, subject = signed[:32], signed[32:]
        if not hmac.compare_digest(signature, hmac.digest(self.run, subject, "sha256")):
            raise AccessDenied("it is not signed by the owner of this run")
        return Ban(subject.decode(), is_lifted=False, decided_at_ns=1, reason="", signed=signed)

    def verify(self, peer: PeerId, certificate: bytes, *, now_s: float) -> Permit:
        self.num_verified += 1
        signature, text = certificate[:32], certificate[32:]
        if not hmac.compare_digest(signature, hmac.digest(self.run, text, "sha256")):
            raise AccessDenied("it is not signed by the owner of this run")
        name, role, expires_at_s, invitation, uses = text.decode().split()
        if name != peer:
            raise AccessDenied(f"it is {name}'s")
        permit = Permit(Role(role), float(expires_at_s), bytes.fromhex(invitation), int(uses))
        if permit.expires_at_s <= now_s:
            raise AccessDenied("it has expired")
        return permit


def credentials_of(peer: PeerId, role: Role = Role.KEEPER, *, uses: int = 100, **named: bytes) -> FakeCredentials:
    """Return the credentials of a peer of the run."""
    return FakeCredentials(certificate_of(peer, role, uses=uses, **named), named.get("run", b"run"))


class Gullible(FakeCredentials):
    """Accepts any certificate as one of its run, like the peers of a forged run."""

    @override
    def verify(self, peer: PeerId, certificate: bytes, *, now_s: float) -> Permit:
        return Permit(Role.KEEPER, now_s + 60.0, bytes(16), 1)


OWNER = Owner("run", Identity.from_seed(b"the owner's seed, of 32 bytes..."))


class OwnedNetwork(MemoryNetwork):
    """A network on which every peer has a real certificate of one owner.

    Args:
        role_of: The role of each peer.
        invitation_of: Peer -> name of its invitation.
    """

    def __init__(
        self, role_of: Callable[[PeerId], Role] = lambda _: Role.SERVER, invitation_of: Callable[[PeerId], str] = str
    ) -> None:
        super().__init__(latency_s=0.001)
        self._role_of, self._invitation_of = role_of, invitation_of
        self.invitations: dict[str, SecretInvitation] = {}
        self.transports: dict[PeerId, MemoryTransport] = {}
        self.members: Collection[PeerId] = ()  # peers that get each other's bans
        self._telling: list[asyncio.Task[None]] = []

    async def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        self._telling.append(asyncio.create_task(work))

    def invitation(self, peer: PeerId) -> SecretInvitation:
        """Return a peer's invitation."""
        name = self._invitation_of(peer)
        if name not in self.invitations:
            expires_at_s = time.time() + HOUR_S
            self.invitations[name] = OWNER.invite(self._role_of(peer), uses=100, expires_at_s=expires_at_s)
        return self.invitations[name]

    @override
    def transport(self, name: str | None = None) -> MemoryTransport:
        transport = super().transport(name)
        certificate = self.invitation(transport.peer_id).certify(transport.peer_id, now_s=time.time())
        transport.set_credentials(RunCredentials("run", OWNER.key.peer_id, encode(certificate)), RPCS)
        answer_bans(transport, lambda: self.members, self._spawn)
        self.transports[transport.peer_id] = transport
        return transport

    def used_by(self, members: Collection[str]) -> list[UsedInvitation]:
        """Return the invitations in the manifest of a run of these members."""
        found: dict[bytes, list[PeerId]] = {}
        for name in members:
            found.setdefault(self.invitation(PeerId(name)).invitation.number, []).append(PeerId(name))
        return [UsedInvitation(number=number, uses=100, peers=peers) for number, peers in found.items()]


class InvitedNetwork(MemoryNetwork):
    """A network on which every peer has credentials.

    Args:
        role_of: The role of each peer.
        invitation_of: Peer -> its invitation.
        uses: Uses of each invitation.
    """

    def __init__(
        self,
        role_of: Callable[[PeerId], Role] = lambda _: Role.KEEPER,
        invitation_of: Callable[[PeerId], bytes] = lambda _: INVITATION,
        uses: int = 100,
    ) -> None:
        super().__init__(latency_s=0.001)
        self._role_of, self._invitation_of, self._uses = role_of, invitation_of, uses
        self.verified: dict[PeerId, FakeCredentials] = {}

    @override
    def transport(self, name: str | None = None) -> MemoryTransport:
        transport = super().transport(name)
        peer = transport.peer_id
        role, invitation = self._role_of(peer), self._invitation_of(peer)
        own = FakeCredentials(certificate_of(peer, role, invitation=invitation, uses=self._uses))
        self.verified[peer] = own
        transport.set_credentials(own, RPCS)
        return transport

    def used_by(self, members: Collection[str]) -> list[UsedInvitation]:
        """Return the invitations in the manifest of a run of these members."""
        found: dict[bytes, list[PeerId]] = {}
        for name in members:
            found.setdefault(self._invitation_of(PeerId(name)), []).append(PeerId(name))
        return [UsedInvitation(number=number, uses=self._uses, peers=peers) for number, peers in found.items()]
