"""Proofs of a stage's state: BLAKE3 digests by which a server confirms the state that another server sent.

Weights and optimizer state are hashed separately, so that one pass over them can prove either kind, or both.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec
from blake3 import blake3
from torch import Tensor

from lightning_swarm.model.fingerprint import raw_bytes
from lightning_swarm.protocol import serialization
from lightning_swarm.protocol.messages.state import StateKind

_PIECE_BYTES: Final = 8 << 20  # hashed at once, in some milliseconds
_PREFIX: Final = b"lightning_swarm/state\0"
_encoder = msgspec.msgpack.Encoder(order="deterministic")  # equal values have equal bytes


class StatePart:
    """A part of a stage's state: one weight or buffer, or the optimizer state of one parameter."""

    def __init__(self, kind: StateKind, name: str, structure: Any, tensors: Sequence[Tensor]) -> None:
        self.kind = kind
        self.tensors = tensors
        # Includes plain numbers and tensors' names, so that two tensors cannot be exchanged.
        self.label = _encoder.encode((kind, name, structure))


def parts_of_weights(weights: Mapping[str, Tensor]) -> list[StatePart]:
    """Return the parts of weights and buffers by name."""
    return [StatePart("weights", name, None, [tensor]) for name, tensor in weights.items()]


def parts_of_optimizer(state: Mapping[str, Any]) -> list[StatePart]:
    """Return the parts of an optimizer's state by parameter name; refuse values that cannot be sent."""
    found = []
    for name, own in state.items():
        ordered = dict(sorted(own.items())) if isinstance(own, dict) else own
        found.append(StatePart("optimizer", name, *serialization.flatten(ordered)))
    return found


class StateDigests:
    """Computes the BLAKE3 of each part of a state piece by piece; the tensors must not change until it is finished."""

    def __init__(self, parts: Sequence[StatePart]) -> None:
        # Differs if a tensor or number was replaced, or a tensor was written to.
        self.identity = [
            (part.label, [(tensor.data_ptr(), tensor._version) for tensor in part.tensors]) for part in parts
        ]
        self._parts = parts  # kept alive, so that no other tensor gets their memory
        self._pieces = self._hash()
        self._digests: list[bytes] = []
        self._is_done = False

    def advance(self) -> bool:
        """Hash one more piece, and return whether there are more."""
        self._is_done = self._is_done or next(self._pieces, self) is self  # `self` stands for the end
        return not self._is_done

    def proof(self, challenge: int, kinds: Iterable[StateKind], more: Any = None) -> bytes:
        """Hash the rest, and return BLAKE3 of a challenge, `more`, and the digests of all parts of these kinds."""
        while self.advance():
            pass
        chosen = set(kinds)
        found = blake3(_PREFIX + _encoder.encode((challenge, sorted(chosen), more)))
        digests = zip(self._parts, self._digests, strict=True)
        for digest in sorted(digest for part, digest in digests if part.kind in chosen):
            found.update(digest)
        return found.digest()

    def _hash(self) -> Generator[None, None, None]:
        for part in self._parts:
            found = blake3(part.label)
            for tensor in part.tensors:
                found.update(f"{tensor.dtype} {list(tensor.shape)};".encode())
                raw = raw_bytes(tensor)
                for start in range(0, len(raw), _PIECE_BYTES):
                    found.update(raw[start : start + _PIECE_BYTES].cpu().numpy().data)
                    yield
            self._digests.append(found.digest())
            yield
