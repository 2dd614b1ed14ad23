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

_ROUNDING: Final = 1e-24  # share of a column's squared norm that counts as rounding, a million times float64's rounding


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
        self.left_length, self.right_length = sum(part.stop - part.start for part in self._whole), 0
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

        `vector` has the gradients ``[length]``. Peers may have different bases ``[right_length]``, but then lose more.
        """
        sent = vector.new_empty(self.left_length)
        for gradient, part in self._parts(sent):
            part.copy_(vector[gradient])
        for matrix in self._matrices:
            torch.mm(matrix.of(vector), self._thin(basis[matrix.right]), out=self._thin(sent[matrix.left]))
        return sent

    def orthonormal(self, left: Tensor) -> Tensor:
        """Make the columns orthonormal; equal inputs give equal bits on every device."""
        result = left.clone()
        for matrix in self._matrices:
            result[matrix.left] = orthonormal(self._thin(left[matrix.left])).reshape(-1)
        return result

    def right(self, vector: Tensor, left: Tensor) -> Tensor:
        """Return the second vector to send, ``[right_length]``: transposed matrices times the orthonormal `left`."""
        sent = vector.new_empty(self.right_length)
        for matrix in self._matrices:
            torch.mm(matrix.of(vector).T, self._thin(left[matrix.left]), out=self._thin(sent[matrix.right]))
        return sent

    def product(self, left: Tensor, right: Tensor) -> Tensor:
        """Return the gradients of both vectors, ``[length]``; equal inputs give equal bits on every device."""
        gradients = left.new_empty(self.length)
        for gradient, part in self._parts(left):
            gradients[gradient] = part
        for matrix in self._matrices:
            target, lefts, rights = matrix.of(gradients), self._thin(left[matrix.left]), self._thin(right[matrix.right])
            # Column by column, because the order of a matrix product depends on the device.
            torch.mul(lefts[:, 0, None], rights[None, :, 0], out=target)
            for k in range(1, self.rank):
                target += lefts[:, k, None] * rights[None, :, k]
        return gradients

    def left_over(self, vector: Tensor, left: Tensor, right: Tensor) -> Tensor:
        """Return the part of `vector` ``[length]`` that its product, of `left` and its own `right`, lacks."""
        error = vector - self.product(left, right)
        for gradient in self._whole:
            error[gradient] = 0.0  # whole parameters are sent exactly
        return error

    def basis(self, right: Tensor, former: Tensor) -> Tensor:
        """Return a basis for the next step, ``[right_length]``: this step's mean directions, which change slowly."""
        basis = former.clone()
        for matrix in self._matrices:
            rights = self._thin(right[matrix.right])
            norms = torch.linalg.vector_norm(rights, dim=0)
            usable = (norms > 0.0) & (norms < math.inf)
            # Other columns of the basis stay unchanged: zeros have no direction, and overflowed columns are useless.
            self._thin(basis[matrix.right])[:, usable] = (rights / norms)[:, usable]
        return basis

    def _parts(self, left: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Yield the slices of each whole parameter in the gradients and in the left vector."""
        begin = 0
        for gradient in self._whole:
            size = gradient.stop - gradient.start
            yield gradient, left[begin : begin + size]
            begin += size

    def _thin(self, flat: Tensor) -> Tensor:
        """View a flat slice as a thin matrix, ``[rows or columns, rank]``."""
        return flat.view(-1, self.rank)


def orthonormal(columns: Tensor) -> Tensor:
    """Return orthonormal columns with the span of the columns ``[rows, rank]``; a dependent column becomes zeros."""
    # Gram-Schmidt, twice, in float64, with operations that round alike everywhere. NaN and infinity become NaN.
    finished: list[Tensor] = []
    largest = columns.abs().amax(dim=0)
    scaled = columns.to(torch.float64) / torch.where(largest == 0.0, 1.0, largest)
    for column in scaled.unbind(dim=1):
        original_norm = tree_sum(column * column)
        for _ in range(2):  # the second time removes rounding errors of the first
            for unit in finished:
                column = column - unit * tree_sum(unit * column)  # noqa: PLW2901
        squared_norm = tree_sum(column * column)
        # A dependent column leaves only rounding errors, which may point anywhere, even along the earlier columns.
        is_dependent = squared_norm <= _ROUNDING * original_norm
        finished.append(torch.where(is_dependent, 0.0, column / squared_norm.sqrt()))
    return torch.stack(finished, dim=1).to(columns.dtype)
