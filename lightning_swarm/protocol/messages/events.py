"""The kinds of what goes another way than straight on, as peers tell each other how often it did."""

from __future__ import annotations

from typing import Final, Literal, TypeAlias, get_args

from lightning_swarm.protocol.messages.wire import Count, WireMessage

EventKind: TypeAlias = Literal[
    "retry",  # a call was sent again
    "ban",  # no microbatch goes to a peer from here for a while
    "replay",  # a microbatch is computed again, for what was added elsewhere is gone or not named
    "discard",  # a server gave up a sum that is not what the closing names
    "strike",  # a batch counts nowhere, and its places are free again
    "round_repeated",  # of averaging
    "gone",  # a peer died, or does not answer
    "left",  # a peer left on its own account, or was left out of a roster
    "download",  # a joiner has its stage's state from those who hold it
    "joined",  # a peer is in a roster now
    "moves",  # a peer leaves its stage for another one
    "sheds",  # a peer with several stages gives one up
    "takeover",  # another peer coordinates
    "pause",  # nothing goes on for now
    "resume",  # it does again
    "went_back",  # the run goes on from an earlier step
]
EVENT_KINDS: Final[tuple[EventKind, ...]] = get_args(EventKind)


class EventCounts(WireMessage, frozen=True):
    """How often a peer has noted each kind since it began: said twice, or late, it tells nothing new."""

    log: Count  # which of the peer's lives is meant: random
    counts: dict[EventKind, Count]
