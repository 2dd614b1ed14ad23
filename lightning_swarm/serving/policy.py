"""Policies of an endpoint's scheduler: how texts are divided into groups, and prompts into parts."""

from __future__ import annotations

from typing import Final

from lightning_swarm.core.moving_average import MovingAverage

_MAX_GROUPS: Final = 4
_TRIAL_STEPS: Final = 24  # steps of a trial of the other number of groups
_SETTLING_STEPS: Final = 4  # steps after a change that are not measured
_STEPS_BETWEEN_TRIALS: Final = 1024
_SMOOTHING: Final = 0.2  # weight of the newest step
_MIN_PART: Final = 16  # tokens of a prompt in one part, while other texts decode
_FIRST_PART: Final = 32
_TOO_SHORT: Final = 0.75  # parts become longer if a part takes less than this share of a step of other texts
_TOO_LONG: Final = 1.5  # parts become shorter if a part takes longer than this many steps


class Groups:
    """Chooses whether the texts on a route form one group, or as many groups as the route has servers.

    Several groups keep all servers busy, while one group reads each weight only once for all texts. Which is faster is
    measured in trials.
    """

    def __init__(self) -> None:
        self.splits = True  # texts form several groups
        self._is_trial = False
        self._steps_left = _TRIAL_STEPS  # steps until the next change
        self._num_steps = 0  # steps since the last change
        self._costs = {True: MovingAverage(_SMOOTHING), False: MovingAverage(_SMOOTHING)}  # seconds of a step per text

    def num_groups(self, num_servers: int) -> int:
        """Return the number of groups on a route with this many servers."""
        return max(1, min(num_servers, _MAX_GROUPS)) if self.splits else 1

    def measure(self, took_s: float, num_texts: int, *, splits: bool) -> None:
        """Record the duration of a step. `num_texts`: of all groups on the route; `splits`: when the step began."""
        if splits != self.splits:  # the step began before the last change
            return
        self._num_steps += 1
        if self._num_steps > _SETTLING_STEPS:
            self._costs[splits].measure(took_s / num_texts)
        self._steps_left -= 1
        if self._steps_left:
            return
        if self._is_trial:
            split_s, joint_s = self._costs[True].value, self._costs[False].value
            self.splits = split_s is not None and (joint_s is None or split_s < joint_s)
        else:
            self.splits = not splits
            self._costs[self.splits] = MovingAverage(_SMOOTHING)
        self._is_trial = not self._is_trial
        self._steps_left, self._num_steps = _TRIAL_STEPS if self._is_trial else _STEPS_BETWEEN_TRIALS, 0


class PromptParts:
    """Chooses how many tokens of a prompt are computed at once, so that other texts do not wait for long."""

    def __init__(self, max_tokens: int) -> None:
        """While no other text decodes, parts have `max_tokens` tokens."""
        self._max_tokens = max_tokens
        self._tokens_beside = min(_FIRST_PART, max_tokens)  # tokens of a part while other texts decode
        self._step_s = MovingAverage(_SMOOTHING)

    def num_tokens(self, *, is_alone: bool) -> int:
        """Return the number of tokens of the next part."""
        return self._max_tokens if is_alone else self._tokens_beside

    def measure_step(self, took_s: float) -> None:
        """Record the duration of a step of texts."""
        self._step_s.measure(took_s)

    def measure_part(self, num_tokens: int, took_s: float) -> None:
        """Record the duration of a part that was computed beside steps."""
        step_s = self._step_s.value
        if step_s is None or num_tokens != self._tokens_beside:
            return
        if took_s > _TOO_LONG * step_s:
            self._tokens_beside = max(min(_MIN_PART, self._max_tokens), self._tokens_beside // 2)
        elif took_s < _TOO_SHORT * step_s:
            self._tokens_beside = min(self._max_tokens, 2 * self._tokens_beside)
