"""Computes the next steps of several texts in one forward of a served model.

A step of one token costs the client's part of a forward: embedding, positions, masks, final norm and head. A joint
forward costs this once for all of its texts. It gets the cache of the longest text and the positions of all texts. If
it then calls the blocks with arguments that have one row for each text, each row goes to the session of its text.

Models differ in how masks and positions depend on a text's length. So each kind of steps is tried once: the blocks'
arguments must equal those of separate forwards exactly, and the results of the separate forwards are used. Texts longer
than a window of attention are of another kind than shorter texts, because the window changes their masks.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_swarm.client.inference.forwards import Delayed
from lightning_swarm.model.inference import attention_cache
from lightning_swarm.model.inference.joint_attention import MASK_DIMENSIONS, CannotJoin, join_rows
from lightning_swarm.serving.blocks import ServedBlocks
from lightning_swarm.serving.growing_text import GrowingText

_log = logging.getLogger(__name__)

StepResult = tuple[Tensor, dict[int, Exception]]
"""Logits ``[texts, tokens]``, and the errors of texts by their index."""


class JointForward:
    """Computes steps of texts together if a trial has shown that the results equal those of separate forwards.

    Args:
        blocks: The served model's blocks. None: the model is not served, and texts are computed one by one.
    """

    def __init__(self, blocks: ServedBlocks | None) -> None:
        self._blocks = blocks
        self._verdicts: dict[Any, bool] = {}  # kind of steps -> whether a joint forward is correct

    def group(self, due: Sequence[GrowingText], max_texts: int) -> tuple[list[GrowingText], bool]:
        """Return the first text with texts that share its forward, and whether it cannot share a forward at all."""
        first, *others = due
        signature = _signature(first)
        if self._blocks is None or signature is None:
            return [first], True
        group = [first, *(other for other in others if _signature(other) == signature)][:max_texts]
        if self._verdicts.get(_kind(group)) is False:
            group = [text for text in group if text.length == first.length]
            if len(group) == 1 or self._verdicts.get(_kind(group)) is False:
                return [first], True
        return group, False

    def feed(self, text: GrowingText, num_tokens: int) -> Tensor | None:
        """Compute the next part of a text's prompt; see `GrowingText.feed`."""
        with self._blocks.exactly() if self._blocks is not None and text.is_exact else contextlib.nullcontext():
            return text.feed(num_tokens)

    def step(self, texts: Sequence[GrowingText]) -> StepResult:
        """Compute the step of each text's newest token; `texts` are of one `group`."""
        if len(texts) == 1:
            return _one_by_one(texts)
        verdict = self._verdicts.get(_kind(texts))
        are_distinct = len({text.tokens[-1] for text in texts}) > 1  # a trial with equal rows would not show mixed rows
        if verdict is None and are_distinct:
            return self._try(texts)
        return self._jointly(texts) if verdict else _one_by_one(texts)

    def _jointly(self, texts: Sequence[GrowingText]) -> StepResult:
        assert self._blocks is not None
        step_many = self._blocks.step_many
        errors: dict[int, Exception] = {}
        has_begun = False

        def compute(hidden: Any, extras: dict[str, Any], cache: Any) -> Any:
            nonlocal has_begun
            rows = _rows((hidden, extras), texts)
            has_begun = True
            outputs = step_many([(*row, text.cache) for row, text in zip(rows, texts, strict=True)])
            errors.update((index, output) for index, output in enumerate(outputs) if isinstance(output, Exception))
            if len(errors) == len(texts):
                raise _TextsFailed
            outputs = [
                attention_cache.without_cache(output, text.cache) for output, text in zip(outputs, texts, strict=True)
            ]
            # Rows of failed texts are not used, so another text's output fills them.
            filler = next(output for output in outputs if not isinstance(output, Exception))
            return _joined([filler if isinstance(output, Exception) else output for output in outputs], cache)

        try:
            with self._blocks.computed_by(compute):
                logits = _forward(texts)
        except _TextsFailed:
            return torch.empty(len(texts), 0), errors
        except CannotJoin as problem:
            if has_begun:
                raise
            self._record_verdict(_kind(texts), str(problem))
            return _one_by_one(texts)
        for index, text in enumerate(texts):
            if not isinstance(errors.get(index), Delayed):
                text.follow()
        return logits, errors

    def finish(self, text: GrowingText, delayed: Delayed) -> Tensor:
        """Wait for a text's delayed step; return its logits ``[tokens]``."""
        assert self._blocks is not None
        with self._blocks.computed_by(lambda *_: delayed.wait()):
            return text.step()

    def _try(self, texts: Sequence[GrowingText]) -> StepResult:
        """Compute texts one by one, and find out whether a joint forward gives the same numbers.

        The joint forward runs first, up to its blocks. There the texts are computed one by one, and the blocks'
        arguments are compared. Then the joint forward continues with the joined outputs, and the logits are compared.
        """
        assert self._blocks is not None
        computed_by, step = self._blocks.computed_by, self._blocks.step
        result: StepResult | None = None
        problem = ""

        def compare(hidden: Any, extras: dict[str, Any], cache: Any) -> Any:
            nonlocal result
            calls: list[tuple[Any, Any]] = []  # arguments of the blocks in each separate forward, and their output

            def record(hidden: Any, extras: dict[str, Any], cache: Any) -> Any:
                output = step(hidden, extras, cache)
                calls.append(((hidden, extras), attention_cache.without_cache(output, cache)))
                return output

            with computed_by(record):
                result = _one_by_one(texts)
            if result[1]:
                raise _TextsFailed
            for row, (arguments, _) in zip(_rows((hidden, extras), texts), calls, strict=True):
                if not _equal(row, arguments):
                    raise CannotJoin("the blocks' arguments differ")
            return _joined([output for _, output in calls], cache)

        kind = _kind(texts)
        try:
            with computed_by(compare):
                logits = _forward(texts)
            if result is None or not _are_close(logits, result[0]):
                problem = "the logits differ"
        except Exception as error:  # noqa: BLE001 - the model's code may raise anything
            problem = str(error) or repr(error)  # keeping the error itself would keep the caches
        if result is None or not result[1]:  # if a text failed, a later step is tried
            self._record_verdict(kind, problem)
        return _one_by_one(texts) if result is None else result

    def _record_verdict(self, kind: Any, problem: str) -> None:
        """Record whether steps of a kind may share a forward: only if there is no `problem`."""
        self._verdicts[kind] = not problem
        if problem:
            _log.info("Texts like these are computed one by one from now on: %s", problem)


class _TextsFailed(Exception):
    """Ends a joint forward at its blocks, because steps of its texts failed."""


def _one_by_one(texts: Sequence[GrowingText]) -> StepResult:
    rows: list[Tensor | None] = []
    errors: dict[int, Exception] = {}
    for index, text in enumerate(texts):
        try:
            rows.append(text.step())
        except Exception as error:  # noqa: BLE001 - it concerns this text alone
            rows.append(None)
            errors[index] = error
    filler = next((row for row in rows if row is not None), torch.empty(0))  # the row of a failed text is not used
    return torch.stack([filler if row is None else row for row in rows]), errors


def _signature(text: GrowingText) -> Any:
    """Return the properties that texts of one forward have in common; None: the text must not share a forward."""
    if text.is_exact or not text.is_joinable:
        return None
    return tuple(text.length >= window for window in text.windows)


def _kind(texts: Sequence[GrowingText]) -> Any:
    """Return the kind of a joint step. With each doubling of the length, another kind begins, which is tried again."""
    lengths = [text.length for text in texts]
    return _signature(texts[0]), len({*lengths}) == 1, max(lengths).bit_length()


def _forward(texts: Sequence[GrowingText]) -> Tensor:
    """Run one forward for the newest tokens of texts, with the longest text's cache; return the logits."""
    longest = max(texts, key=lambda text: text.length)
    inputs = longest.inputs()
    inputs.pop("attention_mask", None)  # no token is masked
    device = inputs["input_ids"].device
    inputs["input_ids"] = torch.tensor([text.tokens[-1:] for text in texts], device=device)
    if inputs.get("position_ids") is not None:
        inputs["position_ids"] = torch.tensor([[text.length - 1] for text in texts], device=device)
    logits: Tensor = longest.model(**inputs, return_dict=True).logits[:, -1]
    return logits


def _rows(tree: Any, texts: Sequence[GrowingText]) -> list[Any]:
    """Return each text's part of the blocks' arguments; raise `CannotJoin` unless they have one row for each text."""
    number, lengths = len(texts), [text.length for text in texts]

    def split(tree: Any) -> list[Any] | None:
        """Return each text's part; None for a tree without tensors, which all texts share."""
        if isinstance(tree, Tensor):
            if not tree.ndim or len(tree) not in (1, number):  # as biases of ALiBi ``[rows * heads, 1, keys]``
                raise CannotJoin("an argument of the blocks does not have one row for each text")
            rows = list(tree.split(1)) if len(tree) == number else [tree] * number
            is_mask = tree.ndim == MASK_DIMENSIONS and tree.shape[-1] == max(lengths)
            return [row[..., -length:] for row, length in zip(rows, lengths, strict=True)] if is_mask else rows
        values = tree.values() if isinstance(tree, dict) else tree if type(tree) in (tuple, list) else ()
        parts = [split(value) for value in values]
        if not any(parts):
            return None
        columns = [part or [value] * number for part, value in zip(parts, values, strict=True)]
        each = zip(*columns, strict=True)
        return [dict(zip(tree, row, strict=True)) if isinstance(tree, dict) else type(tree)(row) for row in each]

    return split(tree) or [tree] * number


def _joined(outputs: Sequence[Any], cache: Any) -> Any:
    return attention_cache.with_cache(join_rows(outputs, [1] * len(outputs)), cache)


def _equal(a: Any, b: Any) -> bool:
    """Return whether two trees of arguments are equal, to the bit."""
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_equal(value, b[key]) for key, value in a.items())
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(map(_equal, a, b))
    return bool(a == b)


def _are_close(logits: Tensor, expected: Tensor) -> bool:
    limit = torch.finfo(logits.dtype).eps ** 0.5
    atol = limit * float(expected.abs().max())
    return logits.shape == expected.shape and torch.allclose(logits, expected, rtol=limit, atol=atol)
