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

# Rounding depends on the number of rows. Mixing rows changes outputs by per cents.
_TOLERANCES: Final = {torch.float64: 1e-5, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
NUM_PROBES: Final = 5  # microbatches that a check computes, if no random numbers are drawn
_FEW: Final = 4  # fewest rows of a group, if the batch has enough for two groups
_SMALL: Final = 0.1  # smaller outputs are compared relative to this size: their differences may be rounding alone

# Computes probes as microbatches that leave no trace. A probe is a call's arguments, and a number: probes of equal
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
        self._confirmation = confirmation  # another check on other servers, which decides if this one refuses something
        self._shared = shared
        self._least_tolerance = 0.0 if codec is None else 2 ** (1 - codec.bits / 2)
        self._has_batch_norm = has_batch_norm
        self._checked: set[object] = set()  # kinds of calls

    def check(self, arguments: CallArguments, mode: ComputeMode, *, rows: int, size: int) -> None:
        """Refuse blocks that mix rows, for a batch of `rows` that will be cut into microbatches of `size`."""
        kind = (arguments.kind, mode.training)
        if kind in self._checked:
            return
        probes = _probes(arguments, rows, size, self._shared)
        if all(map(torch.equal, probes[0].tensors, probes[1].tensors)):
            return  # equal rows show nothing
        mode = replace(mode, grad=False, input_grad=False)
        try:
            # In train mode BatchNorm mixes the rows of a microbatch, of which `NormWatch` warns, and random numbers may
            # hide that blocks mix rows.
            if not mode.training or self._has_batch_norm or not self._is_clear(arguments, probes, mode):
                self._is_clear(arguments, probes, replace(mode, training=False))
        except ProtocolError:
            return  # the step went on meanwhile; the next call checks again
        except ConfigError as refusal:
            if self._confirmation is None:
                raise
            try:  # a server may have sent false results, so the confirmation must refuse, too
                self._confirmation.check(arguments, mode, rows=rows, size=size)
                _log.warning("A server gave false results in the check for blocks that mix samples: %s", refusal)
            except PeerError as error:
                text = "Blocks may mix samples, or a server sent false results; the coordinator could not decide it"
                _log.warning("%s (%s): %s", text, error, refusal)
        self._checked.add(kind)

    def _is_clear(self, arguments: CallArguments, probes: Sequence[CallArguments], mode: ComputeMode) -> bool:
        """Refuse blocks that mix rows in a mode; False if random numbers hide whether they do."""
        try:
            results = self._evaluate([(probe, 0) for probe in probes], mode)
        except StageError as error:
            self._refuse_if_whole_works(arguments, mode, f"failed on a part of it: {str(error).splitlines()[0]}")
            return True
        structures, found = zip(*results, strict=True)
        if not all(map(_has_rows, found, probes)):
            self._refuse_if_whole_works(arguments, mode, "give another number of rows for a part of it.")
            return True
        # The order of `_probes`: both groups, the first beside itself, the second beside itself, the first, the second.
        size, rows = len(probes[3].tensors[0]), len(probes[0].tensors[0])
        if structures[3] != structures[0] and structures[3] == structures[4]:
            raise ConfigError(
                "numbers that the last block returns beside tensors must not depend on the rows that it gets, for the "
                f"batch is cut into microbatches: got {str(structures[3])[:200]} for {size} rows, and for these among "
                f"{rows} {str(structures[0])[:200]}. Return tensors with one row for each sample in place of numbers."
            )
        together, with_first, with_second, first, second = found
        head, tail = [tensor[:size] for tensor in together], [tensor[size:] for tensor in together]
        # In calls of one shape, equal rows draw equal numbers, independent of the other rows.
        beside_others = max(
            _deviation(head, [tensor[:size] for tensor in with_first]),
            _deviation(tail, [tensor[size:] for tensor in with_second]),
        )
        deviation = max(beside_others, _deviation(head, first), _deviation(tail, second))
        tolerance = self._tolerance(together, mode)
        if deviation > tolerance:
            self._refuse_unless_random(probes[0], mode, together, (beside_others, deviation), size)
        return deviation <= tolerance

    def _refuse_unless_random(
        self,
        probe: CallArguments,
        mode: ComputeMode,
        together: Sequence[Tensor],
        deviations: tuple[float, float],  # largest in calls of one shape, with other rows beside; largest of all
        size: int,
    ) -> None:
        """Refuse blocks whose outputs changed, unless random numbers may be the cause."""
        beside_others, deviation = deviations
        tolerance = self._tolerance(together, mode)
        # Both probes draw the same random numbers, but other ones than the earlier probes.
        (_, drawn_anew), (_, again) = self._evaluate([(probe, 1), (probe, 1)], mode)
        if (change := _deviation(drawn_anew, again)) > tolerance:
            raise ConfigError(
                "blocks must give equal rows equal outputs, for a microbatch may be computed again on another peer: "
                f"outputs {_text(change)} when the same rows were computed twice. Draw random numbers "
                "from torch, not from `random` or `numpy.random`, and read no clock, file or counter in a block."
            )
        draws = _deviation(together, drawn_anew) > tolerance
        if not draws or (beside_others > tolerance and not mode.training):
            raise ConfigError(
                "blocks must compute each sample of a batch by itself, for the batch is cut into microbatches along "
                f"dimension 0: outputs {_text(deviation)} when {size} rows were computed together with other ones. "
                "Either dimension 0 is not that of the samples, or a block mixes samples. " + _remedy(mode)
            )
        if beside_others > tolerance:
            _log.warning(
                "Blocks draw random numbers, and with equal ones outputs %s where only other rows of the "
                "microbatch did. If they mix samples, the result is another one than that of the whole batch. %s",
                _text(beside_others),
                _remedy(mode),
            )

    def _refuse_if_whole_works(self, arguments: CallArguments, mode: ComputeMode, failure: str) -> None:
        """Refuse blocks that fail only on a part of a batch. A failure on the whole batch shows in the call itself."""
        try:
            ((_, whole),) = self._evaluate([(arguments, 0)], mode)
        except StageError:
            return
        if _has_rows(whole, arguments):
            raise ConfigError(
                "blocks must take any number of samples, for a batch is cut into microbatches along dimension 0: they "
                f"can compute the whole batch, and {failure} {_remedy(mode)}"
            )

    def _tolerance(self, outputs: Sequence[Tensor], mode: ComputeMode) -> float:
        dtypes = {tensor.real.dtype for tensor in outputs} | ({DTYPES[mode.autocast]} if mode.autocast else set())
        return max(self._least_tolerance, *(_TOLERANCES.get(dtype, 0.0) for dtype in dtypes), 1e-5)


def _remedy(mode: ComputeMode) -> str:
    where = "training_step" if mode.training else "the step's own code"
    return (
        "Put samples into dimension 0 of what goes through the blocks (`batch_first=True` in layers of torch), leave "
        f"to {where} what compares samples, or have each batch computed whole: `microbatch_size` = the length of "
        "dimension 0, and in `shared=(...)` the keyword arguments that have another one."
    )


def _probes(arguments: CallArguments, rows: int, size: int, shared: Collection[str]) -> list[CallArguments]:
    """Make probes of two groups of rows: both together, each beside copies of itself, and each alone."""
    # Whole microbatches, because a block may know about groups of rows within one. Several small ones, because a
    # permutation of few rows may change nothing.
    size *= max(1, min(-(-_FEW // size), rows // (2 * size)))
    first, second = torch.arange(size), torch.arange(size, min(2 * size, rows))
    taken = (
        torch.cat([first, second]),
        torch.cat([first, first[: len(second)]]),
        torch.cat([second[first % len(second)], second]),
        first,
        second,
    )
    return [take_rows(arguments, indices, shared) for indices in taken]


def _has_rows(tensors: Sequence[Tensor], probe: CallArguments) -> bool:
    return all(tensor.ndim > 0 and len(tensor) == len(probe.tensors[0]) for tensor in tensors)


def _deviation(ones: Sequence[Tensor], others: Sequence[Tensor]) -> float:
    """Return the largest difference between rows, relative to the output's size; infinity if their kinds differ."""
    if len(ones) != len(others):
        return math.inf
    return max(map(_deviation_of, ones, others), default=0.0)


def _deviation_of(one: Tensor, other: Tensor) -> float:
    if one.shape != other.shape or one.dtype != other.dtype:
        return math.inf
    if not (one.is_floating_point() or one.is_complex()) or not one.numel():
        return 0.0  # rounding may change integers, as of an argmax
    if not torch.equal(one.isfinite(), other.isfinite()):
        return math.inf
    wide = torch.complex128 if one.is_complex() else torch.float64
    one, other = (tensor.to("cpu", wide).nan_to_num(0.0, 0.0, 0.0).reshape(len(one), -1) for tensor in (one, other))
    size = max(float(one.norm()), float(other.norm())) / math.sqrt(len(one))
    return float((one - other).norm(dim=1).max()) / max(size, _SMALL)


def _text(deviation: float) -> str:
    return f"changed by {deviation:.1%}" if math.isfinite(deviation) else "changed their shape, or became NaN,"
