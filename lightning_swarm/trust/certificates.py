"""Invitations and bans, which a run's owner signs, and certificates, which name the peer that came by an invitation.

The owner signs an invitation that has a key of its own. Whoever has its secret signs a certificate for one peer. So
anyone who knows the owner's public key verifies a peer's certificate, without a server to ask.
"""

from __future__ import annotations

import secrets
from typing import Annotated, Final, TypeVar

import msgspec
from msgspec.structs import replace

from lightning_swarm.network import PeerId
from lightning_swarm.network.access import INVITATION_BYTES, Role
from lightning_swarm.network.identity import Identity, is_signed

MAX_USES: Final = 4096  # all peers that came by an invitation are named where the run is shown
MAX_TIME_S: Final = 1 << 36
STAY_S: Final = 90 * 86400.0
"""For how long a peer may stay, if its invitation does not say it otherwise."""
MAX_REASON: Final = 100  # characters of the reason of a ban

# Domains of signatures: none means two things.
_INVITATION: Final = b"lightning_swarm/invitation/1"
_CERTIFICATE: Final = b"lightning_swarm/certificate/1"
_BAN: Final = b"lightning_swarm/ban/1"
_MAX_BYTES: Final = 1024
_SIGNATURE_BYTES: Final = 64
_SEED_BYTES: Final = 32

InvitationNumber = Annotated[bytes, msgspec.Meta(min_length=INVITATION_BYTES, max_length=INVITATION_BYTES)]
Uses = Annotated[int, msgspec.Meta(ge=1, le=MAX_USES)]
RunId = Annotated[str, msgspec.Meta(min_length=1, max_length=100)]
_Signature = Annotated[bytes, msgspec.Meta(max_length=_SIGNATURE_BYTES)]
_Name = Annotated[str, msgspec.Meta(max_length=64)]  # a peer's id
_Time = Annotated[int, msgspec.Meta(ge=0, le=MAX_TIME_S)]  # in seconds since the epoch


class _Record(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """Base of what is encoded here. No field has a default, so that none may be missing."""


class Invitation(_Record, frozen=True, tag=1):
    """The owner's word that peers may come to a run. It is no secret; the key that it names is."""

    run_id: RunId
    owner: _Name  # the public key that signs this, as an id
    number: InvitationNumber
    role: Role
    uses: Uses  # so many peers may come by it
    expires_at_s: _Time  # peers come before
    stay_s: _Time  # and may stay for so long
    key: _Name  # the public key that signs certificates, as an id
    signature: _Signature

    @property
    def is_genuine(self) -> bool:
        """Return whether its owner has signed it."""
        return is_signed(self.owner, _INVITATION, _unsigned(self), self.signature)


class Certificate(_Record, frozen=True, tag=2):
    """An invitation, and the peer that came by it. It is public, and of no use to any other peer."""

    invitation: Invitation
    peer: _Name
    issued_at_s: _Time
    signature: _Signature

    @property
    def ends_at_s(self) -> int:
        """The time, in seconds since the epoch, from which it is of no use any more."""
        return self.issued_at_s + self.invitation.stay_s

    @property
    def is_genuine(self) -> bool:
        """Return whether the owner has signed the invitation, and whoever had that has signed this."""
        invitation = self.invitation
        return invitation.is_genuine and is_signed(invitation.key, _CERTIFICATE, _unsigned(self), self.signature)


class SecretInvitation(_Record, frozen=True, tag=3):
    """An invitation with the secret of its key: whoever has this may come."""

    invitation: Invitation
    seed: Annotated[bytes, msgspec.Meta(min_length=_SEED_BYTES, max_length=_SEED_BYTES)]

    @property
    def is_genuine(self) -> bool:
        """Return whether the owner has signed the invitation, and the secret is that of its key."""
        return self.invitation.is_genuine and Identity.from_seed(self.seed).peer_id == self.invitation.key

    def certify(self, peer: PeerId, *, now_s: float) -> Certificate:
        """Issue a certificate to a peer."""
        unsigned = Certificate(invitation=self.invitation, peer=peer, issued_at_s=int(now_s), signature=b"")
        signature = Identity.from_seed(self.seed).sign(_CERTIFICATE, encode(unsigned))
        return replace(unsigned, signature=signature)

    def __repr__(self) -> str:  # the secret is for no log
        return f"SecretInvitation({self.invitation!r})"


class SignedBan(_Record, frozen=True, tag=4):
    """The owner's word that a peer, or all that came by an invitation, take no part in a run; or may again."""

    run_id: RunId
    owner: _Name  # the public key that signs this, as an id
    subject: _Name  # a peer's id, or the number of an invitation in hex
    is_lifted: bool
    decided_at_ns: Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]  # since the epoch: the newest word counts
    reason: Annotated[str, msgspec.Meta(max_length=MAX_REASON)]
    signature: _Signature

    @property
    def is_genuine(self) -> bool:
        """Return whether its owner has signed it."""
        return is_signed(self.owner, _BAN, _unsigned(self), self.signature)


_T = TypeVar("_T", bound=_Record)


def invite(
    owner: Identity, run_id: str, role: Role, *, uses: int, expires_at_s: float, stay_s: float
) -> SecretInvitation:
    """Invite peers to a run, in its owner's name."""
    key = Identity.generate()
    unsigned = Invitation(
        run_id=run_id,
        owner=owner.peer_id,
        number=secrets.token_bytes(INVITATION_BYTES),
        role=role,
        uses=uses,
        expires_at_s=int(expires_at_s),
        stay_s=int(stay_s),
        key=key.peer_id,
        signature=b"",
    )
    signature = owner.sign(_INVITATION, encode(unsigned))
    return SecretInvitation(invitation=replace(unsigned, signature=signature), seed=key.seed)


def ban(owner: Identity, run_id: str, subject: str, reason: str, *, is_lifted: bool, decided_at_ns: int) -> SignedBan:
    """Ban a peer or an invitation from a run, or lift the ban, in the owner's name."""
    unsigned = SignedBan(
        run_id=run_id,
        owner=owner.peer_id,
        subject=subject,
        is_lifted=is_lifted,
        decided_at_ns=decided_at_ns,
        reason=reason,
        signature=b"",
    )
    return replace(unsigned, signature=owner.sign(_BAN, encode(unsigned)))


def encode(record: _Record) -> bytes:
    """Encode a record."""
    return msgspec.msgpack.encode(record)


def decode(data: bytes, kind: type[_T]) -> _T:
    """Decode a record of a class, or of one of several; `ValueError` refuses all bytes but what `encode` gives."""
    if len(data) > _MAX_BYTES:
        raise ValueError(f"it has {len(data)} bytes, and may have {_MAX_BYTES}")
    try:
        record = msgspec.msgpack.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise ValueError(str(error)) from error
    if encode(record) != data:
        raise ValueError("it is not encoded in the one way that is allowed")
    return record


def _unsigned(record: Invitation | Certificate | SignedBan) -> bytes:
    return encode(replace(record, signature=b""))
