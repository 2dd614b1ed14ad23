"""`lightning-swarm`, modified to present any certificate unchecked, as a malicious joiner would."""

from __future__ import annotations

import math
import sys

from lightning_swarm import cli
from lightning_swarm.network import PeerId
from lightning_swarm.network.access import INVITATION_BYTES, Permit, Role
from lightning_swarm.peer import entry
from lightning_swarm.trust.certificates import Certificate, SecretInvitation
from lightning_swarm.trust.credentials import RunCredentials


def main() -> int:
    """Run the command; the first argument is the number of days by which certificates are dated back."""
    days = int(sys.argv.pop(1))
    certify = SecretInvitation.certify

    def dated_back(invitation: SecretInvitation, peer: PeerId, *, now_s: float) -> Certificate:
        return certify(invitation, peer, now_s=now_s - 86400.0 * days)

    verify = RunCredentials.verify

    def lenient(own: RunCredentials, peer: PeerId, certificate: bytes, *, now_s: float) -> Permit:
        if certificate == own.certificate:
            return Permit(Role.SERVER, expires_at_s=math.inf, invitation=bytes(INVITATION_BYTES), uses=1)
        return verify(own, peer, certificate, now_s=now_s)

    SecretInvitation.certify = dated_back  # type: ignore[method-assign]
    RunCredentials.verify = lenient  # type: ignore[method-assign]
    entry._untimely = lambda found, *, now_s: None
    entry._check_own = lambda peer, config, source: None
    return cli.main()


if __name__ == "__main__":
    raise SystemExit(main())
