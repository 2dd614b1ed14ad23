"""Access to a run: the roles of its peers, what a certificate permits, and which role each method takes."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Protocol, TypeAlias

from lightning_swarm.network import PeerId


class Role(enum.StrEnum):
    """A peer's role in a run. Each role has the rights of the roles that are listed before it."""

    OBSERVER = "observer"  # look
    SERVER = "server"  # compute, average, and, unless the run is audited, vote and coordinate
    TRAINER = "trainer"  # and read data and, unless the run is audited, begin it and lead
    KEEPER = "keeper"  # and decide in an audited run: the owner's own peers, and those that are trusted as they are

    def includes(self, other: Role) -> bool:
        """Return whether this role may do all that the other one may."""
        return _RANKS[self] >= _RANKS[other]


_RANKS: Final = {role: rank for rank, role in enumerate(Role)}


INVITATION_BYTES: Final = 16  # of an invitation's number


@dataclass(frozen=True)
class Permit:
    """A peer's permission by a verified certificate."""

    role: Role
    expires_at_s: float  # since the epoch
    invitation: bytes  # its number, of `INVITATION_BYTES`
    uses: int  # so many peers may come by this invitation
    come_by_s: float = math.inf  # until then, since the epoch


@dataclass(frozen=True)
class Ban:
    """The owner's verified word that a peer, or all that came by an invitation, take no part; or may again."""

    subject: str  # a peer's id, or the number of an invitation in hex
    is_lifted: bool
    decided_at_ns: int  # since the epoch
    reason: str
    signed: bytes  # as the owner signed it, for others to verify

    @property
    def is_of_invitation(self) -> bool:
        """Return whether it concerns an invitation, not a peer."""
        return len(self.subject) == 2 * INVITATION_BYTES


class Credentials(Protocol):
    """This peer's own certificate, and the means to verify those of others. Pure: no network, no clock."""

    @property
    def certificate(self) -> bytes:
        """This peer's certificate, to be presented to others; at most 1 KiB."""
        ...

    def verify(self, peer: PeerId, certificate: bytes, *, now_s: float) -> Permit:
        """Return what a certificate permits a peer now (seconds since the epoch); else `AccessDenied` says why."""
        ...

    def verify_ban(self, signed: bytes) -> Ban:
        """Return what the run's owner says of a peer or an invitation; else `AccessDenied` says why it is refused."""
        ...


Certify: TypeAlias = Callable[[PeerId], Credentials]
"""Makes the credentials of this process's peer, whose id is known once its network has started."""


# ------------------------------------------------------------------ the rules

MAY: Final[Mapping[str, Role | None]] = {
    # Anybody: what it takes to find out who the other one is.
    "transport.ping": None,
    "transport.certify": None,
    "transport.introduce": None,  # the secrets by which neighbours know each other past their daemons
    **dict.fromkeys(("peer.hello", "peer.report", "peer.others", "run.view"), Role.OBSERVER),
    "peer.ban": Role.OBSERVER,  # whoever carries it: the owner has signed it
    # Every server may come to coordinate, so servers may ask what coordinators ask.
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
    # Trainers, one of which leads.
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
"""The least role that may call each method; None: anybody. Nobody may call a method that is not here."""

ANSWERS: Final[Mapping[str, Role]] = {
    # All peers answer these. What an observer answers only a person reads; a run is shown by its servers.
    **dict.fromkeys(("peer.hello", "peer.report", "peer.others", "peer.ban"), Role.OBSERVER),
    # A peer that keeps the state of the lead's loop may have to lead.
    **dict.fromkeys(
        (
            *("run.claim", "snapshot.keep_loop", "trainer.leads", "trainer.report", "trainer.report_metrics"),
            *("trainer.replay", "trainer.loop", "trainer.audit", "trainer.results", "trainer.avoid"),
            *("session.output", "session.failed"),
        ),
        Role.TRAINER,
    ),
}
"""The least role of a peer that is asked by each method, where that is not `Role.SERVER`."""
