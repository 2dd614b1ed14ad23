"""Policies of an endpoint's scheduler: how texts are divided into groups, and prompts into parts."""

from __future__ import annotations

from typing import Final

from lightning_swarm.core.moving_average import MovingAverage

_MOST_GROUPS: Final = 4
_TRIED: Final = 24  # steps in which another number of groups is tried
_SETTLING: Final = 4  # steps after a change that are not measured
_AGAIN: Final = 1024  # steps until the other number is tried again
_SMOOTHING: Final = 0.2  # weight of the newest step
_MIN_PART: Final = 16  # tokens of a prompt in one step, beside other texts
_FIRST_PART: Final = 32
_TOO_SHORT: Final = 0.75  # a part that takes fewer steps of other texts makes later parts longer
_TOO_LONG: Final = 1.5  # a part that takes more makes them shorter


class Groups:
    """Chooses whether the texts on a route are one group, or as many groups as the route has servers.

    Several groups keep all servers busy. One group reads each weight once for all texts. The faster way is measured.
    """

    def __init__(self) -> None:
        self.splits = True  # texts form several groups
        self._is_trial = False
        self._left = _TRIED  # steps until the next change
        self._num_steps = 0  # steps since the last change
        self._costs = {True: MovingAverage(_SMOOTHING), False: MovingAverage(_SMOOTHING)}  # seconds of a step per text

    def number(self, num_servers: int) -> int:
        """Return the number of groups on a route with so many servers."""
        return max(1, min(num_servers, _MOST_GROUPS)) if self.splits else 1

    def measure(self, took_s: float, num_texts: int, *, splits: bool) -> None:
        """Learn how long a step took beside which `num_texts` texts were due or under way, with its own."""
        if splits != self.splits:  # it began before the change
            return
        self._num_steps += 1
        if self._num_steps > _SETTLING:
            self._costs[splits].measure(took_s / num_texts)
        self._left -= 1
        if self._left:
            return
        if self._is_trial:
            split_s, joint_s = self._costs[True].value, self._costs[False].value
            self.splits = split_s is not None and (joint_s is None or split_s < joint_s)
        else:
            self.splits = not splits
            self._costs[self.splits] = MovingAverage(_SMOOTHING)
        self._is_trial = not self._is_trial
        self._left, self._num_steps = _TRIED if self._is_trial else _AGAIN, 0


class PromptParts:
    """Chooses how many tokens of a prompt are computed at once, so that other texts do not wait for long."""

    def __init__(self, most: int) -> None:
        """With no other text under way, compute `most` tokens at once."""
        self._most = most
        self._beside = min(_FIRST_PART, most)
        self._step_s = MovingAverage(_SMOOTHING)

    def num_tokens(self, *, is_alone: bool) -> int:
        """Return the number of tokens of the next part."""
        return self._most if is_alone else self._beside

    def measure_step(self, took_s: float) -> None:
        """Learn how long a step of texts took."""
        self._step_s.measure(took_s)

    def measure_part(self, num_tokens: int, took_s: float) -> None:
        """Learn how long a part took."""
        step_s = self._step_s.value
        if step_s is None or num_tokens != self._beside:
            return
        if took_s > _TOO_LONG * step_s:
            self._beside = max(min(_MIN_PART, self._most), self._beside // 2)
        elif took_s < _TOO_SHORT * step_s:
            self._beside = min(self._most, 2 * self._beside)
