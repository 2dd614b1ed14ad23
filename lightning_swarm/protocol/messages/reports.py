"""What peers say of themselves to whoever asks."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from lightning_swarm.protocol.messages.wire import Count, NumSamples, Seconds, ShortText, SmallCount, WireMessage
from lightning_swarm.protocol.settings import NO_COMPRESSION, Compression

Bytes = Annotated[int, msgspec.Meta(ge=0, le=1 << 50)]
"""What somebody plans with: so bounded that no sum of them overflows."""

Rate = Annotated[float, msgspec.Meta(ge=1e-12, le=1e15)]
"""Of something a second, likewise."""

ShortSeconds = Annotated[float, msgspec.Meta(ge=0, le=1e6)]


class Greeting(WireMessage, frozen=True):
    """What a peer says of itself to whoever asks."""

    protocol_version: int
    versions: Annotated[dict[ShortText, ShortText], msgspec.Meta(max_length=16)]  # of Python and of what matters here
    unix_time_s: Seconds


NumberBytes = Annotated[int, msgspec.Meta(ge=0, le=16)]
"""Of one number of a tensor; 0: it has none that a codec takes."""


class SampleCosts(WireMessage, frozen=True):
    """What a sample costs a stage: seen once, in a forward of a training step. No codec is counted in."""

    flop: Annotated[float, msgspec.Meta(ge=0, le=1e21)]  # forward and backward; 0: compiled code does not show it
    input_bytes: Bytes  # without extras
    extra_bytes: Bytes  # that a trainer sends beside
    gradient_bytes: Bytes  # that go back
    output_bytes: Bytes
    graph_bytes: Bytes  # what its backward needs of its forward
    input_number_bytes: NumberBytes = 0
    output_number_bytes: NumberBytes = 0


class HeldStage(WireMessage, frozen=True):
    """A stage on a server that microbatches go through."""

    index: SmallCount
    num_blocks: Annotated[int, msgspec.Meta(ge=1, le=1 << 16)]
    num_parameters: Bytes
    weight_bytes: Annotated[int, msgspec.Meta(ge=1, le=16)]  # of one parameter, the widest of them
    samples_per_s: Rate | None = None  # while it computes, forward and backward; None: not measured yet
    microbatch_size: Rate | None = None  # of late, on average
    costs: SampleCosts | None = None  # None: none has gone through yet


class MachineReport(WireMessage, frozen=True):
    """What a server computes on. None: it cannot tell."""

    processor: Literal["cpu", "accelerator"]
    memory_bytes: Bytes | None = None  # of the device
    host_memory_bytes: Bytes | None = None  # beside the device's


class StepReport(WireMessage, frozen=True):
    """What the newest step was made of."""

    num_samples: NumSamples
    num_batches: Annotated[int, msgspec.Meta(ge=1, le=1 << 40)]  # of all trainers


class CarriedReport(WireMessage, frozen=True):
    """A long message, and the seconds of its exchange: the way there and back, and its own."""

    num_bytes: Bytes
    took_s: ShortSeconds


class LinkReport(WireMessage, frozen=True):
    """The way to another peer, at its best. None: not measured yet."""

    peer_id: ShortText
    round_trip_s: ShortSeconds | None = None
    sent: CarriedReport | None = None
    received: CarriedReport | None = None


class ServerReport(WireMessage, frozen=True):
    """A server's part in a run. What is counted is counted since it was admitted."""

    lead: ShortText  # peer ids
    coordinator: ShortText
    num_stages: SmallCount  # of the run
    stages: Annotated[list[SmallCount], msgspec.Meta(max_length=1024)]  # that it holds
    trainers_stage: SmallCount | None  # of what stands around the pipeline; no microbatch goes there
    first_step: Count  # where the run began, or went on
    step: Count  # that is open here
    age_s: Seconds
    num_samples: Count  # that went forward through each of its stages but that one
    queued: Count  # jobs that wait for its compute thread
    held: Annotated[list[HeldStage], msgspec.Meta(max_length=1024)] = []  # noqa: RUF012 - msgspec copies it
    around_parameters: Bytes = 0  # of what stands around the pipeline
    machine: MachineReport | None = None
    newest: StepReport | None = None  # None: no step was decided yet, or it was skipped
    peak_bytes: Bytes | None = None  # of memory, that this peer held at once; None: it cannot tell
    compression: Compression = NO_COMPRESSION  # of the run's tensors


class PeerReport(WireMessage, frozen=True):
    """What a peer says to whoever asks. What is counted is counted since it started."""

    run_id: ShortText
    age_s: Seconds
    sent_bytes: Count
    received_bytes: Count
    server: ServerReport | None  # None: it is in no run, or holds no stage
    links: Annotated[list[LinkReport], msgspec.Meta(max_length=1024)] = []  # noqa: RUF012 - msgspec copies it


class OtherPeer(WireMessage, frozen=True):
    """A server that a peer has heard of."""

    peer_id: ShortText
    addresses: Annotated[list[Annotated[str, msgspec.Meta(max_length=256)]], msgspec.Meta(max_length=16)]


class OtherPeers(WireMessage, frozen=True):
    """All of them."""

    peers: Annotated[list[OtherPeer], msgspec.Meta(max_length=1024)]
