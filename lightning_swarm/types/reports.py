"""What peers say of themselves to whoever asks."""

from __future__ import annotations

from typing import Annotated

import msgspec

from lightning_swarm.types.wire import Count, Seconds, ShortText, SmallCount, Wire


class Greeting(Wire, frozen=True):
    """What a peer says of itself to whoever asks."""

    protocol_version: int
    versions: Annotated[dict[ShortText, ShortText], msgspec.Meta(max_length=16)]  # of Python and of what matters here
    unix_time_s: Seconds


class ServerReport(Wire, frozen=True):
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


class PeerReport(Wire, frozen=True):
    """What a peer says to whoever asks. What is counted is counted since it started."""

    run_id: ShortText
    age_s: Seconds
    sent_bytes: Count
    received_bytes: Count
    server: ServerReport | None  # None: it is in no run, or holds no stage


class OtherPeer(Wire, frozen=True):
    """A server that a peer has heard of."""

    peer_id: ShortText
    addresses: Annotated[list[Annotated[str, msgspec.Meta(max_length=256)]], msgspec.Meta(max_length=16)]


class OtherPeers(Wire, frozen=True):
    """All of them."""

    peers: Annotated[list[OtherPeer], msgspec.Meta(max_length=1024)]
