"""A gradient's matrices as products of two thin ones: what PowerSGD sends, and what comes of it.

The vectors are flat: parameters one after another. A parameter of more than one dimension is a matrix of as many rows
as its first dimension has, ``[rows, columns]``, written as ``left @ right.T`` with ``left`` ``[rows, rank]``, whose
columns are orthonormal, and ``right`` ``[columns, rank]``. Vectors, and matrices too small for it to pay, stay whole.

Source: Vogels, Karimireddy, Jaggi: PowerSGD, arXiv:1905.13727.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Size, Tensor

_ROUNDING: Final = 1e-24
"""Of a squared norm; float64 rounds to about a millionth of that."""


@dataclass(frozen=True)
class _Matrix:
    """Where a matrix is: in the gradients, in the left vector, in the right vector."""

    place: slice
    rows: int
    columns: int
    left: slice
    right: slice

    def of(self, vector: Tensor) -> Tensor:
        return vector[self.place].view(self.rows, self.columns)


class LowRank:
    """How the gradients of a stage are cut into thin matrices.

    Two vectors travel: ``[left_length]``, all that stays whole and then every matrix times its basis; then
    ``[right_length]``, every matrix, transposed, times the orthonormal columns that come of the first one's mean.

    Args:
        shapes: Of the parameters, in the order of their gradients.
        rank: Of every product.
    """

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
        self.num_whole = sum(one.stop - one.start for one in self._whole)
        self._matrices: list[_Matrix] = []
        self.left_length, self.right_length = self.num_whole, 0
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
        """What travels first of ``[length]``: ``[left_length]``.

        Args:
            vector: Gradients.
            basis: ``[right_length]``; peers need not have the same one, but lose less if they do.
        """
        found = vector.new_empty(self.left_length)
        for place, part in self._parts(found):
            part.copy_(vector[place])
        for one in self._matrices:
            torch.mm(one.of(vector), self._thin(basis[one.right]), out=self._thin(found[one.left]))
        return found

    def orthonormal(self, left: Tensor) -> Tensor:
        """The same with orthonormal columns: the same bits of the same bits, on every device."""
        found = left.clone()
        for one in self._matrices:
            found[one.left] = orthonormal(self._thin(left[one.left])).reshape(-1)
        return found

    def right(self, vector: Tensor, left: Tensor) -> Tensor:
        """What travels then: ``[right_length]``, by the orthonormal `left`."""
        found = vector.new_empty(self.right_length)
        for one in self._matrices:
            torch.mm(one.of(vector).T, self._thin(left[one.left]), out=self._thin(found[one.right]))
        return found

    def product(self, left: Tensor, right: Tensor) -> Tensor:
        """What both say of the gradients, ``[length]``: the same bits of the same bits, on every device.

        Products are added one after another, element by element; a matrix product's order is its device's choice.
        """
        found = left.new_empty(self.length)
        for place, part in self._parts(left):
            found[place] = part
        for one in self._matrices:
            matrix, lefts, rights = one.of(found), self._thin(left[one.left]), self._thin(right[one.right])
            torch.mul(lefts[:, 0, None], rights[None, :, 0], out=matrix)
            for k in range(1, self.rank):
                matrix += lefts[:, k, None] * rights[None, :, k]
        return found

    def left_over(self, vector: Tensor, left: Tensor, right: Tensor) -> Tensor:
        """What the product of `left` and of `vector`'s own `right` lacks of `vector`, ``[length]``."""
        found = vector - self.product(left, right)
        for place in self._whole:
            found[place] = 0.0  # `left` has the mean of all there
        return found

    def basis(self, right: Tensor, before: Tensor) -> Tensor:
        """For the next step, ``[right_length]``: the directions of this one's mean, which change slowly.

        Args:
            right: The mean of what travelled.
            before: This step's basis. Its columns stay where the mean has none: a gradient of zeros has no direction.
        """
        found = before.clone()
        for one in self._matrices:
            rights = self._thin(right[one.right])
            norms = torch.linalg.vector_norm(rights, dim=0)
            usable = (norms > 0.0) & (norms < math.inf)
            self._thin(found[one.right])[:, usable] = (rights / norms)[:, usable]
        return found

    def _parts(self, left: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """What stays whole: where it is in the gradients, and in the vector that travels first."""
        begin = 0
        for place in self._whole:
            size = place.stop - place.start
            yield place, left[begin : begin + size]
            begin += size

    def _thin(self, flat: Tensor) -> Tensor:
        return flat.view(-1, self.rank)


def orthonormal(columns: Tensor) -> Tensor:
    """Orthonormal columns that span what those of ``[rows, rank]`` do; one that adds nothing becomes zeros.

    By Gram-Schmidt, twice, in float64, of operations that round alike everywhere: NaN and infinity become NaN.
    """
    done: list[Tensor] = []
    largest = columns.abs().amax(dim=0)
    scaled = columns.to(torch.float64) / torch.where(largest == 0.0, 1.0, largest)
    for column in scaled.unbind(dim=1):
        before = _sum(column * column)
        for _ in range(2):  # again, for what rounding left
            for other in done:
                column = column - other * _sum(other * column)  # noqa: PLW2901
        squared_norm = _sum(column * column)
        # Of a column that is in the others' span only rounding is left, which may point anywhere, to them as well.
        adds_nothing = squared_norm <= _ROUNDING * before
        done.append(torch.where(adds_nothing, 0.0, column / squared_norm.sqrt()))
    return torch.stack(done, dim=1).to(columns.dtype)


def _sum(values: Tensor) -> Tensor:
    """Of ``[n]``, in an order that no device chooses: one half is added to the other until one is left."""
    while len(values) > 1:
        half = (len(values) + 1) // 2
        rest = values[half:]
        values = torch.cat([values[: len(rest)] + rest, values[len(rest) : half]])
    return values[0]
