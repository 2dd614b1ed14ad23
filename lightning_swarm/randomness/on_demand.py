"""`KeyedRandom` where it is needed, and only there: every operation in it passes through Python.

That takes a few per cent of a stage's time on a CPU. Most models draw nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable
from typing import Final, TypeVar

import torch
from torch import Tensor

from lightning_swarm.randomness.attention import plain_attention
from lightning_swarm.randomness.keyed import KeyedRandom

_T = TypeVar("_T")

_MAX_ALARMS: Final = 3
"""Of one kind. Where another thread draws so often while a stage computes, all would be computed twice."""


class KeyedOnDemand:
    """Runs computations of a stage, those that draw random numbers in `KeyedRandom`.

    What drew nothing in the mode runs without it from then on, with an eye on torch's generators. If one has moved, it
    runs again in the mode, which tells whether it drew after all, or another thread of this process did. A draw of
    which the generators keep no trace (in ``torch.random.fork_rng``) is seen if the first run has it.

    Args:
        device: Where the stage computes. On others than CPU and CUDA all runs in the mode.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_known = device.type in ("cpu", "cuda")
        # Asked for by a tensor: "cuda" means whichever is the current one.
        self._cuda_index = torch.empty(0, device=device).device.index if device.type == "cuda" else None
        self._drawless: set[Hashable] = set()
        self._alarms: Counter[Hashable] = Counter()

    def run(
        self,
        kind: Hashable,
        seed: int,
        compute: Callable[[], _T],
        anew: Callable[[], Callable[[], _T]] | None = None,
    ) -> tuple[_T, bool]:
        """Compute.

        Args:
            kind: Computations that are alike in whether they draw.
            seed: Of all random draws.
            compute: What.
            anew: Gives what computes the same once more, if `compute` cannot.

        Returns:
            The result, and whether it was drawn for.

        Raises:
            ConfigError: It drew in backward; see `KeyedRandom`.
        """
        if kind not in self._drawless:
            return self._run_keyed(kind, seed, compute)
        before = self._states()
        with plain_attention():  # as in the mode: compiled code is compiled anew where this differs
            result = compute()
        if all(map(torch.equal, before, self._states())):
            return result, False
        del result  # the second one needs the room
        self._drawless.discard(kind)
        self._alarms[kind] += 1
        try:
            result, has_drawn = self._run_keyed(kind, seed, compute if anew is None else anew())
        except BaseException:
            self._restore(before)
            raise
        if has_drawn:  # what another thread drew meanwhile it may draw once more
            self._restore(before)
        return result, has_drawn

    def _run_keyed(self, kind: Hashable, seed: int, compute: Callable[[], _T]) -> tuple[_T, bool]:
        with KeyedRandom(seed) as mode:
            result = compute()
        if not mode.draw and self._is_known and self._alarms[kind] < _MAX_ALARMS:
            self._drawless.add(kind)
        return result, mode.draw > 0

    def _generators(self) -> list[torch.Generator]:
        cuda = [] if self._cuda_index is None else [torch.cuda.default_generators[self._cuda_index]]
        return [torch.default_generator, *cuda]

    def _states(self) -> list[Tensor]:
        return [generator.get_state() for generator in self._generators()]

    def _restore(self, states: list[Tensor]) -> None:
        for generator, state in zip(self._generators(), states, strict=True):
            generator.set_state(state)
