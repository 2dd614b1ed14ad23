"""Forwards and backwards through a served model's blocks with a client's own adapter, which no server keeps."""

from __future__ import annotations

from typing import Annotated, Any, Final

import msgspec

from lightning_swarm.network import PeerId
from lightning_swarm.protocol.messages.calls import ComputeMode, Direction, ModuleName
from lightning_swarm.protocol.messages.serving import Digest
from lightning_swarm.protocol.messages.wire import Count, Seconds, WireMessage

MAX_LORAS: Final = 1 << 14
MAX_RANK: Final = 4096
SEED_BITS: Final = 62

ModelId = Annotated[str, msgspec.Meta(min_length=64, max_length=64)]
CallId = Annotated[str, msgspec.Meta(min_length=32, max_length=32)]
"""Drawn by the client; identifies a forward for the backward that may follow."""


class Lora(WireMessage, frozen=True):
    """The term that a low-rank adapter adds to a linear layer's output: ``scaling * B(A(dropout(x)))``."""

    block: Count  # index of the layer's block in the model
    module: ModuleName  # the layer's name in the block
    scaling: float
    dropout: Annotated[float, msgspec.Meta(ge=0.0, lt=1.0)]
    rank: Annotated[int, msgspec.Meta(ge=1, le=MAX_RANK)]


class AdapterUpload(WireMessage, frozen=True):
    """A client sends a server its adapter's part of a stage; the tensors A and B of each layer come with it."""

    model: ModelId
    stage: Count
    digest: Digest  # digest of this part, by which calls refer to it
    loras: Annotated[list[Lora], msgspec.Meta(min_length=1, max_length=MAX_LORAS)]


class TuneForward(WireMessage, frozen=True):
    """A client asks for a stage's output. The same call gives the same values on each server of the stage."""

    model: ModelId
    stage: Count
    call: CallId
    seed: Annotated[int, msgspec.Meta(ge=0, lt=1 << SEED_BITS)]  # seed of all random draws
    mode: ComputeMode
    # One flag for each tensor of the inputs, if the message has the inputs.
    wants_grad: Annotated[list[bool], msgspec.Meta(max_length=4096)]
    adapter: Digest | None
    drops: bool  # the adapter's dropout is on
    # Tree of (inputs, extras), whose tensors come with the message; with a `source`, of the extras alone.
    structure: Any
    source: PeerId | None = None  # server of the stage before, which holds the input
    patience_s: Seconds = 0.0  # longest wait for the source
    returns: bool = True  # return the output; False: hold it for the next stage's server, and return nothing


class TuneBackward(WireMessage, frozen=True):
    """A client asks a server for the gradients of a forward that it called there."""

    model: ModelId
    stage: Count
    call: CallId
    # Tree of the list of the outputs' gradients, whose tensors come with the message. None: see `source`.
    structure: Any
    source: PeerId | None = None  # server of the next stage, which holds the outputs' gradients
    patience_s: Seconds = 0.0
    returns: bool = True  # return the inputs' gradients; False: hold them for the server of the stage before


class TuneFetch(WireMessage, frozen=True):
    """A server requests a value that a neighbouring stage's server holds; the tensors come with the answer."""

    client: PeerId
    call: CallId  # proof that the client sent the server here, because nobody can guess it
    stage: Count  # the stage that computed the value
    direction: Direction  # forward: the output; backward: the inputs' gradients


class TuneGradients(WireMessage, frozen=True):
    """The answer to a backward."""

    # Tree of two lists, whose tensors come with the message: gradients of the inputs and of the adapter. The first list
    # is empty if the answering server holds the inputs' gradients for the previous stage's server.
    structure: Any
