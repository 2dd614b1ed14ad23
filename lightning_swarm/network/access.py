"""Access to a run: the roles of its peers, the permits of certificates, and the role that each method requires."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Protocol, TypeAlias

from lightning_swarm.network import PeerId


class Role(enum.StrEnum):
    """A peer's role in a run. Each role has the rights of the roles that are listed before it."""

    OBSERVER = "observer"  # may look
    SERVER = "server"  # may compute, average, and, unless the run is audited, vote and coordinate
    TRAINER = "trainer"  # may read data and, unless the run is audited, begin and lead it
    KEEPER = "keeper"  # may decide in an audited run: the owner's own peers, and equally trusted peers

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
    come_by_s: float = math.inf  # end of the time for joining, in seconds since the epoch


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
        """Return whether it bans an invitation, not a single peer."""
        return len(self.subject) == 2 * INVITATION_BYTES


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


# ------------------------------------------------------------------ the rules

MAY: Final[Mapping[str, Role | None]] = {
    # Any peer may call these methods, by which two peers identify each other.
    "transport.ping": None,
    "transport.certify": None,
    "transport.introduce": None,  # returns the secrets that identify peers of one machine without their daemons
    **dict.fromkeys(("peer.hello", "peer.report", "peer.others", "run.view"), Role.OBSERVER),
    "peer.ban": Role.OBSERVER,  # the owner's signature counts, not the peer that passes it on
    # Every server may become the coordinator, so servers may call all methods that coordinators call.
    **dict.fromkeys(
        (
            *("run.join", "run.meet", "run.ready", "run.listen", "run.drain", "run.leave", "run.break_off"),
            *("run.lead", "run.watch", "run.pull", "run.take_over", "run.inherit", "step.prepare", "step.propose"),
            *("step.settle", "step.freeze", "step.fence", "step.receipts", "step.average", "step.apply"),
            *("step.project", "step.vector", "step.examine", "step.replace_mean"),
            *("stage.follow", "stage.piece", "stage.next", "ticket.wait", "ticket.fetch"),
            *("stage.prove", "run.record_digest"),
            *("snapshot.held", "snapshot.keep", "snapshot.read"),
            *("session.step", "session.output", "session.failed", "model.card", "model.part", "model.stay"),
            *("trainer.leads", "trainer.report", "trainer.report_metrics", "trainer.replay"),
            *("step.sketch", "trainer.audit", "trainer.results", "trainer.avoid", "audit.kept", "audit.findings"),
        ),
        Role.SERVER,
    ),
    # Trainers call these methods; one of them is the lead.
    **dict.fromkeys(
        (
            *("run.claim", "run.enlist", "run.retire", "step.register", "step.renew", "step.change"),
            *("step.plan", "step.take_plan", "step.grant", "step.begin", "step.armed", "step.done", "step.record"),
            *("step.metrics", "step.take_metrics", "stage.forward", "stage.backward", "stage.cancel"),
            *("audit.compute", "session.replay", "session.close", "tune.adapter", "tune.forward", "tune.backward"),
            *("stage.state", "stage.write", "stage.set_evaluation_weights", "snapshot.keep_loop", "trainer.loop"),
            *("server.admit", "server.load", "server.restart", "server.release"),
        ),
        Role.TRAINER,
    ),
}
"""Method -> the least role that may call it; None: any peer. Methods that are not listed are refused."""

ANSWERS: Final[Mapping[str, Role]] = {
    # All peers answer these methods. Observers' answers are for human readers only; servers answer `run.view`.
    **dict.fromkeys(("peer.hello", "peer.report", "peer.others", "peer.ban"), Role.OBSERVER),
    # A peer that keeps the state of the lead's loop may have to take over as the lead.
    **dict.fromkeys(
        (
            *("run.claim", "snapshot.keep_loop", "trainer.leads", "trainer.report", "trainer.report_metrics"),
            *("trainer.replay", "trainer.loop", "trainer.audit", "trainer.results", "trainer.avoid"),
            *("session.output", "session.failed"),
        ),
        Role.TRAINER,
    ),
}
"""Method -> the least role of a peer that answers it, if this is not `Role.SERVER`."""
