"""Writes all texts of a served model: which steps are computed next, and on which thread.

Texts on the same servers whose next token is due share a forward, all of them or in groups. Prompts are computed in
parts, beside the steps of other texts.
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

_MOST_ALONE: Final = 8  # forwards of single texts under way, and parts of prompts if there are no steps
_MOST_PARTS: Final = 2  # parts of prompts under way beside steps
_IDLE_S: Final = 1.0  # seconds after which a thread without work ends


Route = tuple[PeerId, ...]


class TextScheduler:
    """Computes the steps of texts on a few threads, which end when there is nothing to do.

    Args:
        forward: Computes steps of several texts.
        part: Tokens of a prompt in one step if no other text is under way. None: prompts are computed whole.
        step_tokens: Returns the most tokens of a step, which is the part of a prompt if the text is exact.
        most_texts: Texts that may be under way at once. None: any number.
        has_threads: Whether it starts threads. If not, `run` computes the steps.
    """

    def __init__(
        self,
        forward: JointForward,
        *,
        part: int | None,
        step_tokens: Callable[[], int],
        most_texts: int | None = None,
        has_threads: bool = True,
    ) -> None:
        self._forward, self._step_tokens, self._most_texts = forward, step_tokens, most_texts
        self._most_threads = 2 * _MOST_ALONE if has_threads else 0
        self._groups = Groups()
        self._parts = None if part is None else PromptParts(part)
        self._changed = threading.Condition()
        # The following are read and changed under `_changed`.
        self._waiting: deque[GrowingText] = deque()  # texts that have not begun
        self._prompts: deque[GrowingText] = deque()  # texts whose prompt is not computed yet
        self._due: dict[Route, list[GrowingText]] = {}  # texts whose next step is due
        self._late: deque[tuple[GrowingText, Delayed]] = deque()  # texts whose step is under way without their group
        self._num_finishing = 0  # late texts that a thread waits for
        self._num_texts = 0  # texts that have begun and not ended
        self._stepping: dict[int, tuple[Route, int]] = {}  # id of each group under way -> its route, number of texts
        self._feeding = Counter[bool]()  # parts of prompts under way; True: whole prompts of exact texts
        self._was_step = False  # the newest work was a step
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
            while (work := self._next(idle_s)) is not None:
                work()

    # ------------------------------------------------------------------ choice of the next work

    def _wake(self) -> None:
        """Have another thread look for work; start one if all are busy."""
        if self._num_idle:
            self._changed.notify()
        elif self._num_threads < self._most_threads:
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

    def _next(self, idle_s: float) -> Callable[[], None] | None:
        with self._changed:
            is_late = False
            while (work := self._take()) is None:
                if is_late:
                    if idle_s:
                        self._num_threads -= 1
                    return None
                self._num_idle += 1
                try:
                    is_late = not self._changed.wait(idle_s)
                finally:
                    self._num_idle -= 1
            if self._due or self._prompts or self._waiting or self._late:
                self._wake()
            return work

    def _take(self) -> Callable[[], None] | None:
        """Return the next work, or None if nothing can be done now. Steps and parts of prompts take turns."""
        first, second = (self._take_part, self._take_step) if self._was_step else (self._take_step, self._take_part)
        return first() or second() or self._take_late()

    def _take_late(self) -> Callable[[], None] | None:
        if not self._late or self._num_finishing >= _MOST_ALONE:
            return None
        self._num_finishing += 1
        return partial(self._finish, *self._late.popleft())

    def _take_step(self) -> Callable[[], None] | None:
        for route, due in self._due.items():
            under_way = [number for own, number in self._stepping.values() if own == route]
            most, num_texts = self._groups.number(len({*route})), len(due) + sum(under_way)
            group, is_alone = self._forward.group(due, -(-num_texts // most))
            if len(under_way) < (_MOST_ALONE if is_alone else most):
                break
        else:
            return None
        taken = set(map(id, group))
        del self._due[route]
        if rest := [text for text in due if id(text) not in taken]:
            self._due[route] = rest  # last, so that routes take turns
        self._stepping[id(group)] = route, len(group)
        self._was_step = True
        is_measured = num_texts > 1 and not is_alone and len({*route}) > 1
        return partial(self._step, group, num_texts=num_texts if is_measured else 0, splits=self._groups.splits)

    def _take_part(self) -> Callable[[], None] | None:
        is_alone = not (self._due or self._stepping)
        most = _MOST_ALONE if is_alone else _MOST_PARTS
        if self._feeding[False] >= most:
            return None
        while self._waiting and (self._most_texts is None or self._num_texts < self._most_texts):
            self._num_texts += 1
            self._prompts.append(self._waiting.popleft())
        # Whole prompts may take minutes, so they never take all places of parts.
        can_be_exact = self._feeding[True] < most // 2
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
        going: Sequence[GrowingText] = ()
        is_fed = True
        try:
            if not text.listener.is_cancelled and (text.is_prepared or text.prepare()):
                number, begin_s = self._part_of(text, is_alone=is_alone), time.monotonic()
                logits = self._forward.feed(text, number)
                is_fed = logits is not None
                if self._parts is not None and not is_alone:
                    self._parts.measure_part(number, time.monotonic() - begin_s)
                going = [text] if logits is None else _draw([text], logits.unsqueeze(0), {})
        except BaseException as error:  # noqa: BLE001 - the text's listener raises it
            text.end(error)
        if not going:
            text.end()
        with self._changed:
            self._feeding[text.is_exact] -= 1
            self._num_texts -= not going
            if going and is_fed:
                self._due.setdefault(text.route, []).append(text)
            elif going:
                self._prompts.append(text)

    def _part_of(self, text: GrowingText, *, is_alone: bool) -> int:
        if self._parts is None:
            return text.num_prompt
        most = self._step_tokens()
        return most if text.is_exact else min(most, self._parts.num_tokens(is_alone=is_alone))

    def _finish(self, text: GrowingText, delayed: Delayed) -> None:
        """Wait for a text's step, and draw its next token."""
        going: Sequence[GrowingText] = ()
        try:
            if not text.listener.is_cancelled:
                going = _draw([text], self._forward.finish(text, delayed).unsqueeze(0), {})
        except BaseException as error:  # noqa: BLE001 - the text's listener raises it
            text.end(error)
        if not going:
            text.end()
        with self._changed:
            self._num_finishing -= 1
            self._num_texts -= not going
            for one in going:
                self._due.setdefault(one.route, []).append(one)

    def _step(self, group: Sequence[GrowingText], *, num_texts: int, splits: bool) -> None:
        """Compute one step of texts, and draw their next tokens. For the last arguments, see `Groups.measure`."""
        going: Sequence[GrowingText] = ()
        late: Sequence[tuple[GrowingText, Delayed]] = ()
        begin_s = time.monotonic()
        try:
            wanted = [text for text in group if not text.listener.is_cancelled]
            if wanted:
                logits, errors = self._forward.step(wanted)
                late = [(wanted[index], one) for index, one in errors.items() if isinstance(one, Delayed)]
                going = _draw(wanted, logits, errors)
        except BaseException as error:  # noqa: BLE001 - the texts' listeners raise it
            for text in group:
                text.end(error)
        took_s = time.monotonic() - begin_s
        if self._parts is not None:
            self._parts.measure_step(took_s)
        stays = set(map(id, (*going, *(text for text, _ in late))))
        for text in group:
            if id(text) not in stays:
                text.end()
        with self._changed:
            if num_texts:
                self._groups.measure(took_s, num_texts, splits=splits)
            del self._stepping[id(group)]
            self._num_texts -= len(group) - len(stays)
            self._late.extend(late)
            for text in going:
                self._due.setdefault(text.route, []).append(text)


def _draw(texts: Sequence[GrowingText], logits: Tensor, errors: Mapping[int, Exception]) -> Sequence[GrowingText]:
    """Draw the next token of each text by its logits ``[texts, tokens]``; return the texts that go on."""
    for index, error in errors.items():
        if not isinstance(error, Delayed):
            texts[index].end(error)
    if errors:
        kept = [index for index in range(len(texts)) if index not in errors]
        texts, logits = [texts[index] for index in kept], logits[kept]
    if not texts:
        return ()
    scores = logits.to(dtype=torch.float32, copy=True)
    going = []
    for text, token in zip(texts, draw(scores, [text.sampler for text in texts]), strict=True):
        try:
            if isinstance(token, Exception):
                raise token
            if not text.add(token):
                going.append(text)
        except Exception as error:  # noqa: BLE001 - it concerns this text alone
            text.end(error)
    return going
