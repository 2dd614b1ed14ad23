"""The exceptions that cross module borders, in one tree.

::

    SwarmError
    ├── ConfigError          a setting, model or call that cannot work; nothing was started or changed
    ├── ProtocolError        a malformed, oversized or out-of-place message; nothing was changed
    ├── StageError           the user's own blocks (or a gradient through them) raised on every server of a stage
    │   └── OutOfMemory      no server of a stage has memory for a single microbatch, even with nothing else in memory
    ├── StepError            a step could not be decided; the weights stay at the version of the last record
    │   ├── StageLost        a stage has no server left that can come back, or none came back in time
    │   ├── Replaced         the run continues with another lead, because this one was silent for too long
    │   ├── LeftOut          the run continues without this trainer, which was silent for too long
    │   ├── WentBack         the run rolls back to a snapshot, and this trainer with it
    │   ├── FalseWorkCounted the lead must roll the run back, because work of a convicted server counted
    │   └── Diverged         the lead must roll the run back, because its loss diverged
    ├── LeaseRevoked         a batch was struck from its step, or was never in it: run it again, in another place
    ├── RunOver              the lead ended the run; a trainer's loop ends with it
    └── PeerError            the other side left, refused or was slow; safe to retry elsewhere
        ├── Unreachable      no connection to the peer, or a broken one
        │   └── InitialPeersSilent  none of the initial peers answered
        ├── DeadlineExceeded the answer did not come in time
        ├── Busy             the peer's queue is full: not a fault, so it is not ejected; retry elsewhere
        ├── NotMember        the peer is not, or no longer, a member of the run of the call (a ProtocolError, too)
        ├── NotEnlisted      the caller is not a trainer of the run, not yet or no longer (a ProtocolError, too)
        ├── AccessDenied     the caller's certificate does not permit the call (a ProtocolError, too)
        │   └── Uncertified  the peer requires the caller's certificate first
        ├── Untrusted        the peer shows no certificate of the run that permits it to answer; nothing was sent to it
        ├── Damaged          a message has a wrong checksum (a ProtocolError, too): a fault of the link
        ├── Unconfirmed      the state of a stage that a peer sent differs from that of the stage's other servers
        ├── TicketGone       the peer no longer holds (or never held) the tensor
        │   └── GradientGone the peer no longer holds the gradient from which a backward starts
        ├── SessionLost      the peer lacks steps of an inference session: send them again
        ├── AdapterMissing   the peer does not have, or no longer has, the adapter that a call names: send it
        ├── GraphGone        the peer does not have, or no longer has, the graph for a backward: call the forward again
        ├── InputMissing     the input of a call never came: a fault of its sender or of the link
        │   └── GradientMissing  the gradient from which a backward starts never came
        └── NotCoordinator   the peer does not coordinate the run, or no longer does: ask the coordinator
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning_swarm.core.readable import printable, printable_lines


class SwarmError(Exception):
    """Base of everything that `lightning_swarm` raises on purpose."""


class ConfigError(SwarmError, ValueError):
    """A setting, model or call cannot work. The message states the rule, the value and the remedy."""

    @staticmethod
    def like(kind: type[Exception], text: str) -> ConfigError:
        """Return a `ConfigError` that is a `kind`, too, so that code which expects a `kind` catches it."""
        error: ConfigError = _config_error_class(kind)(text)
        return error


def _config_error_class(kind: type[Exception]) -> type[Any]:
    """Derive a class from `ConfigError` and a kind of error; its errors can be pickled."""
    reduced = {"__reduce__": lambda error: (ConfigError.like, (kind, str(error))), "__module__": __name__}
    return type("ConfigError", (ConfigError, kind), reduced)


class ProtocolError(SwarmError):
    """A message is malformed, too large or out of place. It changed nothing."""


class StageError(SwarmError, RuntimeError):  # Lightning recognizes out-of-memory errors only among RuntimeErrors
    """The model's own code raised while a peer computed a stage. The message has that peer's traceback."""


class OutOfMemory(StageError):
    """A peer lacks memory for a microbatch of a stage, even after freeing the memory kept for other microbatches."""


class StepError(SwarmError):
    """A step could not be closed, averaged or decided."""


class StageLost(StepError):
    """A stage has no server left that can come back, or none came back in time. Continue from a checkpoint."""


class LeftOut(StepError):
    """The run continues without this trainer, which was silent for too long and can take no further part."""


class Replaced(StepError):
    """Another peer leads the run now, from an earlier step on, because this lead was silent for too long."""


class WentBack(StepError):
    """The run rolls back to an earlier step, and this trainer's loop with it."""


class FalseWorkCounted(StepError):
    """Work of a convicted server counted in earlier steps. The lead rolls the run back."""

    def __init__(self, reasons: Sequence[str], sound: int) -> None:  # a reason names the server, too
        super().__init__(f"work of convicted servers counts in earlier steps: {'; '.join(reasons)}")
        self.sound = sound  # newest version of the weights that is not known to contain such work


class Diverged(StepError):
    """The loss has diverged. The lead rolls the run back, if it can."""

    def __init__(self, text: str, sound: int | None) -> None:
        super().__init__(text)
        self.sound = sound  # newest version of the weights from before the divergence; None: do not roll back


class LeaseRevoked(SwarmError):
    """A batch counts in no step and must run again: it was struck, or a former coordinator granted its lease."""


class RunOver(SwarmError):
    """The lead has ended the run. This is not a fault: the trainer's loop ends as after its last batch."""


class PeerError(SwarmError):
    """The other peer left, refused or was slow. It is safe to retry elsewhere."""


class Unreachable(PeerError):
    """There is no connection to the peer, or it broke."""


class InitialPeersSilent(Unreachable):
    """None of the initial peers answered."""


class DeadlineExceeded(PeerError):
    """The peer did not answer in time."""


class Busy(PeerError):
    """The peer's queue is full. This is not a fault: call another peer, or the same one later."""


class NotMember(PeerError, ProtocolError):
    """The peer takes no part in the run of the call: it was not admitted, was restarted, or has left."""


class NotEnlisted(PeerError, ProtocolError):
    """The caller is not a trainer of the run: it never enlisted, fell silent, or the record that admits it is late."""


class AccessDenied(PeerError, ProtocolError):
    """The caller has no certificate of this run that permits the call. The handler did not run."""


class Uncertified(AccessDenied):
    """The peer does not know the caller's certificate. The caller presents it and repeats the call."""


class Untrusted(PeerError):
    """The peer shows no certificate of this run that permits it to answer, so nothing was sent to it."""


class Damaged(PeerError, ProtocolError):
    """A message's checksum is wrong: it was damaged in transit. It changed nothing and may be sent again."""


class Unconfirmed(PeerError):
    """The state of a stage that a peer sent differs from that of the stage's other servers. Ask another server."""


class TicketGone(PeerError):
    """The peer does not hold the tensor that a ticket names, or no longer holds it."""


class GradientGone(TicketGone):
    """The gradient from which a backward starts is gone: it can be fetched only once."""


class SessionLost(PeerError):
    """The peer lacks steps of an inference session: it is new to the session, or had no room. Send them again."""


class AdapterMissing(PeerError):
    """The peer does not have the adapter that a call names. Send it."""


class GraphGone(PeerError):
    """The peer has no graph for a backward (any more). Call the forward again, on any server of the stage."""


class InputMissing(PeerError):
    """The input of a call never came: a fault of the sender or of the link, not of the peer that waited."""


class GradientMissing(InputMissing):
    """The gradient from which a backward starts never came."""


class NotCoordinator(PeerError):
    """The peer does not coordinate the run, or no longer does. This is not a fault: ask the coordinator."""


# These are raised only locally, so they are not read from a peer's answer. (`Replaced` also comes from other peers.)
_LOCAL = (LeftOut, WentBack, FalseWorkCounted, Diverged)
_BY_NAME: dict[str, type[SwarmError]] = {
    name: kind
    for name, kind in list(vars().items())
    if isinstance(kind, type) and issubclass(kind, SwarmError) and kind not in _LOCAL
}


def to_wire(error: BaseException) -> tuple[str, str]:
    """Return the name and the text that an answer carries for an error."""
    if isinstance(error, SwarmError):
        return type(error).__name__, str(error)
    # Any other exception is a bug in the handler. Only its type and text leave the process.
    return SwarmError.__name__, f"internal error: {type(error).__name__}: {error}"


def from_wire(name: str, text: str) -> SwarmError:
    """Rebuild the error of a peer's answer. An unknown name becomes a plain `SwarmError`."""
    kind = _BY_NAME.get(name, SwarmError)
    # A StageError contains a traceback, and a StepError may repeat its lines.
    return kind(printable_lines(text) if issubclass(kind, StageError | StepError) else printable(text))
