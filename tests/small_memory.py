"""A server with little device memory: the graphs of microbatches fill it, and computations run out of it."""

from __future__ import annotations

import random
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, TypeVar

import torch
from torch import Tensor

from lightning_swarm.core.errors import ConfigError
from lightning_swarm.network import PeerId
from lightning_swarm.peer.peer import Peer
from lightning_swarm.server.executor import Priority
from lightning_swarm.server.stage import Stage
from lightning_swarm.testing.faults import DidNotHappen
from lightning_swarm.testing.wrapping import on_new_server, wrap

_T = TypeVar("_T")
_MAX_SAVED: Final = 6  # a failing computation saves or reads fewer tensors than this before it fails


class SmallMemory:
    """A peer of an in-memory swarm whose server has the memory of a small card.

    ``SmallMemory("peer-1", num_bytes=4096)``

    Each tensor that autograd saves for a backward takes its bytes until the graph is freed. If a tensor does not fit,
    the block's operation raises `torch.OutOfMemoryError`. A test must look at `struck`, or call `check_ran_out`.

    Args:
        peer: The name of the peer, as in a `FaultPlan`.
        num_bytes: The bytes that all graphs of the server may take; None: as many as they need.
        stage: The only stage with little memory; None: all stages.
        fails: The share of forwards and backwards that run out of memory half-way, independently of their size.
        seed: Seed of the choice of these computations.
    """

    def __init__(
        self, peer: str, *, num_bytes: int | None = None, stage: int | None = None, fails: float = 0.0, seed: int = 0
    ) -> None:
        if num_bytes is None and not fails:
            raise ConfigError("memory is small if `num_bytes` is given, or `fails` is above 0; got neither")
        self.peer = PeerId(peer)
        self.num_bytes, self.stage, self.fails = num_bytes, stage, fails
        self.held_bytes = 0
        self.struck = Counter[str]()  # computations that ran out of memory, by direction
        self._uses = Counter[int]()  # address of a storage -> saved tensors that use it
        self._rng = random.Random(seed)
        self._left: int | None = None  # tensors until the running computation fails; None: it does not

    def watch(self, peer: Peer, name: str) -> None:
        """Limit the memory of a peer's server once it has started, if the peer has this memory's name."""
        if name == self.peer:
            on_new_server(peer, lambda server: wrap(server.calls, "_compute", self._compute))

    def _compute(self, compute: Callable[..., _T], stage: Stage, priority: Priority, run: Callable[[], Any]) -> _T:
        if self.stage not in (None, stage.index):
            return compute(stage, priority, run)
        own = {parameter.untyped_storage().data_ptr() for parameter in stage.parameters.values()}
        direction = "forward" if priority[0] else "backward"

        def in_small_memory() -> Any:
            self._left = self._rng.randrange(_MAX_SAVED) if self._rng.random() < self.fails else None
            try:
                with torch.autograd.graph.saved_tensors_hooks(partial(self._save, own, direction), self._read):
                    return run()
            finally:
                self._left = None

        return compute(stage, priority, in_small_memory)

    def _save(self, own: set[int], direction: str, tensor: Tensor) -> _Saved:
        self._count(direction)
        storage = tensor.untyped_storage()
        if storage.data_ptr() in own:
            return _Saved(tensor)
        is_new = not self._uses[storage.data_ptr()]
        if is_new and self.num_bytes is not None and self.held_bytes + storage.nbytes() > self.num_bytes:
            self._raise(direction, storage.nbytes())
        saved = _Saved(tensor.detach())  # detached: an output would hold itself alive through its own graph
        self._uses[storage.data_ptr()] += 1
        self.held_bytes += is_new * storage.nbytes()
        weakref.finalize(saved, self._free, storage.data_ptr(), storage.nbytes())
        return saved

    def _read(self, saved: _Saved) -> Tensor:
        self._count("backward")
        return saved.tensor

    def _free(self, address: int, num_bytes: int) -> None:
        self._uses[address] -= 1
        if not self._uses[address]:
            del self._uses[address]
            self.held_bytes -= num_bytes

    def _count(self, direction: str) -> None:
        if self._left is None:
            return
        self._left -= 1
        if self._left < 0:
            self._left = None
            self._raise(direction, 0)

    def _raise(self, direction: str, num_bytes: int) -> None:
        self.struck[direction] += 1
        raise torch.OutOfMemoryError(
            f"CUDA out of memory. Tried to allocate {num_bytes} bytes, {self.held_bytes} are in use."
        )


class _Saved:
    """A tensor that autograd saved."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def limit_memory(memories: Sequence[SmallMemory]) -> Callable[[Peer, PeerId], None]:
    """Make the argument `modify_peer` of an `InMemoryStrategy` for servers with these memories."""

    def modify(peer: Peer, name: PeerId) -> None:
        for memory in memories:
            memory.watch(peer, name)

    return modify


def check_ran_out(memories: Sequence[SmallMemory]) -> None:
    """Raise `DidNotHappen` if any peers had enough memory, and name them."""
    if enough := [memory.peer for memory in memories if not memory.struck]:
        raise DidNotHappen(f"These peers never ran out of memory: {', '.join(enough)}.")
