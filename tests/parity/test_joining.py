"""Servers that join during a run download the state, compute, and leave the curve unchanged."""

from __future__ import annotations

import asyncio
import itertools
import logging
import re
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn
from typing_extensions import override

from lightning_swarm.client.pipeline.row_check import NUM_PROBES
from lightning_swarm.core.errors import ConfigError, Unreachable
from lightning_swarm.core.limits import Limits
from lightning_swarm.network import PeerId
from lightning_swarm.network.framing import Buffer
from lightning_swarm.peer.discovery import ANNOUNCEMENT_TTL_S
from lightning_swarm.protocol.rpc import LISTEN, NEXT, PIECE
from lightning_swarm.server.server import Server
from lightning_swarm.server.state_transfer import donor as donor_module
from lightning_swarm.testing import InMemoryStrategy, local
from tests.parity.harness import Run, SwarmRun, assert_exact, run_plain, run_swarm
from tests.parity.models import DigitsMLP, Net, Recipe, TinyGPTWithLosses, digits, loader, sentences

STEPS = 12


class Joining(L.Callback):
    """Starts servers when a batch begins.

    Args:
        at: The global step.
        prepare: Called with the strategy before that; its result, if any, is called with each joining server.
        count: How many servers.
        module: The servers' model; None: the run's.
    """

    def __init__(
        self,
        *,
        at: int = 2,
        prepare: Callable[[InMemoryStrategy], Callable[[Server], None] | None] | None = None,
        count: int = 1,
        module: L.LightningModule | None = None,
    ) -> None:
        self.at = at
        self.prepare = prepare
        self.count = count
        self.module = module
        self.joiners: list[Server] = []
        self.entered_at: list[int] = []  # per joiner: the step before which it was first a member

    @override
    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        strategy = trainer.strategy
        assert isinstance(strategy, InMemoryStrategy)
        if trainer.global_step == self.at and not self.joiners:
            noted = self.prepare(strategy) if self.prepare else None
            for _ in range(self.count):
                self.joiners.append(strategy.join(self.module))
                if noted is not None:
                    noted(self.joiners[-1])
        while len(self.entered_at) < sum(joiner.membership.is_member for joiner in self.joiners):
            self.entered_at.append(trainer.global_step)


def digits_net() -> Net:
    return DigitsMLP(Recipe(optimizer="adamw", schedule="onecycle"))


def plain() -> Run:
    return run_plain(digits_net, loader(digits()), max_steps=STEPS, max_epochs=-1)


def swarm(joining: Joining, num_joiners: int | None = None, **options: Any) -> SwarmRun:
    return run_swarm(
        digits_net,
        loader(digits()),
        callbacks=[joining],
        num_joiners=joining.count if num_joiners is None else num_joiners,
        **{"latency_s": 0.001, "max_steps": STEPS, "max_epochs": -1, **options},
    )


@pytest.mark.first_cells(2)
@pytest.mark.parametrize("at", [0, 1, 5])
def test_a_server_joins_at_the_next_step(at: int) -> None:
    joining = Joining(at=at)
    run = swarm(joining)
    assert_exact(run, plain())
    (joiner,) = joining.joiners
    (entered,) = joining.entered_at
    # Messages and steps take time. Both sides first ask which peer answers at the joiner's addresses.
    assert at < entered <= at + 4
    assert joiner.steps.stages == (0,), "both stages have one server, so it takes the first"
    assert [record.step for record in run.records if record.newcomers] == [entered - 1]
    assert joiner.calls.num_forwards > STEPS - entered, "it computes like the other server of its stage"
    assert run.strategy.refusals == []
    assert joiner.admission.left.is_set(), "it was told of the end"


def test_a_run_is_found_after_hours() -> None:
    def wait(strategy: InMemoryStrategy) -> None:
        strategy.peer.runtime.run(asyncio.sleep(1.1 * ANNOUNCEMENT_TTL_S))

    run = swarm(joining := Joining(at=5, prepare=wait))
    assert_exact(run, plain())
    assert len(joining.entered_at) == 1
    assert run.strategy.refusals == []


def test_a_server_says_when_it_is_in_and_when_the_run_is_over(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, local.__name__):
        run = swarm(Joining())
    (record,) = [record.step for record in run.records if record.newcomers]
    lines = [one.message for one in caplog.records if one.name == local.__name__]
    asking, *_, download, comparing, here, waiting, said, end = lines
    assert asking == "Asking for a run."
    assert re.fullmatch(r"Downloading stage 0 from 1 peer: 0 bytes of \d+\.\d kB\.", download)
    assert comparing == "Comparing stage 0 with the run's."
    assert re.fullmatch(r"Stage 0 is loaded, at step \d+\. This peer enters when a step ends\.", here)
    assert re.fullmatch(r"Waiting for a step to end: step \d+ is open\.", waiting)
    assert said == f"In run 'swarm' from step {record + 1} on, with stage 0."
    assert end.startswith("Run 'swarm' is over.")


class ComingAndGoing(Joining):
    """Starts a server when a batch begins, and stops it when a later batch begins."""

    def __init__(self, leave_at: int) -> None:
        super().__init__()
        self.leave_at = leave_at

    @override
    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)
        assert isinstance(trainer.strategy, InMemoryStrategy)
        if trainer.global_step == self.leave_at:
            trainer.strategy.peers[-1].leave()


def test_a_server_leaves_with_the_next_step_and_nothing_is_computed_twice() -> None:
    run = swarm(ComingAndGoing(leave_at=6), num_joiners=0)
    assert_exact(run, plain())
    peer = run.strategy.peers[-1].transport.peer_id
    members = [{one.peer_id for roster in rosters for one in roster} for rosters in run.rosters]
    inside = [step for step, names in enumerate(members) if peer in names]
    assert inside, "it was in"
    assert inside[-1] in (5, 6), "the record of the step in which it was told to leave may be the one that lets it go"
    joiner = run.strategy.servers[-1]
    assert joiner.calls.num_forwards > 0
    assert joiner.steps.version == inside[-1] + 2, "it applied the record that let it go, and no later one"
    counted = sum(len(run.held.counted(record)) for record in run.records)
    num_forwards = sum(server.calls.num_forwards for server in run.strategy.servers)
    assert num_forwards == 2 * (counted + NUM_PROBES), "once in each stage"
    assert run.strategy.refusals == []


PAUSE_S = 0.5


class Timed(Joining):
    """Measures each step in seconds of the virtual clock, with pauses between steps as under a slow loader.

    Args:
        line: Upload rate of each peer's single line, in bytes/s.
        options: Arguments of `Joining`.
    """

    def __init__(self, line: float, **options: Any) -> None:
        super().__init__(**options)
        self.line = line
        self.begun_s: list[float] = []

    @override
    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        strategy = trainer.strategy
        assert isinstance(strategy, InMemoryStrategy)
        assert strategy.peer is not None
        if not self.begun_s:
            narrow(strategy, self.line)
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)
        self.begun_s.append(strategy.peer.runtime.run(self.paused()))

    async def paused(self) -> float:
        loop = asyncio.get_running_loop()
        begin_s = loop.time()
        await asyncio.sleep(PAUSE_S)
        return begin_s

    @property
    def steps_s(self) -> list[float]:
        return [end - begin - PAUSE_S for begin, end in itertools.pairwise(self.begun_s)]


def narrow(strategy: InMemoryStrategy, bytes_per_s: float) -> None:
    """Limit each peer's upload to one line of this rate."""
    network = strategy.network
    assert network is not None
    carry, free_s = network.carry, dict[PeerId, float]()

    async def in_line(sender: PeerId, receiver: PeerId, buffer: Buffer) -> Buffer:
        now_s = asyncio.get_running_loop().time()
        free_s[sender] = max(free_s.get(sender, 0.0), now_s) + len(bytes(buffer)) / bytes_per_s
        await asyncio.sleep(free_s[sender] - now_s)
        return await carry(sender, receiver, buffer)

    network.carry = in_line  # type: ignore[method-assign]


@pytest.mark.thorough
@pytest.mark.parametrize("share", [10, 20])
def test_ten_joiners_choke_nobody(monkeypatch: pytest.MonkeyPatch, share: int) -> None:
    """No step with joiners under way takes twice as long as one when all twelve are there and average."""
    # Let the small model travel in several pieces, too.
    monkeypatch.setattr(donor_module, "_MIN_PIECE_BYTES", 1024)
    line = 1_000_000.0
    joining = Timed(line, count=10)
    run = swarm(joining, limits=Limits(max_upload=int(line / share)), max_steps=40)
    assert len(joining.entered_at) == 10
    last = joining.entered_at[-1]
    assert last < 30, "the rest of the run shows what twelve take"
    while_coming_s, when_there_s = joining.steps_s[joining.at : last], joining.steps_s[last:]
    assert max(while_coming_s) < 2 * max(when_there_s)
    assert run.strategy.refusals == []


def test_downloads_of_ten_joiners_hold_no_step_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a limit on uploads, steps take no longer than before the joiners came."""
    monkeypatch.setattr(donor_module, "_MIN_PIECE_BYTES", 1024)
    line = 1_000_000.0
    joining = Timed(line, count=10)
    run = swarm(joining, num_joiners=0, limits=Limits(max_upload=int(line / 40)), max_steps=7)
    assert joining.entered_at == [], "they were to be on their way in"
    peers = [joiner.membership.me.peer_id for joiner in joining.joiners]
    sent = [
        sum(server._transport.traffic.sent_bytes[to, PIECE.name] for to in peers) for server in run.strategy.servers[:2]
    ]
    assert min(sent) > 10_000, "nobody downloaded from it"
    before_s, meanwhile_s = joining.steps_s[: joining.at], joining.steps_s[joining.at :]
    assert len(meanwhile_s) == 4
    assert max(meanwhile_s) < 1.2 * max(before_s)


@pytest.mark.thorough
def test_ten_servers_join_at_once() -> None:
    joining = Joining(count=10)
    run = swarm(joining, microbatch_size=1)
    assert_exact(run, plain())
    assert sorted(len(roster) for roster in run.rosters[-1]) == [6, 6]
    assert run.strategy.refusals == []


def test_a_joiner_of_a_larger_model_with_clipping_computes_all_it_needs() -> None:
    """A newcomer takes over every kind of state: three stages, extras, per-sample losses, Adam, clipping."""

    def make() -> Net:
        return TinyGPTWithLosses(Recipe(optimizer="adamw"))

    options: dict[str, Any] = {"max_steps": STEPS, "max_epochs": -1, "gradient_clip_val": 0.5}
    joining = Joining(count=2)
    run = run_swarm(
        make, loader(sentences()), callbacks=[joining], num_stages=3, num_servers=3, num_joiners=2, latency_s=0.001,
        **options,
    )  # fmt: skip
    assert_exact(run, run_plain(make, loader(sentences()), **options))
    assert run.num_clipped > 0


def slowly(bytes_per_s: float) -> Callable[[InMemoryStrategy], Callable[[Server], None]]:
    """Limit the download rate of the joiners."""

    def prepare(strategy: InMemoryStrategy) -> Callable[[Server], None]:
        network = strategy.network
        assert network is not None
        carry, slow = network.carry, set[PeerId]()

        async def limited(sender: PeerId, receiver: PeerId, buffer: Buffer) -> Buffer:
            if receiver in slow:
                await asyncio.sleep(len(bytes(buffer)) / bytes_per_s)
            return await carry(sender, receiver, buffer)

        network.carry = limited  # type: ignore[method-assign]
        return lambda server: slow.add(server.membership.me.peer_id)

    return prepare


def test_a_download_slower_than_a_step_catches_up_by_records() -> None:
    joining = Joining(at=1, prepare=slowly(2_000_000.0))
    run = swarm(joining)
    assert_exact(run, plain())
    (joiner,) = joining.joiners
    (entered,) = joining.entered_at
    assert entered > 3, "the download took more than a step"
    donor = run.strategy.servers[1]
    sent = donor._transport.traffic.sent_bytes[joiner.membership.me.peer_id, NEXT.name]
    assert sent > 2 * joiner.steps.stage(0).next_sum.values.nbytes, "it applied at least two records on its way"
    assert donor.donor._state.kept == {}, "nothing is kept once nobody needs it"


class Unsteady(DigitsMLP):
    """Trains another set of parameters in each step."""

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.net[0].requires_grad_(self.global_step % 2 == 0)


@pytest.mark.parametrize("bytes_per_s", [2_000_000.0, 1e9])
def test_a_joiner_trains_what_the_others_train(bytes_per_s: float) -> None:
    options: dict[str, Any] = {"max_steps": STEPS, "max_epochs": -1}
    joining = Joining(at=1, prepare=slowly(bytes_per_s))
    run = run_swarm(Unsteady, loader(digits()), callbacks=[joining], num_joiners=1, latency_s=0.001, **options)
    assert_exact(run, run_plain(Unsteady, loader(digits()), **options))
    assert sum(record.change.selection is not None for record in run.records) > STEPS / 2
    assert run.strategy.refusals == []


def test_who_needs_more_records_than_are_kept_begins_again() -> None:
    joining = Joining(at=1, prepare=slowly(300_000.0))
    run = swarm(joining, num_joiners=0, limits=Limits(join_bytes=1))
    assert_exact(run, plain())
    assert joining.entered_at == []
    assert all(server.donor._state.kept == {} for server in run.strategy.servers)


def dying(strategy: InMemoryStrategy) -> Callable[[Server], None]:
    """The joiner's process ends after it reported that it is ready, and before the record."""

    def noted(server: Server) -> None:
        async def die(caller: PeerId, body: bytes) -> bytes:
            assert strategy.network is not None
            strategy.network.kill(server.membership.me.peer_id)
            return b""

        server._transport._call_handlers[LISTEN.name] = die  # type: ignore[attr-defined]

    return noted


def test_a_joiner_that_vanishes_before_its_record_is_left_out() -> None:
    joining = Joining(prepare=dying)
    run = swarm(joining, num_joiners=0)
    assert_exact(run, plain())
    assert all(record.newcomers == [] for record in run.records)
    assert run.strategy.network is not None
    with pytest.raises(Unreachable):
        run.strategy.network.find(joining.joiners[0].membership.me.peer_id)


class Asked:
    """A joiner that answers the rounds late or never."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, strategy: InMemoryStrategy) -> Callable[[Server], None]:
        def noted(server: Server) -> None:
            async def be_silent(caller: PeerId, body: bytes) -> bytes:
                self.times.append(asyncio.get_running_loop().time())
                await asyncio.sleep(1000.0)
                return b""

            server._transport._call_handlers[LISTEN.name] = be_silent  # type: ignore[attr-defined]

        return noted


def test_a_joiner_that_does_not_answer_delays_few_steps() -> None:
    asked = Asked()
    joining = Joining(prepare=asked)
    run = swarm(joining, num_joiners=0)
    assert_exact(run, plain())
    assert len(asked.times) == 3, "then it has to join anew"


def test_who_is_still_joining_is_told_of_the_end() -> None:
    joining = Joining(prepare=slowly(100_000.0))
    run = swarm(joining, num_joiners=0)
    assert_exact(run, plain())
    assert joining.joiners[0].admission.left.is_set()
    assert run.strategy.refusals == []


def spoiling(strategy: InMemoryStrategy) -> Callable[[Server], None]:
    """The joiner's downloaded state is corrupted in its memory."""

    def noted(server: Server) -> None:
        follow = server.admission.follow

        async def spoiled(run: Any, stage: Any) -> None:
            next(iter(stage.parameters.values())).data.flatten()[0] += 1e-9
            await follow(run, stage)

        server.admission.follow = spoiled  # type: ignore[method-assign]

    return noted


def test_weights_that_differ_by_a_bit_do_not_get_in(caplog: pytest.LogCaptureFixture) -> None:
    joining = Joining(prepare=spoiling)
    run = swarm(joining, num_joiners=0)
    assert_exact(run, plain())
    assert "differ from the weights of stage 0" in caplog.text


class Wider(DigitsMLP):
    """A model that differs in one field."""

    def __init__(self) -> None:
        super().__init__(Recipe())
        first = self.net[0]
        assert isinstance(first, nn.Linear)
        self.net[0] = nn.Linear(first.in_features, first.out_features, bias=False)


def test_another_model_is_refused_by_the_field() -> None:
    joining = Joining(module=Wider())
    run = swarm(joining, num_joiners=0)
    assert_exact(run, plain())
    (refusal,) = run.strategy.refusals
    assert isinstance(refusal, ConfigError)
    assert "stage 0 differs in ['net.0.bias']" in str(refusal)
    assert "Start all peers with the same script" in str(refusal)


class Projected(DigitsMLP):
    """A layer keeps random numbers that are in no buffer, so a joiner could not download them."""

    def __init__(self, drawn: str, seed: int = 0) -> None:
        super().__init__(Recipe())
        noise = torch.randn(4, generator=torch.Generator().manual_seed(seed))
        vars(self.net[0]).update({"noise": noise, "rate": 0.1} if drawn == "noise" else {"rate": float(noise[0])})


@pytest.mark.parametrize(("drawn", "seed"), [("noise", 0), ("noise", 1), ("rate", 1)])
def test_other_numbers_in_attributes_are_refused(drawn: str, seed: int) -> None:
    joining = Joining(module=Projected(drawn, seed))
    joined = int(seed == 0)
    run = run_swarm(
        lambda: Projected(drawn),
        loader(digits()),
        callbacks=[joining],
        num_joiners=joined,
        latency_s=0.001,
        max_steps=STEPS,
    )
    assert len(run.strategy.refusals) == 1 - joined
    for refusal in run.strategy.refusals:
        assert f"0.{drawn}, which is no weight or buffer" in str(refusal)
        assert "make it a buffer" in str(refusal)


def test_another_optimizer_is_refused() -> None:
    """Its state would be different, and records would set hyperparameters that it does not have."""
    run = swarm(Joining(module=DigitsMLP(Recipe(optimizer="sgd"))), num_joiners=0)
    assert_exact(run, plain())
    (refusal,) = run.strategy.refusals
    assert isinstance(refusal, ConfigError)
    assert "the optimizer of the run, AdamW(amsgrad, betas" in str(refusal)
    assert "this peer builds SGD(dampening" in str(refusal)
