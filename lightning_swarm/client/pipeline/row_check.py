"""Checks that blocks compute each row independently, so that a batch can be cut into microbatches."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Sequence
from typing import Final

import torch
from msgspec.structs import replace
from torch import Tensor

from lightning_swarm.client.pipeline.microbatches import CallArguments, take_rows
from lightning_swarm.core.errors import ConfigError, PeerError, ProtocolError, StageError
from lightning_swarm.network.tensors import DTYPES
from lightning_swarm.protocol.compression import Codec
from lightning_swarm.protocol.messages.calls import ComputeMode
from lightning_swarm.protocol.serialization import Structure

_log = logging.getLogger(__name__)

# Rounding depends on the number of rows and causes smaller changes than these; mixing rows changes outputs by percents.
_TOLERANCES: Final = {torch.float64: 1e-5, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
NUM_PROBES: Final = 5  # microbatches that a check computes, if no random numbers are drawn
_MIN_ROWS: Final = 4  # rows of a group, if the batch has enough for two groups
_MIN_SIZE: Final = 0.1  # smaller outputs are compared relative to this size: their differences may be rounding alone

# Computes probes as microbatches that change no state. A probe is a call's arguments and a number. Probes of equal
# numbers draw equal random numbers. See `CallFactory.evaluate`.
Evaluate = Callable[[Sequence[tuple[CallArguments, int]], ComputeMode], list[tuple[Structure, list[Tensor]]]]


class RowCheck:
    """Compares the outputs of rows computed together and apart, in the first call of each kind that is cut."""

    def __init__(
        self,
        evaluate: Evaluate,
        *,
        shared: Collection[str],
        codec: Codec | None,
        has_batch_norm: bool,
        confirmation: RowCheck | None = None,
    ) -> None:
        self._evaluate = evaluate
        self._confirmation = confirmation  # check by the coordinator, which decides if this check refuses something
        self._shared = shared
        self._least_tolerance = 0.0 if codec is None else 2 ** (1 - codec.bits / 2)
        self._has_batch_norm = has_batch_norm
        self._checked: set[object] = set()  # kinds of calls that were checked

    def check(self, arguments: CallArguments, mode: ComputeMode, *, rows: int, size: int) -> None:
        """Refuse blocks that mix rows, for a batch of `rows` that will be cut into microbatches of `size`."""
        kind = (arguments.kind, mode.training)
        if kind in self._checked:
            return
        probes = _probes(arguments, rows, size, self._shared)
        if all(map(torch.equal, probes[0].tensors, probes[1].tensors)):
            return  # in a batch of equal rows, mixing rows has no effect
        mode = replace(mode, grad=False, input_grad=False)
        try:
            # In train mode, BatchNorm mixes the rows of a microbatch (`NormWatch` warns), and random numbers may hide
            # that blocks mix rows. Then eval mode is checked.
            if not mode.training or self._has_batch_norm or not self._are_rows_independent(arguments, probes, mode):
                self._are_rows_independent(arguments, probes, replace(mode, training=False))
        except ProtocolError:
            return  # the step ended meanwhile; the next call checks again
        except ConfigError as refusal:
            if self._confirmation is None:
                raise
            try:  # servers may have sent false results, so the confirmation must refuse, too
                self._confirmation.check(arguments, mode, rows=rows, size=size)
                _log.warning("A server sent false results in the check for blocks that mix samples: %s", refusal)
            except PeerError as error:
                text = "Blocks may mix samples, or a server sent false results; the coordinator could not decide which"
                _log.warning("%s (%s): %s", text, error, refusal)
        self._checked.add(kind)

    def _are_rows_independent(
        self, arguments: CallArguments, probes: Sequence[CallArguments], mode: ComputeMode
    ) -> bool:
        """Refuse blocks that mix rows in a mode; return False if random numbers may hide that they do."""
        try:
            results = self._evaluate([(probe, 0) for probe in probes], mode)
        except StageError as error:
            self._refuse_if_whole_works(arguments, mode, f"failed on a part of it: {str(error).splitlines()[0]}")
            return True
        structures, outputs = zip(*results, strict=True)
        if not all(map(_has_rows, outputs, probes)):
            self._refuse_if_whole_works(arguments, mode, "return another number of rows for a part of it.")
            return True
        # The order of `_probes`: both groups, the first with itself, the second with itself, the first, the second.
        size, rows = len(probes[3].tensors[0]), len(probes[0].tensors[0])
        if structures[3] != structures[0] and structures[3] == structures[4]:
            raise ConfigError(
                "numbers that the last block returns beside tensors must not depend on the rows that it gets, because "
                f"the batch is cut into microbatches: got {str(structures[3])[:200]} for {size} rows, and "
                f"{str(structures[0])[:200]} for {rows} rows. Return tensors with one row for each sample instead."
            )
        together, with_first, with_second, first, second = outputs
        head, tail = [tensor[:size] for tensor in together], [tensor[size:] for tensor in together]
        # In calls of one shape, a row draws the same random numbers whatever the other rows are.
        same_shape = max(
            _deviation(head, [tensor[:size] for tensor in with_first]),
            _deviation(tail, [tensor[size:] for tensor in with_second]),
        )
        deviation = max(same_shape, _deviation(head, first), _deviation(tail, second))
        tolerance = self._tolerance(together, mode)
        if deviation > tolerance:
            self._refuse_unless_random(probes[0], mode, together, (same_shape, deviation), size)
        return deviation <= tolerance

    def _refuse_unless_random(
        self,
        probe: CallArguments,
        mode: ComputeMode,
        together: Sequence[Tensor],
        deviations: tuple[float, float],  # largest deviation between calls of one shape, and of all calls
        size: int,
    ) -> None:
        """Refuse blocks whose outputs changed, unless random numbers may be the cause."""
        same_shape, deviation = deviations
        tolerance = self._tolerance(together, mode)
        # Both draw equal random numbers, but not the numbers of the earlier probes.
        (_, drawn_anew), (_, again) = self._evaluate([(probe, 1), (probe, 1)], mode)
        if (change := _deviation(drawn_anew, again)) > tolerance:
            raise ConfigError(
                "blocks must give equal rows equal outputs, because a microbatch may be computed again on another "
                f"peer: outputs {_change_text(change)} when the same rows were computed twice. Draw random numbers "
                "from torch, not from `random` or `numpy.random`, and read no clock, file or counter in a block."
            )
        draws = _deviation(together, drawn_anew) > tolerance
        if not draws or (same_shape > tolerance and not mode.training):
            raise ConfigError(
                "blocks must compute each sample of a batch by itself, because the batch is cut into microbatches "
                f"along dimension 0: outputs {_change_text(deviation)} when {size} rows were computed together with "
                "other rows. Either dimension 0 is not the samples' dimension, or a block mixes samples. "
                + _remedy(mode)
            )
        if same_shape > tolerance:
            _log.warning(
                "Blocks draw random numbers. With equal random numbers, outputs of the same rows %s when other rows "
                "of the microbatch were different. If blocks mix samples, results differ from a whole batch's. %s",
                _change_text(same_shape),
                _remedy(mode),
            )

    def _refuse_if_whole_works(self, arguments: CallArguments, mode: ComputeMode, failure: str) -> None:
        """Refuse blocks that fail only on a part of a batch. If the whole batch fails, the call itself will show it."""
        try:
            ((_, whole),) = self._evaluate([(arguments, 0)], mode)
        except StageError:
            return
        if _has_rows(whole, arguments):
            raise ConfigError(
                "blocks must take any number of samples, because a batch is cut into microbatches along dimension 0: "
                f"they can compute the whole batch, but {failure} {_remedy(mode)}"
            )

    def _tolerance(self, outputs: Sequence[Tensor], mode: ComputeMode) -> float:
        dtypes = {tensor.real.dtype for tensor in outputs} | ({DTYPES[mode.autocast]} if mode.autocast else set())
        return max(self._least_tolerance, *(_TOLERANCES.get(dtype, 0.0) for dtype in dtypes), 1e-5)


def _remedy(mode: ComputeMode) -> str:
    where = "training_step" if mode.training else "the step's own code"
    return (
        "Let dimension 0 of the blocks' tensors count the samples (`batch_first=True` in layers of torch), compare "
        f"samples in {where}, or have each batch computed whole: set `microbatch_size` to the length of dimension 0, "
        "and name keyword arguments of another length in `shared=(...)`."
    )


def _probes(arguments: CallArguments, rows: int, size: int, shared: Collection[str]) -> list[CallArguments]:
    """Make probes of two groups of rows: both together, each with copies of itself, and each alone."""
    # A group consists of whole microbatches, because a block may combine rows within a microbatch. It has several small
    # microbatches, because a permutation of few rows may change nothing.
    size *= max(1, min(-(-_MIN_ROWS // size), rows // (2 * size)))
    first, second = torch.arange(size), torch.arange(size, min(2 * size, rows))
    row_indices = (
        torch.cat([first, second]),
        torch.cat([first, first[: len(second)]]),
        torch.cat([second[first % len(second)], second]),
        first,
        second,
    )
    return [take_rows(arguments, indices, shared) for indices in row_indices]


def _has_rows(tensors: Sequence[Tensor], probe: CallArguments) -> bool:
    return all(tensor.ndim > 0 and len(tensor) == len(probe.tensors[0]) for tensor in tensors)


def _deviation(first: Sequence[Tensor], second: Sequence[Tensor]) -> float:
    """Return the largest difference of a row, relative to the outputs' size; infinity if shapes or dtypes differ."""
    if len(first) != len(second):
        return math.inf
    return max(map(_tensor_deviation, first, second), default=0.0)


def _tensor_deviation(a: Tensor, b: Tensor) -> float:
    if a.shape != b.shape or a.dtype != b.dtype:
        return math.inf
    if not (a.is_floating_point() or a.is_complex()) or not a.numel():
        return 0.0  # rounding may change integers, such as an argmax
    if not torch.equal(a.isfinite(), b.isfinite()):
        return math.inf
    wide = torch.complex128 if a.is_complex() else torch.float64
    a, b = (tensor.to("cpu", wide).nan_to_num(0.0, 0.0, 0.0).reshape(len(a), -1) for tensor in (a, b))
    size = max(float(a.norm()), float(b.norm())) / math.sqrt(len(a))
    return float((a - b).norm(dim=1).max()) / max(size, _MIN_SIZE)


def _change_text(deviation: float) -> str:
    return f"changed by {deviation:.1%}" if math.isfinite(deviation) else "changed their shape, or became NaN,"
