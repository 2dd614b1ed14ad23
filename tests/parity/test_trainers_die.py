"""Some of several trainers die or freeze; the curve is that of the batches in the records.

Each peer of these runs trains and serves, so a stage also loses a server with its trainer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torchmetrics import SumMetric
from typing_extensions import override

from lightning_swarm.client.pipeline.router import StageRouter
from lightning_swarm.client.run_session import Session
from lightning_swarm.core.errors import LeftOut, StageLost, Unreachable
from lightning_swarm.core.limits import Limits
from lightning_swarm.network import PeerId
from lightning_swarm.protocol.rpc import ARMED, DONE, GRANT, RECORD
from tests.features.test_trainers import Lines
from tests.parity import trainers
from tests.parity.models import DigitsMLP, NanoGPT, digits, sentences
from tests.parity.trainers import Seen, place_of, shuffled, train

LIMITS = Limits(call_timeout=10.0, start_timeout=30.0, lead_timeout=30.0, silence_timeout=2.0)
VICTIM, RANK = PeerId("peer-3"), 3
BATCH = 2  # index of the victim's batch with the fault
NUM_STEPS = 24
ROOM = 10  # steps left for lost batches to run again
_SLOW_S = 0.2

Fault = Callable[[Seen], None]


def kill(seen: Seen) -> None:
    seen.network.kill(VICTIM)


def freeze(seen: Seen) -> None:
    seen.network.freeze(VICTIM)


def session_of(seen: Seen, rank: int) -> Session:
    strategy = seen.trainers[rank].strategy
    assert isinstance(strategy, trainers.ThreadStrategy)
    assert strategy.run is not None
    return strategy.run.session


def lead_past(router: StageRouter, to: PeerId | None = None) -> None:
    """Send nothing to the victim's own server in any roster; if `to` is in a roster, send everything there."""

    def set_peers(peers: Iterable[PeerId]) -> None:
        others = [peer for peer in peers if peer != VICTIM]
        StageRouter.set_peers(router, [to] if to in others else others)

    router.set_peers = set_peers  # type: ignore[method-assign]
    router.set_peers(router.peers)


def freeze_when_it_says(seen: Seen, method: str, *, is_heard: bool) -> None:
    """Freeze the victim when it reports its batch as armed or through, after or before the report is received."""
    session = session_of(seen, RANK)
    handlers = seen.network.find(session._steps.run.manifest.coordinator)._call_handlers
    handler = handlers[method]

    async def freezing(caller: PeerId, body: bytes) -> bytes:
        if caller != VICTIM:
            return await handler(caller, body)
        handlers[method] = handler
        for router in session.pipeline.context.routers:
            del router.set_peers
        seen.said = True  # type: ignore[attr-defined]
        if not is_heard:
            freeze(seen)
            raise Unreachable("it froze before it was heard")
        answer = await handler(caller, body)
        freeze(seen)
        return answer

    handlers[method] = freezing


def lose_what_is_through(seen: Seen, method: str, killed: PeerId) -> None:
    """Freeze the victim at its next call, and kill the server that holds the sums of its completed batches.

    This must happen while the step waits for other batches, because nothing is lost after averaging, and early enough
    for the lost batches to run again before the run ends.
    """
    session = session_of(seen, RANK)
    routers = session.pipeline.context.routers
    coordinator = seen.network.find(session._steps.run.manifest.coordinator)
    handlers = coordinator._call_handlers
    handler = handlers[method]

    for router in routers:
        lead_past(router, to=killed)
    pinned_from = session.version, place_of(seen.modules[RANK])[1]

    async def freezing(caller: PeerId, body: bytes) -> bytes:
        role = next(peer for peer in seen.peers if peer.transport is coordinator).server.admission.election.coordinator
        assert role is not None
        step = role.generation.step_state.open
        through = [batch.first for batch in step._batches.values() if batch.trainer == VICTIM and batch.completed]
        lost = [place for first in through if (place := (step.step, first)) >= pinned_from]
        early = step.step < seen.trainers[0].max_steps - ROOM
        if caller != VICTIM or not (lost and early) or role.generation.step_state.finishing:
            return await handler(caller, body)
        handlers[method] = handler
        for router in routers:
            del router.set_peers
        seen.lost = lost  # type: ignore[attr-defined]
        seen.network.kill(killed)
        freeze(seen)
        raise Unreachable("it froze before it was heard")

    handlers[method] = freezing


class Faulty(DigitsMLP):
    """Injects a fault at one place of the victim's third batch.

    With `past_its_own` the victim sends nothing to its own server, whose gradients would freeze with it.
    """

    def __init__(self, seen: Seen, where: str, fault: Fault, *, tracks: bool, past_its_own: bool) -> None:
        super().__init__()
        self.seen = seen
        self.where = where
        self.fault = fault
        self.past_its_own = past_its_own
        self.places: list[Any] = []  # where the victim's third batch ran
        self.is_in_it = False  # whether that batch runs, not a repeated earlier one
        self.num_samples = SumMetric() if tracks else None

    def at(self, where: str) -> None:
        if not self.is_in_it or self.where != where or len(self.places) > 1:
            return

        async def act() -> None:
            self.fault(self.seen)

        self.seen.runtime.run(act())

    async def lead_past_its_own(self) -> None:
        for router in session_of(self.seen, RANK).pipeline.context.routers:
            lead_past(router)

    @override
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if self.past_its_own and self.trainer.global_rank == RANK:
            self.past_its_own = False
            self.seen.runtime.run(self.lead_past_its_own())
        own_idx = self.trainer.fit_loop.batch_idx
        self.is_in_it = (self.trainer.global_rank, self.trainer.current_epoch, own_idx) == (RANK, 0, BATCH)
        if self.is_in_it:
            self.places.append(place_of(self))
        self.at("before forward")
        loss = super().training_step(batch, batch_idx)
        self.log("samples", float(len(batch[0])), sync_dist=True, reduce_fx="sum", on_step=True, on_epoch=False)
        if self.num_samples is not None:
            self.num_samples(float(len(batch[0])))
            self.log("tracked", self.num_samples, sync_dist=True, on_step=True, on_epoch=False)
        self.at("after forward")
        return loss

    @override
    def on_before_backward(self, loss: Tensor) -> None:
        self.at("before backward")

    @override
    def on_after_backward(self) -> None:
        self.at("after backward")


def num_batches(seen: Seen) -> int:
    """Count the batches that the victim began, including repetitions."""
    return sum(rank == RANK for rank, _ in list(seen.batches.values()))


class Lead(L.Callback):
    """Thaws the victim after `num_records` further records, and keeps the logged values.

    The lead is slow until the victim has run another batch, because the run could end before that.
    """

    def __init__(self, num_records: int) -> None:
        self.num_records = num_records
        self.due: int | None = None
        self.num_batches: int | None = None  # batches of the victim when it thawed
        self.lines = Lines()

    @override
    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        seen = pl_module.seen
        strategy = trainer.strategy
        assert isinstance(strategy, trainers.ThreadStrategy)
        assert strategy.peer is not None
        if RANK not in seen.errors and num_batches(seen) == self.num_batches:
            time.sleep(_SLOW_S)
        if not seen.network.is_frozen(VICTIM):
            return
        if self.due is None and any(event.peer == VICTIM for event in strategy.peer.events.newest):
            self.due = len(seen.records) + self.num_records
        if self.due is not None and len(seen.records) >= self.due:

            async def thaw() -> None:
                seen.network.thaw(VICTIM)

            self.num_batches = num_batches(seen)
            seen.runtime.run(thaw())


def run(
    where: str,
    fault: Fault,
    *,
    num_records: int = 0,
    tracks: bool = False,
    target_batch_size: int = 12,
    num_steps: int = NUM_STEPS,
    past_its_own: bool = False,
    **swarm: Any,
) -> tuple[Seen, Lead]:
    lead = Lead(num_records)
    loggers = iter([lead.lines, Lines(), Lines(), Lines()])
    seen = train(
        4,
        lambda seen: Faulty(seen, where, fault, tracks=tracks, past_its_own=past_its_own),
        callbacks=lambda rank: [lead] if rank == 0 else [],
        raises=False,
        max_steps=num_steps,
        log_every_n_steps=1,
        use_distributed_sampler=False,  # separate data, so that no other trainer brings the struck batches
        each={"logger": lambda: next(loggers)},
        # Only the faults may change the roster: a peer that moves is in no stage for a while.
        swarm={"limits": LIMITS, "target_batch_size": target_batch_size, "rebalancing": "none", **swarm},
    )
    return seen, lead


def places(seen: Seen) -> list[Any]:
    """Return the places where the victim's third batch ran."""
    module = seen.modules[RANK]
    assert isinstance(module, Faulty)
    return module.places


def assert_right(seen: Seen, lead: Lead, *, tracks: bool = False) -> None:
    """Check losses, weights and the lead's log against the batches in the records."""
    trainers.assert_exact(seen, DigitsMLP, digits(), num_trainers=4, gone=seen.errors)
    assert len(seen.records) == seen.trainers[0].max_steps
    num_samples = [record.closing.num_samples for record in seen.records]
    for name in ["samples", *(["tracked"] if tracks else [])]:
        assert lead.lines.column(name) == num_samples


def run_without_loss(method: str, *, is_heard: bool, num_records: int) -> tuple[Seen, Lead]:
    """Freeze the victim at a report. Repeat the run if servers began a sum with its batch anew.

    A server that was slow to answer is replaced, and both then hold the same microbatch. One of the sums begins anew,
    and a frozen trainer cannot replay the batches in it. Such a batch is struck and runs again, which is right, too.
    """
    for _ in range(4):
        seen, lead = run(
            "before forward",
            lambda seen: freeze_when_it_says(seen, method, is_heard=is_heard),
            num_records=num_records,
            past_its_own=True,
        )
        assert seen.said  # type: ignore[attr-defined]
        assert not seen.errors
        assert_right(seen, lead)
        events = [event for peer in seen.peers for event in peer.events.newest if event.peer == VICTIM]
        if not any(event.kind == "strike" and "computed again" in event.reason for event in events):
            break
    return seen, lead


WHERE = pytest.mark.parametrize("where", ["before forward", "after forward", "before backward"])


@pytest.mark.first_cells(1)
@WHERE
@pytest.mark.parametrize("num_records", [0, 2])
def test_a_trainer_that_thaws_runs_its_batch_again(where: str, num_records: int) -> None:
    seen, lead = run(where, freeze, num_records=num_records)
    assert not seen.errors
    struck, place = places(seen)
    counted = [one for step in seen.steps for one in step]
    assert struck not in counted
    assert place in counted
    assert_right(seen, lead)


@pytest.mark.thorough
def test_the_server_of_a_trainer_that_thaws_joins_again() -> None:
    """It joins like any server, while its trainer trains, after it has found out that it was excluded."""
    seen, lead = run("before forward", freeze, num_records=1, num_steps=120)
    assert not seen.errors
    members = [{member.peer_id for roster in rosters for member in roster} for rosters in seen.rosters]
    assert any(VICTIM not in one for one in members)
    assert VICTIM in members[-1]
    assert_right(seen, lead)


@pytest.mark.thorough
def test_what_a_batch_logged_is_forgotten_when_it_runs_again() -> None:
    """This applies to numbers and metrics, of all trainers and of one trainer alone."""
    seen, lead = run("before backward", freeze, tracks=True)
    assert not seen.errors
    assert len(places(seen)) == 2
    assert_right(seen, lead, tracks=True)


@pytest.mark.thorough
@pytest.mark.parametrize("num_records", [0, 2])
def test_an_armed_batch_counts_though_its_trainer_froze(num_records: int) -> None:
    """After it thaws, the trainer does not run the batch again."""
    seen, _ = run_without_loss(ARMED.name, is_heard=True, num_records=num_records)
    (place,) = places(seen)
    assert place in [counted for step in seen.steps for counted in step]


@pytest.mark.thorough
def test_a_batch_is_struck_though_all_of_it_was_added() -> None:
    """Its trainer froze before it reported the batch, so the added gradients are discarded and those sums replayed."""
    seen, lead = run(
        "before forward", lambda seen: freeze_when_it_says(seen, ARMED.name, is_heard=False), past_its_own=True
    )
    assert seen.said  # type: ignore[attr-defined]
    assert not seen.errors
    struck, _ = places(seen)
    assert struck not in [one for step in seen.steps for one in step]
    assert_right(seen, lead)


@pytest.mark.thorough
@pytest.mark.parametrize("is_heard", [True, False])
def test_a_trainer_freezes_while_it_says_that_its_batch_is_through(is_heard: bool) -> None:
    """It was armed before, so it counts exactly once, whether the report was received or not."""
    seen, _ = run_without_loss(DONE.name, is_heard=is_heard, num_records=2)
    (place,) = places(seen)
    assert place in [counted for step in seen.steps for counted in step]


@pytest.mark.thorough
@pytest.mark.parametrize(("method", "target_batch_size"), [(RECORD.name, 12), (GRANT.name, 36)])
def test_a_batch_that_was_through_runs_again_if_it_is_lost(method: str, target_batch_size: int) -> None:
    """The trainer froze while it waited for the record or for its next place; a server with its gradients died."""

    def fault(seen: Seen) -> None:
        lose_what_is_through(seen, method, PeerId("peer-2"))

    for _ in range(3):  # thread timing decides whether the victim waits with a completed batch
        num_steps = NUM_STEPS + ROOM
        seen, lead = run(
            "before forward", fault, num_records=2, num_steps=num_steps, target_batch_size=target_batch_size
        )
        if hasattr(seen, "lost"):
            break
    assert set(seen.errors) == {2}
    counted = [place for step in seen.steps for place in step]
    for place in seen.lost:  # type: ignore[attr-defined]
        assert place not in counted
        again = [other for other in seen.batches if other != place and seen.batches[other] == seen.batches[place]]
        assert len(again) == 1, "it ran again once"
    assert_right(seen, lead)


@pytest.mark.thorough
@pytest.mark.parametrize("where", ["before forward", "after forward", "before backward", "after backward"])
def test_the_others_go_on_without_a_trainer_that_is_killed(where: str) -> None:
    seen, lead = run(where, kill)
    assert set(seen.errors) == {RANK}
    assert len(places(seen)) == 1
    assert_right(seen, lead)
    assert sum(lead.lines.column("swarm/gone")) >= 1.0
    if where != "after backward":  # otherwise it may be armed and no longer need its trainer
        # One more batch of the same step may be lost, which its server had added.
        assert sum(lead.lines.column("swarm/strike")) >= 1.0
    assert lead.lines.column("swarm/peers")[-1] == 3.0


@pytest.mark.thorough
def test_a_trainer_with_layers_of_its_own_ends_alone_when_it_was_left_out() -> None:
    """Its own copy of the layers around the pipeline is outdated, so it must not train with it. The run goes on."""

    class Freezing(NanoGPT):
        def __init__(self, seen: Seen) -> None:
            super().__init__()
            self.seen = seen

        @override
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            if (self.trainer.global_rank, self.trainer.fit_loop.batch_idx) == (
                RANK,
                BATCH,
            ) and not self.seen.network.is_frozen(VICTIM):

                async def act() -> None:
                    freeze(self.seen)

                self.seen.runtime.run(act())
            return super().training_step(batch, batch_idx)

    lead = Lead(1)
    seen = train(
        4,
        Freezing,
        data=lambda: shuffled(sentences()),
        callbacks=lambda rank: [lead] if rank == 0 else [],
        raises=False,
        max_steps=50,  # enough for it to notice; after the run's end it would finish without an error
        # Four trainers share the cores; a longer timeout keeps slow trainers from being excluded.
        swarm={"limits": replace(LIMITS, silence_timeout=3.0), "pipeline": "transformer.h"},
    )
    assert lead.due is not None, "it was not missed"
    assert set(seen.errors) == {RANK}
    assert isinstance(seen.errors[RANK], LeftOut)
    assert "other trainers continue" in str(seen.errors[RANK])
    assert len(seen.records) == 50
    trainers.assert_exact(seen, NanoGPT, sentences(), num_trainers=4, gone=seen.errors)


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
def test_a_batch_without_a_loss_counts_nowhere_though_its_backward_ran() -> None:
    """Only the backward that Lightning runs adds to a step, so there is no gradient to discard."""

    class Undecided(DigitsMLP):
        def __init__(self, seen: Seen) -> None:
            super().__init__()
            self.seen = seen

        @override
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor | None:  # type: ignore[override]
            loss = super().training_step(batch, batch_idx)
            if batch_idx % 3 == 1:
                self.seen.withdrawn.add(place_of(self))
                loss.backward()
                return None
            return loss

    seen = train(2, Undecided, max_steps=8)
    trainers.assert_exact(seen, DigitsMLP, digits(), num_trainers=2)
    assert len(seen.withdrawn) > 2
    assert not seen.withdrawn & {place for places in seen.steps for place in places}
    assert not [event for peer in seen.peers for event in peer.events.newest if event.kind in ("discard", "replay")]


class KillAll(L.Callback):
    """Kills both servers of the second stage at one batch."""

    def __init__(self, seen: Callable[[], Seen]) -> None:
        self.seen = seen

    @override
    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 5:

            async def kill() -> None:
                self.seen().network.kill(PeerId("peer-1"))

            if "peer-1" in self.seen().network._peers:
                self.seen().runtime.run(kill())


@pytest.mark.thorough
@pytest.mark.parametrize("saves", [True, False])
def test_a_lost_stage_names_the_checkpoint_to_resume_from(tmp_path: Any, saves: bool) -> None:
    found: list[Seen] = []

    class Module(DigitsMLP):
        def __init__(self, seen: Seen) -> None:
            super().__init__()
            found[:] = [seen]

    def callbacks(rank: int) -> list[L.Callback]:
        checkpoint = ModelCheckpoint(tmp_path, every_n_train_steps=2, filename="{step}")
        return [KillAll(lambda: found[0]), *([checkpoint] if saves else [])] if rank == 0 else []

    limits = replace(LIMITS, call_timeout=3.0, stage_timeout=4.0, leave_timeout=0.5, snapshot_interval=None)
    seen = train(
        2, Module, callbacks=callbacks, raises=False, max_steps=24, swarm={"limits": limits}, enable_checkpointing=saves
    )
    error = seen.errors[0]
    assert isinstance(error, StageLost)
    assert "stage 0" in str(error)
    note = error.__notes__[-1]
    if saves:
        path = str(tmp_path / "step=4.ckpt")
        assert f"ckpt_path={path!r}" in note
        assert torch.load(path, weights_only=True)["global_step"] == 4
    else:
        assert "start it again, with a ModelCheckpoint" in note
