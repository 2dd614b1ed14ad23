"""Peers in real processes are removed: at seeded random, by a plan, or by a cloud's notice. The curve stays the same.

Other tests use codecs without removals. The peers serve; in the test in which the lead dies they train, too.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from typing_extensions import override

from lightning_swarm import SwarmStrategy, cli
from lightning_swarm.core.limits import Limits
from lightning_swarm.peer.config import Compression
from lightning_swarm.protocol.compression.quantization import Blockwise8Bit, Rotated4Bit
from lightning_swarm.protocol.messages.reports import EVENT_KINDS
from lightning_swarm.protocol.run_state import RunState
from lightning_swarm.testing import FaultySwarmStrategy
from tests.contract.metadata import ACTION, REASONS, Metadata, let_go
from tests.features.test_trainers import Lines
from tests.p2p import train
from tests.p2p.several import BATCHES, NUM_EPOCHS, Losses, Several, Validated, said
from tests.p2p.warm import LIMITS, Server, Zygote, shared_zygote, wait_until
from tests.p2p.zygote import Planned, planned
from tests.parity.harness import LOSS_TOLERANCE, QUIET, WEIGHT_TOLERANCE, run_plain
from tests.parity.models import DigitsMLP, Net, Recipe, digits, loader
from tests.parity.test_shared_data import curve

# Cold starts in this file: 1, the process that all peers are forked from.

NUM_SERVERS = 6
TIMES = int(os.environ.get("SWARM_TIMES", "0"))
"""Number of removals by method, if it differs from the default."""
MOST_S = 600.0


class Strategy(SwarmStrategy):
    """Strategy of a trainer that waits for all servers before it begins."""

    @property
    @override
    def num_awaited_servers(self) -> int:
        return NUM_SERVERS

    @property
    def run_state(self) -> RunState:
        """The run's state, as the trainer knows it."""
        assert self.peer is not None
        assert self.peer.lead.run is not None
        return self.peer.lead.run

    @property
    def roster(self) -> set[str]:
        """Return the members of the run."""
        return {member.peer_id for stage in self.run_state.rosters for member in stage}


class FaultyStrategy(Strategy, FaultySwarmStrategy):
    """The same strategy in a swarm with a fault plan."""


class Steps(L.Callback):
    """Records the curve, and ends the run.

    Args:
        look: Called after each step; returns whether the run may end.
    """

    def __init__(self, look: Callable[[Strategy], bool]) -> None:
        self.losses: list[float] = []
        self.events: Counter[str] = Counter()  # counts in the Trainer's logger
        self.begin_s = self.end_s = time.monotonic()
        self._look = look

    @override
    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))
        assert isinstance(trainer.strategy, Strategy)
        trainer.should_stop = self._look(trainer.strategy)
        assert time.monotonic() < self.begin_s + MOST_S, "what shall happen did not"
        self.end_s = time.monotonic()


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    with shared_zygote() as made:
        yield made


def make() -> Net:
    return DigitsMLP(Recipe(optimizer="sgd"))


@dataclass
class Swarm:
    """Servers that wait for their trainer.

    Args:
        options: Options of each server, as in `serve` in `zygote.py`.
    """

    zygote: Zygote
    num_stages: int
    options: Callable[[int], dict[str, Any]] = lambda _: {}
    servers: list[Server] = field(default_factory=list)

    def __post_init__(self) -> None:
        for number in range(NUM_SERVERS):
            self.begin(number)

    def begin(self, number: int = 0) -> None:
        """Start another server."""
        known = [one.address for one in (self.servers[:1] if number else self.servers)]
        self.servers.append(self.zygote.begin(known, num_stages=self.num_stages, **self.options(number)))

    def close(self) -> None:
        for server in self.servers:
            if server.alive:
                os.kill(server.pid, signal.SIGKILL)

    def strategy(self, made: type[Strategy] = Strategy, **options: Any) -> Strategy:
        """Return the trainer's strategy."""
        return made(
            role="trainer",
            num_stages=self.num_stages,
            pipeline="net",
            initial_peers=[self.servers[0].address],
            limits=Limits(**LIMITS),
            **options,
        )

    def wait(self) -> None:
        """Wait until the run is over at the servers, too."""
        wait_until(lambda: not any(one.alive for one in self.servers), "a server outlived its run")

    def train(self, look: Callable[[Strategy], bool], made: type[Strategy] = Strategy, **options: Any) -> Steps:
        """Train until `look` returns True. The curve is the plain Trainer's, and no server outlives the run."""
        strategy = self.strategy(made, microbatch_size=2, **options)
        steps = Steps(look)
        L.seed_everything(0)
        module = make()
        lines = Lines()
        quiet = {**QUIET, "logger": lines, "log_every_n_steps": 1}
        trainer = L.Trainer(strategy=strategy, devices=1, max_epochs=-1, callbacks=[steps], **quiet)
        trainer.fit(module, loader(digits()))
        for line in lines.lines:
            counts = {name.removeprefix("swarm/"): int(count) for name, count in line.items()}
            steps.events.update({kind: count for kind, count in counts.items() if kind in EVENT_KINDS})
        plain = run_plain(make, loader(digits()), max_steps=trainer.global_step, max_epochs=-1)
        assert len(steps.losses) == trainer.global_step
        off = max(abs(a - b) / abs(b) for a, b in zip(steps.losses, plain.losses, strict=True))
        assert off <= LOSS_TOLERANCE
        state = module.state_dict()
        weights_off = max(float((state[name] - tensor).abs().max()) for name, tensor in plain.weights.items())
        assert weights_off <= WEIGHT_TOLERANCE
        self.wait()
        print(  # shown with `-s`, for docs/faults.md
            f"\n{trainer.global_step} steps in {steps.end_s - steps.begin_s:.0f} s, losses off by {off:.1e}, "
            f"weights by {weights_off:.1e}, {dict(steps.events)}"
        )
        return steps


# ---------------------------------------------------------------------- by a hand


@dataclass
class Hand:
    """Removes servers while the trainer's loop runs.

    Args:
        take: Removes a server; returns whether a new one is needed.
        times: Number of removals.
    """

    swarm: Swarm
    take: Callable[[Hand, Server], bool]
    times: int
    rng: random.Random = field(default_factory=lambda: random.Random(7))
    taken: list[tuple[int, str]] = field(default_factory=list)  # (step, server)
    strategy: Strategy | None = None
    error: BaseException | None = None
    done: bool = False

    def look(self, strategy: Strategy) -> bool:
        """Start the removals on the first call; return whether they are done."""
        if self.strategy is None:
            self.strategy = strategy
            threading.Thread(target=self.work, daemon=True).start()
        return self.done

    @property
    def roster(self) -> set[str]:
        assert self.strategy is not None
        return self.strategy.roster

    @property
    def step(self) -> int:
        assert self.strategy is not None
        return self.strategy.run_state.version

    def work(self) -> None:
        """Remove servers, on a separate thread."""
        try:
            for _ in range(self.times):
                self._once()
        except BaseException as error:  # noqa: BLE001 - the test raises it
            self.error = error
        finally:
            self.done = True

    def _once(self) -> None:
        servers = self.swarm.servers
        server = self.rng.choice(servers)
        before = self.step
        wait_until(lambda: self.step > before, "no step was decided")  # a random moment within a step
        threading.Event().wait(self.rng.uniform(0.0, 0.1))
        self.taken.append((self.step, server.peer_id))
        if self.take(self, server):
            servers.remove(server)
            self.swarm.begin()
        wait_until(
            lambda: {one.peer_id for one in servers} == self.roster,
            f"the roster is not whole again after {self.taken}",
        )


def kill(hand: Hand, server: Server) -> bool:
    os.kill(server.pid, signal.SIGKILL)
    return True


def freeze(hand: Hand, server: Server) -> bool:
    """Freeze a server until the run has excluded it. Thawed, it joins again by itself."""
    os.kill(server.pid, signal.SIGSTOP)
    wait_until(lambda: server.peer_id not in hand.roster, f"{server.peer_id} is frozen and still in the roster")
    os.kill(server.pid, signal.SIGCONT)
    return False


def terminate(hand: Hand, server: Server) -> bool:
    """Let a server leave by a record, and end."""
    os.kill(server.pid, signal.SIGTERM)
    wait_until(lambda: not server.alive, f"{server.peer_id} did not leave")
    assert "Run 'swarm' has released this peer." in server.said
    wait_until(lambda: server.peer_id not in hand.roster, f"{server.peer_id} has left and is still in the roster")
    return True


@pytest.mark.first_cells(1)
@pytest.mark.parametrize(
    ("take", "times"),
    [
        pytest.param(kill, TIMES or 6, id="kill -9"),
        # Each removal takes at least `silence_timeout`.
        pytest.param(freeze, TIMES or 2, id="SIGSTOP and SIGCONT"),
        pytest.param(terminate, TIMES or 6, id="SIGTERM"),
    ],
)
def test_the_curve_is_the_plain_trainers_whoever_is_taken_away(
    zygote: Zygote, take: Callable[[Hand, Server], bool], times: int
) -> None:
    with closing(Swarm(zygote, num_stages=3)) as swarm:
        hand = Hand(swarm, take, times)
        steps = swarm.train(hand.look)
        assert hand.error is None, hand.error
        assert len(hand.taken) == times
        if take is terminate:
            assert steps.events["replay"] == 0
        else:
            assert steps.events["retry"] + steps.events["replay"] > 0, "nothing was under way"


# ---------------------------------------------------------------------- the lead of several trainers


@pytest.mark.first_cells(1)
@pytest.mark.parametrize("cut", [True, False])
def test_another_trainer_leads_when_the_lead_is_killed(zygote: Zygote, tmp_path: Path, cut: bool) -> None:
    """The lead dies in the middle of an epoch; training and validation equal one trainer's without failures."""
    limits = {**LIMITS, "silence_timeout": 2.0, "revive_timeout": 1.0, "snapshot_interval": 0.001}
    options = {"folder": str(tmp_path), "limits": limits, "cut": cut}
    trainers = [zygote.begin_trainer(number=0, others=2, initial_peers=[], **options)]
    try:
        known = [trainers[0].address]
        trainers += [zygote.begin_trainer(number=one, others=0, initial_peers=known, **options) for one in (1, 2)]

        def held() -> bool:
            assert all(one.alive for one in trainers), [(one.state, one.said) for one in trainers]
            return any(kind == "held" for kind, *_ in said(tmp_path, 0))

        wait_until(held, "nobody could lead after it")
        os.kill(trainers[0].pid, signal.SIGKILL)
        wait_until(lambda: not any(one.alive for one in trainers), "a trainer outlived its run")
    finally:
        for one in trainers:
            if one.alive:
                os.kill(one.pid, signal.SIGKILL)
    kind, epoch, index = said(tmp_path, 0)[-1]
    assert (kind, 0 < index < BATCHES) == ("held", True), "it said nothing after that"
    (leads,) = [number for number, one in enumerate(trainers) if "This peer takes the run over" in one.said]
    seen = Several.read(tmp_path)
    assert len(seen.generations) == 2
    after = {rank for (step, _), (rank, _) in seen.batches.items() if step >= seen.generations[1]}
    assert after == {1, 2}, "the other one trains on beside it"
    assert [rank for _, (rank, _) in sorted(seen.validated.items())] == [0] * epoch + [leads] * NUM_EPOCHS
    assert_undisturbed(seen)


def assert_undisturbed(seen: Several, make: type[Validated] = Validated) -> None:
    """Check samples, losses and weights against the plain Trainer's, with each sample once an epoch."""
    loader, validated, num_epochs = make().train_dataloader(), Losses(), len(seen.validated)
    num_batches, batches_of_a_step = make.num_batches, make.batches_of_a_step
    listed = [batch[-1].tolist() for _ in range(num_epochs) for batch in islice(loader, num_batches)]
    for epoch in range(num_epochs):
        samples = [sample for batch in listed[epoch * num_batches : (epoch + 1) * num_batches] for sample in batch]
        assert sorted(samples) == list(range(len(loader.dataset)))  # type: ignore[arg-type]
    counted = [batch for step in curve(seen) for batch in step]
    assert [ids for ids, _ in counted] == listed
    plain = run_plain(
        make, make().train_dataloader(), make().val_dataloader(),
        max_epochs=num_epochs, accumulate_grad_batches=batches_of_a_step, callbacks=[validated],
    )  # fmt: skip
    # Lightning reports the loss divided by the number of the step's batches.
    assert [loss / batches_of_a_step for _, loss in counted] == pytest.approx(plain.losses, rel=LOSS_TOLERANCE)
    assert [loss for _, (_, loss) in sorted(seen.validated.items())] == pytest.approx(
        validated.losses, rel=LOSS_TOLERANCE
    )
    for name, tensor in plain.weights.items():
        assert float((seen.weights[name] - tensor).abs().max()) <= WEIGHT_TOLERANCE


# ---------------------------------------------------------------------- by the owner


@pytest.mark.thorough
def test_a_ban_outlives_the_coordinator(zygote: Zygote, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The owner bans a server, the coordinator is killed, and its successor keeps the banned peer out."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))

    def command(*arguments: object) -> None:
        monkeypatch.setattr(sys, "argv", ["lightning-swarm", *map(str, arguments)])
        assert cli.main() == 0

    invitation, reason = tmp_path / "server.invite", "its gradients are noise"
    command("invite", "--role", "server", "--uses", NUM_SERVERS + 1, "--out", invitation)

    def told(number: int) -> dict[str, Any]:
        return {"invite": str(invitation), "identity_path": str(tmp_path / f"{number}.key")}

    def coordinator(hand: Hand) -> str:
        assert hand.strategy is not None
        return hand.strategy.status().coordinator

    def take(hand: Hand, server: Server) -> bool:
        if server.peer_id == coordinator(hand):  # another server, so that the coordinator can be killed afterwards
            server = next(one for one in hand.swarm.servers if one.peer_id != coordinator(hand))
        number = hand.swarm.servers.index(server)
        leads = next(one for one in hand.swarm.servers if one.peer_id == coordinator(hand))
        command("ban", leads.address, server.peer_id, "--reason", reason)
        wait_until(lambda: not server.alive, f"{server.peer_id} did not end")
        assert f"This peer was banned from this run by its owner, who gives the reason: {reason}" in server.said
        wait_until(lambda: server.peer_id not in hand.roster, f"{server.peer_id} is still in the roster")

        os.kill(leads.pid, signal.SIGKILL)
        wait_until(lambda: coordinator(hand) != leads.peer_id, "nobody took over")
        after = hand.step
        wait_until(lambda: hand.step > after, "the run does not go on")
        for gone in (server, leads):
            hand.swarm.servers.remove(gone)
        again = zygote.begin([hand.swarm.servers[-1].address], num_stages=hand.swarm.num_stages, **told(number))
        wait_until(lambda: not again.alive, "a banned peer waits to be let in")
        assert f"{server.peer_id} was banned from this run by its owner" in again.said
        hand.swarm.begin(NUM_SERVERS)  # the invitation itself is not banned
        return False

    with closing(Swarm(zygote, num_stages=2, options=told)) as swarm:
        hand = Hand(swarm, take, 1)
        steps = swarm.train(hand.look, trust="invited")
        assert hand.error is None, hand.error
        assert len(hand.taken) == 1
        assert steps.events["expelled"] > 0
        assert steps.events["takeover"] > 0


# ---------------------------------------------------------------------- by a plan

FAULTS: Planned = [
    # The first call, because a server with a slow first answer gets few further calls, and a fifth may come late.
    ("kill", "server-2", {"at": "BACKWARD_DONE"}),
    # Long enough to be excluded even as the coordinator, which takes detection and an election.
    ("freeze", "server-3", {"at": "CLOSE", "step": 16, "for_s": 4 * LIMITS["silence_timeout"]}),
]


@pytest.mark.thorough
def test_a_plans_faults_strike_real_processes(zygote: Zygote, tmp_path: Path) -> None:
    """One server dies after adding its first gradient, before its receipt; one freezes at a close and returns."""
    fired = tmp_path / "fired"

    def told(number: int) -> dict[str, Any]:
        return {"faults": FAULTS, "name": f"server-{number}", "fired": str(fired)}

    with closing(Swarm(zygote, num_stages=2, options=told)) as swarm:
        killed, frozen = swarm.servers[2:4]
        kills, freezes = (str(fault) for fault in planned(FAULTS).faults)
        there: list[bool] = []  # whether the frozen server is in the roster, after each step since

        def struck() -> list[str]:
            return sorted(fired.read_text().splitlines()) if fired.exists() else []

        def look(strategy: Strategy) -> bool:
            if freezes in struck():
                there.append(frozen.peer_id in strategy.roster)
            return kills in struck() and bool(there) and there[-1] and not all(there)

        steps = swarm.train(look, FaultyStrategy, faults=planned(FAULTS), fired=fired)
        assert struck() == sorted([kills, freezes])
        assert not killed.alive
        assert "lightning_swarm:" not in killed.said, "it had a last word"
        assert steps.events["retry"] > 0, "somebody else added what it had sent no receipt for"


# ---------------------------------------------------------------------- by a cloud


@pytest.mark.thorough
def test_a_server_leaves_on_its_clouds_notice_and_nothing_is_replayed(zygote: Zygote) -> None:
    """The notice comes by HTTP in the form of AWS."""
    with closing(Metadata()) as service:
        service.be_aws()

        def told(number: int) -> dict[str, Any]:
            address = (service.endpoint.host, service.endpoint.port)
            return {"metadata": address} if number == 4 else {}

        with closing(Swarm(zygote, num_stages=3, options=told)) as swarm:
            server = swarm.servers[4]
            num_steps = num_asked = 0

            def look(strategy: Strategy) -> bool:
                nonlocal num_steps, num_asked
                num_steps += 1
                if num_steps == 5:
                    assert server.peer_id in strategy.roster
                    num_asked = len(service.asked)
                    let_go(service, "aws")
                return not server.alive

            steps = swarm.train(look)
            assert ("GET", ACTION) in service.asked[num_asked:]
            assert f"{REASONS['aws']}: leaving the run." in server.said
            assert "Run 'swarm' has released this peer." in server.said
            assert steps.events["replay"] == 0
            assert steps.events["retry"] == 0


# ---------------------------------------------------------------------- by nobody


@pytest.mark.thorough
def test_the_curve_is_nearly_the_plain_trainers_in_an_eighth_of_the_bytes(zygote: Zygote, tmp_path: Path) -> None:
    """All tensors are encoded: hidden states and their gradients in eight bits, sums and their means in four."""
    codecs = Compression(activations="8bit", gradients="8bit", averaging="4bit", error_feedback=True)
    num_steps, microbatch_size = 8, 16

    def told(number: int) -> dict[str, Any]:
        (tmp_path / str(number)).mkdir()
        return {"model": "wide", "traffic": str(tmp_path / str(number))}

    L.seed_everything(0)
    module, data = train.make("wide")
    with closing(Swarm(zygote, num_stages=2, options=told)) as swarm:
        strategy = swarm.strategy(microbatch_size=microbatch_size, split=["2"], compression=codecs)
        steps = Steps(lambda _: False)
        L.Trainer(strategy=strategy, devices=1, max_steps=num_steps, callbacks=[steps], **QUIET).fit(module, data)
        swarm.wait()
    plain = run_plain(lambda: train.make("wide")[0], data, max_steps=num_steps, max_epochs=-1)
    off = max(abs(a - b) / b for a, b in zip(steps.losses, plain.losses, strict=True))
    assert LOSS_TOLERANCE < off < 0.01
    assert steps.losses[-1] < 0.6 * steps.losses[0]

    files = [json.loads(path.read_text()) for path in tmp_path.glob("*/traffic-0.json")]
    assert len(files) == NUM_SERVERS
    tensors = sum(n for one in files for _, method, n in one["sent"] if method == "ticket.wait")
    num_microbatches = num_steps * 2 * train.ROWS // microbatch_size
    hidden = 2 * num_microbatches * microbatch_size * train.WIDTH * Blockwise8Bit.bits / 8
    # Each of a stage's three servers sends two thirds of its sums, and a third of the mean to each of the two peers.
    weights = sum(one.numel() for one in module.net.parameters())
    averaged = num_steps * 4 * weights * Rotated4Bit.bits / 8
    assert hidden + averaged < tensors < 1.05 * (hidden + averaged)
