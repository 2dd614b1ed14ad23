"""Computes the next steps of several texts in one forward of a served model.

A step of one token costs the client's part of a forward: embedding, positions, masks, final norm and head. With rows of
several texts it costs that once. The model's forward gets one text's cache and the positions of all texts. If its
blocks are called with arguments whose rows are those of the texts, each text's row goes to the session of that text.

Models differ in how masks and positions depend on a text's length. So each kind of step is tried first: the arguments
must equal those of separate forwards exactly, and only the results of separate forwards count. Texts with a length that
changes masks, such as a window of attention, are a kind of their own.
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

Found = tuple[Tensor, dict[int, Exception]]
"""Logits ``[texts, tokens]``, and the errors of texts by index."""


class JointForward:
    """Computes steps of texts together where that was found to be equal to one by one.

    Args:
        blocks: The served model's blocks. None: the model has none, so texts are computed one by one.
    """

    def __init__(self, blocks: ServedBlocks | None) -> None:
        self._blocks = blocks
        self._verdicts: dict[Any, bool] = {}  # kind of steps -> whether a joint forward equals separate forwards

    def group(self, due: Sequence[GrowingText], most: int) -> tuple[list[GrowingText], bool]:
        """Return the texts that share a forward with the first one, at most `most`, and whether it can share none."""
        first, *others = due
        own = _signature(first)
        if self._blocks is None or own is None:
            return [first], True
        alike = [first, *(other for other in others if _signature(other) == own)][:most]
        if self._verdicts.get(_kind(alike)) is False:
            alike = [text for text in alike if text.length == first.length]
            if len(alike) == 1 or self._verdicts.get(_kind(alike)) is False:
                return [first], True
        return alike, False

    def feed(self, text: GrowingText, num_tokens: int) -> Tensor | None:
        """Compute the next part of a text's prompt; see `GrowingText.feed`."""
        with self._blocks.exactly() if self._blocks is not None and text.is_exact else contextlib.nullcontext():
            return text.feed(num_tokens)

    def step(self, texts: Sequence[GrowingText]) -> Found:
        """Compute the step of each text's newest token; `texts` are of one `group`."""
        if len(texts) == 1:
            return _one_by_one(texts)
        verdict = self._verdicts.get(_kind(texts))
        are_unlike = len({text.tokens[-1] for text in texts}) > 1  # equal rows would hide that rows are mixed
        if verdict is None and are_unlike:
            return self._tried(texts)
        return self._jointly(texts) if verdict else _one_by_one(texts)

    def _jointly(self, texts: Sequence[GrowingText]) -> Found:
        assert self._blocks is not None
        step_many = self._blocks.step_many
        errors: dict[int, Exception] = {}
        has_begun = False

        def compute(hidden: Any, extras: dict[str, Any], cache: Any) -> Any:
            nonlocal has_begun
            rows = _rows((hidden, extras), texts)
            has_begun = True
            outputs = step_many([(*row, text.cache) for row, text in zip(rows, texts, strict=True)])
            errors.update((index, found) for index, found in enumerate(outputs) if isinstance(found, Exception))
            if len(errors) == len(texts):
                raise _AllFailed
            outputs = [
                attention_cache.without_cache(found, text.cache) for found, text in zip(outputs, texts, strict=True)
            ]
            some = next(found for found in outputs if not isinstance(found, Exception))
            return _joined([some if isinstance(found, Exception) else found for found in outputs], cache)

        try:
            with self._blocks.computed_by(compute):
                logits = _forward(texts)
        except _AllFailed:
            return torch.empty(len(texts), 0), errors
        except CannotJoin as problem:
            if has_begun:
                raise
            self._enter(_kind(texts), str(problem))
            return _one_by_one(texts)
        for index, text in enumerate(texts):
            if not isinstance(errors.get(index), Delayed):
                text.follow()
        return logits, errors

    def finish(self, text: GrowingText, delayed: Delayed) -> Tensor:
        """Wait for a delayed step of a text; return its logits ``[tokens]``."""
        assert self._blocks is not None
        with self._blocks.computed_by(lambda *_: delayed.wait()):
            return text.step()

    def _tried(self, texts: Sequence[GrowingText]) -> Found:
        """Compute texts one by one, and find out whether one forward gives the same numbers."""
        assert self._blocks is not None
        computed_by, step = self._blocks.computed_by, self._blocks.step
        found: Found | None = None
        problem = ""

        def compare(hidden: Any, extras: dict[str, Any], cache: Any) -> Any:
            nonlocal found
            seen: list[tuple[Any, Any]] = []

            def record(hidden: Any, extras: dict[str, Any], cache: Any) -> Any:
                output = step(hidden, extras, cache)
                seen.append(((hidden, extras), attention_cache.without_cache(output, cache)))
                return output

            with computed_by(record):
                found = _one_by_one(texts)
            if found[1]:
                raise _AllFailed
            for row, (arguments, _) in zip(_rows((hidden, extras), texts), seen, strict=True):
                if not _equal(row, arguments):
                    raise CannotJoin("the blocks' arguments differ")
            return _joined([output for _, output in seen], cache)

        kind = _kind(texts)
        try:
            with computed_by(compare):
                logits = _forward(texts)
            if found is None or not _are_close(logits, found[0]):
                problem = "the logits differ"
        except Exception as error:  # noqa: BLE001 - the model's code may raise anything
            problem = str(error) or repr(error)  # the error itself would keep the caches
        if found is None or not found[1]:  # if a text failed, it is found out another time
            self._enter(kind, problem)
        return _one_by_one(texts) if found is None else found

    def _enter(self, kind: Any, problem: str) -> None:
        """Record that texts of a kind may share a forward, or the problem if they may not."""
        self._verdicts[kind] = not problem
        if problem:
            _log.info("Texts like these are computed one by one from now on: %s", problem)


class _AllFailed(Exception):
    """No text's step has an output with which the forward could go on."""


def _one_by_one(texts: Sequence[GrowingText]) -> Found:
    rows: list[Tensor | None] = []
    errors: dict[int, Exception] = {}
    for index, text in enumerate(texts):
        try:
            rows.append(text.step())
        except Exception as error:  # noqa: BLE001 - it concerns this text alone
            rows.append(None)
            errors[index] = error
    some = next((row for row in rows if row is not None), torch.empty(0))
    return torch.stack([some if row is None else row for row in rows]), errors


def _signature(text: GrowingText) -> Any:
    """Return the properties by which texts may share a forward; None: this text shares none."""
    if text.is_exact or not text.is_joinable:
        return None
    return tuple(text.length >= window for window in text.windows)


def _kind(texts: Sequence[GrowingText]) -> Any:
    """Return the kind of a joint step. Each doubling of the length is tried again."""
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
    """Return each text's part of the blocks' arguments; raise `CannotJoin` if they have no rows of texts."""
    number, lengths = len(texts), [text.length for text in texts]

    def split(tree: Any) -> list[Any] | None:
        """Return each text's part; None if there are no tensors, so that all texts share the tree."""
        if isinstance(tree, Tensor):
            if not tree.ndim or len(tree) not in (1, number):
                raise CannotJoin("an argument of the blocks has other rows than the texts")
            rows = list(tree.split(1)) if len(tree) == number else [tree] * number
            is_mask = tree.ndim == MASK_DIMENSIONS and tree.shape[-1] == max(lengths)
            return [row[..., -length:] for row, length in zip(rows, lengths, strict=True)] if is_mask else rows
        values = tree.values() if isinstance(tree, dict) else tree if type(tree) in (tuple, list) else ()
        parts = [split(value) for value in values]
        if not any(parts):
            return None
        columns = [part or [value] * number for part, value in zip(parts, values, strict=True)]
        each = zip(*columns, strict=True)
        return [dict(zip(tree, own, strict=True)) if isinstance(tree, dict) else type(tree)(own) for own in each]

    return split(tree) or [tree] * number


def _joined(outputs: Sequence[Any], cache: Any) -> Any:
    return attention_cache.with_cache(join_rows(outputs, [1] * len(outputs)), cache)


def _equal(one: Any, other: Any) -> bool:
    """Return whether two trees of arguments are equal, to the bit."""
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_equal(value, other[key]) for key, value in one.items())
    if isinstance(one, (tuple, list)):
        return len(one) == len(other) and all(map(_equal, one, other))
    return bool(one == other)


def _are_close(one: Tensor, other: Tensor) -> bool:
    limit = torch.finfo(one.dtype).eps ** 0.5
    return one.shape == other.shape and torch.allclose(one, other, rtol=limit, atol=limit * float(other.abs().max()))
