"""Many microbatches in a few bytes for each of their batches, and many batches in a few bytes for all of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Annotated, Final

import msgspec

from lightning_swarm.errors import ProtocolError
from lightning_swarm.types.calls import MAX_MICROBATCHES, Receipt
from lightning_swarm.types.wire import Count

MAX_RECEIPTS: Final = 1 << 18
"""Of one message. In memory each takes a hundred times as much as on the wire."""

Receipts = list[tuple[Count, Count, Annotated[bytes, msgspec.Meta(min_length=1, max_length=MAX_MICROBATCHES // 8)]]]
"""``(first, call, a bitmap over the batch's microbatches)``: eight bytes for a batch of a few."""

Run = tuple[Count, Annotated[int, msgspec.Meta(ge=1)], Annotated[int, msgspec.Meta(ge=1, le=1 << 40)]]
"""``(start, stride, number)`` of places: batches of one size that stand side by side are one of these."""


def pack(receipts: Iterable[Receipt]) -> Receipts:
    """As they travel; in order, each once."""
    batches: defaultdict[tuple[int, int], int] = defaultdict(int)
    for first, index, call in receipts:
        batches[first, call] |= 1 << index
    return [
        (first, call, bits.to_bytes((bits.bit_length() + 7) // 8, "little"))
        for (first, call), bits in sorted(batches.items())
    ]


def unpack(packed: Receipts) -> set[Receipt]:
    """What `pack` was given.

    Raises:
        ProtocolError: They are too many. Said before memory is allocated for them.
    """
    number = sum(int.from_bytes(bitmap, "little").bit_count() for _, _, bitmap in packed)
    if number > MAX_RECEIPTS:
        raise ProtocolError(f"a message may name {MAX_RECEIPTS} microbatches, got {number}")
    return {
        (first, 8 * place + bit, call)
        for first, call, bitmap in packed
        for place, byte in enumerate(bitmap)
        if byte
        for bit in range(8)
        if byte >> bit & 1
    }


def to_runs(places: Sequence[int]) -> list[Run]:
    """As they travel; they are in order, each once."""
    runs: list[Run] = []
    for place in places:
        if runs:
            start, stride, number = runs[-1]
            if number == 1 or place == start + stride * number:
                runs[-1] = (start, place - start if number == 1 else stride, number + 1)
                continue
        runs.append((place, 1, 1))
    return runs


def to_ranges(runs: Iterable[Run]) -> tuple[range, ...]:
    """To look places up in: whatever a message claims, it takes no memory."""
    return tuple(range(start, start + stride * number, stride) for start, stride, number in runs)
