"""A single trainer calls the coordinator once per batch, and its curve equals that of one machine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset
from typing_extensions import override

from lightning_swarm.client.coordinator_client import CoordinatorCalls
from lightning_swarm.coordinator.trainer_handlers import TrainerHandlers
from lightning_swarm.protocol.rpc import BEGIN, DONE, GRANT, RECORD, Call
from tests.parity.harness import assert_exact, run_plain, run_swarm
from tests.parity.models import DigitsMLP, Recipe, digits, loader
from tests.parity.test_delayed import assert_late, run_late

NUM_BATCHES = 12
NUM_EPOCHS = 2
PER_EPOCH = NUM_BATCHES // NUM_EPOCHS
SIZES = [8, 8, 5, 8, 3, 3, 3, 8]


def digits_net() -> DigitsMLP:
    return DigitsMLP(Recipe(schedule="onecycle"))


class Sizes(IterableDataset[list[Tensor]]):
    """Batches of irregular sizes, so that the size of the next one cannot be predicted."""

    @override
    def __iter__(self) -> Iterator[list[Tensor]]:
        rows = iter(digits())
        for size in SIZES:
            images, labels = zip(*(next(rows) for _ in range(size)), strict=True)
            yield [torch.stack(images), torch.stack([torch.as_tensor(one) for one in labels])]


@contextmanager
def asked() -> Iterator[list[str]]:
    """Collect the methods that the trainer calls at the coordinator."""
    found: list[str] = []
    call = CoordinatorCalls.call

    async def noted(self: CoordinatorCalls, method: Call, request: Any) -> Any:
        found.append(method.name)
        return await call(self, method, request)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CoordinatorCalls, "call", noted)
        yield found


@pytest.mark.first_cells(1)
@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("target_batch_size", [None, 8])
def test_one_call_a_batch(window: int, target_batch_size: int | None) -> None:
    options: dict[str, Any] = {"max_epochs": NUM_EPOCHS, "limit_train_batches": PER_EPOCH}
    if target_batch_size is None:
        options["accumulate_grad_batches"] = window
    target = {} if target_batch_size is None else {"target_batch_size": window * target_batch_size}
    with asked() as calls:
        swarm = run_swarm(digits_net, loader(digits()), num_servers=4, latency_s=0.01, **options, **target)
    assert len(swarm.losses) == NUM_BATCHES
    if target_batch_size is None:
        assert_exact(swarm, run_plain(digits_net, loader(digits()), **options))
    assert calls.count(DONE.name) == NUM_BATCHES
    assert calls.count(GRANT.name) == 2 * NUM_EPOCHS, (
        "of an epoch's first and last batch the place is asked for by itself"
    )
    assert RECORD.name not in calls


@pytest.mark.first_cells(1)
@pytest.mark.parametrize("window", [1, 2])
def test_steps_that_are_late_wait_for_one_call_a_batch(window: int) -> None:
    """While the first microbatches are under way the lead also announces that it trains."""
    data = loader(digits())
    late = run_late(digits_net, list(data)[:PER_EPOCH], max_steps=NUM_BATCHES // window, window=window)
    with asked() as calls:
        swarm = run_swarm(
            digits_net,
            data,
            max_epochs=NUM_EPOCHS,
            limit_train_batches=PER_EPOCH,
            accumulate_grad_batches=window,
            num_servers=4,
            latency_s=0.01,
            delay_optimizer_step=True,
            rebalancing="none",
        )
    assert_late(swarm, late)
    assert calls.count(DONE.name) == NUM_BATCHES
    assert calls.count(GRANT.name) == 2 * NUM_EPOCHS
    assert calls.count(RECORD.name) <= 2 * NUM_EPOCHS, "where an epoch ends, and before its last batch"
    assert calls.count(BEGIN.name) >= NUM_BATCHES // window // 2


def test_a_place_that_is_not_large_enough_is_given_back() -> None:
    data = DataLoader(Sizes(), batch_size=None)
    with asked() as calls:
        swarm = run_swarm(digits_net, data, max_steps=len(SIZES), num_servers=4)
    assert_exact(swarm, run_plain(digits_net, data, max_steps=len(SIZES)))
    num_changes = sum(one != other for one, other in pairwise(SIZES))
    assert calls.count(GRANT.name) == 1 + num_changes
    assert calls.count(DONE.name) == len(SIZES) + num_changes


class Thaws(Callback):
    """Trains another block from the third batch on."""

    @override
    def on_train_batch_start(self, trainer: object, pl_module: torch.nn.Module, batch: object, batch_idx: int) -> None:
        for name, parameter in pl_module.named_parameters():
            if name.startswith("net.0"):
                parameter.requires_grad_(batch_idx >= 2)


@pytest.mark.parametrize("ahead", [True, False])
def test_a_place_is_given_back_where_something_else_is_to_train(
    monkeypatch: pytest.MonkeyPatch, *, ahead: bool
) -> None:
    if not ahead:

        async def none(*_: object) -> None:
            return None

        monkeypatch.setattr(TrainerHandlers, "_grant_ahead", none)
    data = loader(digits())
    with asked() as calls:
        swarm = run_swarm(digits_net, data, max_steps=PER_EPOCH, num_servers=4, callbacks=[Thaws()])
    assert_exact(swarm, run_plain(digits_net, data, max_steps=PER_EPOCH, callbacks=[Thaws()]))
    assert calls.count(GRANT.name) == (2 if ahead else PER_EPOCH), (
        "the first, and the one from which something else trains"
    )
