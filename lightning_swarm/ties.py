"""Parameters that several stages hold, such as embeddings whose weight is the head's, too. Pure.

Each of these stages adds up its own part of the gradient. Together they are the gradient that one machine would have:
with it all of them take the same step, so that the parameter stays the same in all.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

from lightning_swarm.types.runs import StageManifest


class Ties:
    """What the stages of a run have in common.

    Args:
        stages: Of its manifest.
    """

    def __init__(self, stages: Sequence[StageManifest]) -> None:
        self._sizes = [{name: math.prod(shape) for name, shape, _ in stage.parameters} for stage in stages]
        holders: dict[str, list[int]] = {}
        for index, sizes in enumerate(self._sizes):
            for name in sizes:
                holders.setdefault(name, []).append(index)
        self._holders = {name: indices for name, indices in holders.items() if len(indices) > 1}

    def __bool__(self) -> bool:
        return bool(self._holders)

    def of(self, index: int) -> list[str]:
        """Those of a stage."""
        return [name for name in self._sizes[index] if name in self._holders]

    def groups(self) -> list[Sequence[int]]:
        """Stages that have a parameter in common; each group once."""
        return [list(group) for group in sorted(set(map(tuple, self._holders.values())))]

    def partners(self, index: int, trained: Collection[str]) -> list[int]:
        """The other stages that have a parameter that trains in common with this one."""
        names = self._holders.keys() & self._sizes[index].keys() & set(trained)
        return sorted({holder for name in names for holder in self._holders[name]} - {index})

    def places(self, index: int, trained: Collection[str]) -> dict[str, slice]:
        """Where the tied ones are in the gradient of a stage, which is flat: what trains of it, in its order."""
        found, begin = {}, 0
        for name in self.trainable(index, trained):
            end = begin + self._sizes[index][name]
            if name in self._holders:
                found[name] = slice(begin, end)
            begin = end
        return found

    def counted(self, index: int, trained: Collection[str]) -> list[slice]:
        """The places of what counts in the norm of a stage's gradient: of what several hold, with the first of them."""
        foreign = [place for name, place in self.places(index, trained).items() if self._holders[name][0] != index]
        length = sum(self._sizes[index][name] for name in self.trainable(index, trained))
        bounds = [0, *(bound for place in foreign for bound in (place.start, place.stop)), length]
        return [slice(begin, end) for begin, end in zip(bounds[::2], bounds[1::2], strict=True) if begin < end]

    def trainable(self, index: int, trained: Collection[str]) -> list[str]:
        """What trains of a stage, in its order."""
        return [name for name in self._sizes[index] if name in trained]

    def touched(self, index: int, trained: Collection[str], flags: Mapping[int, Sequence[bool]]) -> list[bool]:
        """Which parameters got a gradient, in whatever stage.

        Args:
            index: Of the stage whose parameters are meant.
            trained: What trains.
            flags: For this stage and its partners, over what trains of each, which got one there.
        """
        got = {
            name
            for holder, own in flags.items()
            for name, flag in zip(self.trainable(holder, trained), own, strict=True)
            if flag
        }
        return [name in got for name in self.trainable(index, trained)]
