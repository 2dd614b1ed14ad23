"""Messages about a served model: its card, announcements of its servers, and requests for parts of its weights."""

from __future__ import annotations

import hashlib
from itertools import accumulate
from typing import Annotated, Final, Literal

import msgspec

from lightning_swarm.network import PeerId
from lightning_swarm.protocol.messages.wire import (
    Addresses,
    Count,
    NotNegative,
    Seconds,
    ShortText,
    WireMessage,
    encode,
)

MAX_SERVED_STAGES: Final = 1024
MAX_LISTED_SERVERS: Final = 128  # the offers of this many servers fit into one reply
MAX_FILE_BYTES: Final = 64 << 20
MAX_STAY_S: Final = 3600.0
_MAX_CONFIG: Final = 512 << 10
_MAX_NEIGHBOURS: Final = 64

Digest = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
"""A digest of 32 bytes: SHA-256, or BLAKE3 for adapters."""


class WeightsDigest(WireMessage, frozen=True):
    """The digest of some weights of a served model: of their names, dtypes, shapes and bytes."""

    num_bytes: Count
    sha256: Digest


class ServedStage(WireMessage, frozen=True):
    """A stage of a served model."""

    num_blocks: Annotated[int, msgspec.Meta(ge=1, le=4096)]
    weights: WeightsDigest


class CardFile(WireMessage, frozen=True):
    """A small file of a served model, such as its tokenizer's."""

    name: ShortText
    num_bytes: Annotated[int, msgspec.Meta(ge=0, le=MAX_FILE_BYTES)]
    sha256: Digest


class ModelCard(WireMessage, frozen=True):
    """A served model. Servers of equal cards serve the same model, to the bit."""

    # The model's Hugging Face config in JSON, with its `quantization_config` if weights are quantised.
    config: Annotated[str, msgspec.Meta(max_length=_MAX_CONFIG)]
    generation_config: Annotated[str, msgspec.Meta(max_length=_MAX_CONFIG)]  # also Hugging Face's; empty: there is none
    transformers: ShortText  # version of transformers, which has the blocks' code
    blocks: ShortText  # the name of the list of blocks
    dtype: ShortText  # dtype of the weights that are not quantised, as in ``float32``
    stages: Annotated[list[ServedStage], msgspec.Meta(min_length=1, max_length=MAX_SERVED_STAGES)]
    around: WeightsDigest  # the weights in no block, such as embeddings
    files: Annotated[list[CardFile], msgspec.Meta(max_length=32)]

    @property
    def id(self) -> str:
        """Identifies this model: a digest of the card."""
        return hashlib.sha256(encode(self)).hexdigest()

    @property
    def ranges(self) -> list[range]:
        """The blocks of each stage."""
        ends = list(accumulate(stage.num_blocks for stage in self.stages))
        return [range(end - stage.num_blocks, end) for end, stage in zip(ends, self.stages, strict=True)]


class ServerOffer(WireMessage, frozen=True):
    """A server's announcement of the stages of a model that it serves."""

    addresses: Addresses
    first_stage: Count
    num_stages: Annotated[int, msgspec.Meta(ge=1, le=MAX_SERVED_STAGES)]
    step_s: Seconds  # average time of one session's token at a stage; 0: not measured
    num_sessions: Count  # open sessions
    tokens_per_s: NotNegative  # recent rate of prompts' and new tokens, averaged over its stages
    free_bytes: Count  # memory for further sessions
    step_tokens: Annotated[int, msgspec.Meta(ge=1)]  # limit of one step, all rows together
    has_files: bool  # the server has the whole model, including the weights outside the blocks and the card's files
    is_draining: bool  # the server takes no new sessions
    shares_prefixes: bool  # sessions may begin with prefixes of other clients' sessions
    # Seconds of a round trip to servers of other stages.
    round_trips: Annotated[dict[PeerId, NotNegative], msgspec.Meta(max_length=_MAX_NEIGHBOURS)]

    @property
    def stages(self) -> range:
        """The indices of the announced stages."""
        return range(self.first_stage, self.first_stage + self.num_stages)


class CardRequest(WireMessage, frozen=True):
    """A peer asks a server for the card of the model that it serves."""


class ModelServers(WireMessage, frozen=True):
    """A served model and its servers, as one of them knows them."""

    model: Annotated[str, msgspec.Meta(min_length=64, max_length=64)]  # the card's id
    kind: ShortText  # model type as in config.json, such as ``llama``
    weights: ShortText  # dtype, or kind of quantisation
    stage_bytes: Annotated[
        list[Annotated[int, msgspec.Meta(ge=0, le=1 << 50)]], msgspec.Meta(min_length=1, max_length=MAX_SERVED_STAGES)
    ]
    servers: Annotated[dict[PeerId, ServerOffer], msgspec.Meta(max_length=MAX_LISTED_SERVERS)]


class StayRequest(WireMessage, frozen=True):
    """A server that is about to leave its stages asks another server to stay at some of them."""

    model: Annotated[str, msgspec.Meta(min_length=64, max_length=64)]  # the card's id
    stages: Annotated[list[Count], msgspec.Meta(max_length=MAX_SERVED_STAGES)]  # empty: the request is withdrawn
    for_s: Annotated[float, msgspec.Meta(ge=0.0, le=MAX_STAY_S)]


class StayReply(WireMessage, frozen=True):
    """A server's answer to `StayRequest`."""

    stays: bool  # whether it stays at all requested stages for the requested time


class PartRequest(WireMessage, frozen=True):
    """A peer asks a server for a tensor of the model that it serves, or for a file, whose bytes come as a tensor."""

    model: Annotated[str, msgspec.Meta(min_length=64, max_length=64)]  # the card's id
    kind: Literal["tensor", "file"]
    name: Annotated[str, msgspec.Meta(max_length=512)]
