"""Tied parameters, which several stages of a run hold, and their places in the stages' gradients. Pure."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

from lightning_swarm.protocol.messages.run import StageManifest


# Several stages may hold one parameter, such as embeddings whose weight is also the head's. Each stage sums its own
# part of the gradient, and the parts together are the gradient that one machine would have. All stages take the same
# step with it, so the parameter stays the same in all of them.
class TiedTensors:
    """The tied parameters of a run's stages, which are given by their indices."""

    def __init__(self, stages: Sequence[StageManifest]) -> None:
        self._sizes = [{name: math.prod(shape) for name, shape, _ in stage.parameters} for stage in stages]
        holders: dict[str, list[int]] = {}
        for index, sizes in enumerate(self._sizes):
            for name in sizes:
                holders.setdefault(name, []).append(index)
        # parameter -> all stages that hold it
        self._holders = {name: indices for name, indices in holders.items() if len(indices) > 1}

    def __bool__(self) -> bool:
        return bool(self._holders)

    def of(self, index: int) -> list[str]:
        """Return the tied parameters of a stage."""
        return [name for name in self._sizes[index] if name in self._holders]

    def groups(self) -> list[Sequence[int]]:
        """Return the distinct groups of stages that share a parameter."""
        return [list(group) for group in sorted(set(map(tuple, self._holders.values())))]

    def partners(self, index: int, trained: Collection[str]) -> list[int]:
        """Return the other stages that share a trained parameter with this one."""
        names = self._holders.keys() & self._sizes[index].keys() & set(trained)
        return sorted({holder for name in names for holder in self._holders[name]} - {index})

    def slices(self, index: int, trained: Collection[str]) -> dict[str, slice]:
        """Locate the tied parameters in a stage's flat gradient, which has its trained parameters in manifest order."""
        slices, begin = {}, 0
        for name in self.trainable(index, trained):
            end = begin + self._sizes[index][name]
            if name in self._holders:
                slices[name] = slice(begin, end)
            begin = end
        return slices

    def counted(self, index: int, trained: Collection[str]) -> list[slice]:
        """Locate the parts of a stage's gradient that count in its norm: tied parameters count in their first stage."""
        counted_elsewhere = [
            part for name, part in self.slices(index, trained).items() if self._holders[name][0] != index
        ]
        length = sum(self._sizes[index][name] for name in self.trainable(index, trained))
        bounds = [0, *(bound for part in counted_elsewhere for bound in (part.start, part.stop)), length]
        return [slice(begin, end) for begin, end in zip(bounds[::2], bounds[1::2], strict=True) if begin < end]

    def trainable(self, index: int, trained: Collection[str]) -> list[str]:
        """Return the trained parameters of a stage, in manifest order."""
        return [name for name in self._sizes[index] if name in trained]

    def touched(self, index: int, trained: Collection[str], flags: Mapping[int, Sequence[bool]]) -> list[bool]:
        """Return for each trained parameter of a stage whether any stage has a gradient for it.

        `flags`: stage index -> whether each of its trained parameters has a gradient in that stage.
        """
        names = {
            name
            for holder, has_gradients in flags.items()
            for name, has_gradient in zip(self.trainable(holder, trained), has_gradients, strict=True)
            if has_gradient
        }
        return [name in names for name in self.trainable(index, trained)]
