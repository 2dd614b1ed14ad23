"""Reports of peers about themselves, which any peer may request, and counts of events."""

from __future__ import annotations

import sys
from typing import Annotated, Final, Literal, TypeAlias, get_args

import msgspec

from lightning_swarm.protocol.messages.wire import (
    MAX_TEXT,
    Count,
    NumSamples,
    Seconds,
    ShortText,
    SmallCount,
    WireMessage,
)
from lightning_swarm.protocol.settings import WithCompression

EventKind: TypeAlias = Literal[
    "retry",  # a call was sent again
    "ban",  # this peer sends no microbatch to another peer for a while
    "replay",  # a microbatch is computed again, because a sum that had its gradient is lost or does not count
    "out_of_memory",  # a server has no memory for one microbatch of its stage
    "discard",  # a server gave up a gradient sum that does not match the closing
    "strike",  # a batch counts nowhere, and its place in the step is free again
    "round_repeated",  # a round of averaging failed and begins again
    "gone",  # a peer died, or does not answer
    "left",  # a peer left by its own decision, or was left out of a roster
    "refused",  # requests of peers whose certificates are missing or do not permit them; counted at each warning
    "convicted",  # a server reported false work, and is out of the run
    "disputed",  # a server's work could not be recomputed, or two servers report one transfer differently
    "expelled",  # the run's owner banned a peer, or all peers of an invitation
    "unconfirmed",  # a server sent a stage's state that its other servers do not have
    "download",  # a joining server has downloaded its stage's state
    "joined",  # a peer is in a roster now
    "moves",  # a peer leaves its stage for another one
    "sheds",  # a peer with several stages gives one up
    "takeover",  # another peer becomes the coordinator
    "pause",  # the run waits for a stage without servers
    "resume",  # the run continues after a pause
    "went_back",  # the run rolled back to an earlier step
    "stopped",  # user code of a trainer that began the run with the lead set `trainer.should_stop`
]
EVENT_KINDS: Final[tuple[EventKind, ...]] = get_args(EventKind)


class EventCounts(WireMessage, frozen=True):
    """A peer's counts of events of each kind since it started. Repeated or late reports do no harm."""

    log: Count  # random; identifies the counting process, because a restarted peer counts anew
    counts: dict[EventKind, Count]


# Numbers that a planner computes with, bounded so that no sum of them overflows.
Bytes = Annotated[int, msgspec.Meta(ge=0, le=1 << 50)]
Rate = Annotated[float, msgspec.Meta(ge=1e-12, le=1e15)]  # something per second
ShortSeconds = Annotated[float, msgspec.Meta(ge=0, le=1e6)]


class Greeting(WireMessage, frozen=True):
    """A peer's versions and clock, in answer to another peer's handshake."""

    protocol_version: int
    # Versions of Python and important packages, and the kind of CPU.
    versions: Annotated[dict[ShortText, ShortText], msgspec.Meta(max_length=16)]
    unix_time_s: Seconds


NumberBytes = Annotated[int, msgspec.Meta(ge=0, le=16)]  # size of one element of a tensor; 0: codecs do not encode it


class SampleCosts(WireMessage, frozen=True):
    """The costs of one sample in one stage, measured once, in the forward of a training step, without any codec."""

    # Forward and backward; 0: unknown, because the code is compiled.
    flop: Annotated[float, msgspec.Meta(ge=0, le=1e21)]
    input_bytes: Bytes  # without extras
    extra_bytes: Bytes  # further inputs, which the trainer sends
    gradient_bytes: Bytes  # sent by the backward to the previous stage
    output_bytes: Bytes
    graph_bytes: Bytes  # kept by the forward for the backward
    input_number_bytes: NumberBytes = 0
    output_number_bytes: NumberBytes = 0


class HeldStage(WireMessage, frozen=True):
    """A pipeline stage that a server holds, as part of its report."""

    index: SmallCount
    num_blocks: Annotated[int, msgspec.Meta(ge=1, le=1 << 16)]
    num_parameters: Bytes
    weight_bytes: Annotated[int, msgspec.Meta(ge=1, le=16)]  # size of one parameter, in the widest dtype
    samples_per_s: Rate | None = None  # forward and backward, while it computes; None: not measured yet
    microbatch_size: Rate | None = None  # recent average, samples
    costs: SampleCosts | None = None  # None: no sample has gone through yet


class MachineReport(WireMessage, frozen=True):
    """The machine of a server, as part of the server's report. None: unknown."""

    processor: Literal["cpu", "accelerator"]
    memory_bytes: Bytes | None = None  # the device's memory
    host_memory_bytes: Bytes | None = None  # besides the device's memory


class StepReport(WireMessage, frozen=True):
    """The newest step, as part of a server's report."""

    num_samples: NumSamples
    num_batches: Annotated[int, msgspec.Meta(ge=1, le=1 << 40)]  # batches of all trainers
    # Stages that took the step by portable arithmetic.
    portable: Annotated[list[SmallCount], msgspec.Meta(max_length=1024)] = []  # noqa: RUF012 - msgspec copies it


class CarriedReport(WireMessage, frozen=True):
    """The length of a long message, and the duration of its exchange, including the message in the other direction."""

    num_bytes: Bytes
    took_s: ShortSeconds


class LinkReport(WireMessage, frozen=True):
    """The link to another peer at its best, as part of a peer's report. None: not measured yet."""

    peer_id: ShortText
    round_trip_s: ShortSeconds | None = None
    sent: CarriedReport | None = None
    received: CarriedReport | None = None


class ServerReport(WithCompression, frozen=True):
    """A server's part in a run, as part of a peer's report. Counts begin when the server was admitted."""

    lead: ShortText  # peer ids
    coordinator: ShortText
    num_stages: SmallCount  # stages of the run
    stages: Annotated[list[SmallCount], msgspec.Meta(max_length=1024)]  # stages that this server holds
    trainers_stage: SmallCount | None  # the stage of the layers around the pipeline, which trainers compute
    first_step: Count  # first step of this generation of the run
    step: Count  # the open step, as this server knows it
    age_s: Seconds
    num_samples: Count  # samples that went forward through each of its pipeline stages
    queued: Count  # jobs that wait for the compute thread
    held: Annotated[list[HeldStage], msgspec.Meta(max_length=1024)] = []  # noqa: RUF012 - msgspec copies it
    around_parameters: Bytes = 0  # parameters of the layers around the pipeline
    machine: MachineReport | None = None
    newest: StepReport | None = None  # None: no step was decided yet, or the newest was skipped
    peak_bytes: Bytes | None = None  # the most memory that this peer has held; None: unknown
    arithmetic: ShortText = ""  # see `FreezeReply`


MAX_LOGGED: Final = 32  # names of logged numbers, in a report and over a dashboard's time


class LoggedNumber(WireMessage, frozen=True):
    """The newest number that a run's lead logged under a name, as part of its peer's report."""

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_TEXT)]
    value: Annotated[float, msgspec.Meta(ge=-sys.float_info.max, le=sys.float_info.max)]
    step: Count  # the Trainer's `global_step`
    age_s: ShortSeconds


class PeerReport(WireMessage, frozen=True):
    """A peer's report about its activity, for any peer. Counts begin when the peer started."""

    run_id: ShortText
    age_s: Seconds
    sent_bytes: Count
    received_bytes: Count
    server: ServerReport | None  # None: the peer is in no run, or holds no stage
    links: Annotated[list[LinkReport], msgspec.Meta(max_length=1024)] = []  # noqa: RUF012 - msgspec copies it
    role: ShortText | msgspec.UnsetType = msgspec.UNSET  # role in its certificate; unset: its run takes any peer
    refused: Count = 0  # requests that its gate refused
    logged: Annotated[list[LoggedNumber], msgspec.Meta(max_length=MAX_LOGGED)] = []  # noqa: RUF012 - as above


class OtherPeer(WireMessage, frozen=True):
    """A server that a peer has heard of."""

    peer_id: ShortText
    addresses: Annotated[list[Annotated[str, msgspec.Meta(max_length=256)]], msgspec.Meta(max_length=16)]


class OtherPeers(WireMessage, frozen=True):
    """The servers that a peer has heard of, for any peer."""

    peers: Annotated[list[OtherPeer], msgspec.Meta(max_length=1024)]
