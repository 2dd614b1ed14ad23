"""Products of two thin matrices in place of a gradient's matrices, as PowerSGD (arXiv:1905.13727) sends them.

Vectors are flat: parameters one after another. A parameter with several dimensions is a matrix ``[rows, columns]``,
whose rows are its first dimension. It is written as ``left @ right.T``: ``left`` ``[rows, rank]`` has orthonormal
columns, and ``right`` is ``[columns, rank]``. Vectors and small matrices, where this does not pay, stay whole.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Size, Tensor

from lightning_swarm.model.portable_products import tree_sum

_ROUNDING: Final = 1e-24  # share of a column's squared norm that may be rounding; float64's is a millionth of it


@dataclass(frozen=True)
class _Matrix:
    """The slices of a matrix in the gradients, in the left vector and in the right vector."""

    gradient: slice
    rows: int
    columns: int
    left: slice
    right: slice

    def of(self, vector: Tensor) -> Tensor:
        return vector[self.gradient].view(self.rows, self.columns)


class LowRank:
    """Factors a stage's gradients into thin matrices, which travel as two vectors: `left`, then `right`."""

    def __init__(self, shapes: Sequence[Size], rank: int) -> None:
        self.rank = rank
        self._whole: list[slice] = []  # slices of the parameters that stay whole
        matrices: list[tuple[slice, int, int]] = []
        begin = 0
        for shape in shapes:
            gradient = slice(begin, begin + shape.numel())
            begin = gradient.stop
            rows, columns = (shape[0], math.prod(shape[1:])) if len(shape) > 1 else (shape.numel(), 1)
            if rank * (rows + columns) < rows * columns:
                matrices.append((gradient, rows, columns))
            else:
                self._whole.append(gradient)
        self.length = begin
        self._matrices: list[_Matrix] = []
        self.left_length, self.right_length = sum(one.stop - one.start for one in self._whole), 0
        for gradient, rows, columns in matrices:
            left = slice(self.left_length, self.left_length + rows * rank)
            right = slice(self.right_length, self.right_length + columns * rank)
            self._matrices.append(_Matrix(gradient, rows, columns, left, right))
            self.left_length, self.right_length = left.stop, right.stop

    def initial_basis(self, like: Tensor) -> Tensor:
        """Return a basis for the first step, ``[right_length]``: random, and the same on all peers."""
        generator = torch.Generator("cpu").manual_seed(0)
        basis = torch.randn(self.right_length, generator=generator, dtype=torch.float64, device="cpu")
        return basis.to(like.device, like.dtype)

    def left(self, vector: Tensor, basis: Tensor) -> Tensor:
        """Return the first vector to send, ``[left_length]``: whole parameters, then matrices times their basis.

        `vector` are the gradients ``[length]``. Peers may have different bases ``[right_length]``, but then lose more.
        """
        found = vector.new_empty(self.left_length)
        for gradient, part in self._parts(found):
            part.copy_(vector[gradient])
        for matrix in self._matrices:
            torch.mm(matrix.of(vector), self._thin(basis[matrix.right]), out=self._thin(found[matrix.left]))
        return found

    def orthonormal(self, left: Tensor) -> Tensor:
        """Make the columns orthonormal; equal inputs give equal bits on every device."""
        found = left.clone()
        for matrix in self._matrices:
            found[matrix.left] = orthonormal(self._thin(left[matrix.left])).reshape(-1)
        return found

    def right(self, vector: Tensor, left: Tensor) -> Tensor:
        """Return the second vector to send, ``[right_length]``: transposed matrices times the orthonormal `left`."""
        found = vector.new_empty(self.right_length)
        for matrix in self._matrices:
            torch.mm(matrix.of(vector).T, self._thin(left[matrix.left]), out=self._thin(found[matrix.right]))
        return found

    def product(self, left: Tensor, right: Tensor) -> Tensor:
        """Return the gradients of both vectors, ``[length]``; equal inputs give equal bits on every device."""
        found = left.new_empty(self.length)
        for gradient, part in self._parts(left):
            found[gradient] = part
        for matrix in self._matrices:
            target, lefts, rights = matrix.of(found), self._thin(left[matrix.left]), self._thin(right[matrix.right])
            # Column by column, because the order of a matrix product depends on the device.
            torch.mul(lefts[:, 0, None], rights[None, :, 0], out=target)
            for k in range(1, self.rank):
                target += lefts[:, k, None] * rights[None, :, k]
        return found

    def left_over(self, vector: Tensor, left: Tensor, right: Tensor) -> Tensor:
        """Return the part of `vector` ``[length]`` that is missing in the product of `left` and its own `right`."""
        found = vector - self.product(left, right)
        for gradient in self._whole:
            found[gradient] = 0.0  # whole parameters have no error
        return found

    def basis(self, right: Tensor, before: Tensor) -> Tensor:
        """Return a basis for the next step, ``[right_length]``: this step's mean directions, which change slowly."""
        found = before.clone()
        for matrix in self._matrices:
            rights = self._thin(right[matrix.right])
            norms = torch.linalg.vector_norm(rights, dim=0)
            usable = (norms > 0.0) & (norms < math.inf)
            # The other columns of the basis stay unchanged, because a gradient of zeros has no direction.
            self._thin(found[matrix.right])[:, usable] = (rights / norms)[:, usable]
        return found

    def _parts(self, left: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Yield the slices of each whole parameter in the gradients and in the left vector."""
        begin = 0
        for gradient in self._whole:
            size = gradient.stop - gradient.start
            yield gradient, left[begin : begin + size]
            begin += size

    def _thin(self, flat: Tensor) -> Tensor:
        """View a thin matrix, ``[rows or columns, rank]``."""
        return flat.view(-1, self.rank)


def orthonormal(columns: Tensor) -> Tensor:
    """Return orthonormal columns with the span of the columns ``[rows, rank]``; a dependent column becomes zeros."""
    # Gram-Schmidt, twice, in float64, with operations that round alike everywhere. NaN and infinity become NaN.
    done: list[Tensor] = []
    largest = columns.abs().amax(dim=0)
    scaled = columns.to(torch.float64) / torch.where(largest == 0.0, 1.0, largest)
    for column in scaled.unbind(dim=1):
        before = tree_sum(column * column)
        for _ in range(2):  # again, to remove the remainder of rounding
            for other in done:
                column = column - other * tree_sum(other * column)  # noqa: PLW2901
        squared_norm = tree_sum(column * column)
        # A dependent column leaves only rounding errors, which may point anywhere, also along the earlier columns.
        adds_nothing = squared_norm <= _ROUNDING * before
        done.append(torch.where(adds_nothing, 0.0, column / squared_norm.sqrt()))
    return torch.stack(done, dim=1).to(columns.dtype)
