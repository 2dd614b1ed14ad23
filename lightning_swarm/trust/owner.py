"""The key of a run's owner, which signs invitations and bans."""

from __future__ import annotations

import hashlib
import re
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from lightning_swarm.core.errors import ConfigError
from lightning_swarm.network import PeerId
from lightning_swarm.network.access import INVITATION_BYTES, Role
from lightning_swarm.network.identity import Identity, KeyUse, load_identity
from lightning_swarm.trust.certificates import (
    DEFAULT_STAY_S,
    Certificate,
    Invitation,
    SecretInvitation,
    SignedBan,
    signed,
)

_USE: Final = KeyUse(
    "the file of the owner's key", "the owner's", "invite to the run", "and earlier invitations to the run are void"
)
OWN_STAY_S: Final = 10 * 365 * 86400.0  # stay of the owner's own peers: longer than any run


@dataclass(frozen=True)
class Owner:
    """The holder of the key that signs a run's invitations."""

    run_id: str
    key: Identity

    @classmethod
    def load(cls, run_id: str, path: Path) -> Owner:
        """Read the key from a file; create file and folder if missing. Raise `ConfigError` if it is unusable."""
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"the owner's key needs a writable folder, got {str(path.parent)!r}: {error.strerror}. "
                "Set XDG_CONFIG_HOME to another folder, or start the run with an invitation for the role trainer."
            ) from error
        key = load_identity(path, _USE)
        if not key.can_sign:
            raise ConfigError(
                f"the owner's key must be an Ed25519 key, which can sign, got an RSA key in {str(path)!r}. Name "
                "a file that does not exist yet; a key is created there."
            )
        return cls(run_id, key)

    def invite(self, role: Role, *, uses: int, expires_at_s: float, stay_s: float = DEFAULT_STAY_S) -> SecretInvitation:
        """Create an invitation: peers may join until `expires_at_s`, and stay for `stay_s` seconds."""
        key = Identity.generate()
        unsigned = Invitation(
            run_id=self.run_id,
            owner=self.key.peer_id,
            number=secrets.token_bytes(INVITATION_BYTES),
            role=role,
            uses=uses,
            expires_at_s=int(expires_at_s),
            stay_s=int(stay_s),
            key=key.peer_id,
            signature=b"",
        )
        return SecretInvitation(invitation=signed(unsigned, self.key), seed=key.seed)

    def certify(
        self, peer: PeerId, role: Role, *, now_s: float, expires_at_s: float, stay_s: float = DEFAULT_STAY_S
    ) -> Certificate:
        """Certify one peer by a separate invitation, whose secret is discarded."""
        invitation = self.invite(role, uses=1, expires_at_s=expires_at_s, stay_s=stay_s)
        return invitation.certify(peer, now_s=now_s)

    def ban(self, subject: str, reason: str, *, is_lifted: bool, now_ns: int) -> SignedBan:
        """Sign a ban of a peer, or of an invitation by its number in hex, from the run; or the end of a ban."""
        unsigned = SignedBan(
            run_id=self.run_id,
            owner=self.key.peer_id,
            subject=subject,
            is_lifted=is_lifted,
            decided_at_ns=now_ns,
            reason=reason,
            signature=b"",
        )
        return signed(unsigned, self.key)

    def certify_own(self, peer: PeerId, *, now_s: float) -> Certificate:
        """Certify one of the owner's own peers as a keeper."""
        return self.certify(peer, Role.KEEPER, now_s=now_s, expires_at_s=now_s + OWN_STAY_S, stay_s=OWN_STAY_S)


def owner_file(folder: Path, run_id: str) -> Path:
    """Return the path of the owner's key for a run. An id that cannot be a file name is hashed."""
    name = run_id if re.fullmatch(r"\w[\w.-]*", run_id, re.ASCII) else hashlib.sha256(run_id.encode()).hexdigest()
    return folder / f"{name}.owner"
