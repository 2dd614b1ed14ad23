"""Steps of inference sessions: a text grows, and the keys and values of its tokens stay in caches at the servers."""

from __future__ import annotations

import itertools
from typing import Annotated, Any, Final, Literal

import msgspec

from lightning_swarm.network import PeerId
from lightning_swarm.protocol.messages.calls import ComputeMode
from lightning_swarm.protocol.messages.serving import Digest
from lightning_swarm.protocol.messages.wire import Count, ShortText, WireMessage

MAX_STAGES: Final = 1024
MAX_TOGETHER: Final = 64
"""Most steps or outputs in one message."""

WINDOW: Final = 16
"""Most steps of a session that a server accepts ahead of its computation, and that are sent to it ahead."""

MAX_PREFIXES: Final = 64
"""Most prefixes among which a server chooses the longest that it keeps."""

_MAX_LAYERS: Final = 4096
_MAX_ROWS: Final = 1 << 16
_MAX_REASON: Final = 1 << 16  # characters of an error

SessionId = Annotated[str, msgspec.Meta(min_length=32, max_length=32)]
"""A secret drawn by the session's client and sent only to its servers, because it suffices to continue the session."""

Number = Annotated[int, msgspec.Meta(ge=1, le=1 << 32)]
"""Counts the steps of a session from 1. A server applies each number once."""

LayerKind = Literal["full", "sliding", "linear", "linear_full", "linear_sliding"]
"""Content of a block's cache: all keys and values, a window of them, the state of linear attention, or that state
beside all or a window of the keys and values."""

FailureKind = Literal["lost", "unreachable", "busy", "adapter", "refused"]
"""lost: the server lacks earlier steps; unreachable: the previous stage's server got no answer from it; busy: it has no
room; adapter: it lacks the step's adapter; refused: it raised another error."""


class CacheLayer(WireMessage, frozen=True):
    """The cache of one block."""

    kind: LayerKind
    window: Annotated[int, msgspec.Meta(ge=0, le=1 << 40)] = 0  # tokens, for sliding kinds
    num_states: Annotated[int, msgspec.Meta(ge=1, le=64)] = 1  # number of linear attention's states


class CacheRecipe(WireMessage, frozen=True):
    """The description from which servers create a session's cache."""

    # One per block that has a cache, in the order of the blocks' layer indices; None: all are `full`.
    layers: Annotated[list[CacheLayer], msgspec.Meta(max_length=_MAX_LAYERS)] | None
    records_past: bool  # keep entries that have left a window until the next crop


class CacheOperation(WireMessage, frozen=True):
    """A change of a cache between two steps."""

    # `values` for each kind. crop: the number of tokens to remove. repeat: copies of each row. reorder, select: rows of
    # the former cache. record (see `CacheRecipe.records_past`) and reset: none.
    kind: Literal["crop", "repeat", "reorder", "select", "record", "reset"]
    values: Annotated[list[Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]], msgspec.Meta(max_length=_MAX_ROWS)]


class SessionStep(WireMessage, frozen=True):
    """A client, or the previous stage's server, asks a server to compute its stage's part of one step."""

    session: SessionId
    client: PeerId  # receives the last stage's output
    attempt: Count  # rises with each change of the route, which ends older routes
    generation: Count
    version: Count  # version of the weights
    weights: Count  # which evaluation weights to use, by their number; 0: the version's weights
    number: Number
    resume: Number  # a server forwards its outputs from this step on
    stage_index: Count
    # The servers of this and all later stages, and their compute modes.
    route: Annotated[list[PeerId], msgspec.Meta(min_length=1, max_length=MAX_STAGES)]
    modes: Annotated[list[ComputeMode], msgspec.Meta(min_length=1, max_length=MAX_STAGES)]
    # Digests of the client's adapter at these stages; empty: the session has no adapter.
    adapters: Annotated[list[Digest | None], msgspec.Meta(max_length=MAX_STAGES)]
    # Whether dropout of the adapter is on at each of these stages; empty: at none.
    drops: Annotated[list[bool], msgspec.Meta(max_length=MAX_STAGES)]
    seed: Count | None  # seed of the session's random draws; None: no module is in train mode
    recipe: CacheRecipe | None  # None: the blocks take no cache, and the session has one step
    operations: Annotated[list[CacheOperation], msgspec.Meta(max_length=1024)]  # applied to the cache before the step
    exact: bool  # compute it alone, because rounding may differ beside other texts
    structure: Any  # tree of (hidden state, extras of all blocks), whose tensors come with the message
    num_tensors: Count  # in the structure; a message's tensors are in the order of its steps

    def __post_init__(self) -> None:
        """Refuse a number of modes or adapters that differs from the servers', and a train mode without a seed."""
        if len(self.modes) != len(self.route) or len(self.adapters) not in (0, len(self.route)):
            raise ValueError(
                f"a step must have a mode, and an adapter or None, for each of its {len(self.route)} servers; got "
                f"{len(self.modes)} modes and {len(self.adapters)} adapters"
            )
        if len(self.drops) not in (0, len(self.adapters)):
            raise ValueError(f"{len(self.adapters)} adapters must have as many dropout flags, got {len(self.drops)}")
        if self.seed is None and (any(self.drops) or any(mode.training for mode in self.modes)):
            raise ValueError("a step in train mode must have a seed, got none")

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


class SessionSteps(WireMessage, frozen=True):
    """Steps that go to the same server at the same moment, usually of different sessions."""

    steps: Annotated[list[SessionStep], msgspec.Meta(min_length=1, max_length=MAX_TOGETHER)]


class StepRefusal(WireMessage, frozen=True):
    """The error of one step in a message."""

    index: Annotated[int, msgspec.Meta(ge=0, lt=MAX_TOGETHER)]  # in `SessionSteps.steps`
    # The step came before earlier steps of its session, and the server waits for these only if all steps of the message
    # belong to that session.
    is_early: bool
    error: ShortText  # name of the error's class
    reason: Annotated[str, msgspec.Meta(max_length=_MAX_REASON)]


class SessionStepsReply(WireMessage, frozen=True):
    """A server has accepted the steps, except the refused steps."""

    refused: Annotated[list[StepRefusal], msgspec.Meta(max_length=MAX_TOGETHER)]


class SessionOutput(WireMessage, frozen=True):
    """The output of a step."""

    session: SessionId
    number: Number
    length: Count | None  # length of the server's cache, in tokens
    structure: Any  # tree of the output, whose tensors come with the message
    num_tensors: Count  # in the structure; a message's tensors are in the order of its outputs


class SessionOutputs(WireMessage, frozen=True):
    """The server of the last stage sends a client the outputs of its sessions' steps."""

    outputs: Annotated[list[SessionOutput], msgspec.Meta(min_length=1, max_length=MAX_TOGETHER)]


class SessionFailed(WireMessage, frozen=True):
    """A server reports to the client that a step failed."""

    session: SessionId
    number: Number
    attempt: Count
    stage_index: Count  # stage of the server at fault
    kind: FailureKind
    reason: Annotated[str, msgspec.Meta(max_length=_MAX_REASON)]


class SessionReplay(WireMessage, frozen=True):
    """A client asks a server to send all outputs so far to the next server, which is new to the session."""

    session: SessionId
    stage_index: Count
    attempt: Count
    resume: Number
    route: Annotated[list[PeerId], msgspec.Meta(min_length=2, max_length=MAX_STAGES)]  # begins with the asked server


class SessionClose(WireMessage, frozen=True):
    """A client notifies a server that a session is over."""

    session: SessionId
    keeps: bool  # whether further sessions of the client may begin with its steps; a hint


class SessionBranch(WireMessage, frozen=True):
    """A client, or the previous stage's server, asks a server to begin a session with a prefix that it keeps.

    The prefix is the first steps of a session of the same client, or of any client's session with the same digest.
    """

    session: SessionId  # the new session
    client: PeerId
    stage_index: Count
    route: Annotated[list[PeerId], msgspec.Meta(min_length=1, max_length=MAX_STAGES)]  # begins with the asked server
    adapters: Annotated[list[Digest | None], msgspec.Meta(max_length=MAX_STAGES)]  # as in `SessionStep`
    source: SessionId | None  # the client's session that began with the prefix; None: prefixes are named by digests
    numbers: Annotated[list[Number], msgspec.Meta(min_length=1, max_length=MAX_PREFIXES)]  # steps of each prefix
    digests: Annotated[list[Digest], msgspec.Meta(max_length=MAX_PREFIXES)]  # at this stage; empty with a source

    # Constants, because only sessions of served models keep prefixes, and the weights of these models never change.
    generation: Literal[0] = 0
    version: Literal[0] = 0
    weights: Literal[0] = 0
    number: Literal[1] = 1

    def __post_init__(self) -> None:
        """Refuse numbers that do not increase, digests beside a source, and too many or too few digests or adapters."""
        if any(later <= earlier for earlier, later in itertools.pairwise(self.numbers)):
            raise ValueError(f"the numbers of prefixes must increase, got {self.numbers}")
        if len(self.digests) != (0 if self.source else len(self.numbers)):
            raise ValueError("each prefix must be named by its digest, or all prefixes by one source")
        if len(self.adapters) not in (0, len(self.route)):
            raise ValueError(f"{len(self.route)} servers must have as many adapters, got {len(self.adapters)}")

    @property
    def adapter(self) -> bytes | None:
        """The adapter's name at this stage."""
        return self.adapters[0] if self.adapters else None


class SessionBranched(WireMessage, frozen=True):
    """A server's answer to `SessionBranch`."""

    number: Annotated[int, msgspec.Meta(ge=0, le=1 << 32)]  # steps of the prefix, one of `numbers`; 0: none is kept


class RunTextRequest(WireMessage, frozen=True):
    """A peer asks the lead of a run to continue a prompt with the weights that train."""

    prompt: Annotated[str, msgspec.Meta(min_length=1, max_length=1 << 16)]
    max_new_tokens: Annotated[int, msgspec.Meta(ge=1, le=1 << 14)]
    follows: bool  # write a piece of the text after each of several steps; False: write all of it after one step
    # Seed and temperature for drawing tokens. A seed of None selects the likeliest tokens.
    seed: Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)] | None
    temperature: Annotated[float, msgspec.Meta(gt=0.0, le=1e3)]


class RunText(WireMessage, frozen=True):
    """The continuation of a prompt."""

    text: str
    num_tokens: Count
    steps: Annotated[list[Count], msgspec.Meta(min_length=1, max_length=1 << 14)]  # steps whose weights wrote the text
