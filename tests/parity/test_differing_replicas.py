"""Replicas whose weights come to differ: the run keeps the reference's weights and excludes the other replicas."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from typing_extensions import override

from lightning_swarm.core.errors import ConfigError, StepError
from lightning_swarm.protocol.messages.step import Record, Vacancy
from lightning_swarm.server.server import Server
from lightning_swarm.testing import InMemoryStrategy
from tests.parity.harness import Run, SwarmRun, assert_exact, run_plain, run_swarm
from tests.parity.models import DigitsMLP, Recipe, digits, loader
from tests.parity.test_joining import Joining
from tests.parity.test_whole import WHOLE, Branches
from tests.parity.trainers import Seen, ThreadStrategy, train
from tests.parity.trainers import assert_exact as assert_same

STEPS = 9
AT = 3

Spoil = Callable[[Mapping[str, Tensor], Mapping[str, Tensor]], None]
"""Changes a stage's weights; its second argument is the weights of one step before."""


def make() -> DigitsMLP:
    return DigitsMLP(Recipe(optimizer="adamw"))


def flip_bit(weights: Mapping[str, Tensor], before: Mapping[str, Tensor]) -> None:
    """Flip the last bit of one number."""
    next(iter(weights.values())).view(-1).view(torch.int64)[:1] ^= 1


def step_twice_as_far(weights: Mapping[str, Tensor], before: Mapping[str, Tensor]) -> None:
    for name, tensor in weights.items():
        tensor.mul_(2.0).sub_(before[name])


def miss_a_step(weights: Mapping[str, Tensor], before: Mapping[str, Tensor]) -> None:
    for name, tensor in weights.items():
        tensor.copy_(before[name])


def spoil_server(server: Server, spoil: Spoil, before: Mapping[str, Tensor] | None = None) -> None:
    (index,) = server.steps.stages
    with torch.no_grad():
        spoil(server.steps.stage(index).parameters, before or {})


class Spoiling(L.Callback):
    """Corrupts the weights of some servers before a step, once."""

    def __init__(self, *servers: int, spoil: Spoil = flip_bit, at: int = AT) -> None:
        self.servers, self.spoil, self.at = servers, spoil, at
        self.before: dict[int, dict[str, Tensor]] = {}
        self.num_spoilt = 0

    @override
    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        assert isinstance(trainer.strategy, InMemoryStrategy)
        for number in self.servers:
            server = trainer.strategy.servers[number]
            if trainer.global_step == self.at and self.num_spoilt < len(self.servers):
                spoil_server(server, self.spoil, self.before[number])
                self.num_spoilt += 1
            weights = server.steps.stage(*server.steps.stages).parameters
            self.before[number] = {name: tensor.detach().clone() for name, tensor in weights.items()}


def plain(**options: Any) -> Run:
    return run_plain(make, loader(digits()), **{"max_steps": STEPS, "max_epochs": -1, **options})


def swarm(spoiling: Spoiling, num_servers: int, *, num_gone: int = 1, **options: Any) -> SwarmRun:
    options = {"max_steps": STEPS, "max_epochs": -1, **options}
    run = run_swarm(make, loader(digits()), callbacks=[spoiling], num_servers=num_servers, num_gone=num_gone, **options)
    assert spoiling.num_spoilt == len(spoiling.servers)
    return run


def left_out(records: Sequence[Record]) -> list[tuple[int, Vacancy]]:
    return [(record.step, one) for record in records for one in record.left if one.reason]


# Servers 1, 3 (and 5) hold the first stage, 0, 2 (and 4) the second. Server 0 coordinates.
@pytest.mark.each_value
@pytest.mark.parametrize(("number", "spoil"), [(2, flip_bit), (3, step_twice_as_far), (2, miss_a_step)])
def test_of_two_the_older_one_stays(number: int, spoil: Spoil, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "lightning_swarm"):
        run = swarm(Spoiling(number, spoil=spoil), 4)
    assert_exact(run, plain())
    ((step, vacancy),) = left_out(run.records)
    assert (step, vacancy.member.peer_id) == (AT, f"peer-{number}")
    name = "'net.2.weight'" if number == 2 else "'net.0.weight'"
    assert f"optimizer state of peer-{number} differ in " in vacancy.reason
    assert f" from those of peer-{number - 2}, which has been in the stage longest." in vacancy.reason
    assert name in vacancy.reason
    assert "so the right one is unknown: the oldest is kept" in vacancy.reason
    events = [event for event in run.strategy.peers[0].events.newest if event.kind == "gone"]
    assert [event.peer for event in events] == [f"peer-{number}"]
    (line,) = [one.getMessage() for one in caplog.records if one.name == "lightning_swarm.membership"]
    assert f"peer-{number} was left out, because its weights differ" in line
    assert name in line


@pytest.mark.parametrize("number", [0, 1])
def test_of_two_the_older_one_stays_though_it_is_the_wrong_one(number: int) -> None:
    run = swarm(Spoiling(number), 4)
    ((step, vacancy),) = left_out(run.records)
    assert (step, vacancy.member.peer_id) == (AT, f"peer-{number + 2}")
    assert_exact(run, plain())  # a flipped last bit is within rounding


@pytest.mark.parametrize(("number", "spoil"), [(0, miss_a_step), (1, flip_bit), (5, miss_a_step)])
def test_of_three_the_two_that_are_equal_stay(number: int, spoil: Spoil) -> None:
    run = swarm(Spoiling(number, spoil=spoil), 6)
    assert_exact(run, plain())
    ((step, vacancy),) = left_out(run.records)
    assert (step, vacancy.member.peer_id) == (AT, f"peer-{number}")
    assert "from those of 2 of 3 replicas. " in vacancy.reason
    assert ".weight'" in vacancy.reason
    takeovers = [event for peer in run.strategy.peers for event in peer.events.newest if event.kind == "takeover"]
    assert len(takeovers) == (number == 0), "a coordinator that differs has another one coordinate"


def test_in_both_stages_at_once() -> None:
    run = swarm(Spoiling(2, 3), 4, num_gone=2)
    assert_exact(run, plain())
    assert [(step, one.member.peer_id) for step, one in left_out(run.records)] == [(AT, "peer-3"), (AT, "peer-2")]


def test_steps_that_are_late() -> None:
    options: dict[str, Any] = {"delay_optimizer_step": True, "max_steps": STEPS + 3}
    run = swarm(Spoiling(2), 4, **options)
    sound = run_swarm(make, loader(digits()), num_servers=2, max_epochs=-1, **options)
    # The record that excludes a server does not lag, so the sound run's counters differ.
    run.global_steps = sound.global_steps
    assert_exact(run, sound)
    assert [one.member.peer_id for _, one in left_out(run.records)] == ["peer-2"]


def test_a_step_of_several_batches_of_one_trainer_keeps_them() -> None:
    """The trainer keeps only its newest batch, so earlier batches that passed through the server still count."""
    run = swarm(Spoiling(2), 4, accumulate_grad_batches=2)
    assert_exact(run, plain(accumulate_grad_batches=2))
    assert [one.member.peer_id for _, one in left_out(run.records)] == ["peer-2"]


# ---------------------------------------------------------------------- newcomers


class SpoilingJoiners(Joining):
    """Starts servers, and corrupts joiners of the first stage before each step."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.spoilt: list[tuple[int, str]] = []

    @override
    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)
        strategy = trainer.strategy
        assert isinstance(strategy, InMemoryStrategy)
        assert strategy.peer is not None
        assert strategy.run is not None
        strategy.peer.runtime.run(asyncio.sleep(2.0))  # excluded servers need time to notice it and to join again
        for joiner in self.joiners:
            if joiner.membership.me in strategy.run.session.run.rosters[0]:
                spoil_server(joiner, flip_bit)
                self.spoilt.append((trainer.global_step, joiner.membership.me.peer_id))


@pytest.mark.first_cells(1)
@pytest.mark.parametrize("count", [1, 4, 6])
def test_newcomers_that_differ_alike_outvote_nobody(count: int) -> None:
    joining = SpoilingJoiners(at=1, count=count)
    options: dict[str, Any] = {"max_steps": 40, "max_epochs": -1}
    spoilt = (count + 1) // 2
    run = run_swarm(
        make,
        loader(digits()),
        callbacks=[joining],
        num_joiners=count,
        num_gone=spoilt,
        latency_s=0.001,
        **options,
    )
    assert_exact(run, plain(**options))
    out = left_out(run.records)
    assert {(step, one.member.peer_id) for step, one in out} == set(joining.spoilt)
    assert len(out) == 2 * spoilt, "each joins once more"
    assert all("'net.0.weight'" in one.reason for _, one in out)
    assert len(run.strategy.refusals) == spoilt
    for error in run.strategy.refusals:
        assert isinstance(error, ConfigError)
        assert "may join once more" in str(error)


class KillingTheCoordinator(SpoilingJoiners):
    """Kills the coordinator once, while newcomers are in a roster that no closing has compared."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.killed: list[str] = []

    @override
    def on_train_batch_start(self, trainer: L.Trainer, *arguments: Any) -> None:
        super().on_train_batch_start(trainer, *arguments)
        strategy = trainer.strategy
        assert isinstance(strategy, InMemoryStrategy)
        assert strategy.run is not None
        assert strategy.network is not None
        if len(self.spoilt) == self.count and not self.killed:
            self.killed.append(strategy.run.session.run.coordinator)
            strategy.network.kill(strategy.run.session.run.coordinator)


def test_who_takes_over_knows_the_newcomers() -> None:
    """If one server and two newcomers differ from it alike, the successor still keeps the server."""
    joining = KillingTheCoordinator(at=1, count=2)
    options: dict[str, Any] = {"max_steps": 12, "max_epochs": -1}
    run = run_swarm(
        make,
        loader(digits()),
        callbacks=[joining],
        num_stages=1,
        num_joiners=2,
        num_gone=3,
        role="trainer",
        latency_s=0.001,
        **options,
    )
    assert_exact(run, plain(**options))
    assert joining.killed == ["peer-1"]
    assert [event.peer for peer in run.strategy.peers for event in peer.events.newest if event.kind == "takeover"]
    first = left_out(run.records)[:2]
    assert {(step, one.member.peer_id) for step, one in first} == set(joining.spoilt[:2])


# ---------------------------------------------------------------------- uncut


class SpoilingItself(L.Callback):
    """Corrupts the weights of the trainer's own server before a step, once."""

    def __init__(self, seen: list[Seen], rank: int) -> None:
        self.seen, self.rank, self.done = seen, rank, False

    @override
    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        strategy = trainer.strategy
        assert isinstance(strategy, ThreadStrategy)
        if strategy._rank == self.rank and len(self.seen[0].records) >= AT and not self.done:
            assert strategy.peer is not None
            assert strategy.peer.server is not None
            spoil_server(strategy.peer.server, flip_bit)
            self.done = True


@pytest.mark.parametrize(("num_trainers", "rank"), [(2, 1), (4, 2)])
def test_trainers_of_a_model_that_is_not_cut(num_trainers: int, rank: int) -> None:
    kept: list[Seen] = []

    def making(seen: Seen) -> Branches:
        kept.append(seen)
        return Branches()

    spoiling = SpoilingItself(kept, rank)
    seen = train(num_trainers, making, callbacks=lambda _: [spoiling], max_steps=20, swarm=WHOLE)
    assert spoiling.done
    assert_same(seen, lambda: Branches(), digits(), num_trainers=num_trainers, gone=[rank])
    assert {one.member.peer_id for _, one in left_out(seen.records)} == {f"peer-{rank}"}


def test_the_leads_own_copy_of_a_model_that_is_not_cut() -> None:
    """The other trainers' loops follow the lead's, so the run fails with an error that names the lead's machine."""
    kept: list[Seen] = []

    def making(seen: Seen) -> Branches:
        kept.append(seen)
        return Branches()

    spoiling = SpoilingItself(kept, 0)
    with pytest.raises(StepError, match=r"'temperature' from those of 2 of 3 replicas.*This is the lead's own copy"):
        train(3, making, callbacks=lambda _: [spoiling], max_steps=20, swarm=WHOLE)
    assert spoiling.done
