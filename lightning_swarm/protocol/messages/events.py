"""Kinds of faults and recoveries, and the message by which peers tell each other how often each happened."""

from __future__ import annotations

from typing import Final, Literal, TypeAlias, get_args

from lightning_swarm.protocol.messages.wire import Count, WireMessage

EventKind: TypeAlias = Literal[
    "retry",  # a call was sent again
    "ban",  # this peer sends no microbatch to another one for a while
    "replay",  # a microbatch is computed again, because a sum that had its gradient is lost or does not count
    "discard",  # a server gave up a gradient sum that does not match the closing
    "strike",  # a batch counts nowhere, and its place in the step is free again
    "round_repeated",  # a round of averaging failed and begins again
    "gone",  # a peer died, or does not answer
    "left",  # a peer left by its own decision, or was left out of a roster
    "download",  # a joining server has downloaded its stage's state
    "joined",  # a peer is in a roster now
    "moves",  # a peer leaves its stage for another one
    "sheds",  # a peer with several stages gives one up
    "takeover",  # another peer becomes the coordinator
    "pause",  # the run waits for a stage without servers
    "resume",  # the run goes on after a pause
    "went_back",  # the run rolled back to an earlier step
]
EVENT_KINDS: Final[tuple[EventKind, ...]] = get_args(EventKind)


class EventCounts(WireMessage, frozen=True):
    """A peer tells how often it has noted each kind since it started. Repeated or late counts do no harm."""

    log: Count  # random; identifies the process that counts, for a restarted peer counts anew
    counts: dict[EventKind, Count]
