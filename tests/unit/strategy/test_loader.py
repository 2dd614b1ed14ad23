"""Batches that a trainer reads for another trainer equal those in the loader's order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info
from typing_extensions import override

from lightning_swarm.core.errors import ConfigError
from lightning_swarm.protocol.messages.run import BatchNumber
from lightning_swarm.strategy.data.loader import LaneSampler, SharedLoader, part_of


class Numbers(Dataset[Tensor]):
    """Numbers that must be opened first."""

    numbers: Tensor | None = torch.arange(12.0)

    def __len__(self) -> int:
        return 12

    @override
    def __getitem__(self, index: int) -> Tensor:
        assert self.numbers is not None
        return self.numbers[index]


class Unopened(Numbers):
    numbers = None


def open_numbers(_: int) -> None:
    info = get_worker_info()
    assert info is not None
    info.dataset.numbers = torch.arange(12.0)


class Scaled(DataLoader[Tensor]):
    """Changes each batch that it yields, as many projects do."""

    @override
    def __iter__(self) -> Iterator[Tensor]:  # type: ignore[override]
        for batch in super().__iter__():
            yield batch * 10.0


class Twice(DataLoader[Tensor]):
    @override
    def __iter__(self) -> Iterator[Tensor]:  # type: ignore[override]
        for batch in super().__iter__():
            yield batch
            yield batch


def shared(loader: DataLoader[Any]) -> SharedLoader:
    """Return the shared loader, with all batches in its lane."""
    lists = list(loader.batch_sampler)  # type: ignore[arg-type]

    def read() -> Iterator[tuple[BatchNumber, list[Any], int]]:
        for index, indices in enumerate(lists):
            yield (0, index), indices, len(lists) - 1 - index

    vars(loader).update(batch_sampler=LaneSampler(loader.batch_sampler, read, lambda: len(lists)))
    return SharedLoader(loader, lambda *_: None, lambda: None)


@pytest.mark.parametrize(
    "loader",
    [
        lambda: DataLoader(Numbers(), 4),
        lambda: Scaled(Numbers(), 4),
        lambda: Scaled(Numbers(), 4, generator=torch.Generator(), timeout=5.0, num_workers=1, prefetch_factor=2),
        lambda: Scaled(Unopened(), 4, num_workers=1, worker_init_fn=open_numbers),
    ],
    ids=["plain", "its own `__iter__`", "workers", "what workers open"],
)
def test_a_batch_out_of_order_is_that_in_order(loader: Any) -> None:
    made = shared(loader())
    in_order = list(made)
    state = torch.get_rng_state()
    out_of_order = [made.fetch([8, 9, 10, 11]), made.fetch([0, 1, 2, 3])]
    assert torch.equal(torch.get_rng_state(), state), "the order of the next epoch is drawn from these"
    assert torch.equal(out_of_order[0], in_order[2])
    assert torch.equal(out_of_order[1], in_order[0])


def test_a_loader_that_gives_other_batches_than_its_sampler_is_refused() -> None:
    made = shared(Twice(Numbers(), 4))
    with pytest.raises(ConfigError, match=r"`__iter__` of Twice gives another number.*distributed_sampler=False"):
        list(made)
    with pytest.raises(ConfigError, match="gives another number"):
        made.fetch([0, 1])


@pytest.mark.parametrize("num_trainers", [1, 2])
def test_the_position_of_a_whole_stream_is_not_that_of_a_part(num_trainers: int) -> None:
    """A stateful loader would resume the part there."""

    class Stateful(IterableDataset[int]):
        @override
        def __iter__(self) -> Iterator[int]:
            yield from range(10)

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise AssertionError

    part = part_of(DataLoader(Stateful(), batch_size=2), 0, num_trainers).dataset
    for name in ("state_dict", "load_state_dict"):
        assert hasattr(part, name) == (num_trainers == 1)
    assert list(part) == list(range(0, 10, num_trainers))
