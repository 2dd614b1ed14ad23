"""Runs forwards with a cache as steps of inference sessions; the servers hold the cache's contents."""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from lightning_swarm.client.inference.adapters import PackedAdapter, names_of
from lightning_swarm.client.inference.prefixes import branch
from lightning_swarm.client.inference.routes import SessionRoutes
from lightning_swarm.client.inference.session import (
    InferenceSession,
    SessionInput,
    SessionResult,
    SessionWeights,
)
from lightning_swarm.client.inference.sessions import InferenceSessions
from lightning_swarm.core.errors import ConfigError
from lightning_swarm.core.event_loop import Runtime
from lightning_swarm.model.inference.attention_cache import CacheHandle, build, restorer_of, with_cache
from lightning_swarm.model.partition import CALLS, packed_calls
from lightning_swarm.protocol import serialization
from lightning_swarm.protocol.compression import Codec, decoded, encoded, on_cpu
from lightning_swarm.protocol.messages.calls import ComputeMode
from lightning_swarm.protocol.messages.inference import CacheRecipe

_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True, eq=False)
class TextStep:
    """The next tokens of a text."""

    hidden: Any  # ``[rows, tokens, ...]``
    extras: dict[str, Any]  # the blocks' other arguments
    cache: Any  # the user's cache object
    weights: SessionWeights
    modes: Sequence[ComputeMode]  # one for each stage
    adapters: Sequence[PackedAdapter | None] = ()  # one for each stage; empty: none
    drops: Sequence[bool] = ()  # one for each stage: its adapter's dropout is on; empty: all off
    exact: bool = False  # see `InferenceSession`; used in the text's first step


class Delayed(Exception):
    """A step's servers are being replaced, while other texts' steps are done. `wait` returns its output later."""

    def __init__(self, wait: Callable[[], Any]) -> None:
        super().__init__("a step is delayed")
        self.wait = wait


@dataclass(frozen=True, eq=False)
class SentStep:
    """A step that was sent, and whose output was not received yet."""

    session: InferenceSession
    number: int
    cache: Any
    length: int  # tokens in the cache after the step

    @property
    def has_arrived(self) -> bool:
        """Whether the result has arrived."""
        return self.session.has_result(self.number)


class SessionForwards:
    """Runs the steps of texts. The rows of a text stay together, and are not cut into microbatches."""

    def __init__(
        self, runtime: Runtime, routes: SessionRoutes, *, codec: Codec | None, device: torch.device, num_blocks: int
    ) -> None:
        self._runtime, self._routes = runtime, routes
        self._codec, self._device = codec, device  # codec of tensors in transit; device of outputs
        self._num_blocks = num_blocks
        self._sessions: InferenceSessions | None = None  # created with the first session
        self._calls: tuple[Any, str] = (None, "")  # (block calls of the newest step, the same as text)

    def step(self, step: TextStep) -> Any:
        """Compute the next tokens of a text, and return the blocks' output."""
        (output,) = self.step_many([step])
        if isinstance(output, Exception):
            raise output
        return output

    def send(self, step: TextStep) -> SentStep:
        """Send a text's next tokens, even while earlier steps are under way. The cache's length does not change."""
        session, session_input = self._prepare(step)

        async def begin() -> int:
            return session.begin(session_input)

        handle = CacheHandle.bound_to(step.cache)
        sent = SentStep(session, self._runtime.run(begin()), step.cache, handle.length + session_input.num_tokens)
        handle.in_step = False
        return sent

    def receive(self, sent: SentStep) -> Any:
        """Wait for the output of a sent step, after which earlier steps cannot be received any more."""
        handle = CacheHandle.bound_to(sent.cache)
        handle.in_step = True
        result = self._runtime.run(sent.session.result(sent.number))
        _check_length(sent.cache, result.length, sent.length)
        handle.in_step = False
        return self._decode(result.output, sent.cache)

    def grow(self, cache: Any, length: int) -> None:
        """Extend the lengths of a text's cache by tokens of one row that the servers have or will have."""
        CacheHandle.bound_to(cache).grow(cache, rows=1, length=length, num_layers=self._num_blocks)

    @contextlib.contextmanager
    def growing(self, cache: Any, length: int) -> Iterator[None]:
        """Within this context, a text's cache is longer by `length` tokens, which were sent but not received."""
        handle, restore = CacheHandle.bound_to(cache), restorer_of(cache)
        former = handle.length
        try:
            if length:
                self.grow(cache, length)
            yield
        finally:
            restore()
            handle.length = former

    def step_many(self, steps: Sequence[TextStep]) -> list[Any]:
        """Compute the next tokens of texts with different caches; return each text's output, or its error.

        The steps go to servers together as far as the texts' routes agree. A text whose servers are being replaced gets
        the error `Delayed` if another text's step is done meanwhile.
        """
        prepared = [_result_or_error(self._prepare, step) for step in steps]
        valid = [pair for pair in prepared if not isinstance(pair, Exception)]
        tasks = iter(self._runtime.run(_run_steps(valid)) if valid else ())

        def finish(step: TextStep) -> Any:
            task = next(tasks)
            if task.done():
                return _result_or_error(lambda: self._end(step, task.result()))

            async def result() -> SessionResult:
                return await task

            return Delayed(lambda: self._end(step, self._runtime.run(result())))

        pairs = zip(steps, prepared, strict=True)
        return [pair if isinstance(pair, Exception) else finish(step) for step, pair in pairs]

    def _prepare(self, step: TextStep) -> tuple[InferenceSession, SessionInput]:
        """Return a step's session, opened if it is the text's first step, and the step's input."""
        handle = CacheHandle.of(step.cache)
        session = self._session_of(step, handle)
        handle.in_step = True  # stays set if the step fails or is interrupted
        return session, self._session_input(step.hidden, step.extras, handle, step.modes, step.drops)

    def _end(self, step: TextStep, result: SessionResult) -> Any:
        """Return a step's output, and extend the lengths of its cache."""
        cache, (rows, length) = step.cache, serialization.leaves(step.hidden)[0].shape[:2]
        handle, output = CacheHandle.bound_to(cache), self._decode(result.output, cache)
        handle.grow(cache, rows=rows, length=length, num_layers=self._num_blocks)
        _check_length(cache, result.length, handle.length)
        handle.in_step = False
        return output

    def recorded(self, hidden: Any, extras: dict[str, Any], cache: Any, modes: Sequence[ComputeMode]) -> SessionInput:
        """Return the input of a text's next step without computing the step. The cache then serves no text any more."""
        handle = CacheHandle.of(cache)
        step = self._session_input(hidden, extras, handle, modes)
        handle.grow(cache, rows=step.num_rows, length=step.num_tokens, num_layers=self._num_blocks)
        return step

    def branched(
        self,
        recipe: CacheRecipe,
        steps: Sequence[SessionInput],
        *,
        weights: SessionWeights,
        adapters: Sequence[PackedAdapter | None],
        source: InferenceSession | None,
        exact: bool,
    ) -> tuple[Any, int] | None:
        """Return a cache that begins with the longest prefix of `steps` that servers keep, and its number of tokens.

        None if servers keep no prefix. See `prefixes.branch` for `source`.
        """

        async def open_branch() -> InferenceSession | None:
            sessions = self._get_sessions()
            session = sessions.open(recipe, weights, adapters, exact=exact, prefix=steps)
            if await branch(session, self._routes, source):
                return session
            sessions.close_soon(session)
            return None

        session = self._runtime.run(open_branch())
        if session is None:
            return None
        cache = build(recipe)
        handle = CacheHandle.of(cache)
        self._bind(session, cache, handle)
        length = sum(step.num_tokens for step in session.log)
        self.grow(cache, length)
        return cache, length

    def _bind(self, session: InferenceSession, cache: Any, handle: CacheHandle) -> None:
        """Bind a session to a cache, and close it once the cache is garbage-collected."""
        handle.session = session
        weakref.finalize(cache, self._close, session).atexit = False

    def once(
        self, hidden: Any, extras: dict[str, Any], *, weights: SessionWeights, modes: Sequence[ComputeMode]
    ) -> Any:
        """Compute a forward without a cache, as a session of one step."""
        session_input = self._session_input(hidden, extras, None, modes)

        async def compute() -> SessionResult:
            sessions = self._get_sessions()
            session = sessions.open(None, weights)
            try:
                return await session.step(session_input)
            finally:
                sessions.close_soon(session)

        return self._decode(self._runtime.run(compute()).output, None)

    def _session_input(
        self,
        hidden: Any,
        extras: dict[str, Any],
        handle: CacheHandle | None,
        modes: Sequence[ComputeMode],
        drops: Sequence[bool] = (),
    ) -> SessionInput:
        """Return a step's input; refuse inputs that require a gradient."""
        if torch.is_grad_enabled() and any(
            tensor.requires_grad for tensor in serialization.flatten((hidden, extras))[1]
        ):
            raise ConfigError(
                "text is generated without gradients, got blocks with a cache and an input that requires a gradient. "
                "Generate under `torch.no_grad()`; to train layers before the blocks, use no cache, by "
                "`use_cache=False` in a Hugging Face model's config."
            )
        with _any_thread():
            # Copied, because a step may be sent again, and the forward may overwrite its arguments.
            return SessionInput(
                hidden=on_cpu(encoded(hidden, self._codec), copy=True),
                extras=on_cpu(self._pack_calls(extras), copy=True),
                operations=[] if handle is None else handle.take_operations(),
                modes=modes,
                drops=drops,
            )

    def _pack_calls(self, extras: dict[str, Any]) -> dict[str, Any]:
        """Return extras with the blocks' calls as text, which is kept, because most steps have equal calls."""
        calls = extras.get(CALLS)
        if calls is None:
            return extras
        newest, text = self._calls
        if calls != newest:
            self._calls = calls, (text := packed_calls(calls))
        return {**extras, CALLS: text}

    def _decode(self, output: serialization.Tree, cache: Any) -> Any:
        """Decode an output, in which `cache` takes the place of the servers' cache."""
        with _any_thread():
            return with_cache(decoded(on_cpu(output, copy=True), self._codec, self._device), cache)

    def _session_of(self, step: TextStep, handle: CacheHandle) -> InferenceSession:
        """Return the session of a step's cache; the cache's first step opens one."""
        session: InferenceSession | None = handle.session
        if session is None:
            session = self._runtime.run(self._open(step, handle))
            self._bind(session, step.cache, handle)
        if handle.in_step:
            raise ConfigError(
                "a cache cannot be used any more after a step of its text has failed. Begin with a new cache."
            )
        if session.weights != step.weights or self._sessions is None or not self._sessions.has(session):
            raise ConfigError(
                "a text must be generated with the same weights from beginning to end: this cache belongs to "
                f"{session.weights}, and the run is at {step.weights}. Begin with a new cache."
            )
        if names_of(session.adapters) != names_of(step.adapters):
            raise ConfigError(
                "a text must be generated with the same adapter from beginning to end: since the first step with this "
                "cache, the adapter has changed, or another adapter is active. Begin with a new cache."
            )
        return session

    async def _open(self, step: TextStep, handle: CacheHandle) -> InferenceSession:
        """On the loop: open a session for a cache."""
        return self._get_sessions().open(handle.recipe, step.weights, step.adapters, exact=step.exact)

    def _get_sessions(self) -> InferenceSessions:
        """On the loop: return the client's sessions; the first call creates them, and registers their handlers."""
        if self._sessions is None:
            self._sessions = InferenceSessions(self._routes)
        return self._sessions

    def _close(self, session: InferenceSession) -> None:
        """Close the session of a cache that was garbage-collected, on any thread."""
        sessions = self._sessions
        if sessions is not None:
            self._runtime.post(lambda: sessions.close_soon(session))


async def _run_steps(steps: Sequence[tuple[InferenceSession, SessionInput]]) -> list[asyncio.Task[SessionResult]]:
    """Begin steps; return when all are done, or when some are done and all the rest are delayed."""
    changed = asyncio.Event()

    def on_done(task: asyncio.Task[SessionResult]) -> None:
        changed.set()
        if not task.cancelled():
            task.exception()  # marks it as retrieved, because a text that has ended does not wait for it

    tasks = [asyncio.ensure_future(session.step(session_input)) for session, session_input in steps]
    try:
        for task, (session, _) in zip(tasks, steps, strict=True):
            session.on_delay = changed.set
            task.add_done_callback(on_done)
        while unfinished := [session for task, (session, _) in zip(tasks, steps, strict=True) if not task.done()]:
            if len(unfinished) < len(tasks) and all(session.is_delayed for session in unfinished):
                break
            changed.clear()
            await changed.wait()
    except BaseException:
        for task in tasks:
            task.cancel()
        raise
    return tasks


def _check_length(cache: Any, server_length: int | None, length: int) -> None:
    """Refuse a cache that has another number of tokens at the servers than here."""
    if server_length != length:
        raise ConfigError(
            f"a cache on servers must grow as on one machine, got {length} tokens here and {server_length} on a "
            f"server. This {type(cache).__name__} cannot be used in a swarm: pass `use_cache=False`."
        )


def _result_or_error(function: Callable[..., _T], *arguments: Any) -> _T | Exception:
    try:
        return function(*arguments)
    except Exception as error:  # noqa: BLE001 - it concerns one text of several
        return error


@contextlib.contextmanager
def _any_thread() -> Iterator[None]:
    """Within this context, make tensors without gradients that other threads can use."""
    with torch.inference_mode(False), torch.no_grad():
        yield
