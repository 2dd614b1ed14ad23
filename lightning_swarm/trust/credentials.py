"""Verifies peers' certificates and the owner's bans for one run, and presents this peer's own certificate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from lightning_swarm.core.errors import AccessDenied
from lightning_swarm.network import PeerId
from lightning_swarm.network.access import Ban, Permit
from lightning_swarm.trust.certificates import Certificate, Invitation, SignedBan, decode

# A denied peer gets the error as text, in which `is_untimely` recognizes these parts.
_EXPIRED: Final = "it expired"
_IN_THE_FUTURE: Final = "in the future"
_CLOCK_SKEW_S: Final = 60.0  # tolerated difference of clocks, the same as in the directory


@dataclass(frozen=True)
class RunCredentials:
    """A peer's certificate for a run, and the means to verify other peers' certificates."""

    run_id: str
    owner: PeerId  # its key signs the run's invitations: the root of all certificates
    certificate: bytes

    def verify(self, peer: PeerId, certificate: bytes, *, now_s: float) -> Permit:
        """Verify a certificate at `now_s` (seconds since the epoch); return its permit or raise `AccessDenied`."""
        try:
            presented = decode(certificate, Certificate)
        except ValueError as error:
            raise self._denial(peer, f"it is malformed: {error}") from error
        problem = (
            mismatch(presented.invitation, run_id=self.run_id, owner=self.owner)
            or (None if presented.is_genuine else "it is forged: a signature in it is wrong")
            or (None if presented.peer == peer else "it was made for another peer")
            or untimely(presented, now_s=now_s)
        )
        if problem is not None:
            raise self._denial(peer, problem)
        invitation = presented.invitation
        return Permit(
            role=invitation.role,
            expires_at_s=float(presented.ends_at_s),
            come_by_s=float(invitation.expires_at_s),
            invitation=invitation.number,
            uses=invitation.uses,
        )

    def verify_ban(self, signed: bytes) -> Ban:
        """Verify a signed ban and return it. Raise `AccessDenied` if it is malformed or not signed by the owner."""
        try:
            ban = decode(signed, SignedBan)
        except ValueError as error:
            raise AccessDenied(f"a ban must be signed by the run's owner, got a malformed ban: {error}") from error
        if ban.run_id != self.run_id or ban.owner != self.owner or not ban.is_genuine:
            raise AccessDenied(
                f"a ban from run {self.run_id!r} must be signed by its owner {self.owner}, got a ban from run "
                f"{ban.run_id!r} in the name of {ban.owner}. Call `lightning-swarm ban` where the owner's key is."
            )
        return Ban(ban.subject, ban.is_lifted, ban.decided_at_ns, ban.reason, signed)

    def _denial(self, peer: PeerId, problem: str) -> AccessDenied:
        remedy = "Its user needs an invitation from the run's owner, who makes one with `lightning-swarm invite`."
        if problem.endswith(_IN_THE_FUTURE):
            remedy = "Set the clocks of both machines."
        return AccessDenied(f"the certificate of {peer} does not admit it to run {self.run_id!r}: {problem}. {remedy}")


def mismatch(invitation: Invitation, *, run_id: str, owner: PeerId | None = None) -> str | None:
    """Return why an invitation is invalid for a run; None if it is valid. Without `owner`, any owner is accepted."""
    if invitation.run_id != run_id:
        return f"this invitation is for run {invitation.run_id!r}, not {run_id!r}"
    if owner not in (None, invitation.owner):
        return f"this invitation is signed by {invitation.owner}, but the run's owner is {owner}"
    return None


def untimely(admission: Invitation | Certificate, *, now_s: float) -> str | None:
    """Return why an invitation or a certificate is invalid at `now_s` (seconds since the epoch); None if valid."""
    end_s = admission.ends_at_s if isinstance(admission, Certificate) else admission.expires_at_s
    if (late_s := now_s - end_s) >= 0:
        return f"{_EXPIRED} {_in_words(late_s)} ago"
    if isinstance(admission, Invitation):
        return None
    if admission.issued_at_s >= admission.invitation.expires_at_s:
        return "its peer joined after the invitation had expired"
    if (early_s := admission.issued_at_s - now_s) > _CLOCK_SKEW_S:
        return f"it was issued {_in_words(early_s)} {_IN_THE_FUTURE}"
    return None


def is_untimely(denial: str) -> bool:
    """Return whether a peer denied access because of the time, so that the two clocks may disagree."""
    return _EXPIRED in denial or _IN_THE_FUTURE in denial


def _in_words(seconds: float) -> str:
    for unit, size_s in (("day", 86400), ("hour", 3600), ("minute", 60)):
        if seconds >= size_s:
            number = int(seconds // size_s)
            return f"{number} {unit}{'s' if number != 1 else ''}"
    return "less than a minute"
