"""Hashes of tensors, equal on every device: a fast hash that finds accidental drift, and BLAKE3 against forgery."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Final

import msgspec
import numpy as np
import torch
from blake3 import blake3
from torch import Tensor

from lightning_swarm.model.random.keyed_stream import long_bits
from lightning_swarm.protocol import serialization

_ROW: Final = 1 << 15  # words in a row, each with its own multiplier
_MASK: Final = (1 << 64) - 1
_PRIME: Final = 0x9E3779B97F4A7C15
_PIECE: Final = 1 << 21  # words that are hashed at once, in a few milliseconds


def digest(tensors: Iterable[Tensor], prefix: bytes) -> bytes:
    """Return the BLAKE3 hash of a prefix and of tensors' dtypes, shapes and bytes, in order. It cannot be forged."""
    hasher = blake3(prefix)
    for tensor in tensors:
        hasher.update(f"{tensor.dtype} {list(tensor.shape)};".encode())
        hasher.update(raw_bytes(tensor).cpu().numpy().data)
    return hasher.digest()


def tree_digest(tree: serialization.Tree, flags: Sequence[bool] = ()) -> bytes:
    """Return the BLAKE3 hash of a tree in its wire form: its structure, its tensors, and a flag for each tensor."""
    structure, tensors = serialization.flatten(tree)
    return digest(tensors, msgspec.msgpack.encode((structure, list(flags))))


def proof(tensors: Iterable[Tensor], challenge: int) -> int:
    """Return 64 bits of a digest of tensors and a fresh challenge, which proves that this process has the tensors."""
    # 64 bits suffice, because a search for other tensors must end before the answer's deadline.
    return int.from_bytes(digest(tensors, challenge.to_bytes(8, "little"))[:8], "little")


def fingerprint(tensors: Iterable[Tensor]) -> int:
    """Return a 64-bit hash of the bytes of tensors, in order. It is fast, but an attacker can forge it."""
    return Fingerprint(tensors).finish()


class Fingerprint:
    """Computes a fingerprint piece by piece; the tensors must not change until it is finished."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._pieces = _pieces(tensors)
        self._value: int | None = None

    def advance(self) -> bool:
        """Hash one more piece, and return whether pieces are left."""
        if self._value is None:
            try:
                next(self._pieces)
            except StopIteration as end:
                self._value = end.value
        return self._value is None

    def finish(self) -> int:
        """Hash the rest, and return the fingerprint."""
        while self.advance():
            pass
        assert self._value is not None
        return self._value


def _pieces(tensors: Iterable[Tensor]) -> Generator[None, None, int]:
    total = 0
    for tensor in tensors:
        tensor_hash = yield from _hash_bytes(tensor)
        total = (total * _PRIME + tensor_hash + tensor.numel() + 1) & _MASK
        yield
    return total


def raw_bytes(tensor: Tensor) -> Tensor:
    """Return a tensor's bytes, as a vector that shares its memory if it is contiguous."""
    # Not `reshape`: a single element counts as contiguous with any stride, but a byte view needs stride 1.
    return tensor.detach().contiguous().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _hash_bytes(tensor: Tensor) -> Generator[None, None, int]:
    raw = raw_bytes(tensor)
    padding = -len(raw) % 4
    if padding:
        raw = torch.nn.functional.pad(raw, (0, padding))
    words = raw.view(torch.int32)
    sums = _row_sums_on_cpu if words.device.type == "cpu" else _row_sums
    total = 0
    for start in range(0, len(words), _PIECE):
        if start:
            yield
        for row_sum in sums(words[start : start + _PIECE]):
            total = (total * _PRIME + row_sum) & _MASK
    return total


# A row's words have 32 bits, and their multipliers 64 bits, so that 33 bits of its multiplier weigh a word's sign bit.
# With 64-bit words only one bit would, and two changed signs would cancel. int64 arithmetic wraps alike everywhere.


def _row_sums(words: Tensor) -> Iterator[int]:
    multipliers = _multipliers(words.device)
    num_whole = len(words) // _ROW * _ROW
    if num_whole:  # all rows at once, because one transfer from a GPU takes longer than a row
        yield from (words[:num_whole].view(-1, _ROW) * multipliers).sum(dim=1).tolist()
    if num_whole < len(words):
        yield int((words[num_whole:] * multipliers[: len(words) - num_whole]).sum())


def _row_sums_on_cpu(words: Tensor) -> Iterator[int]:
    """Compute the same sums by numpy, which needs a third of the time."""
    row, multipliers = words.numpy(), _multipliers(words.device).numpy()
    num_whole = len(row) // _ROW * _ROW
    if num_whole:
        yield from np.einsum("ij,j->i", row[:num_whole].reshape(-1, _ROW), multipliers).tolist()
    if num_whole < len(row):
        yield int(row[num_whole:] @ multipliers[: len(row) - num_whole])


@lru_cache(maxsize=8)
def _multipliers(device: torch.device) -> Tensor:
    """Draw an odd multiplier for each word of a row. Multilinear hashing: Dietzfelbinger, STACS 1996."""
    return long_bits(_PRIME, _ROW, device) | 1
