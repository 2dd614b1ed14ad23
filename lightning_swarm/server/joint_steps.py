"""Steps of several sessions at a stage: those that wait at the same time are computed together, where that is the same.

One row costs nearly as much as eight where the weights come from memory. Whether rows of several texts may share a
forward depends on the model, so each kind of step is tried first, on copies of the caches, beside the steps one by one.
"""

from __future__ import annotations

import asyncio
import copy
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from typing import Any, Final, Generic, TypeVar

import torch
from torch import Tensor

from lightning_swarm.core.clock import now_s
from lightning_swarm.core.errors import SessionLost
from lightning_swarm.core.moving_average import MovingAverage
from lightning_swarm.model import attention_cache, joint_attention
from lightning_swarm.protocol import serialization
from lightning_swarm.protocol.messages.inference import SessionStep
from lightning_swarm.server.compute import SessionPart
from lightning_swarm.server.executor import TOKENS, Executor
from lightning_swarm.server.session_host import SessionStage

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

_MAX_ROWS: Final = 64  # together
_MAX_TOKENS: Final = 8  # of each row: a longer step keeps the others waiting
_MAX_KINDS: Final = 256  # that are known
_SMOOTHING: Final = 0.1
_PATIENCE: Final = 0.5  # of the time that a forward takes
_LONGEST_PATIENCE_S: Final = 0.05
_GOING_ON_S: Final = 1.0  # for so long after its last step a session counts


@dataclass(eq=False)
class WaitingStep(Generic[_T]):
    """A session's step that waits for the compute thread."""

    stage: SessionStage
    step: SessionStep
    part: SessionPart
    prepare: Callable[[], Any]  # returns the session's cache as the step finds it
    finish: Callable[[serialization.Tree], _T]  # takes the output
    kind: Any = None  # steps of one kind may be computed together; None: this one alone
    result: _T | None = None
    error: Exception | None = None
    busy_s: float = 0.0
    done: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        """Find its kind."""
        rows, tokens = self.part.rows, self.part.tokens
        if self.stage.joins and self.step.number > 1 and self.step.recipe is not None and tokens <= _MAX_TOKENS:
            arguments = joint_attention.kind_of((self.part.hidden, self.part.extras), rows)
            self.kind = (self.stage.index, str(self.step.modes[0]), arguments)


class JointSteps(Generic[_T]):
    """The steps that wait for the compute thread of a server."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._waiting: dict[Any, list[WaitingStep[_T]]] = {}  # by kind, in the order in which they came
        self._starts: dict[Any, asyncio.TimerHandle] = {}  # by kind: when those that wait go, at the latest
        self._verdicts: dict[Any, bool] = {}  # by kind: whether steps of it may be computed together
        self._seen_s: dict[tuple[str, int], float] = {}  # by session and stage: when its last step came
        self._busy_s = MovingAverage(_SMOOTHING)  # of steps together
        self.num_joint = 0  # steps that were computed together with others

    async def compute(self, work: WaitingStep[_T]) -> tuple[_T, float]:
        """Compute a step; returns what `finish` made of its output, and the seconds that were this step's own."""
        if work.kind is None or self._verdicts.get(work.kind) is False:
            _, took_s = await self._executor.submit(TOKENS, partial(self._compute, [work]))
            self._end([work], took_s)
        else:
            waiting = self._waiting.setdefault(work.kind, [])
            waiting.append(work)
            self._start(work, len(waiting))
            await work.done.wait()
        if work.error is not None:
            raise work.error
        assert work.result is not None
        return work.result, work.busy_s

    def _start(self, work: WaitingStep[_T], num_waiting: int) -> None:
        """Have those that wait computed: now if they are many, else soon, for others may come to share the forward."""
        loop, kind = asyncio.get_running_loop(), work.kind
        if num_waiting >= self._num_expected(work):
            if (start := self._starts.pop(kind, None)) is not None:
                start.cancel()
            self._submit_waiting(kind)
        elif kind not in self._starts:
            patience_s = min(_PATIENCE * (self._busy_s.value or 0.0), _LONGEST_PATIENCE_S)
            self._starts[kind] = loop.call_later(patience_s, self._submit_waiting, kind)

    def _num_expected(self, work: WaitingStep[_T]) -> int:
        """Return how many steps are worth a start: half of the sessions that go on, for the others are elsewhere."""
        at_s = now_s()
        self._seen_s.pop((work.step.session, work.stage.index), None)
        self._seen_s[work.step.session, work.stage.index] = at_s  # the newest is the last
        for key in [*takewhile(lambda key: self._seen_s[key] < at_s - _GOING_ON_S, self._seen_s)]:
            del self._seen_s[key]
        going_on = sum(stage == work.stage.index for _, stage in self._seen_s)
        return (going_on + 1) // 2

    def _submit_waiting(self, kind: Any) -> None:
        """Queue a job for all that wait when it begins."""
        self._starts.pop(kind, None)
        taken: list[WaitingStep[_T]] = []

        def ended(job: asyncio.Future[tuple[None, float]]) -> None:
            if job.cancelled():
                for work in self._waiting.pop(kind, ()):
                    work.error = SessionLost("the server ends")
                    work.done.set()
                return
            self._end(taken, job.result()[1])
            self._busy_s.measure(job.result()[1])
            if not self._waiting.get(kind):
                self._waiting.pop(kind, None)
            elif kind not in self._starts:  # they found no room
                self._submit_waiting(kind)

        self._executor.submit(TOKENS, partial(self._compute_waiting, kind, taken)).add_done_callback(ended)

    def _compute_waiting(self, kind: Any, taken: list[WaitingStep[_T]]) -> None:
        """On the compute thread: take as many as go together, and compute them. The loop only appends meanwhile."""
        waiting, num_rows = self._waiting.get(kind, []), 0
        while waiting and (not taken or num_rows + waiting[0].part.rows <= _MAX_ROWS):
            taken.append(waiting.pop(0))
            num_rows += taken[-1].part.rows
        self._compute(taken)

    def _end(self, works: Sequence[WaitingStep[_T]], took_s: float) -> None:
        for work in works:
            work.busy_s = took_s / len(works)
            work.done.set()

    def _compute(self, works: Sequence[WaitingStep[_T]]) -> None:
        """On the compute thread. This raises nothing: each step has its result, or its error."""
        ready = []
        for work in works:
            try:
                work.part.cache = work.prepare()
                ready.append(work)
            except Exception as error:  # noqa: BLE001 - it concerns this session alone
                work.error = error
        for work, output in self._outputs(ready):
            try:
                work.result = work.finish(output)
            except Exception as error:  # noqa: BLE001
                work.error = error

    def _outputs(self, works: list[WaitingStep[_T]]) -> list[tuple[WaitingStep[_T], serialization.Tree]]:
        if len(works) > 1:
            verdict = self._verdicts.get(works[0].kind)
            if verdict is None:
                return self._try(works)
            if verdict:
                return self._jointly(works)
        return [(work, output) for work in works for output in _one(work)]

    def _jointly(self, works: list[WaitingStep[_T]]) -> list[tuple[WaitingStep[_T], serialization.Tree]]:
        try:
            outputs = _computed([work.part for work in works], works[0])
        except Exception as error:  # noqa: BLE001 - the model's code may raise anything
            self._verdicts[works[0].kind] = False
            text = f"steps of {len(works)} texts could not be computed together: {error!r}"
            _log.warning("%s. Each goes alone from now on.", text)
            for work in works:  # whatever the blocks have put into their caches by now
                work.error = SessionLost(text)
            return []
        self.num_joint += len(works)
        return list(zip(works, outputs, strict=True))

    def _try(self, works: list[WaitingStep[_T]]) -> list[tuple[WaitingStep[_T], serialization.Tree]]:
        """Compute steps one by one, and find out whether the same comes of computing copies together."""
        copies = [copy.deepcopy(work.part) for work in works]
        outputs = [(work, output) for work in works for output in _one(work)]
        done = [work for work, _ in outputs]
        if len(done) == len(works) and len(self._verdicts) < _MAX_KINDS:
            try:
                joint = _computed(copies, works[0])
                same = all(
                    _alike(output, other) and _alike(*map(_contents, (work.part, one)))
                    for (work, output), other, one in zip(outputs, joint, copies, strict=True)
                )
                reason = "the outputs differ"
            except Exception as error:  # noqa: BLE001 - the model's code may raise anything
                same, reason = False, repr(error)
            self._verdicts[works[0].kind] = same
            if not same:
                _log.info("Texts are not computed together at stage %d: %s", works[0].stage.index, reason)
        return outputs


def _one(work: WaitingStep[Any]) -> list[serialization.Tree]:
    """Compute a step alone: its output, or none."""
    try:
        return _computed([work.part], work)
    except Exception as error:  # noqa: BLE001 - the model's code may raise anything; the client is told
        work.error = error
        return []


def _computed(parts: Sequence[SessionPart], work: WaitingStep[Any]) -> list[serialization.Tree]:
    return work.stage.compute(work.step, parts)


def _contents(part: SessionPart) -> list[Tensor]:
    return attention_cache.tensors(part.cache)


def _alike(one: serialization.Tree, other: serialization.Tree) -> bool:
    """Return whether two trees have the same numbers, but for roundings."""
    pairs = [serialization.flatten(one), serialization.flatten(other)]
    if pairs[0][0] != pairs[1][0]:
        return False
    return all(map(_are_close, pairs[0][1], pairs[1][1]))


def _are_close(one: Tensor, other: Tensor) -> bool:
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    if not one.is_floating_point() or not one.numel():
        return torch.equal(one, other)
    scale = one.abs().max()
    return bool((one - other).abs().max() <= torch.finfo(one.dtype).eps ** 0.5 * scale) and bool(scale.isfinite())
