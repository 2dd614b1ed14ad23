"""If the lead of several trainers dies, another trainer takes over, and the curve remains that of one trainer."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, ProgressBar
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import SumMetric
from typing_extensions import override

from lightning_swarm.coordinator.membership.trainers import TrainerMembership
from lightning_swarm.coordinator.takeover import choose_standby_lead, seniority
from lightning_swarm.core.errors import ProtocolError, Replaced, Unreachable
from lightning_swarm.core.limits import Limits
from lightning_swarm.network import PeerId
from lightning_swarm.peer.peer import Peer
from lightning_swarm.protocol.messages.state import HeldSnapshots
from lightning_swarm.strategy import startup
from lightning_swarm.strategy.rollback import loop_transfer
from tests.parity.harness import comparable
from tests.parity.models import DigitsMLP, Recipe, digits
from tests.parity.test_shared_data import Weights, assert_each_once, assert_same, validation
from tests.parity.trainers import Seen, ThreadStrategy, coordinator_of, shuffled, train

LIMITS = Limits(
    call_timeout=10.0,
    start_timeout=30.0,
    lead_timeout=30.0,
    silence_timeout=0.5,
    revive_timeout=0.5,
    leave_timeout=0.5,
    stage_timeout=60.0,
    snapshot_interval=0.001,
)
"""The interval is so short that a snapshot begins at every step if the one before is complete."""

NUM_EPOCHS = 3


@pytest.fixture(autouse=True)
def one_more_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a server beside two trainers, most of the voters survive the lead."""
    make_peer = ThreadStrategy.make_peer

    def with_server(strategy: ThreadStrategy) -> None:
        make_peer(strategy)
        if strategy._rank == 0:
            strategy.add_server()

    monkeypatch.setattr(ThreadStrategy, "make_peer", with_server)


class Several(DigitsMLP):
    """A validated module that kills the lead.

    Args:
        seen: Observations of the run.
        kills: Number of records -> place in the loop where the lead is killed then, once.
    """

    def __init__(self, seen: Seen, kills: dict[int, str] | None = None) -> None:
        super().__init__(Recipe(schedule="onecycle"))
        self.seen = seen
        self.kills = kills or {}
        self.num_samples = SumMetric()
        self.steps: dict[int, tuple[float, float]] = {}  # step -> sums over all its samples, as logged
        self.epochs: dict[int, tuple[int, float, float]] = {}

    def at(self, place: str) -> None:
        if not self.is_due(place):
            return
        self.seen.wait_for(lambda: standby_of(self.seen) is not None)
        if place == "behind" and not comes_with_records(self.seen):
            return  # a later batch will do
        del self.kills[next(at for at, where in self.kills.items() if where == place)]
        self.seen.kill(f"peer-{rank_of(self.trainer)}")

    def is_due(self, place: str) -> bool:
        lives = self.trainer.is_global_zero and rank_of(self.trainer) not in dead(self.seen)
        return lives and any(where == place and len(self.seen.records) >= at for at, where in self.kills.items())

    def fall_behind(self) -> None:
        """Wait until the other trainers have filled a step without the current batch."""
        until_s = time.monotonic() + 0.3

        def is_full() -> bool:
            coordinator = coordinator_of([*self.seen.peers, *self.seen.servers])
            return coordinator is not None and coordinator.generation.step_state.open.ready

        self.seen.wait_for(lambda: is_full() or time.monotonic() >= until_s)

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.at("between batches")
        if self.is_due("behind"):
            self.fall_behind()

    @override
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        num_samples = float(len(batch[0]))
        self.log("logged", num_samples, sync_dist=True, reduce_fx="sum", on_step=True, on_epoch=True)
        self.num_samples(torch.tensor(num_samples))
        self.log("counted", self.num_samples, sync_dist=True, on_step=True, on_epoch=True)
        self.at("in a batch")
        self.at("behind")
        return loss

    @override
    def on_train_batch_end(self, *args: Any) -> None:
        strategy, found = self.trainer.strategy, self.trainer.callback_metrics
        assert isinstance(strategy, ThreadStrategy)
        loop = None if strategy.run is None else strategy.run.loop
        if self.trainer.is_global_zero and loop is not None and loop.stepped:
            self.steps[self.trainer.global_step] = float(found["logged_step"]), float(found["counted_step"])

    @override
    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.seen.validated.append(rank_of(self.trainer))
        self.log("val_loss", super().training_step(batch[:-1] if len(batch) > 2 else batch, batch_idx))
        self.at("validating")

    @override
    def on_train_epoch_end(self) -> None:
        found = self.trainer.callback_metrics
        if self.trainer.is_global_zero:
            values = float(found["logged_epoch"]), float(found["counted_epoch"])
            self.epochs[self.trainer.current_epoch] = self.trainer.global_step, *values


def rank_of(trainer: L.Trainer) -> int:
    assert isinstance(trainer.strategy, ThreadStrategy)
    return trainer.strategy._rank


def dead(seen: Seen) -> Collection[int]:
    return [int(peer.removeprefix("peer-")) for peer in seen.killed if peer != "server"]


def standby_of(seen: Seen) -> tuple[Peer, int] | None:
    """Return the standby that would take over if the lead died now, and the step it would resume from."""
    peers = [one for one in seen.peers if one.server is not None and one.transport.peer_id not in seen.killed]
    lead = next(one for one in peers if one.lead.run is not None)
    assert lead.server is not None
    servers = {one.transport.peer_id: one for one in [*peers, *seen.servers]}
    held = {
        peer: HeldSnapshots(
            host="", snapshots=one.server.snapshots.store.held, loops=one.server.snapshots.loops.versions
        )
        for peer, one in servers.items()
        if one is not lead and one.server is not None and one.server.membership.is_member
    }
    run = lead.server.membership.run
    chosen = choose_standby_lead(held, seniority(run), len(run.rosters))
    return None if chosen is None else (servers[chosen[0]], chosen[1])


def comes_with_records(seen: Seen) -> bool:
    """Whether the standby's loop state is older than its records and has logged values that no record shares yet."""
    chosen = standby_of(seen)
    assert chosen is not None
    peer, version = chosen
    assert peer.server is not None
    value = peer.server.snapshots.loops.get(version)
    return bool(value["heard"] and any(value["logs"].values()) and any(part for part, _ in value["added"].values()))


def under_way(seen: Seen) -> None:
    """Wait for the run's first record, as trainers do that join later."""
    seen.wait_for(lambda: len(seen.records) > 0)


def run(
    num_trainers: int,
    kills: dict[int, str],
    come: dict[int, Callable[[Seen], None]] | None = None,
    gone: Collection[int] = (),
    make: type[Several] = Several,
    roles: dict[int, dict[str, Any]] | None = None,
    **options: Any,
) -> Seen:
    """Train; the first trainer leads, and the other trainers join. Only the lead configures the cut.

    Args:
        num_trainers: Trainers in the whole run.
        kills: As in `Several`.
        come: Rank -> condition that its start waits for, in place of the first record.
        gone: Ranks that may end with an error, besides the killed.
        make: Makes the module.
        roles: As in `train`.
        options: As in `train`.
    """
    due, rank = kills, vars(rank_zero_only)["rank"]
    try:
        seen = train(
            num_trainers,
            lambda seen: make(seen, due),
            come={**dict.fromkeys(range(1, num_trainers), under_way), **(come or {})},
            validation=validation,
            raises=False,
            roles={rank: {"num_stages": None, **(roles or {}).get(rank, {})} for rank in range(1, num_trainers)},
            swarm={"limits": LIMITS, **options.pop("swarm", {})},
            **{"max_steps": -1, "max_epochs": NUM_EPOCHS, **options},
        )
    finally:
        vars(rank_zero_only)["rank"] = rank  # a global of the process, which these trainers share as threads only
    for number, error in seen.errors.items():
        if number not in (*dead(seen), *gone):
            raise error
    assert not due, "nobody was killed"
    return seen


ALONE = Weights()


def one_trainer(callbacks: list[L.Callback], make: type[Several] = Several, **options: Any) -> Seen:
    """Train with a single trainer and no failures, as the reference."""
    options = {"max_steps": -1, "max_epochs": NUM_EPOCHS, **options}
    return train(1, make, callbacks=lambda rank: callbacks, validation=validation, **options)


@pytest.fixture(scope="module")
def alone() -> Seen:
    return one_trainer([ALONE])


def standbys(seen: Seen) -> list[int]:
    """Return the leads' ranks in their order, without the first."""
    return [rank for rank in dict.fromkeys(seen.validated) if rank]


def assert_right(seen: Seen, alone: Seen, *, gone: Collection[int] = (0,)) -> None:
    """Check for one trainer's weights and losses, and that all live trainers train on under the last standby."""
    standby = standbys(seen)[-1]
    seen.weights = seen.modules[standby].state_dict()
    assert_same(seen, alone)
    assert_each_once(seen, NUM_EPOCHS)
    assert {len(rosters) for rosters in seen.rosters} == {2}, "it stays cut as it was"
    after = {seen.batches[place][0] for places in seen.steps[seen.went_back[-1] :] for place in places}
    assert after == set(seen.trainers) - set(gone), "all who live train on"
    trainer = seen.trainers[standby]
    assert (trainer.global_step, trainer.current_epoch) == (len(alone.steps), NUM_EPOCHS)
    if len(seen.went_back) == 1:
        assert_logged(seen, standby)


def assert_logged(seen: Seen, standby: int) -> None:
    """Check the new lead's logged counts per epoch.

    They include the samples that were counted when it took over; its own later samples count by its own epochs.
    """
    former, module, back = seen.modules[0], seen.modules[standby], seen.went_back[0]
    assert isinstance(former, Several)
    assert isinstance(module, Several)
    assert module.epochs
    counted = [place for places in seen.steps for place in places]

    def by_then(epoch: int, version: int) -> int:
        total = 0
        for place in counted:
            rank, ids = seen.batches[place]
            own = rank == (0 if place[0] < back else standby)
            total += len(ids) * (seen.numbers[place][0] <= epoch if own else place[0] < version)
        return total

    for step, values_of_step in module.steps.items():
        num_samples = sum(len(seen.batches[place][1]) for place in seen.steps[step - 1])
        assert values_of_step == (num_samples, num_samples), step
    before = 0
    for epoch, (version, *values) in sorted((former.epochs | module.epochs).items()):
        total = by_then(epoch, version)
        if epoch in module.epochs:
            assert values == [total - before] * 2, epoch
        before = total


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("num_trainers", "at", "place"),
    [(2, 6, "between batches"), (2, 3, "in a batch"), (4, 7, "in a batch"), (4, 2, "behind")],
)
def test_another_one_leads(alone: Seen, num_trainers: int, at: int, place: str) -> None:
    """Behind: the lead dies with its loop between two batches, before the records that its snapshot includes."""
    weights = Weights()
    seen = run(num_trainers, {at: place}, callbacks=lambda rank: [weights])
    assert seen.killed == ["peer-0"]
    assert len(standbys(seen)) == 1
    assert_right(seen, alone)
    found = {step: tensors for step, tensors in weights.found.items() if tensors}
    assert len(found) >= 10
    for step, tensors in found.items():
        for name, tensor in tensors.items():
            assert (tensor - ALONE.found[step][name]).abs().max() <= 1e-10, step


class AtTheSeam(Several):
    """Kills the lead where the run resumes from the end of an epoch that is also the end of a step."""

    @override
    def is_due(self, place: str) -> bool:
        chosen = standby_of(self.seen) if super().is_due(place) else None
        return chosen is not None and chosen[1] in (4, 8)


@pytest.mark.thorough
def test_it_goes_on_between_two_epochs() -> None:
    """The loader's generator is restored, so the next epoch has the order it would have had."""

    def data() -> DataLoader[Any]:
        return shuffled(TensorDataset(*(part[:48] for part in digits().tensors)))

    plain = one_trainer([], data=data)
    seen = run(3, {4: "in a batch"}, make=AtTheSeam, data=data)
    assert seen.killed == ["peer-0"]
    assert seen.went_back[0] in (4, 8)
    assert plain.records[3].position == (0, 12)
    seen.weights = seen.modules[standbys(seen)[-1]].state_dict()
    assert_same(seen, plain)


class Deciding(Several):
    """Adds a callback with a decision that depends on validation, which only the lead runs."""

    @override
    def configure_callbacks(self) -> EarlyStopping:
        return EarlyStopping("val_loss", patience=50)


class Bar(ProgressBar):
    """As in Lightning's own example, with an `enable` that is no method."""

    def __init__(self) -> None:
        super().__init__()
        self.enable = True  # type: ignore[assignment, method-assign]

    @override
    def disable(self) -> None:
        self.enable = False  # type: ignore[assignment, method-assign]


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
def test_it_validates_saves_and_decides_from_there_on(alone: Seen, tmp_path: Path) -> None:
    """The lead may also die while it validates."""

    def callbacks(folder: str) -> list[L.Callback]:
        return [ModelCheckpoint(tmp_path / folder, "{epoch}-{step}", monitor="val_loss", save_top_k=2), Bar()]

    options = {"make": Deciding, "enable_checkpointing": True, "enable_progress_bar": True}
    plain = one_trainer(callbacks("alone"), **options)
    seen = run(3, {5: "validating"}, callbacks=lambda rank: callbacks("several"), **options)
    assert seen.killed == ["peer-0"]
    assert_right(seen, alone)
    (standby,) = standbys(seen)
    own = [one for one in plain.trainers[0].callbacks if isinstance(one, (ModelCheckpoint, EarlyStopping))]  # type: ignore[attr-defined]
    assert len(own) == 2
    for rank, trainer in seen.trainers.items():
        decide = [one for one in trainer.callbacks if isinstance(one, (ModelCheckpoint, EarlyStopping))]  # type: ignore[attr-defined]
        shows = [one.enable for one in trainer.callbacks if isinstance(one, Bar)]  # type: ignore[attr-defined]
        assert (len(decide), shows) == ((2, [True]) if rank in (0, standby) else (0, [False])), rank
    for one in own:
        other = next(c for c in seen.trainers[standby].callbacks if type(c) is type(one))  # type: ignore[attr-defined]
        assert comparable(one.state_dict()) == comparable(other.state_dict()), type(one)
    names = [{path.name for path in (tmp_path / folder).iterdir()} for folder in ("alone", "several")]
    assert names[0] == names[1]


@pytest.mark.thorough
def test_the_standby_dies_too(alone: Seen) -> None:
    seen = run(4, {4: "in a batch", 9: "between batches"})
    assert len(seen.killed) == 2
    assert len(seen.went_back) == 2
    assert_right(seen, alone, gone=dead(seen))


@pytest.mark.thorough
def test_the_lead_and_its_standby_die_at_once(alone: Seen) -> None:
    class Both(Several):
        @override
        def at(self, place: str) -> None:
            holding = [one for one in self.seen.peers if one.server and one.server.snapshots.loops.versions]
            chosen = standby_of(self.seen) if self.is_due(place) and len(holding) > 1 else None
            if chosen is not None:
                self.kills.clear()
                self.seen.kill(f"peer-{rank_of(self.trainer)}", chosen[0].transport.peer_id)

    seen = run(5, {4: "in a batch"}, make=Both)
    assert len(seen.killed) == 2
    assert standbys(seen)[0] not in dead(seen)
    assert_right(seen, alone, gone=dead(seen))


@pytest.mark.thorough
def test_the_run_keeps_its_starters_settings(alone: Seen) -> None:
    """Settings that the lead imposes on later trainers are kept by its successor, although its own arguments differ."""
    seen = run(2, {4: "in a batch"}, roles={1: {"microbatch_size": 1, "compression": "8bit", "rebalancing": "none"}})
    assert standbys(seen) == [1]
    assert_right(seen, alone)
    manifests = [one for rank in (0, 1) for one in seen.trainers[rank].strategy.manifests]  # type: ignore[attr-defined]
    assert {one.generation for one in manifests} == {0, 1}
    assert {(one.settings.microbatch_size, one.settings.rebalancing) for one in manifests} == {(3, "gain")}
    ways = [one.settings.compression for one in manifests]
    assert {(one.activations, one.averaging) for one in ways} == {("none", "none")}


@pytest.mark.thorough
def test_the_process_has_its_rank_back(monkeypatch: pytest.MonkeyPatch) -> None:
    found, leave = {}, ThreadStrategy.leave

    def left(strategy: ThreadStrategy) -> None:
        leave(strategy)
        found[strategy._rank] = vars(rank_zero_only)["rank"]

    monkeypatch.setattr(ThreadStrategy, "leave", left)
    monkeypatch.setitem(vars(rank_zero_only), "rank", 7)
    seen = run(2, {4: "in a batch"})
    assert standbys(seen) == [1]
    assert found[1] == 7


@pytest.mark.thorough
def test_a_standby_that_dies_before_it_begins_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has already released the other trainers, which wait for the run that it would begin."""
    begin = startup.start_as_lead

    def dying(strategy: Any, *args: Any) -> Any:
        if strategy._seen.killed:
            strategy._seen.kill(f"peer-{strategy._rank}")
            raise RuntimeError("it is dead")
        return begin(strategy, *args)

    monkeypatch.setattr(startup, "start_as_lead", dying)
    seen = run(3, {4: "in a batch"}, gone=[1, 2])
    assert len(seen.killed) == 2
    (left,) = {1, 2} - set(dead(seen))
    assert isinstance(seen.errors[left], Unreachable)
    assert "which was to continue the run, has not answered for 0.5 s" in str(seen.errors[left])


@pytest.mark.thorough
def test_a_standby_that_cannot_is_followed_by_the_next(alone: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    """A standby that fails to take over does not end any other trainer."""
    unpack, tried = loop_transfer.unpack, []

    def failing(value: Any, version: int, trainer: L.Trainer) -> Any:
        tried.append(rank_of(trainer))
        if len(tried) == 1:
            raise ProtocolError("it is no loop's state")
        return unpack(value, version, trainer)

    monkeypatch.setattr(loop_transfer, "unpack", failing)
    seen = run(4, {4: "in a batch"}, gone=[1, 2, 3])
    cannot = "this peer must take over the run, but cannot: it is no loop's state"
    assert [str(error) for rank, error in seen.errors.items() if rank] == [cannot]
    assert standbys(seen) == tried[1:]
    assert_right(seen, alone, gone=(0, tried[0]))


def is_member(seen: Seen, name: str) -> bool:
    """Return whether a peer's server is in the run."""
    peer = next((one for one in seen.peers if one.transport.peer_id == name), None)
    return peer is not None and peer.server is not None and peer.server.membership.is_member


@pytest.mark.thorough
def test_one_whose_server_is_in_the_run_before_it_trains_comes_again(
    alone: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trainer that had not trained yet is released as well, although its loop has no progress."""
    late, waiting = PeerId("peer-2"), TrainerMembership.waiting
    released: list[Seen] = []

    class Waiting(Several):
        @override
        def is_due(self, place: str) -> bool:
            if not super().is_due(place):
                return False
            until_s = time.monotonic() + 0.2
            self.seen.wait_for(lambda: is_member(self.seen, late) or time.monotonic() >= until_s)
            released[:] = [self.seen]
            return is_member(self.seen, late)

    def held(enrolment: TrainerMembership) -> list[PeerId]:
        gone_back = released and released[0].went_back
        return [one for one in waiting.fget(enrolment) if one != late or gone_back]  # type: ignore[attr-defined]

    monkeypatch.setattr(TrainerMembership, "waiting", property(held))
    seen = run(3, {2: "in a batch"}, callbacks=lambda rank: [Awaiting("peer-2")], make=Waiting)
    before = {seen.batches[place][0] for places in seen.steps[: seen.went_back[0]] for place in places}
    assert 2 not in before, "it did not train yet"
    assert_right(seen, alone)


class Awaiting(L.Callback):
    """After the rollback the lead waits for a trainer before its last steps."""

    def __init__(self, peer: str) -> None:
        self.peer = peer

    @override
    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        assert isinstance(pl_module, Several)
        seen = pl_module.seen
        if trainer.is_global_zero and seen.went_back and len(seen.records) >= 10:
            seen.wait_for(lambda: self.comes(seen))

    def comes(self, seen: Seen) -> bool:
        """Return whether the next record admits it, or an earlier one did."""
        lives = set(seen.trainers) - set(dead(seen))
        coordinator = coordinator_of([*seen.peers, *seen.servers])
        waiting = [] if coordinator is None else coordinator.generation.trainers.membership.waiting
        return self.peer in (*waiting, *seen.trainers_of_the_run) or bool(lives & seen.errors.keys())


@pytest.mark.thorough
def test_the_leads_script_started_again_trains_along(alone: Seen) -> None:
    """The restarted process joins the standby's run as a trainer."""

    def gone_back(seen: Seen) -> None:
        seen.wait_for(lambda: bool(seen.went_back) and len(seen.records) > seen.went_back[0])

    seen = run(4, {5: "in a batch"}, {3: gone_back}, callbacks=lambda rank: [Awaiting("peer-3")])
    assert seen.killed == ["peer-0"]
    assert_right(seen, alone)


@pytest.mark.thorough
def test_a_lead_that_was_frozen_learns_who_leads(alone: Seen) -> None:
    class Freezing(L.Callback):
        @override
        def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
            seen, rank = pl_module.seen, rank_of(trainer)
            if rank == 0 and len(seen.records) == 6:
                seen.wait_for(lambda: standby_of(seen) is not None)
                act(seen, lambda: seen.network.freeze(PeerId("peer-0")))
                seen.wait_for(lambda: bool(seen.went_back))
                act(seen, lambda: seen.network.thaw(PeerId("peer-0")))

    def act(seen: Seen, action: Callable[[], None]) -> None:
        async def act() -> None:
            action()

        seen.runtime.run(act())

    seen = run(3, {}, callbacks=lambda rank: [Freezing()], gone=[0])
    assert isinstance(seen.errors[0], Replaced)
    assert_right(seen, alone)


@pytest.mark.thorough
def test_a_server_with_data_may_take_it_over_too(alone: Seen) -> None:
    """`role="auto"`: it serves, and reads no data until the takeover. The other trainer could not take over."""
    roles = {1: {"role": "auto"}, 2: {"state_dict_type": "sharded"}}
    seen = run(3, {3: "behind"}, {2: lambda seen: seen.wait_for(lambda: is_member(seen, "peer-1"))}, roles=roles)
    assert standbys(seen) == [1]
    assert_right(seen, alone)


@pytest.mark.thorough
def test_one_that_holds_no_stage_comes_again(alone: Seen) -> None:
    """`role="trainer"`: no call reports the rollback to it, and another peer leads."""
    roles = {2: {"role": "trainer"}}
    seen = run(3, {6: "in a batch"}, callbacks=lambda rank: [Awaiting("peer-2")], roles=roles)
    assert standbys(seen) == [1]
    assert_right(seen, alone)


def has_snapshot(seen: Seen) -> bool:
    """Return whether the lead alone has a snapshot to roll back to; further snapshots travel during the steps."""
    peer = next(one for one in seen.peers if one.lead.run is not None)
    assert peer.server is not None
    held = {(one.version, one.stage_index) for one in peer.server.snapshots.store.held}
    return any({(version, 0), (version, 1)} <= held for version in peer.lead.versions_kept())


@pytest.mark.thorough
def test_one_comes_again_where_its_run_goes_back_without_it(alone: Seen) -> None:
    """The lead lives, and the only server of a stage dies."""

    class Killing(L.Callback):
        @override
        def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
            seen = pl_module.seen
            if rank_of(trainer) == 0 and len(seen.records) >= 5 and not seen.killed:
                seen.wait_for(lambda: ("peer-1" in seen.trainers_of_the_run and has_snapshot(seen)) or seen.errors)
                seen.kill("server")

    seen = run(2, {}, callbacks=lambda rank: [Killing(), Awaiting("peer-1")], roles={1: {"role": "trainer"}})
    assert seen.killed == ["server"]
    assert len(seen.went_back) == 1
    assert_same(seen, alone)
    assert_each_once(seen, NUM_EPOCHS)
    after = {seen.batches[place][0] for places in seen.steps[seen.went_back[0] :] for place in places}
    assert after == {0, 1}
