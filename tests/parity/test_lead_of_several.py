"""The lead of several trainers dies: one of the others leads from then on, and the curve is that of one trainer."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor
from torchmetrics import SumMetric
from typing_extensions import override

from lightning_swarm.config import Limits
from lightning_swarm.errors import Replaced
from lightning_swarm.network import PeerId
from lightning_swarm.steps.succession import choose_heir
from lightning_swarm.types.snapshots import HeldSnapshots
from tests.parity.models import DigitsMLP, Recipe
from tests.parity.test_shared_data import Weights, assert_each_once, assert_same, validation
from tests.parity.trainers import Seen, ThreadStrategy, train

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
"""A snapshot at every step at which the one before is through."""

NUM_EPOCHS = 3


@pytest.fixture(autouse=True)
def one_more_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that of two trainers and this one most of the voters live when the lead dies."""
    make_peer = ThreadStrategy.make_peer

    def with_server(strategy: ThreadStrategy) -> None:
        make_peer(strategy)
        if strategy._rank == 0:
            strategy.add_server()

    monkeypatch.setattr(ThreadStrategy, "make_peer", with_server)


class Several(DigitsMLP):
    """Validated, and kills whoever leads.

    Args:
        seen: Of the run.
        kills: After so many records, each once: in which of `PLACES`.
    """

    def __init__(self, seen: Seen, kills: dict[int, str] | None = None) -> None:
        super().__init__(Recipe(schedule="onecycle"))
        self.seen = seen
        self.kills = kills or {}
        self.num_samples = SumMetric()
        self.epochs: dict[int, tuple[int, float, float]] = {}

    def at(self, place: str) -> None:
        due = [at for at, where in self.kills.items() if where == place and len(self.seen.records) >= at]
        if not due or not self.trainer.is_global_zero or rank_of(self.trainer) in dead(self.seen):
            return
        self.seen.wait_for(lambda: has_heir(self.seen))
        del self.kills[due[0]]
        self.seen.kill(f"peer-{rank_of(self.trainer)}")

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.at("between batches")

    @override
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        num_samples = float(len(batch[0]))
        self.log("logged", num_samples, sync_dist=True, reduce_fx="sum", on_step=False, on_epoch=True)
        self.num_samples(num_samples)
        self.log("counted", self.num_samples, sync_dist=True, on_step=False, on_epoch=True)
        self.at("in a batch")
        return loss

    @override
    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.seen.validated.append(rank_of(self.trainer))
        self.log("val_loss", super().training_step(batch[:-1] if len(batch) > 2 else batch, batch_idx))
        self.at("validating")

    @override
    def on_train_epoch_end(self) -> None:
        found = self.trainer.callback_metrics
        if self.trainer.is_global_zero:
            values = float(found["logged"]), float(found["counted"])
            self.epochs[self.trainer.current_epoch] = self.trainer.global_step, *values


def rank_of(trainer: L.Trainer) -> int:
    assert isinstance(trainer.strategy, ThreadStrategy)
    return trainer.strategy._rank


def dead(seen: Seen) -> Collection[int]:
    return [int(peer.removeprefix("peer-")) for peer in seen.killed]


def has_heir(seen: Seen) -> bool:
    """Whether somebody could take the run over now."""
    peers = [one for one in seen.peers if one.server is not None and one.transport.peer_id not in seen.killed]
    lead = next(one for one in peers if one.lead.run is not None)
    assert lead.server is not None
    servers = {one.transport.peer_id: one.server for one in [*peers, *seen.servers] if one.server is not None}
    held = {
        peer: HeldSnapshots(host="", snapshots=one.snapshots.store.held, loops=one.snapshots.loops.versions)
        for peer, one in servers.items()
        if peer != lead.transport.peer_id and one.admission.is_member
    }
    return choose_heir(held, sorted(held), len(lead.server.admission.run.rosters)) is not None


def under_way(seen: Seen) -> None:
    """What one that comes waits for."""
    seen.wait_for(lambda: len(seen.records) > 0)


def run(
    num_trainers: int,
    kills: dict[int, str],
    come: dict[int, Callable[[Seen], None]] | None = None,
    gone: Collection[int] = (),
    **options: Any,
) -> Seen:
    """Train; the first leads, and the others come to it by themselves.

    Args:
        num_trainers: That come at all.
        kills: As of `Several`.
        come: By rank, what those wait for that wait for something else than the run.
        gone: Who may end with an error, but for those that are killed.
        options: As of `train`.
    """
    due, rank = kills, vars(rank_zero_only)["rank"]
    try:
        seen = train(
            num_trainers,
            lambda seen: Several(seen, due),
            come={**dict.fromkeys(range(1, num_trainers), under_way), **(come or {})},
            validation=validation,
            raises=False,
            swarm={"limits": LIMITS, **options.pop("swarm", {})},
            **{"max_steps": -1, "max_epochs": NUM_EPOCHS, **options},
        )
    finally:
        vars(rank_zero_only)["rank"] = rank  # of the process, which each of these trainers has for itself elsewhere
    for number, error in seen.errors.items():
        if number not in (*dead(seen), *gone):
            raise error
    assert not due, "nobody was killed"
    return seen


ALONE = Weights()


def one_trainer(callbacks: list[L.Callback], **options: Any) -> Seen:
    """Whom nothing happens to."""
    options = {"max_steps": -1, "max_epochs": NUM_EPOCHS, **options}
    return train(1, lambda seen: Several(seen), callbacks=lambda rank: callbacks, validation=validation, **options)


@pytest.fixture(scope="module")
def alone() -> Seen:
    return one_trainer([ALONE])


def heirs(seen: Seen) -> list[int]:
    """Who led, one after the other, but for the first."""
    return [rank for rank in dict.fromkeys(seen.validated) if rank]


def assert_right(seen: Seen, alone: Seen, *, gone: Collection[int] = (0,)) -> None:
    """Weights and losses are those of one trainer, and all that live train on beside the last heir."""
    heir = heirs(seen)[-1]
    seen.weights = seen.modules[heir].state_dict()
    assert_same(seen, alone)
    assert_each_once(seen, NUM_EPOCHS)
    after = {seen.batches[place][0] for places in seen.steps[seen.went_back[-1] :] for place in places}
    assert after == set(seen.trainers) - set(gone), "all who live train on"
    trainer = seen.trainers[heir]
    assert (trainer.global_step, trainer.current_epoch) == (len(alone.steps), NUM_EPOCHS)
    assert_logged(seen, heir)


def assert_logged(seen: Seen, heir: int) -> None:
    """What the last lead's epochs have of the samples is what was counted by then, its own by its epochs."""
    module, (back, *_) = seen.modules[heir], seen.went_back
    assert isinstance(module, Several)
    first, counted = min(module.epochs), [place for places in seen.steps for place in places]

    def by_then(epoch: int, version: int) -> int:
        total = 0
        for place in counted:
            rank, ids = seen.batches[place]
            own = rank == (0 if place[0] < back else heir)
            total += len(ids) * (seen.numbers[place][0] <= epoch if own else place[0] < version)
        return total

    before = None
    for epoch, (version, *values) in sorted(module.epochs.items()):
        total = by_then(epoch, version)
        if epoch > first and before is not None:
            assert values == [total - before] * 2, epoch
        before = total
    assert max(module.epochs) > first, "nothing was looked at"


@pytest.mark.parametrize("place", ["between batches", "in a batch"])
@pytest.mark.parametrize(("num_trainers", "at"), [(2, 6), (4, 7)])
def test_another_one_leads(alone: Seen, num_trainers: int, at: int, place: str) -> None:
    weights = Weights()
    seen = run(num_trainers, {at: place}, callbacks=lambda rank: [weights])
    assert seen.killed == ["peer-0"]
    assert len(heirs(seen)) == 1
    assert_right(seen, alone)
    found = {step: tensors for step, tensors in weights.found.items() if tensors}
    assert len(found) >= 10
    for step, tensors in found.items():
        for name, tensor in tensors.items():
            assert (tensor - ALONE.found[step][name]).abs().max() <= 1e-10, step


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
def test_it_validates_saves_and_decides_from_there_on(alone: Seen, tmp_path: Path) -> None:
    """Also where the lead dies while it validates."""

    def callbacks(folder: str) -> list[L.Callback]:
        return [
            ModelCheckpoint(tmp_path / folder, "{epoch}-{step}", monitor="val_loss", save_top_k=2),
            EarlyStopping("val_loss", patience=50),
        ]

    own = callbacks("alone")
    one_trainer(own, enable_checkpointing=True)
    seen = run(3, {5: "validating"}, callbacks=lambda rank: callbacks("several"), enable_checkpointing=True)
    assert seen.killed == ["peer-0"]
    assert_right(seen, alone)
    (heir,) = heirs(seen)
    for rank, trainer in seen.trainers.items():
        assert {type(one) for one in own} <= {type(one) for one in trainer.callbacks} or rank not in (0, heir)  # type: ignore[attr-defined]
    for one in own:
        other = next(c for c in seen.trainers[heir].callbacks if type(c) is type(one))  # type: ignore[attr-defined]
        assert _plain(one.state_dict()) == _plain(other.state_dict()), type(one)
    names = [{path.name for path in (tmp_path / folder).iterdir()} for folder in ("alone", "several")]
    assert names[0] == names[1]


def test_the_heir_dies_too(alone: Seen) -> None:
    seen = run(4, {4: "in a batch", 9: "between batches"})
    assert len(seen.killed) == 2
    assert len(seen.went_back) == 2
    assert_right(seen, alone, gone=dead(seen))


class Awaiting(L.Callback):
    """Whoever leads in the place of the first one waits for something before the run's last steps."""

    def __init__(self, reached: Callable[[], bool]) -> None:
        self.reached = reached

    @override
    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        assert isinstance(pl_module, Several)
        if trainer.is_global_zero and rank_of(trainer) and trainer.global_step >= 10:
            pl_module.seen.wait_for(self.reached)


def test_the_leads_script_started_again_trains_along(alone: Seen) -> None:
    """Beside the one that leads by now."""
    found: list[Seen] = []

    def gone_back(seen: Seen) -> None:
        found.append(seen)
        seen.wait_for(lambda: bool(seen.went_back) and len(seen.records) > seen.went_back[0])

    def there() -> bool:
        return bool(found[0].errors.keys() - {0}) or "peer-3" in found[0].trainers_of_the_run

    seen = run(4, {5: "in a batch"}, {3: gone_back}, callbacks=lambda rank: [Awaiting(there)])
    assert seen.killed == ["peer-0"]
    assert_right(seen, alone)


def test_a_lead_that_was_frozen_learns_who_leads(alone: Seen) -> None:
    class Freezing(L.Callback):
        @override
        def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
            seen, rank = pl_module.seen, rank_of(trainer)
            if rank == 0 and len(seen.records) == 6:
                seen.wait_for(lambda: has_heir(seen))
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


def test_a_server_with_data_may_take_it_over_too(alone: Seen) -> None:
    """`role="auto"`: it serves, and reads no data until then. The other trainer could not."""

    def member(seen: Seen) -> bool:
        peer = next((one for one in seen.peers if one.transport.peer_id == "peer-1"), None)
        return peer is not None and peer.server is not None and peer.server.admission.is_member

    roles = {1: {"role": "auto"}, 2: {"state_dict_type": "sharded"}}
    seen = run(3, {6: "in a batch"}, {2: lambda seen: seen.wait_for(lambda: member(seen))}, roles=roles)
    assert heirs(seen) == [1]
    assert_right(seen, alone)


def _plain(state: dict[str, Any]) -> dict[str, Any]:
    """Without folders, and with numbers that are equal up to rounding."""
    found: dict[str, Any] = {}
    for key, value in state.items():
        if isinstance(value, (float, Tensor)):
            found[key] = round(float(value), 9)
        elif isinstance(value, str):
            found[key] = value.rpartition("/")[2] if key != "dirpath" else ""
        elif isinstance(value, dict):
            found[key] = {path.rpartition("/")[2]: round(float(score), 9) for path, score in value.items()}
        else:
            found[key] = value
    return found
