"""Steps of inference sessions: a text grows, and the keys and values of its tokens stay in caches at the servers."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

import msgspec

from lightning_swarm.network import PeerId
from lightning_swarm.protocol.messages.calls import ComputeMode
from lightning_swarm.protocol.messages.serving import Digest
from lightning_swarm.protocol.messages.wire import Count, WireMessage

MAX_STAGES: Final = 1024

WINDOW: Final = 16
"""Steps of a session that a server takes before they are computed, so also those that are sent to it at once."""

_MAX_LAYERS: Final = 4096
_MAX_ROWS: Final = 1 << 16

SessionId = Annotated[str, msgspec.Meta(min_length=32, max_length=32)]
"""Drawn by the session's client. Whoever knows it may continue the session, so only its servers are told."""

Number = Annotated[int, msgspec.Meta(ge=1, le=1 << 32)]
"""Counts the steps of a session from 1. A server applies each number once."""

LayerKind = Literal["full", "sliding", "linear", "linear_full", "linear_sliding"]
"""What a block's cache keeps: all keys and values, those of a window, the state of linear attention, or both."""


FailureKind = Literal["lost", "unreachable", "busy", "adapter", "refused"]
"""The server has not all steps before, cannot be reached by the one before it, has no room, misses the step's adapter,
or raised an error."""


class CacheLayer(WireMessage, frozen=True):
    """The cache of one block."""

    kind: LayerKind
    window: Annotated[int, msgspec.Meta(ge=0, le=1 << 40)] = 0  # tokens, where the kind is sliding
    num_states: Annotated[int, msgspec.Meta(ge=1, le=64)] = 1  # of linear attention


class CacheRecipe(WireMessage, frozen=True):
    """How servers make a session's cache."""

    # One for each block that has a cache, by the number that the block knows; None: all are `full`.
    layers: Annotated[list[CacheLayer], msgspec.Meta(max_length=_MAX_LAYERS)] | None
    records_past: bool  # keep what has left a window until the next crop


class CacheOperation(WireMessage, frozen=True):
    """A change of a cache between two steps."""

    # crop: the number of tokens to remove. repeat: how often each row. reorder, select: rows of the cache before.
    kind: Literal["crop", "repeat", "reorder", "select", "record", "reset"]
    values: Annotated[list[Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]], msgspec.Meta(max_length=_MAX_ROWS)]


class SessionStep(WireMessage, frozen=True):
    """A client or the server of the stage before asks a server for its stage's part in one step."""

    session: SessionId
    client: PeerId  # gets the last stage's output
    attempt: Count  # rises with each change of the route: an older route counts no more
    generation: Count
    version: Count  # of the weights
    weights: Count  # the number of evaluation weights; 0: those of the version
    number: Number
    resume: Number  # a server hands on the outputs of this step and of those after it
    stage_index: Count
    # The servers of this stage and of those after it, and the modes that they compute in.
    route: Annotated[list[PeerId], msgspec.Meta(min_length=1, max_length=MAX_STAGES)]
    modes: Annotated[list[ComputeMode], msgspec.Meta(min_length=1, max_length=MAX_STAGES)]
    # What they were given of the client's adapter; empty: the session has none.
    adapters: Annotated[list[Digest | None], msgspec.Meta(max_length=MAX_STAGES)]
    # Whether dropout of the adapter is on at each of these stages; empty: at none.
    drops: Annotated[list[bool], msgspec.Meta(max_length=MAX_STAGES)]
    seed: Count | None  # of all random draws of the session; None: nothing is in train mode
    recipe: CacheRecipe | None  # None: the blocks take no cache, and the session has one step
    operations: Annotated[list[CacheOperation], msgspec.Meta(max_length=1024)]  # before the step
    structure: Any  # tree of (hidden state, extras of all blocks), whose tensors come with the message

    def __post_init__(self) -> None:
        """Refuse another number of modes or adapters than of servers, and a train mode without a seed."""
        if len(self.modes) != len(self.route) or len(self.adapters) not in (0, len(self.route)):
            raise ValueError(
                f"a step has a mode, and an adapter or none, for each of its {len(self.route)} servers; got "
                f"{len(self.modes)} and {len(self.adapters)}"
            )
        if len(self.drops) not in (0, len(self.adapters)):
            raise ValueError(f"{len(self.adapters)} adapters have as many flags of dropout, got {len(self.drops)}")
        if self.seed is None and (any(self.drops) or any(mode.training for mode in self.modes)):
            raise ValueError("a step in train mode has a seed, got none")

    @property
    def adapter(self) -> bytes | None:
        """The adapter's name at this stage."""
        return self.adapters[0] if self.adapters else None

    @property
    def adapter_drops(self) -> bool:
        """Whether dropout of the adapter is on at this stage."""
        return self.drops[0] if self.drops else False

    @property
    def draws(self) -> bool:
        """Whether this stage may draw random numbers, because something is in train mode."""
        return self.modes[0].training or self.adapter_drops


class SessionOutput(WireMessage, frozen=True):
    """The server of the last stage tells the client what a step came to."""

    session: SessionId
    number: Number
    length: Count | None  # of the cache there, in tokens
    structure: Any  # tree of the output, whose tensors come with the message


class SessionFailed(WireMessage, frozen=True):
    """A server tells the client that a step did not get through."""

    session: SessionId
    number: Number
    attempt: Count
    stage_index: Count  # whose server is to blame
    kind: FailureKind
    reason: Annotated[str, msgspec.Meta(max_length=1 << 16)]


class SessionReplay(WireMessage, frozen=True):
    """A client asks a server to send the server behind it all steps so far: that one is new to the session."""

    session: SessionId
    stage_index: Count
    attempt: Count
    resume: Number
    route: Annotated[list[PeerId], msgspec.Meta(min_length=2, max_length=MAX_STAGES)]  # from the asked server on


class SessionClose(WireMessage, frozen=True):
    """A client tells a server that a session is over."""

    session: SessionId
