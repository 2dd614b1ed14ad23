"""Invitations and bans, which a run's owner signs, and certificates, which bind a peer to its invitation.

Each invitation has its own key pair: the owner signs its public key, and its secret key signs certificates of peers. So
the owner's public key suffices to verify a peer's certificate, offline.
"""

from __future__ import annotations

from typing import Annotated, Final, TypeVar

import msgspec
from msgspec.structs import replace

from lightning_swarm.network import PeerId
from lightning_swarm.network.access import INVITATION_BYTES, Role
from lightning_swarm.network.identity import Identity, is_signed

_T = TypeVar("_T", bound="_Record")
_SignedT = TypeVar("_SignedT", "Invitation", "Certificate", "SignedBan")

MAX_USES: Final = 4096  # the view of a run lists all peers of an invitation
MAX_TIME_S: Final = 1 << 36
DEFAULT_STAY_S: Final = 90 * 86400.0
"""Seconds that a peer may stay, unless its invitation sets another time."""
MAX_REASON: Final = 100  # characters of a ban's reason

_MAX_BYTES: Final = 1024
_SIGNATURE_BYTES: Final = 64
_SEED_BYTES: Final = 32

InvitationNumber = Annotated[bytes, msgspec.Meta(min_length=INVITATION_BYTES, max_length=INVITATION_BYTES)]
Uses = Annotated[int, msgspec.Meta(ge=1, le=MAX_USES)]
RunId = Annotated[str, msgspec.Meta(min_length=1, max_length=100)]
_Signature = Annotated[bytes, msgspec.Meta(max_length=_SIGNATURE_BYTES)]
_Name = Annotated[str, msgspec.Meta(max_length=64)]  # a peer's id
_Time = Annotated[int, msgspec.Meta(ge=0, le=MAX_TIME_S)]  # seconds since the epoch


class _Record(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """Base of the encoded classes. Fields have no defaults, so that none may be missing."""


class Invitation(_Record, frozen=True, tag=1):
    """The owner's permission for peers to join a run. It is public; its secret key is in `SecretInvitation`."""

    run_id: RunId
    owner: _Name  # the public key that signs this, as an id
    number: InvitationNumber
    role: Role
    uses: Uses  # number of peers that may join with it
    expires_at_s: _Time  # end of the time for joining
    stay_s: _Time  # seconds that a peer may stay
    key: _Name  # the public key that signs certificates, as an id
    signature: _Signature

    @property
    def is_genuine(self) -> bool:
        """Return whether the owner signed the invitation."""
        return _is_signed(self, self.owner)


class Certificate(_Record, frozen=True, tag=2):
    """An invitation, and the peer that joined with it. It is public, and useless to any other peer."""

    invitation: Invitation
    peer: _Name
    issued_at_s: _Time
    signature: _Signature

    @property
    def ends_at_s(self) -> int:
        """The time at which the certificate expires, in seconds since the epoch."""
        return self.issued_at_s + self.invitation.stay_s

    @property
    def is_genuine(self) -> bool:
        """Return whether the owner signed the invitation, and the invitation's key signed this certificate."""
        return self.invitation.is_genuine and _is_signed(self, self.invitation.key)


class SecretInvitation(_Record, frozen=True, tag=3):
    """An invitation with its secret key, with which any holder may join."""

    invitation: Invitation
    seed: Annotated[bytes, msgspec.Meta(min_length=_SEED_BYTES, max_length=_SEED_BYTES)]

    @property
    def is_genuine(self) -> bool:
        """Return whether the owner signed the invitation, and the secret belongs to the invitation's key."""
        return self.invitation.is_genuine and Identity.from_seed(self.seed).peer_id == self.invitation.key

    def certify(self, peer: PeerId, *, now_s: float) -> Certificate:
        """Issue a certificate to a peer."""
        unsigned = Certificate(invitation=self.invitation, peer=peer, issued_at_s=int(now_s), signature=b"")
        return signed(unsigned, Identity.from_seed(self.seed))

    def __repr__(self) -> str:  # keeps the secret out of logs
        return f"SecretInvitation({self.invitation!r})"


class SignedBan(_Record, frozen=True, tag=4):
    """The owner's ban of a peer, or of all peers of an invitation, from a run; or the end of such a ban."""

    run_id: RunId
    owner: _Name  # the public key that signs this, as an id
    subject: _Name  # a peer's id, or the number of an invitation in hex
    is_lifted: bool
    decided_at_ns: Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]  # nanoseconds since the epoch; the newest ban counts
    reason: Annotated[str, msgspec.Meta(max_length=MAX_REASON)]
    signature: _Signature

    @property
    def is_genuine(self) -> bool:
        """Return whether the owner signed the ban."""
        return _is_signed(self, self.owner)


# Domains of signatures: a signature for one purpose is invalid for another.
_DOMAINS: Final[dict[type[_Record], bytes]] = {
    Invitation: b"lightning_swarm/invitation/1",
    Certificate: b"lightning_swarm/certificate/1",
    SignedBan: b"lightning_swarm/ban/1",
}


def signed(record: _SignedT, key: Identity) -> _SignedT:
    """Return a copy of a record, signed by a key."""
    return replace(record, signature=key.sign(_DOMAINS[type(record)], _unsigned(record)))


def encode(record: _Record) -> bytes:
    """Encode a record."""
    return msgspec.msgpack.encode(record)


def decode(data: bytes, kind: type[_T]) -> _T:
    """Decode a record of one class or of a union. Raise `ValueError` if `encode` would write it differently."""
    if len(data) > _MAX_BYTES:
        raise ValueError(f"it has {len(data)} bytes, and at most {_MAX_BYTES} are allowed")
    try:
        record = msgspec.msgpack.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise ValueError(str(error)) from error
    if encode(record) != data:
        raise ValueError("its encoding is not the canonical one")
    return record


def _unsigned(record: Invitation | Certificate | SignedBan) -> bytes:
    return encode(replace(record, signature=b""))


def _is_signed(record: Invitation | Certificate | SignedBan, signer: str) -> bool:
    return is_signed(signer, _DOMAINS[type(record)], _unsigned(record), record.signature)
