"""Certificates for tests of the gate: as small as can be, and forgeable by nobody who lacks the run's secret."""

from __future__ import annotations

import hmac
import time
from dataclasses import dataclass

from lightning_swarm.core.errors import AccessDenied
from lightning_swarm.network import PeerId
from lightning_swarm.network.access import Permit, Role

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
    """A certificate, which lasts for an hour from now if nothing else is said."""
    expires_at_s = time.time() + HOUR_S if expires_at_s is None else expires_at_s
    text = f"{peer} {role} {expires_at_s!r} {invitation.hex()} {uses}".encode()
    return hmac.digest(run, text, "sha256") + text


@dataclass
class FakeCredentials:
    """Credentials of a peer; `run` stands for the owner's key."""

    certificate: bytes
    run: bytes = b"run"
    num_verified: int = 0

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
    """What a peer of the run has."""
    return FakeCredentials(certificate_of(peer, role, uses=uses, **named), named.get("run", b"run"))
