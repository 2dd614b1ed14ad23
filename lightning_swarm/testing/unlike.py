"""A simulated machine of another kind, whose server rounds differently and reports its kind."""

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

_SINGLE: Final = frozenset(("add", "sub", "rsub", "mul", "div", "sqrt"))  # operations that IEEE 754 defines to the bit
# Operations that copy numbers, or split them exactly.
_LOOKED_UP: Final = frozenset(("aten::embedding", "aten::frexp", "aten::_pin_memory"))
_PRODUCTS: Final = frozenset(("aten::mm", "aten::bmm", "aten::matmul"))
_MAX_WHOLE: Final = 2.0**53  # bound on whole numbers that float64 holds exactly
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

    Each result of a kernel with several roundings is moved by up to `ulps` units in the last place. The move follows
    from the number and the seed, so the machine repeats its own results. Copies, comparisons and single operations of
    IEEE 754 (sum of two numbers, difference, product, quotient, square root) stay as they are, as on real machines of
    any kind. So do products of matrices of whole numbers that float64 holds exactly.

    Args:
        ulps: The largest move, in units in the last place.
        seed: Machines of the same seed and `ulps` are of one kind.

    Attributes:
        num_moved: Numbers that were moved. A test whose machine moved none has shown nothing.
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

        async def start(honest: Callable[..., Awaitable[None]], model: PeerModel) -> None:
            _report_kind(self.arithmetic, model)
            await honest(model)

        def be_unlike(server: Server) -> None:
            _report_kind(self.arithmetic, server.steps.sums)
            wrap(server._executor, "submit", submit)

        def submit(honest: Callable[..., Any], priority: Priority, run: Callable[[], Any]) -> Any:
            return honest(priority, lambda: self.compute(run))

        wrap(peer._host, "start", start)  # called with each model: a rollback brings another
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
        found = func(*args, **kwargs)
        if not _is_repeated(func, kwargs) and not _is_whole(func._schema.name, args, found):
            for tensor in _results(func, args, kwargs, found):
                self._move(tensor)
        return found

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


def check_moved(machines: Mapping[str, UnlikeMachine]) -> None:
    """Raise `DidNotHappen` if any machines rounded nothing differently, and name their peers."""
    if alike := [peer for peer, machine in machines.items() if not machine.num_moved]:
        raise DidNotHappen(f"These unlike machines rounded nothing differently: {', '.join(alike)}.")


def _is_repeated(func: Any, kwargs: Mapping[str, Any]) -> bool:
    """Return whether an operation gives the same bits on machines of all kinds."""
    schema = func._schema
    space, _, name = schema.name.partition("::")
    if is_exact(schema.name) or schema.name in _LOOKED_UP or torch.Tag.nondeterministic_seeded in func.tags:
        return True
    if any(one.alias_info is not None and not one.alias_info.is_write for one in schema.returns):
        return True  # a view
    name = name.removesuffix("_").removeprefix("_foreach_")
    # With `alpha` or a rounding mode, the operation is more than one of IEEE 754.
    plain = kwargs.get("alpha", 1) == 1 and kwargs.get("rounding_mode") is None
    return space == "aten" and name in _SINGLE and plain


def _is_whole(name: str, args: Sequence[Any], product: Any) -> bool:
    """Return whether a product is of whole numbers, whose sum is exact in any order."""
    if name not in _PRODUCTS or product.dtype != torch.float64:
        return False
    left, right = args
    largest = left.abs() @ right.abs()
    return all(bool((one == one.round()).all()) for one in (left, right)) and bool((largest < _MAX_WHOLE).all())


def _results(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], found: Any) -> Iterable[Tensor]:
    """Return the float tensors that an operation returned or wrote to, each once."""
    both = tree_leaves((found, written_tensors(func, args, kwargs)))
    return {id(one): one for one in both if isinstance(one, Tensor) and one.dtype in _BITS}.values()


def _report_kind(kind: str, reporter: PeerModel | GradientSums) -> None:
    """Make an object report this kind of machine, by a subclass whose `arithmetic` is `kind`."""
    own = type(reporter)
    reporter.__class__ = type(own.__name__, (own,), {"arithmetic": property(lambda _: kind)})
