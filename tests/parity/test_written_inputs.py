"""Blocks that overwrite their inputs: the caller sees the new values as on one machine, or its reads are refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import lightning as L
import lightning_swarm.nn
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from lightning_swarm.core.errors import ConfigError, ProtocolError
from lightning_swarm.model.fidelity.written_inputs import POSITIONAL, write_back
from tests.parity.harness import assert_exact, run_plain, run_swarm
from tests.parity.models import digits, loader

STEPS = 6


class Shifted(nn.Module):
    """Adds a parameter to its argument, in place."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.full((64,), 0.1))

    @override
    def forward(self, x: Tensor) -> Tensor:
        x += self.shift
        return 2 * x


class Rebuilding(L.LightningModule):
    """Compares the output with the input, which the first block overwrites."""

    def __init__(self, make_first: Callable[[], nn.Module], *, stem: bool = False) -> None:
        super().__init__()
        self.stem = nn.Linear(64, 64) if stem else nn.Identity()
        self.net = nn.Sequential(
            make_first(), nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 16), nn.ReLU(inplace=True), nn.Linear(16, 64)
        )

    @override
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        images = self.stem(batch[0] - 0.3)
        with torch.no_grad():
            before = self.net(images[:4]).mean()
        return F.mse_loss(self.net(images), images) + before + images.square().mean()

    @override
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.each_value
@pytest.mark.parametrize("num_servers", [1, 2, 4])
@pytest.mark.parametrize(
    "make",
    [
        partial(Rebuilding, partial(nn.ReLU, inplace=True)),
        partial(Rebuilding, partial(nn.ReLU, inplace=True), stem=True),
        partial(Rebuilding, Shifted),
    ],
    ids=["of the batch", "of a trained layer", "with a gradient"],
)
def test_the_first_block_works_in_place(make: Callable[[], L.LightningModule], num_servers: int) -> None:
    swarm = run_swarm(make, loader(digits()), pipeline="net", num_servers=num_servers, max_steps=STEPS)
    assert_exact(swarm, run_plain(make, loader(digits()), max_steps=STEPS))


class Handing(nn.Module):
    """Takes a dict and returns it with a changed value."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, out)

    @override
    def forward(self, given: dict[str, Any]) -> dict[str, Any]:
        given["hidden"] = torch.tanh(self.linear(given["hidden"]))
        given["seen"] = given["hidden"].mean(1)
        return given


class OfDicts(L.LightningModule):
    """Passes a dict through its blocks; its loss uses the returned dict, or the original one."""

    def __init__(self, read: Callable[[dict[str, Any], dict[str, Any]], Tensor]) -> None:
        super().__init__()
        self.net = nn.Sequential(Handing(64, 16), Handing(16, 16), Handing(16, 10))
        self.read = read

    @override
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        given = {"hidden": batch[0], "images": batch[0]}
        returned = self.net(given)
        return F.cross_entropy(returned["hidden"], batch[1]) + self.read(given, returned)

    configure_optimizers = Rebuilding.configure_optimizers


def test_blocks_hand_a_dict_on() -> None:
    make = partial(OfDicts, lambda given, returned: given["images"].mean() + returned["seen"].mean())
    assert_exact(run_swarm(make, loader(digits()), max_steps=STEPS), run_plain(make, loader(digits()), max_steps=STEPS))


@pytest.mark.parametrize("key", ["hidden", "seen"])
def test_what_the_first_block_put_into_a_dict_cannot_be_read(key: str) -> None:
    make = partial(OfDicts, lambda given, returned: given[key].mean())
    with pytest.raises(ConfigError, match=rf"a block replaced '{key}' in a dict"):
        run_swarm(make, loader(digits()), max_steps=STEPS)


class Masked(nn.Linear):
    @override
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
        mask *= 1.5
        return super().forward(x * mask)


def test_a_keyword_argument_that_later_stages_read() -> None:
    class Model(Rebuilding):
        def __init__(self) -> None:
            super().__init__(nn.Identity)
            self.net = lightning_swarm.nn.Sequential(Masked(64, 16), nn.Tanh(), Masked(16, 10))

        @override
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            mask = torch.full((len(batch[0]), 1), 0.5, dtype=batch[0].dtype)
            return F.cross_entropy(self.net(batch[0], mask=mask), batch[1])

    with pytest.raises(ConfigError, match=r"a forward of stage 0 wrote into `mask`"):
        run_swarm(Model, loader(digits()), pipeline="net", max_steps=STEPS)


class Scaled(nn.Linear):
    """Multiplies its mask in place by a trained factor."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__(width, out)
        self.scale = nn.Parameter(torch.tensor(0.7))

    @override
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
        mask *= self.scale
        return super().forward(x * mask)


class Noting(nn.Linear):
    """Applies an operation of the test's choice to its second argument."""

    def __init__(self, width: int, out: int, do: Callable[[Any, Tensor], Any]) -> None:
        super().__init__(width, out)
        self.do = do

    @override
    def forward(self, x: Tensor, given: Any) -> Tensor:  # type: ignore[override]
        self.do(given, x)
        return super().forward(x)


class Keywords(Rebuilding):
    """Its loss reads a keyword argument, which a block overwrote."""

    shared = ("given",)

    def __init__(
        self, *net: Callable[[], nn.Module], make: Callable[[Tensor], Any], read: Callable[[Any], Any]
    ) -> None:
        super().__init__(nn.Identity)
        self.net = lightning_swarm.nn.Sequential(*(block() for block in net))
        self.make, self.read = make, read

    @override
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        name = "mask" if any(isinstance(block, Scaled) for block in self.net) else "given"
        given = self.make(batch[0])
        with torch.no_grad():
            before = self.net(batch[0], **{name: self.make(batch[0])}).mean()
        loss = F.cross_entropy(self.net(batch[0], **{name: given}), batch[1])
        return loss + before + self.read(given)


HEAD = partial(nn.Linear, 16, 10)


@pytest.mark.parametrize(
    "net",
    [(partial(Scaled, 64, 16), nn.Tanh, HEAD), (partial(nn.Linear, 64, 16), nn.Tanh, partial(Scaled, 16, 10))],
    ids=["by the first stage", "by the last stage"],
)
def test_a_keyword_argument_is_written_with_a_gradient(net: Any) -> None:
    make = partial(
        Keywords,
        *net,
        make=lambda x: torch.full((len(x), 1), 0.5, dtype=x.dtype),
        read=lambda mask: mask.square().mean(),
    )
    assert_exact(run_swarm(make, loader(digits()), max_steps=STEPS), run_plain(make, loader(digits()), max_steps=STEPS))


def table(x: Tensor) -> Tensor:
    return torch.linspace(0.0, 2.0, 5, dtype=x.dtype)


def clamp(given: Any, x: Tensor) -> None:
    given.clamp_(max=1.0)


def count(given: Any, x: Tensor) -> None:
    given += x.sum()


def hide(given: Any, x: Tensor) -> None:
    given.data.clamp_(max=1.0)


def append(given: Any, x: Tensor) -> None:
    given.append(x.mean(1))


def of_notes(do: Any, make: Any, read: Any) -> Callable[[], L.LightningModule]:
    return partial(Keywords, partial(nn.Linear, 64, 16), nn.Tanh, partial(Noting, 16, 10, do), make=make, read=read)


def test_all_microbatches_write_the_same() -> None:
    make = of_notes(clamp, table, Tensor.sum)
    assert_exact(run_swarm(make, loader(digits()), max_steps=STEPS), run_plain(make, loader(digits()), max_steps=STEPS))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (of_notes(count, table, Tensor.sum), r"wrote into `given` are not available"),
        (of_notes(hide, table, Tensor.sum), r"`given` was written by `.data`"),
        (of_notes(append, lambda x: [], lambda given: given[0].mean()), r"a block replaced 0 in a list"),
    ],
    ids=["a sum", "by data", "a list"],
)
def test_what_is_written_into_a_keyword_argument_cannot_be_had(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run_swarm(make, loader(digits()), max_steps=STEPS)


class Residual(nn.Linear):
    @override
    def forward(self, x: Tensor, skip: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x + skip)


class Twice(Rebuilding):
    """Passes its blocks one tensor under two names, or two parts of one tensor."""

    def __init__(self, *, apart: bool) -> None:
        super().__init__(nn.Identity)
        self.net = lightning_swarm.nn.Sequential(nn.ReLU(inplace=True), Residual(32, 16), nn.Tanh(), HEAD())
        self.apart = apart

    @override
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        one, other = (batch[0] - 0.3).chunk(2, dim=1)
        return F.cross_entropy(self.net(one, skip=other if self.apart else one), batch[1])


def test_what_is_written_is_given_twice() -> None:
    make = partial(Twice, apart=True)
    assert_exact(run_swarm(make, loader(digits()), max_steps=STEPS), run_plain(make, loader(digits()), max_steps=STEPS))
    with pytest.raises(ConfigError, match=r"wrote into a positional argument, whose memory is also in `skip`"):
        run_swarm(partial(Twice, apart=False), loader(digits()), max_steps=STEPS)


class Splits(nn.Linear):
    """Returns its output, and a tensor that `handed` computes from its output and input."""

    def __init__(self, width: int, out: int, handed: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__(width, out)
        self.handed = handed

    @override
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        output = super().forward(x)
        return output, self.handed(output, x)


class Joins(nn.Module):
    """Overwrites its second argument in place."""

    def forward(self, both: tuple[Tensor, Tensor]) -> Tensor:
        output, other = both
        other.tanh_()
        return output + other.mean(1, keepdim=True)


def of_two(handed: Callable[[Tensor, Tensor], Tensor]) -> L.LightningModule:
    module = Rebuilding(nn.Identity)
    module.net = nn.Sequential(Splits(64, 16, handed), Joins(), nn.Linear(16, 64))
    return module


@pytest.mark.parametrize(
    ("handed", "message"),
    [
        (lambda output, x: x, r"a positional argument would change"),
        (lambda output, x: output[:, 2:], r"another part of its output would change"),
    ],
    ids=["the argument", "a part of the output"],
)
def test_a_later_stage_writes_into_what_others_see(handed: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run_swarm(partial(of_two, handed), loader(digits()), split=["0", "1"], max_steps=STEPS)


def test_a_later_stage_writes_into_what_only_it_has() -> None:
    make = partial(of_two, lambda output, x: 2 * output)
    swarm = run_swarm(make, loader(digits()), split=["0", "1"], max_steps=STEPS)
    assert_exact(swarm, run_plain(make, loader(digits()), max_steps=STEPS))


class AddsInPlace(nn.Module):
    def __init__(self, *, writes: bool) -> None:
        super().__init__()
        self.linear, self.writes = nn.Linear(16, 16), writes

    def forward(self, hidden: Tensor, memory: Tensor) -> Tensor:
        if self.writes:
            memory += 1.0
        return self.linear(hidden) + memory


class OneByOne(Rebuilding):
    """A later block overwrites an encoder's output."""

    def __init__(self) -> None:
        super().__init__(nn.Identity)
        self.net = nn.ModuleList(AddsInPlace(writes=index == 2) for index in range(3))
        self.encoder, self.head = nn.Linear(64, 16), nn.Linear(16, 10)

    @override
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        memory = self.encoder(batch[0])
        hidden = memory.tanh()
        for block in self.net:
            hidden = block(hidden, memory=memory)
        return F.cross_entropy(self.head(hidden), batch[1]) + memory.square().mean()


def test_a_later_block_writes_into_what_all_are_given() -> None:
    with pytest.raises(ConfigError, match=r"a positional argument would change"):
        run_swarm(OneByOne, loader(digits()), pipeline="net", max_steps=STEPS)


@pytest.mark.parametrize(
    "written",
    [
        {},
        {"tensors": {"7": torch.ones(2)}, "replaced": []},
        {"tensors": {"x": torch.ones(2)}, "replaced": []},
        {"tensors": {}, "replaced": [["a", "b"]]},
        {"tensors": {}, "replaced": [[]]},
        {"tensors": {"0": 1.0}, "replaced": []},
    ],
)
def test_a_server_cannot_write_elsewhere(written: Any) -> None:
    x = torch.zeros(2)
    with pytest.raises(ProtocolError, match="wrote into arguments that the call does not have"):
        write_back({POSITIONAL: ((x,), [x])}, POSITIONAL, written, str)


def test_an_expanded_argument_is_not_written() -> None:
    x = torch.zeros(2, 1).expand(2, 3)
    written = {"tensors": {"0": torch.ones(2, 3)}, "replaced": []}
    with pytest.raises(ConfigError, match=r"unless it is an expanded tensor"):
        write_back({POSITIONAL: ((x,), [x])}, POSITIONAL, written, str)
