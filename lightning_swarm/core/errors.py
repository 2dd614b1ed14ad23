"""Every exception of the package, in one tree.

::

    SwarmError
    ├── ConfigError          a setting, model or call that cannot work; nothing was started or changed
    ├── ProtocolError        a malformed, oversized or out-of-place message; nothing was changed
    ├── StageError           the user's own blocks (or a gradient through them) raised on every server of a stage
    │   └── OutOfMemory      no server of a stage has memory for one microbatch, with no other one beside it
    ├── StepError            a step could not be decided; the weights are those of the last record
    │   ├── StageLost        nobody was left of a stage, for too long
    │   ├── Replaced         the run goes on with another lead, for this one was silent for too long
    │   ├── LeftOut          the run goes on without this trainer, which was silent for too long
    │   ├── WentBack         the run rolls back to a snapshot, and this trainer with it
    │   └── FalseWorkCounted the lead is to roll the run back: work of a convicted server counted unaudited
    ├── LeaseRevoked         a batch was struck from its step, or never in it: run it again, in another place
    ├── RunOver              the lead ended the run; a trainer's loop ends with it
    └── PeerError            the other side left, refused or was slow; safe to retry elsewhere
        ├── Unreachable      no connection, or it broke
        │   └── InitialPeersSilent  none of the peers to join answered
        ├── DeadlineExceeded the answer did not come in time
        ├── Busy             the peer's queue is full: no fault, no ban, go elsewhere
        ├── NotMember        the peer has no part (any more) in what it was asked for (a ProtocolError, too)
        ├── NotEnlisted      the peer does not train in the run (any more, or yet) (a ProtocolError, too)
        ├── AccessDenied     the peer's certificate does not permit what was asked (a ProtocolError, too)
        │   └── Uncertified  the peer wants to see the caller's certificate first
        ├── Untrusted        the peer shows no certificate of the run that permits it to answer; nothing was sent to it
        ├── Damaged          a message whose checksum is wrong (a ProtocolError, too): the link is to blame
        ├── Unconfirmed      what a peer sent of a stage's state is not what other servers of the stage have
        ├── TicketGone       the peer no longer holds (or never held) the tensor
        │   └── GradientGone likewise, for the gradient that a backward was to begin with
        ├── AdapterMissing   the peer does not have (any more) the adapter that a call names: send it
        ├── GraphGone        the peer does not have (any more) the forward of a backward: call it again
        ├── InputMissing     what a call was to work on never came: blames its sender or the link
        │   └── GradientMissing  likewise, the gradient of what it gave
        └── NotCoordinator   another peer coordinates the run (by now): ask that one
"""

from __future__ import annotations

from typing import Any

from lightning_swarm.core.readable import printable, printable_lines


class SwarmError(Exception):
    """Base of everything that `lightning_swarm` raises on purpose."""


class ConfigError(SwarmError, ValueError):
    """A setting, model or call cannot work. The message says the rule, the value and the remedy."""

    @staticmethod
    def like(kind: type[Exception], text: str) -> ConfigError:
        """Make one that ``except`` clauses for `kind` catch, too: what Lightning or Python raise in its place."""
        error: ConfigError = _also(kind)(text)
        return error


def _also(kind: type[Exception]) -> type[Any]:
    reduced = {"__reduce__": lambda error: (ConfigError.like, (kind, str(error))), "__module__": __name__}
    return type("ConfigError", (ConfigError, kind), reduced)


class ProtocolError(SwarmError):
    """A message is malformed, too large or out of place. It changed nothing."""


class StageError(SwarmError, RuntimeError):  # Lightning looks among RuntimeErrors for those of memory
    """The model's own code raised while a peer computed a stage. The message has that peer's traceback."""


class OutOfMemory(StageError):
    """A peer has no memory for a microbatch of a stage, even after it has freed what it keeps of others."""


class StepError(SwarmError):
    """A step could not be closed, averaged or decided."""


class StageLost(StepError):
    """A stage has had no server for as long as the swarm may wait. The run can go on from a checkpoint."""


class LeftOut(StepError):
    """The run goes on without this trainer, which was silent for too long and cannot take part any more."""


class Replaced(StepError):
    """Another peer leads the run now, from an earlier step on, because this lead was silent for too long."""


class WentBack(StepError):
    """The run rolls back to an earlier step, and this trainer's loop with it."""


class FalseWorkCounted(StepError):
    """Work of a convicted server counted in earlier steps, and nobody audited it. The lead takes the run back.

    Args:
        message: Says which server, and why.
        sound: The newest version of the weights that has none of it, as far as is known.
    """

    def __init__(self, message: str, sound: int) -> None:
        super().__init__(message)
        self.sound = sound


class LeaseRevoked(SwarmError):
    """A batch counts in no step and must run again: it was struck, or a former coordinator granted its lease."""


class RunOver(SwarmError):
    """The lead has ended the run. This is no fault: a trainer's loop ends as if it had come to its own end."""


class PeerError(SwarmError):
    """The other peer left, refused or was slow. It is safe to retry elsewhere."""


class Unreachable(PeerError):
    """There is no connection to the peer, or it broke."""


class InitialPeersSilent(Unreachable):
    """None of the peers by which a peer is to join answered."""


class DeadlineExceeded(PeerError):
    """The peer did not answer in time."""


class Busy(PeerError):
    """The peer's queue is full. This is no fault: another peer, or the same one later, will do."""


class NotMember(PeerError, ProtocolError):
    """The peer has no part in the run that it was asked about: not admitted, restarted, or gone from it."""


class NotEnlisted(PeerError, ProtocolError):
    """The caller does not train in the run: it never enlisted, fell silent, or the record that lets it in is late."""


class AccessDenied(PeerError, ProtocolError):
    """The caller has no certificate of this run that permits what it asked for. The handler was not entered."""


class Uncertified(AccessDenied):
    """The peer has not seen a certificate of the caller, who presents it and asks again."""


class Untrusted(PeerError):
    """The peer shows no certificate of this run that permits it to answer, so it was not asked."""


class Damaged(PeerError, ProtocolError):
    """A message's checksum is wrong: it was damaged on its way. It changed nothing and may be sent again."""


class Unconfirmed(PeerError):
    """What a peer sent of a stage's state is not what other servers of the stage have. Another one can be asked."""


class TicketGone(PeerError):
    """The peer does not hold the tensor that a ticket names, or not any more."""


class GradientGone(TicketGone):
    """The gradient that a backward was to begin with is gone: it can be fetched only once."""


class SessionLost(PeerError):
    """The peer lacks steps of an inference session: it is new to it, or had no room. They can be sent again."""


class AdapterMissing(PeerError):
    """The peer does not have the adapter that a call names. It can be sent."""


class GraphGone(PeerError):
    """The peer does not have what a backward needs. The forward can be called again, on any server of the stage."""


class InputMissing(PeerError):
    """The input of a call never came. The sender or the link is to blame, not the peer that waited."""


class GradientMissing(InputMissing):
    """The gradient that a backward was to begin with never came."""


class NotCoordinator(PeerError):
    """The peer does not coordinate the run, or not any more. This is no fault: the coordinator can be asked."""


# All but `LeftOut`, `WentBack` and `FalseWorkCounted`: a peer finds these out for itself, and no other one can tell it.
_BY_NAME: dict[str, type[SwarmError]] = {
    name: kind
    for name, kind in list(vars().items())
    if isinstance(kind, type) and issubclass(kind, SwarmError) and kind not in (LeftOut, WentBack, FalseWorkCounted)
}


def to_wire(error: BaseException) -> tuple[str, str]:
    """Return the name and text under which an error travels to the peer that asked."""
    if isinstance(error, SwarmError):
        return type(error).__name__, str(error)
    # Any other exception is a bug over there. Its text is all that leaves the process.
    return SwarmError.__name__, f"internal error: {type(error).__name__}: {error}"


def from_wire(name: str, text: str) -> SwarmError:
    """Make the error that a peer answered with. An unknown name becomes a plain `SwarmError`."""
    kind = _BY_NAME.get(name, SwarmError)
    # A stage's error has the lines of a traceback, and a step's may repeat them.
    return kind(printable_lines(text) if issubclass(kind, StageError | StepError) else printable(text))
