"""Computes waiting steps of several sessions in one forward, if that gives the same numbers as separate forwards.

A forward of one row costs nearly as much as of eight, because it reads the same weights. Whether rows of several texts
may share a forward depends on the model. So the first steps of each kind are computed twice, jointly and separately.
The separate results are used, and the comparison decides about later steps of the kind.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import Any, Final, Generic, TypeVar

import torch
from torch import Tensor

from lightning_swarm.core.errors import SessionLost
from lightning_swarm.model.inference import attention_cache, joint_attention, padded_cache
from lightning_swarm.network import PeerId
from lightning_swarm.protocol import serialization
from lightning_swarm.protocol.messages.inference import SessionStep
from lightning_swarm.server.executor import TOKENS, Executor
from lightning_swarm.server.inference.host import SessionStage
from lightning_swarm.server.inference.session_compute import SessionPart
from lightning_swarm.server.out_of_memory import is_out_of_memory

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

_MAX_ROWS: Final = 64  # rows in one forward
_MAX_TOKENS: Final = 8  # tokens per row; a longer step would delay the other rows
_LONG_TOKENS: Final = 512  # tokens in all rows; a longer step runs block by block
_MAX_KINDS: Final = 256  # kinds with a verdict
_MAX_TRIED: Final = 4  # steps in one trial
_MAX_REFUSED: Final = 16  # a client's refused kinds at a stage; beyond these, none of its steps are tried
_MAX_CLIENTS: Final = 8  # clients remembered for a refused kind
_REFUSED_S: Final = 600.0  # seconds until a refused kind is tried again
_AGREEING: Final = 0.99  # share of numbers that must agree; rounding may change the choice of an expert


@dataclass(eq=False)
class WaitingStep(Generic[_T]):
    """A session's step that waits for the compute thread."""

    stage: SessionStage
    step: SessionStep
    part: SessionPart
    prepare: Callable[[], Any]  # returns the session's cache, ready for the step
    finish: Callable[[serialization.Tree], _T]  # converts the output to the result
    is_wanted: Callable[[], bool] = lambda: True  # returns whether the session still exists
    kind: Any = None  # steps of one kind may share a forward; None: it runs alone
    result: _T | None = None
    error: Exception | None = None
    busy_s: float = 0.0  # its share of the forward's seconds; 0 if they do not predict later steps
    was_tried: bool = False  # it took part in a trial, which is slower
    done: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        """Set `kind`, unless the step must run alone."""
        rows, tokens = self.part.rows, self.part.tokens
        # Judge by the cache, not by its recipe: a client chooses the recipe, and must not affect other clients' steps.
        can_join = self.step.number > 1 and not self.step.draws and attention_cache.is_restorable(self.part.cache)
        if self.stage.batches_texts and not self.step.exact and can_join and tokens <= _MAX_TOKENS:
            arguments = joint_attention.kind_of((self.part.hidden, self.part.extras), rows)
            adapted = None if self.part.adapter is None else self.part.adapter.layers
            self.kind = (self.stage.index, str(self.step.modes[0]), arguments, adapted)

    @property
    def is_long(self) -> bool:
        """Whether the step would keep other sessions waiting for long."""
        rows, tokens = self.part.rows, self.part.tokens
        return self.stage.max_tokens is not None and tokens > _MAX_TOKENS and rows * tokens > _LONG_TOKENS


class JointSteps(Generic[_T]):
    """The steps that wait for the compute thread of a server."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._waiting: dict[Any, list[WaitingStep[_T]]] = {}  # kind -> steps in the order of their arrival
        self._queued: set[Any] = set()  # kinds whose job waits to begin
        self._verdicts = _Verdicts()
        self.num_joint = 0  # steps that shared a forward
        self._problem: Exception | None = None  # error of the newest joint forward, if it failed
        self._long_step = asyncio.Lock()

    async def compute(self, work: WaitingStep[_T]) -> tuple[_T, float]:
        """Compute a step; return the result of `finish`, and the step's share of the seconds.

        The seconds are 0 if they cannot predict the next step, as for a prompt or a trial.
        """
        if work.is_long:
            await self._compute_by_blocks(work)
        elif work.kind is None or self._verdicts.refuses(work):
            _, took_s = await self._executor.submit(TOKENS, partial(self._compute, [work]))
            self._end([work], took_s)
        else:
            self._waiting.setdefault(work.kind, []).append(work)
            # Later in this tick of the loop, in which further steps of the same message are added.
            asyncio.get_running_loop().call_soon(self._submit, work.kind)
            await work.done.wait()
        if work.error is not None:
            raise work.error
        assert work.result is not None
        return work.result, work.busy_s

    async def _compute_by_blocks(self, work: WaitingStep[_T]) -> None:
        """Compute a long step, and let short steps of other sessions run between its blocks."""
        blocks: Generator[None, None, serialization.Tree] | None = None

        def compute_blocks() -> bool:
            """Compute blocks until another session waits, on the compute thread; return whether all are done."""
            nonlocal blocks
            try:
                if blocks is None:
                    work.part.cache = work.prepare()
                    blocks = work.stage.compute_by_blocks(work.step, work.part)
                next(blocks)
                while not self._executor.has_waiting(TOKENS):
                    next(blocks)
            except StopIteration as end:
                work.result = work.finish(end.value)
                return True
            return False

        async with self._long_step:  # one at a time, because no limit counts the memory of an unfinished step
            await asyncio.sleep(0)  # queue steps that came at the same time, so that they run after the first block
            is_done = False
            while not is_done:
                if not work.is_wanted():
                    raise SessionLost("the session ended while a step was computed")
                is_done, _ = await self._executor.submit(TOKENS, compute_blocks)

    def release(self, cache: Any) -> None:
        """Free the memory that the cache of an ended session shares with other sessions, on the compute thread."""
        if (slab := padded_cache.slab_of(cache)) is not None:
            self._executor.submit(TOKENS, slab.dissolve)

    def _submit(self, kind: Any) -> None:
        """Queue a job that computes the steps of a kind that wait when it begins."""
        if kind in self._queued or kind not in self._waiting:
            return
        self._queued.add(kind)
        taken: list[WaitingStep[_T]] = []

        def on_ended(job: asyncio.Future[tuple[None, float]]) -> None:
            """End the steps that the job has taken, and queue another job for the rest; runs on the loop."""
            if job.cancelled() or (error := job.exception()) is not None:
                error = SessionLost("the server stops" if job.cancelled() else f"a step failed: {error!r}")
                for work in (*taken, *self._waiting.pop(kind, ())):
                    work.error = error
                    work.done.set()
                self._queued.discard(kind)
                return
            self._end(taken, job.result()[1])
            if self._waiting.get(kind):  # these steps did not fit into the job
                self._submit(kind)
            else:
                self._waiting.pop(kind, None)

        self._executor.submit(TOKENS, partial(self._compute_waiting, kind, taken)).add_done_callback(on_ended)

    def _compute_waiting(self, kind: Any, taken: list[WaitingStep[_T]]) -> None:
        """Compute as many waiting steps as fit, on the compute thread; meanwhile, the loop only appends to the list."""
        self._queued.discard(kind)  # before reading the list, so that a later step queues another job
        waiting, num_rows = self._waiting.get(kind, []), 0
        while waiting and (not taken or num_rows + waiting[0].part.rows <= _MAX_ROWS):
            taken.append(waiting.pop(0))
            num_rows += taken[-1].part.rows
        self._compute(taken)

    def _end(self, works: Sequence[WaitingStep[_T]], took_s: float) -> None:
        for work in works:
            if not work.was_tried and work.part.tokens <= _MAX_TOKENS:
                work.busy_s = took_s / len(works)
            work.done.set()

    def _compute(self, works: Sequence[WaitingStep[_T]]) -> None:
        """Set each step's result or error, on the compute thread."""
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
        """Compute steps in one forward if a trial found the same numbers, otherwise one by one."""
        joint: Sequence[serialization.Tree] | None = None
        self._problem = None
        if len(works) > 1:
            verdict = self._verdicts.of(works)
            if verdict is None:
                self._try(works[:_MAX_TRIED])
            elif verdict:
                joint = self._compute_jointly(works)
        if joint is not None:
            self.num_joint += len(works)
            return list(zip(works, joint, strict=True))
        separate = []
        for work in works:
            try:
                separate.append((work, *work.stage.compute(work.step, [work.part])))
            except Exception as error:  # noqa: BLE001 - the model's code may raise anything; the client gets the error
                work.error = error
        if self._problem is not None and len(separate) == len(works):  # each step succeeds alone
            self._verdicts.record(works, self._problem, {work.step.client for work in works})
        return separate

    def _compute_jointly(self, works: Sequence[WaitingStep[_T]]) -> list[serialization.Tree] | None:
        """Compute steps in one forward; if it fails, restore the caches and return None."""
        restore = _restorer_of(works)
        try:
            return works[0].stage.compute(works[0].step, [work.part for work in works])
        except Exception as error:  # noqa: BLE001 - the model's code may raise anything
            if is_out_of_memory(error):
                _log.warning("Too little memory to compute steps of %d texts together: %s", len(works), error)
            else:
                self._problem = error
        restore()
        return None

    def _try(self, works: Sequence[WaitingStep[_T]]) -> None:
        """Record whether a joint forward gives the same numbers as separate forwards; restore the caches."""
        if not _differ([work.part for work in works]):  # with equal rows, an exchange of rows would go unnoticed
            return
        for work in works:
            work.was_tried = True
        restore = _restorer_of(works)
        outputs = self._compute_jointly(works)
        if outputs is None:
            return
        joint = [_results_of(work.part, output) for work, output in zip(works, outputs, strict=True)]
        restore()
        try:
            separate = [_results_of(work.part, *work.stage.compute(work.step, [work.part])) for work in works]
        except Exception:  # noqa: BLE001 - `_outputs` computes again, and reports it
            return
        finally:
            restore()
        # Numbers like NaN, which a client may send, prove nothing.
        comparable = [each for each in zip(works, joint, separate, strict=True) if _is_finite(each[2])]
        differing = {work.step.client for work, first, second in comparable if not _are_alike(first, second)}
        if differing or len(comparable) > 1:
            self._verdicts.record(works, "the numbers differ" if differing else None, differing)


class _Verdicts:
    """Verdicts on joint forwards, by the kind of step, by whether the texts have one length, and by padding.

    A refusal concerns the clients whose numbers differed, and all clients if these are several. It ends after a while.
    """

    def __init__(self) -> None:
        self._joint: dict[Any, bool] = {}  # kinds that may share a forward
        self._refused: dict[Any, dict[PeerId, float]] = {}  # kind -> client -> monotonic time at which the refusal ends

    def of(self, works: Sequence[WaitingStep[Any]]) -> bool | None:
        """Return the verdict on steps of one kind; None if a trial is due."""
        key = _key_of(works)
        return False if any(self._is_refused(key, work) for work in works) else self._joint.get(key)

    def record(self, works: Sequence[WaitingStep[Any]], problem: object, clients: Iterable[PeerId] = ()) -> None:
        """Record that such steps may share a forward, or the problem because of which those of `clients` may not."""
        key = _key_of(works)
        if problem is None:
            self._joint[key] = True
        else:
            self._joint.pop(key, None)
            ends = self._refused.setdefault(key, {})
            ends.update(dict.fromkeys(clients, time.monotonic() + _REFUSED_S))
            for client in [*ends][:-_MAX_CLIENTS]:
                del ends[client]
            _log.info("Steps of a kind run separately at stage %d for a while: %s", works[0].stage.index, problem)
        for verdicts in (self._joint, self._refused):
            if len(verdicts) > _MAX_KINDS:
                del verdicts[next(iter(verdicts))]

    def refuses(self, work: WaitingStep[Any]) -> bool:
        """Return whether a step is to run alone, because its kind or many kinds of its client were refused."""
        if any(self._is_refused((work.kind, *forms), work) for forms in product((True, False), repeat=2)):
            return True
        # Kinds with adapters do not count, because a client's users may have many different adapters.
        kinds = [kind for (kind, *_), ends in self._refused.items() if work.step.client in ends and kind[-1] is None]
        return [kind[0] for kind in kinds].count(work.stage.index) >= _MAX_REFUSED

    def _is_refused(self, key: Any, work: WaitingStep[Any]) -> bool:
        if (ends := self._refused.get(key)) is None:
            return False
        clients = [client for client, end_s in ends.items() if time.monotonic() < end_s]
        return work.step.client in clients or len(clients) > 1


def _key_of(works: Sequence[WaitingStep[Any]]) -> Any:
    """Return the kind of steps, whether their texts have one length, and whether they would be padded."""
    caches = [work.part.cache for work in works]
    is_equal = len({*map(attention_cache.length_of, caches)}) == 1
    return works[0].kind, is_equal, padded_cache.pads(caches, works[0].part.tokens)


def _restorer_of(works: Sequence[WaitingStep[Any]]) -> Callable[[], None]:
    """Return a function that restores the steps' caches to their present contents."""
    restorers = [attention_cache.restorer_of(work.part.cache) for work in works]

    def restore() -> None:
        for restore_cache in restorers:
            restore_cache()

    return restore


def _differ(parts: Sequence[SessionPart]) -> bool:
    """Return whether the texts' hidden states differ."""
    first, *others = (serialization.flatten(part.hidden)[1] for part in parts)
    return not all(all(map(torch.equal, first, other)) for other in others)


def _results_of(part: SessionPart, output: serialization.Tree) -> tuple[Any, list[Tensor]]:
    """Return a step's output, and the keys and values of its tokens."""
    structure, tensors = serialization.flatten(output)
    new = [tensor[..., -part.tokens :, :] for tensor in attention_cache.tensors(part.cache) if tensor.ndim > 2]
    return structure, [*tensors, *new]


def _is_finite(results: tuple[Any, list[Tensor]]) -> bool:
    return all(bool(tensor.isfinite().all()) for tensor in results[1])


def _are_alike(first: tuple[Any, list[Tensor]], second: tuple[Any, list[Tensor]]) -> bool:
    """Return whether two steps gave the same numbers, up to rounding."""
    return first[0] == second[0] and len(first[1]) == len(second[1]) and all(map(_are_close, first[1], second[1]))


def _are_close(first: Tensor, second: Tensor) -> bool:
    if (first.shape, first.dtype) != (second.shape, second.dtype):
        return False
    if not first.is_floating_point() or not first.numel():
        return torch.equal(first, second)
    # Relative to each number and to the median, because a few numbers are often a hundred times as large as the rest.
    limit = torch.finfo(first.dtype).eps ** 0.5 * (first.abs() + first.abs().median())
    return bool(((first - second).abs() <= limit).float().mean() >= _AGREEING) and bool(second.isfinite().all())
