"""Blocks that write into what they are given: the caller sees it, as on one machine, or reads of it are refused."""

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
from lightning_swarm.model.partition.written_inputs import write_back
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
    """Compares what comes out with what went in, which the first block has changed meanwhile."""

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
    """Takes a dict and returns it, with another value in it."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, out)

    @override
    def forward(self, given: dict[str, Any]) -> dict[str, Any]:
        given["hidden"] = torch.tanh(self.linear(given["hidden"]))
        given["seen"] = given["hidden"].mean(1)
        return given


class OfDicts(L.LightningModule):
    """Its blocks hand a dict on; the loss is of the one returned, or of the one given."""

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
    with pytest.raises(ConfigError, match=rf"the first block replaced '{key}' in a dict"):
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
        write_back((x,), [x], written, str)


def test_an_expanded_argument_is_not_written() -> None:
    x = torch.zeros(2, 1).expand(2, 3)
    with pytest.raises(ConfigError, match=r"not into one that is expanded"):
        write_back((x,), [x], {"tensors": {"0": torch.ones(2, 3)}, "replaced": []}, str)
