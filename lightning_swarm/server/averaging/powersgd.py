"""A gradient's matrices as products of two thin ones, which PowerSGD (arXiv:1905.13727) sends.

Vectors are flat: parameters one after another. A parameter of more than one dimension is a matrix ``[rows, columns]``
of as many rows as its first dimension has, written as ``left @ right.T`` with ``left`` ``[rows, rank]``, whose columns
are orthonormal, and ``right`` ``[columns, rank]``. Vectors, and matrices too small for it to pay, stay whole.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Size, Tensor

from lightning_swarm.model.portable_products import tree_sum

_ROUNDING: Final = 1e-24  # part of a squared norm; float64 rounds to about a millionth of it


@dataclass(frozen=True)
class _Matrix:
    """The place of a matrix in the gradients, in the left vector, in the right vector."""

    place: slice
    rows: int
    columns: int
    left: slice
    right: slice

    def of(self, vector: Tensor) -> Tensor:
        return vector[self.place].view(self.rows, self.columns)


class LowRank:
    """Cuts the gradients of a stage into thin matrices, which travel as two vectors: `left`, then `right`."""

    def __init__(self, shapes: Sequence[Size], rank: int) -> None:
        self.rank = rank
        self._whole: list[slice] = []
        matrices: list[tuple[slice, int, int]] = []
        begin = 0
        for shape in shapes:
            place = slice(begin, begin + shape.numel())
            begin = place.stop
            rows, columns = (shape[0], math.prod(shape[1:])) if len(shape) > 1 else (shape.numel(), 1)
            if rank * (rows + columns) < rows * columns:
                matrices.append((place, rows, columns))
            else:
                self._whole.append(place)
        self.length = begin
        self._matrices: list[_Matrix] = []
        self.left_length, self.right_length = sum(place.stop - place.start for place in self._whole), 0
        for place, rows, columns in matrices:
            left = slice(self.left_length, self.left_length + rows * rank)
            right = slice(self.right_length, self.right_length + columns * rank)
            self._matrices.append(_Matrix(place, rows, columns, left, right))
            self.left_length, self.right_length = left.stop, right.stop

    def initial_basis(self, like: Tensor) -> Tensor:
        """A basis for the first step, ``[right_length]``: random, and the same on all peers."""
        generator = torch.Generator("cpu").manual_seed(0)
        basis = torch.randn(self.right_length, generator=generator, dtype=torch.float64, device="cpu")
        return basis.to(like.device, like.dtype)

    def left(self, vector: Tensor, basis: Tensor) -> Tensor:
        """The first vector that travels for gradients ``[length]``: what stays whole, then matrices times their basis.

        It is ``[left_length]``. Peers need not have the same basis ``[right_length]``, but lose less if they do.
        """
        found = vector.new_empty(self.left_length)
        for place, part in self._parts(found):
            part.copy_(vector[place])
        for matrix in self._matrices:
            torch.mm(matrix.of(vector), self._thin(basis[matrix.right]), out=self._thin(found[matrix.left]))
        return found

    def orthonormal(self, left: Tensor) -> Tensor:
        """Make the columns orthonormal: the same bits from the same bits, on every device."""
        found = left.clone()
        for matrix in self._matrices:
            found[matrix.left] = orthonormal(self._thin(left[matrix.left])).reshape(-1)
        return found

    def right(self, vector: Tensor, left: Tensor) -> Tensor:
        """The second vector that travels, ``[right_length]``: transposed matrices times the orthonormal `left`."""
        found = vector.new_empty(self.right_length)
        for matrix in self._matrices:
            torch.mm(matrix.of(vector).T, self._thin(left[matrix.left]), out=self._thin(found[matrix.right]))
        return found

    def product(self, left: Tensor, right: Tensor) -> Tensor:
        """The gradients that both vectors stand for, ``[length]``: the same bits from the same, on every device."""
        found = left.new_empty(self.length)
        for place, part in self._parts(left):
            found[place] = part
        for matrix in self._matrices:
            target, lefts, rights = matrix.of(found), self._thin(left[matrix.left]), self._thin(right[matrix.right])
            # One product after another, element by element: a matrix product's order is its device's choice.
            torch.mul(lefts[:, 0, None], rights[None, :, 0], out=target)
            for k in range(1, self.rank):
                target += lefts[:, k, None] * rights[None, :, k]
        return found

    def left_over(self, vector: Tensor, left: Tensor, right: Tensor) -> Tensor:
        """The part of `vector` ``[length]`` that the product of `left` and its own `right` lacks."""
        found = vector - self.product(left, right)
        for place in self._whole:
            found[place] = 0.0  # `left` has the mean of all there
        return found

    def basis(self, right: Tensor, before: Tensor) -> Tensor:
        """A basis for the next step, ``[right_length]``: the directions of this step's mean, which change slowly."""
        found = before.clone()
        for matrix in self._matrices:
            rights = self._thin(right[matrix.right])
            norms = torch.linalg.vector_norm(rights, dim=0)
            usable = (norms > 0.0) & (norms < math.inf)
            # Other columns stay as they were: a gradient of zeros has no direction.
            self._thin(found[matrix.right])[:, usable] = (rights / norms)[:, usable]
        return found

    def _parts(self, left: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """The places, in the gradients and in the vector that travels first, of all that stays whole."""
        begin = 0
        for place in self._whole:
            size = place.stop - place.start
            yield place, left[begin : begin + size]
            begin += size

    def _thin(self, flat: Tensor) -> Tensor:
        return flat.view(-1, self.rank)


def orthonormal(columns: Tensor) -> Tensor:
    """Orthonormal columns that span what those of ``[rows, rank]`` do; one that adds nothing becomes zeros."""
    # By Gram-Schmidt, twice, in float64, of operations that round alike everywhere: NaN and infinity become NaN.
    done: list[Tensor] = []
    largest = columns.abs().amax(dim=0)
    scaled = columns.to(torch.float64) / torch.where(largest == 0.0, 1.0, largest)
    for column in scaled.unbind(dim=1):
        before = tree_sum(column * column)
        for _ in range(2):  # again, for what rounding left
            for other in done:
                column = column - other * tree_sum(other * column)  # noqa: PLW2901
        squared_norm = tree_sum(column * column)
        # Of a column that is in the others' span only rounding is left, which may point anywhere, to them as well.
        adds_nothing = squared_norm <= _ROUNDING * before
        done.append(torch.where(adds_nothing, 0.0, column / squared_norm.sqrt()))
    return torch.stack(done, dim=1).to(columns.dtype)
