"""Writes all texts of a served model: chooses which steps are computed next, and on which thread.

Decoding texts on the same servers share a forward, all of them or in groups; `Groups` measures which is faster. Prompts
are computed in parts, in turn with the steps of other texts. A few threads choose work under one lock and compute it
without the lock. If a text's servers delay its step, the text leaves its group: a thread waits for this step alone, and
then the text joins a group again.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final

import torch
from torch import Tensor

from lightning_swarm.client.inference.forwards import Delayed
from lightning_swarm.network import PeerId
from lightning_swarm.serving.growing_text import GrowingText
from lightning_swarm.serving.joint_forward import JointForward
from lightning_swarm.serving.policy import Groups, PromptParts
from lightning_swarm.serving.sampling import draw

_MAX_SINGLE: Final = 8  # concurrent forwards of single texts, and concurrent parts of prompts while no text decodes
_MAX_PARTS: Final = 2  # concurrent parts of prompts while texts decode
_IDLE_S: Final = 1.0  # seconds after which a thread without work ends


Route = tuple[PeerId, ...]


class TextScheduler:
    """Computes the steps of texts on a few threads, which end when there is nothing to do.

    Args:
        forward: Computes steps of several texts.
        part_tokens: Tokens in a part of a prompt while no text decodes. None: prompts are computed whole.
        step_tokens: Returns the most tokens that servers take in one step. Prompts of exact texts have parts of this
            size.
        max_texts: The maximum number of texts in progress. None: any number.
        has_threads: Whether it starts threads. If not, `run` computes the steps.
    """

    def __init__(
        self,
        forward: JointForward,
        *,
        part_tokens: int | None,
        step_tokens: Callable[[], int],
        max_texts: int | None = None,
        has_threads: bool = True,
    ) -> None:
        self._forward, self._step_tokens, self._max_texts = forward, step_tokens, max_texts
        self._max_threads = 2 * _MAX_SINGLE if has_threads else 0
        self._groups = Groups()
        self._parts = None if part_tokens is None else PromptParts(part_tokens)
        self._changed = threading.Condition()
        # The following are read and changed under `_changed`.
        self._waiting: deque[GrowingText] = deque()  # texts that have not begun
        self._prompts: deque[GrowingText] = deque()  # texts whose prompt is not computed yet
        self._due: dict[Route, list[GrowingText]] = {}  # texts whose next step is due
        self._late: deque[tuple[GrowingText, Delayed]] = deque()  # texts that left their group, with their steps
        self._num_finishing = 0  # delayed steps that threads wait for
        self._num_texts = 0  # texts that have begun and not ended
        self._stepping: dict[int, tuple[Route, int]] = {}  # id of a group in progress -> its route, number of texts
        self._feeding = Counter[bool]()  # is exact -> number of parts of prompts in progress
        self._was_step = False  # the newest work was a step of texts
        self._num_threads = self._num_idle = 0

    def submit(self, text: GrowingText) -> None:
        """Write a text; its listener receives the tokens."""
        with self._changed:
            self._waiting.append(text)
            try:
                self._wake()
            except RuntimeError:  # no thread can be started
                self._waiting.remove(text)
                raise

    def run(self, *, idle_s: float = 0.0) -> None:
        """Compute steps on this thread until there was nothing to do for `idle_s` seconds."""
        with torch.no_grad():
            while (work := self._wait_for_work(idle_s)) is not None:
                work()

    # ------------------------------------------------------------------ choice of the next work

    def _wake(self) -> None:
        """Have another thread look for work; start one if all are busy."""
        if self._num_idle:
            self._changed.notify()
        elif self._num_threads < self._max_threads:
            try:
                threading.Thread(target=self._serve, name="texts", daemon=True).start()
            except RuntimeError:
                if not self._num_threads:
                    raise
            else:
                self._num_threads += 1

    def _serve(self) -> None:
        try:
            self.run(idle_s=_IDLE_S)
        except BaseException:
            with self._changed:
                self._num_threads -= 1
            raise

    def _wait_for_work(self, idle_s: float) -> Callable[[], None] | None:
        """Return the next work; None if there was none for `idle_s` seconds, after which this thread ends."""
        with self._changed:
            has_waited = False
            while (work := self._choose()) is None:
                if has_waited:
                    if idle_s:
                        self._num_threads -= 1
                    return None
                self._num_idle += 1
                try:
                    has_waited = not self._changed.wait(idle_s)
                finally:
                    self._num_idle -= 1
            if self._due or self._prompts or self._waiting or self._late:
                self._wake()
            return work

    def _choose(self) -> Callable[[], None] | None:
        """Return the next work, or None if nothing can be done now. Steps and parts of prompts take turns."""
        first, second = self._choose_step, self._choose_part
        if self._was_step:
            first, second = second, first
        return first() or second() or self._choose_late()

    def _choose_late(self) -> Callable[[], None] | None:
        if not self._late or self._num_finishing >= _MAX_SINGLE:
            return None
        self._num_finishing += 1
        return partial(self._finish, *self._late.popleft())

    def _choose_step(self) -> Callable[[], None] | None:
        for route, due in self._due.items():
            group_sizes = [size for group_route, size in self._stepping.values() if group_route == route]
            max_groups, num_texts = self._groups.num_groups(len({*route})), len(due) + sum(group_sizes)
            # `is_alone`: the group is one text, which cannot share a forward.
            group, is_alone = self._forward.group(due, -(-num_texts // max_groups))
            if len(group_sizes) < (_MAX_SINGLE if is_alone else max_groups):
                break
        else:
            return None
        chosen = set(map(id, group))
        del self._due[route]
        if rest := [text for text in due if id(text) not in chosen]:
            self._due[route] = rest  # at the end, so that routes take turns
        self._stepping[id(group)] = route, len(group)
        self._was_step = True
        is_measured = num_texts > 1 and not is_alone and len({*route}) > 1
        return partial(self._step, group, num_texts=num_texts if is_measured else 0, splits=self._groups.splits)

    def _choose_part(self) -> Callable[[], None] | None:
        is_alone = not (self._due or self._stepping)  # no text decodes
        max_parts = _MAX_SINGLE if is_alone else _MAX_PARTS
        if self._feeding[False] >= max_parts:
            return None
        while self._waiting and (self._max_texts is None or self._num_texts < self._max_texts):
            self._num_texts += 1
            self._prompts.append(self._waiting.popleft())
        # Parts of exact texts are large and may take minutes, so at most half as many of them are computed at a time.
        can_be_exact = self._feeding[True] < max_parts // 2
        text = next((text for text in self._prompts if can_be_exact or not text.is_exact), None)
        if text is None:
            return None
        self._prompts.remove(text)
        self._was_step = False
        self._feeding[text.is_exact] += 1
        return partial(self._feed, text, is_alone=is_alone)

    # ------------------------------------------------------------------ work

    def _feed(self, text: GrowingText, *, is_alone: bool) -> None:
        """Compute a part of a text's prompt, and after the last part draw the first token."""
        continuing: Sequence[GrowingText] = ()
        is_fed = True  # the whole prompt is computed
        try:
            if not text.listener.is_cancelled and (text.is_prepared or text.prepare()):
                num_tokens, begin_s = self._part_size(text, is_alone=is_alone), time.monotonic()
                logits = self._forward.feed(text, num_tokens)
                is_fed = logits is not None
                if self._parts is not None and not is_alone:
                    self._parts.measure_part(num_tokens, time.monotonic() - begin_s)
                continuing = [text] if logits is None else _draw([text], logits.unsqueeze(0), {})
        except BaseException as error:  # noqa: BLE001 - the text's listener raises it
            text.end(error)
        if not continuing:
            text.end()
        with self._changed:
            self._feeding[text.is_exact] -= 1
            self._num_texts -= not continuing
            if continuing and is_fed:
                self._due.setdefault(text.route, []).append(text)
            elif continuing:
                self._prompts.append(text)

    def _part_size(self, text: GrowingText, *, is_alone: bool) -> int:
        if self._parts is None:
            return text.num_prompt
        step_tokens = self._step_tokens()
        return step_tokens if text.is_exact else min(step_tokens, self._parts.num_tokens(is_alone=is_alone))

    def _finish(self, text: GrowingText, delayed: Delayed) -> None:
        """Wait for a text's delayed step, and draw its next token."""
        continuing: Sequence[GrowingText] = ()
        try:
            if not text.listener.is_cancelled:
                continuing = _draw([text], self._forward.finish(text, delayed).unsqueeze(0), {})
        except BaseException as error:  # noqa: BLE001 - the text's listener raises it
            text.end(error)
        if not continuing:
            text.end()
        with self._changed:
            self._num_finishing -= 1
            self._num_texts -= not continuing
            if continuing:
                self._due.setdefault(text.route, []).append(text)

    def _step(self, group: Sequence[GrowingText], *, num_texts: int, splits: bool) -> None:
        """Compute one step of texts, and draw their next tokens.

        `num_texts` and `splits` are for `Groups.measure`, with 0 texts for a step that is not measured.
        """
        continuing: Sequence[GrowingText] = ()
        late: Sequence[tuple[GrowingText, Delayed]] = ()
        begin_s = time.monotonic()
        try:
            wanted = [text for text in group if not text.listener.is_cancelled]
            if wanted:
                logits, errors = self._forward.step(wanted)
                late = [(wanted[index], error) for index, error in errors.items() if isinstance(error, Delayed)]
                continuing = _draw(wanted, logits, errors)
        except BaseException as error:  # noqa: BLE001 - the texts' listeners raise it
            for text in group:
                text.end(error)
        took_s = time.monotonic() - begin_s
        if self._parts is not None:
            self._parts.measure_step(took_s)
        remaining = set(map(id, (*continuing, *(text for text, _ in late))))
        for text in group:
            if id(text) not in remaining:
                text.end()
        with self._changed:
            if num_texts:
                self._groups.measure(took_s, num_texts, splits=splits)
            del self._stepping[id(group)]
            self._num_texts -= len(group) - len(remaining)
            self._late.extend(late)
            for text in continuing:
                self._due.setdefault(text.route, []).append(text)


def _draw(texts: Sequence[GrowingText], logits: Tensor, errors: Mapping[int, Exception]) -> Sequence[GrowingText]:
    """Draw the next token of each text by its logits ``[texts, tokens]``; return the texts that continue."""
    for index, error in errors.items():
        if not isinstance(error, Delayed):
            texts[index].end(error)
    if errors:
        kept = [index for index in range(len(texts)) if index not in errors]
        texts, logits = [texts[index] for index in kept], logits[kept]
    if not texts:
        return ()
    scores = logits.to(dtype=torch.float32, copy=True)
    continuing = []
    for text, token in zip(texts, draw(scores, [text.sampler for text in texts]), strict=True):
        try:
            if isinstance(token, Exception):
                raise token
            if not text.add(token):
                continuing.append(text)
        except Exception as error:  # noqa: BLE001 - it concerns this text alone
            text.end(error)
    return continuing
