"""Attributes that a block's forward sets appear on the trainer's module, with their values for the whole batch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from lightning_swarm.core.errors import ConfigError
from tests.parity.harness import Run, assert_same_curve, run_plain, run_swarm
from tests.parity.models import digits, loader

STEPS = 4
WIDTH = 64


class Layer(nn.Module):
    """A block that sets the attributes that a test chooses."""

    def __init__(self, leave: Callable[[Layer, Tensor, Tensor], None]) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.leave = leave

    @override
    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.linear(x)
        self.leave(self, x, hidden)
        return x + hidden.tanh()


class Keeping(Layer):
    """A block that sets an attribute in its own forward."""

    def __init__(self) -> None:
        super().__init__(lambda *_: None)
        self.kept: Any = torch.zeros(())

    @override
    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.linear(x)
        self.kept = hidden.square().mean()
        return x + hidden.tanh()


class Model(L.LightningModule):
    """Has blocks that set attributes, which `read` makes a part of the loss."""

    def __init__(
        self, leave: Callable[[Layer, Tensor, Tensor], None], read: Callable[[Any], Tensor] = lambda block: block.kept
    ) -> None:
        super().__init__()
        self.net = nn.Sequential(*(Layer(leave) for _ in range(4)), nn.Linear(WIDTH, 10))
        self.read = read

    @override
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        return loss + 0.1 * sum((self.read(block) for block in self.net[:4]), torch.zeros(()))

    @override
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def keep(value: Callable[[Tensor, Tensor], Any]) -> Callable[[Layer, Tensor, Tensor], None]:
    def leave(block: Layer, x: Tensor, hidden: Tensor) -> None:
        block.kept = value(x, hidden)

    return leave


def both(make: Callable[[], L.LightningModule], **options: Any) -> tuple[Run, Run]:
    """Train with a swarm and with the plain Trainer, and check that the curves are equal."""
    swarm = run_swarm(make, loader(digits()), max_steps=STEPS, **options)
    plain = run_plain(make, loader(digits()), max_steps=STEPS)
    assert_same_curve(swarm, plain)
    return swarm, plain


@pytest.mark.parametrize(
    ("value", "read"),
    [
        (lambda x, h: h.square().mean(), lambda block: block.kept),
        (lambda x, h: h.square().sum(), lambda block: 0.01 * block.kept),
        (lambda x, h: h.square().sum(1), lambda block: block.kept.mean()),
        (lambda x, h: h.repeat_interleave(3, 0), lambda block: block.kept.square().mean()),
        (lambda x, h: {"a": [h.mean(), h], "b": 2}, lambda block: block.kept["a"][1].mean() * block.kept["b"]),
        (lambda x, h: h.detach().mean(0), lambda block: block.kept.sum()),
        (lambda x, h: (h > 0).sum(0), lambda block: block.kept.float().mean()),
    ],
    ids=["mean", "sum", "rows", "three-a-row", "nested", "detached", "counts"],
)
def test_left_tensors_and_their_gradients(value: Any, read: Any) -> None:
    both(partial(Model, keep(value), read))


class Seen(Model):
    """Keeps a layer's output, which the next layer overwrites in place."""

    def __init__(self, kept: Callable[[Tensor], Tensor]) -> None:
        super().__init__(lambda *_: None)
        self.net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True), nn.Linear(WIDTH, 10))
        self.features: list[Tensor] = []
        self.net[0].register_forward_hook(lambda module, args, output: self.features.append(kept(output)))

    @override
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.features.clear()
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        return loss + 0.1 * self.features[0].sum(1).mean()


class KeepsOutput(nn.Linear):
    keeps_clone = False

    @override
    def forward(self, x: Tensor) -> Tensor:
        output = super().forward(x)
        self.kept = output.clone() if self.keeps_clone else output
        return output


class ReadsOutput(Model):
    def __init__(self, *, keeps_clone: bool = False) -> None:
        super().__init__(lambda *_: None)
        self.net = nn.Sequential(KeepsOutput(WIDTH, WIDTH), nn.ReLU(inplace=True), nn.Linear(WIDTH, 10))
        self.net[0].keeps_clone = keeps_clone

    @override
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        return loss + 0.1 * self.net[0].kept.sum(1).mean()


def test_what_is_kept_is_overwritten_by_the_next_block() -> None:
    both(ReadsOutput, split=["0", "2"])
    with pytest.raises(ConfigError, match=r"write into its input if other code holds.*`kept` of '0' would change"):
        run_swarm(ReadsOutput, loader(digits()), max_steps=STEPS, split=["0", "1"])


@pytest.mark.parametrize(
    ("begins", "message"), [("2", r"a later layer overwrites .* of '0' in place"), ("1", r"of '0' would change")]
)
@pytest.mark.parametrize("kept", [lambda output: output, torch.clone], ids=["itself", "a clone"])
def test_what_a_hook_observes_is_not_overwritten(kept: Callable[[Tensor], Tensor], begins: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run_swarm(partial(Seen, kept), loader(digits()), max_steps=STEPS, split=["0", begins])


def test_a_kept_clone_stays_what_it_was() -> None:
    both(partial(ReadsOutput, keeps_clone=True), split=["0", "1"])


def test_left_on_other_terms_than_rows() -> None:
    with pytest.raises(ConfigError, match=r"`kept` of block '0' cannot be read.*`microbatch_size`"):
        run_swarm(partial(Model, keep(lambda x, h: h.mean(0).square().sum())), loader(digits()), max_steps=STEPS)


def test_nobody_reads_it() -> None:
    make = partial(Model, keep(lambda x, h: h.mean(0).square().sum()), lambda block: torch.zeros(()))
    both(make)


class Loop(L.LightningModule):
    """Reads a block's attribute immediately after its call."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Keeping() for _ in range(4))
        self.head = nn.Linear(WIDTH, 10)

    @override
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, found, total = batch[0], [], torch.zeros(())
        for block in self.blocks:
            x = block(x)
            total += 0.1 * block.kept
            found.append(block.kept)
        return F.cross_entropy(self.head(x), batch[1]) + total + torch.stack(found).square().sum()

    configure_optimizers = Model.configure_optimizers


def test_read_between_the_blocks() -> None:
    both(Loop, pipeline="blocks")


def count(block: Any, x: Tensor, hidden: Tensor) -> None:
    block.calls = getattr(block, "calls", 0) + 1


def grow(block: Any, x: Tensor, hidden: Tensor) -> None:
    vars(block).setdefault("seen", [])
    block.seen.append(hidden.mean())


@pytest.mark.parametrize(("leave", "name"), [(count, "calls"), (grow, "seen")])
def test_what_the_next_forward_goes_on_from(leave: Any, name: str) -> None:
    with pytest.raises(ConfigError, match=f"`{name}` of '"):
        run_swarm(partial(Model, leave, lambda block: torch.zeros(())), loader(digits()), max_steps=STEPS)


def cache(block: Any, x: Tensor, hidden: Tensor) -> None:
    if not hasattr(block, "table"):
        block.table = torch.arange(WIDTH)
    block.width = x.shape[1]
    hidden += 0.001 * block.table


def test_caches_stay_on_the_peers() -> None:
    both(partial(Model, cache, lambda block: torch.zeros(())))


class Hooked(Model):
    """Takes features by a hook that only the trainer's module has."""

    def __init__(self, *, on_start: bool = True) -> None:
        super().__init__(lambda *_: None)
        self.found: list[Tensor] = []
        self.on_start = on_start
        if not on_start:
            self._hook()

    def _hook(self) -> None:
        self.net[1].linear.register_forward_hook(lambda module, args, output: self.found.append(output))

    @override
    def on_fit_start(self) -> None:
        if self.on_start:
            self._hook()

    @override
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.found.clear()
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        (features,) = self.found
        return loss + 0.1 * features.square().mean()


@pytest.mark.parametrize("on_start", [True, False])
def test_a_hook_observes_the_whole_batch(on_start: bool) -> None:
    both(partial(Hooked, on_start=on_start))


class Before(Model):
    """Reads a layer's input before or after the layer overwrites it in place."""

    def __init__(self, register: Callable[[nn.Module, Any], Any]) -> None:
        super().__init__(lambda *_: None)
        self.net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True), nn.Linear(WIDTH, 10))
        self.sums: list[Tensor] = []
        register(self.net[1], self._note)

    def _note(self, module: nn.Module, args: Any, output: Any = None) -> None:
        self.sums.append(args[0].sum(1).mean())

    @override
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.sums.clear()
        return F.cross_entropy(self.net(batch[0]), batch[1]) + 0.1 * self.sums[0]


def test_a_hook_looks_at_what_its_layer_overwrites() -> None:
    both(partial(Before, nn.Module.register_forward_hook))
    with pytest.raises(ConfigError, match=r"the hook or a later layer overwrites an argument or the output of '1'"):
        run_swarm(partial(Before, nn.Module.register_forward_pre_hook), loader(digits()), max_steps=STEPS)


class Ordered(Model):
    """Its hooks append to one list, on a block and on its layers, one of which is called twice."""

    def __init__(self) -> None:
        super().__init__(lambda *_: None)
        inner, twice = nn.Linear(WIDTH, WIDTH), nn.Tanh()
        self.net = nn.Sequential(nn.Sequential(inner, twice, nn.Linear(WIDTH, WIDTH), twice), nn.Linear(WIDTH, 10))
        self.means: list[Tensor] = []
        for layer in (self.net[1], self.net[0], inner, twice):
            layer.register_forward_hook(lambda module, args, output: self.means.append(output.sum(1).mean()))
        self.net[0].register_forward_pre_hook(lambda module, args: self.means.append(args[0].sum(1).mean()))
        twice.register_forward_pre_hook(lambda module, args: self.means.append(args[0].sum(1).mean()))

    @override
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.means.clear()
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        assert len(self.means) == 8
        return loss + sum((0.1 * place * mean for place, mean in enumerate(self.means)), torch.zeros(()))


def test_hooks_observe_calls_in_their_order() -> None:
    both(Ordered, split=["0", "1"])


class ObservesFirst(Model):
    """Its first hook reads an input that its second hook replaces."""

    def __init__(self) -> None:
        super().__init__(lambda *_: None, lambda block: torch.zeros(()))
        self.found: list[Tensor] = []
        self.net[1].register_forward_pre_hook(lambda module, args: self.found.append(args[0]))
        self.net[1].register_forward_pre_hook(lambda module, args: (2 * args[0],))


class Storing(Model):
    """Its hook both keeps a value and returns a value."""

    def __init__(self) -> None:
        super().__init__(lambda *_: None, lambda block: torch.zeros(()))
        self.found: Any = None

        def hook(module: nn.Module, args: Any, output: Tensor) -> Tensor:
            self.found = output
            return output

        self.net[1].register_forward_hook(hook)


class Backward(Model):
    """Its hook records a gradient."""

    def __init__(self) -> None:
        super().__init__(lambda *_: None, lambda block: torch.zeros(()))
        self.found: list[Any] = []
        self.net[1].register_full_backward_hook(lambda module, before, after: self.found.append(after))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (Storing, "may observe or change a value"),
        (Backward, "backward hook of '1'"),
        (ObservesFirst, "observe a layer must come after those that change its values"),
    ],
)
def test_hooks_that_peers_cannot_serve(make: Callable[[], L.LightningModule], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run_swarm(make, loader(digits()), max_steps=STEPS)
