"""A simulated machine of another kind: its server rounds differently, and reports another kind."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, Final, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from lightning_swarm.core.errors import ConfigError
from lightning_swarm.model.init_record import written_tensors
from lightning_swarm.model.portable import is_exact
from lightning_swarm.peer.peer import Peer
from lightning_swarm.server.executor import Priority
from lightning_swarm.server.gradients import GradientSums
from lightning_swarm.server.server import Server
from lightning_swarm.server.stage_builder import PeerModel
from lightning_swarm.testing.faults import DidNotHappen
from lightning_swarm.testing.wrapping import on_new_server, wrap

_T = TypeVar("_T")

_SINGLE_ROUNDING: Final = frozenset(("add", "sub", "rsub", "mul", "div", "sqrt"))  # IEEE 754 defines them exactly
# Operations that copy numbers, or split numbers exactly.
_COPYING: Final = frozenset(("aten::embedding", "aten::frexp", "aten::_pin_memory"))
_PRODUCTS: Final = frozenset(("aten::mm", "aten::bmm", "aten::matmul"))
_MAX_INTEGER: Final = 2.0**53  # below it, float64 represents all integers exactly
_BITS: Final = {
    torch.float64: torch.int64,
    torch.float32: torch.int32,
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
}
_MIXER: Final = 0x1E3779B97F4A7C15  # odd factor of the hash in `_move`


class UnlikeMachine:
    """A machine of another kind, for a peer of an in-memory swarm: its server rounds differently.

    ``local_swarm(2, unlike={"peer-1": UnlikeMachine()})``

    Each result of a kernel with several roundings is moved by up to `ulps` units in the last place. The move depends
    only on the number and the seed, so the machine repeats its own results. Copies, comparisons and single operations
    of IEEE 754 (sum of two numbers, difference, product, quotient, square root) are not changed, because real machines
    of all kinds agree on them. For the same reason, exact products of matrices of integers in float64 are not changed.

    Args:
        ulps: The largest move, in units in the last place.
        seed: Machines of the same seed and `ulps` are of one kind.

    Attributes:
        num_moved: Count of moved numbers. A test whose machine moved no number has shown nothing.
    """

    def __init__(self, ulps: int = 1, seed: int = 0) -> None:
        if not 1 <= ulps <= 64:
            raise ConfigError(f"`ulps` must be from 1 to 64, got {ulps}")
        self.ulps, self.seed = ulps, seed
        self.num_moved = 0

    @property
    def arithmetic(self) -> str:
        """The name of the machine's kind, which its server reports."""
        return f"unlike machine, {self.ulps} ulps, seed {self.seed}"

    def compute(self, run: Callable[[], _T]) -> _T:
        """Run a function with this machine's rounding."""
        with _OtherRounding(self):
            return run()

    def watch(self, peer: Peer) -> None:
        """Make a peer compute as this machine; call this before the peer serves."""

        async def start(original: Callable[..., Awaitable[None]], model: PeerModel) -> None:
            _report_kind(self.arithmetic, model)
            await original(model)

        def be_unlike(server: Server) -> None:
            _report_kind(self.arithmetic, server.steps.sums)
            wrap(server._executor, "submit", submit)

        def submit(original: Callable[..., Any], priority: Priority, run: Callable[[], Any]) -> Any:
            return original(priority, lambda: self.compute(run))

        wrap(peer._host, "start", start)  # called with each model, of which a rollback may bring another
        on_new_server(peer, be_unlike)


class _OtherRounding(TorchDispatchMode):
    """Makes kernels round as on an `UnlikeMachine` while it is active."""

    def __init__(self, machine: UnlikeMachine) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._machine = machine

    @override
    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        result = func(*args, **kwargs)
        if not _gives_equal_bits(func, kwargs) and not _is_exact_product(func._schema.name, args, result):
            for tensor in _float_results(func, args, kwargs, result):
                self._move(tensor)
        return result

    def _move(self, tensor: Tensor) -> None:
        """Move each number by up to `ulps` units in the last place, by a hash of its bits and the seed."""
        bits = tensor.detach().view(_BITS[tensor.dtype])
        mixed = bits.to(torch.int64) * _MIXER + self._machine.seed
        mixed = (mixed ^ (mixed >> 29)) * _MIXER
        moves = ((mixed >> 33) % (2 * self._machine.ulps + 1)) - self._machine.ulps
        limits = torch.finfo(tensor.dtype)
        sizes = tensor.detach().abs()
        is_safe = (sizes > 2.0**10 * limits.tiny) & (sizes < limits.max / 2.0)  # far from zero and infinity
        moves = torch.where(is_safe, moves, 0).to(bits.dtype)
        self._machine.num_moved += int(moves.count_nonzero())
        bits.add_(moves)


def check_rounded_differently(machines: Mapping[str, UnlikeMachine]) -> None:
    """Raise `DidNotHappen` if any machines rounded nothing differently, and name their peers."""
    if peers := [peer for peer, machine in machines.items() if not machine.num_moved]:
        raise DidNotHappen(f"These unlike machines rounded nothing differently: {', '.join(peers)}.")


def _gives_equal_bits(func: Any, kwargs: Mapping[str, Any]) -> bool:
    """Return whether an operation gives the same bits on machines of all kinds."""
    schema = func._schema
    space, _, name = schema.name.partition("::")
    if is_exact(schema.name) or schema.name in _COPYING or torch.Tag.nondeterministic_seeded in func.tags:
        return True
    if any(value.alias_info is not None and not value.alias_info.is_write for value in schema.returns):
        return True  # a view
    name = name.removesuffix("_").removeprefix("_foreach_")
    # With `alpha` or a rounding mode, the operation rounds more than once.
    plain = kwargs.get("alpha", 1) == 1 and kwargs.get("rounding_mode") is None
    return space == "aten" and name in _SINGLE_ROUNDING and plain


def _is_exact_product(name: str, args: Sequence[Any], product: Any) -> bool:
    """Return whether a matrix product is exact, because it multiplies integers and its sums stay exact."""
    if name not in _PRODUCTS or product.dtype != torch.float64:
        return False
    left, right = args
    largest = left.abs() @ right.abs()
    is_integer = all(bool((factor == factor.round()).all()) for factor in (left, right))
    return is_integer and bool((largest < _MAX_INTEGER).all())


def _float_results(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Iterable[Tensor]:
    """Return the float tensors that an operation returned or wrote to, each once."""
    leaves = tree_leaves((result, written_tensors(func, args, kwargs)))
    return {id(leaf): leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.dtype in _BITS}.values()


def _report_kind(kind: str, reporter: PeerModel | GradientSums) -> None:
    """Make an object report this kind of machine, by changing its class to a subclass with this `arithmetic`."""
    original = type(reporter)
    reporter.__class__ = type(original.__name__, (original,), {"arithmetic": property(lambda _: kind)})
