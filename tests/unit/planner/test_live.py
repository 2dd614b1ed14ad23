"""A plan for a live swarm is based on its peers' reports, and refused if these are incomplete."""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import lightning as L
import msgspec
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_swarm import cli
from lightning_swarm.core.errors import SwarmError
from lightning_swarm.monitor import survey
from lightning_swarm.monitor.swarm_report import ObservedPeer, Sighting
from lightning_swarm.network import LinkEstimate, LinkEstimates, PeerId, TransferSample
from lightning_swarm.network.addresses import Address
from lightning_swarm.network.simulated_link import Direction, SimulatedLink
from lightning_swarm.planner.live import AssumedRates, LiveSwarm, read_swarm
from lightning_swarm.planner.machine_files import WireSettings
from lightning_swarm.planner.plan import make_plan, predict
from lightning_swarm.planner.report import describe_now
from lightning_swarm.protocol.messages.reports import (
    CarriedReport,
    HeldStage,
    LinkReport,
    MachineReport,
    PeerReport,
    SampleCosts,
    ServerReport,
    StepReport,
)
from lightning_swarm.protocol.settings import CodecName, Compression
from lightning_swarm.testing import InMemoryStrategy
from tests.parity.harness import QUIET

TOKENS, WIDTH, ROWS, SIZE = 512, 128, 32, 4
MBIT = 1e6 / 8
ASSUMED = AssumedRates(line_bytes_per_s=100 * MBIT, bus_bytes_per_s=12e9)
SAMPLES_PER_S = (16.0, 8.0)
MBITS = (400.0, 200.0)


class Wide(L.LightningModule):
    """The first stage computes as much as the second: all blocks are equal except the last."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch).square().mean()  # type: ignore[no-any-return]

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Onlooker(L.Callback):
    """Queries all peers after the second step and after the last."""

    def __init__(self, strategy: InMemoryStrategy) -> None:
        self.strategy = strategy
        self.seen: list[tuple[float, int, dict[PeerId, PeerReport]]] = []

    @override
    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        network, loop = self.strategy.network, self.strategy.virtual_loop
        assert network is not None
        if trainer.global_step not in (2, trainer.max_steps):
            return
        at_s = loop.time()
        transport = network.find("stranger") if self.seen else network.transport("stranger")
        found = self.strategy.peers[0].runtime.run(survey.ask_all(transport, PeerId("peer-0"), "peer-0", timeout=9.0))
        reports = {one.peer_id: one.report for one in found if one.report is not None}
        self.seen.append((at_s, trainer.global_step * ROWS, reports))


def at_pace(samples_per_s: float, sent_gb_per_hour: float = 0.0) -> ObservedPeer:
    """Return a peer as `status` shows it."""
    return ObservedPeer(peer_id="", place="", samples_per_s=samples_per_s, sent_gb_per_hour=sent_gb_per_hour)


Watched = tuple[LiveSwarm, dict[PeerId, PeerReport]]


def watch(mbits: Sequence[float], compression: CodecName = "none") -> Watched:
    """Observe a swarm of two peers with given speed, links and latency."""
    lines = [SimulatedLink(Direction(mbit * MBIT), Direction(mbit * MBIT), latency_s=0.001) for mbit in mbits]
    strategy = InMemoryStrategy(
        compression=compression,
        num_stages=2,
        microbatch_size=SIZE,
        microbatch_s=[SIZE / rate for rate in SAMPLES_PER_S],
        links=lines,
    )
    onlooker = Onlooker(strategy)
    options = {**QUIET, "precision": 32, "devices": 2, "max_steps": 6, "max_epochs": -1}
    data = DataLoader(torch.randn(2 * ROWS, TOKENS, WIDTH), batch_size=ROWS)  # type: ignore[arg-type]
    L.Trainer(**options, strategy=strategy, callbacks=[onlooker]).fit(Wide(), data)
    (began_s, before, _), (ended_s, after, reports) = onlooker.seen
    pace = (after - before) / (ended_s - began_s)
    return read_swarm(reports, dict.fromkeys(reports, at_pace(pace)), ASSUMED), reports


@pytest.fixture(scope="module")
def watched() -> Watched:
    return watch(MBITS)


def test_the_machines_are_as_they_were_given(watched: tuple[LiveSwarm, Any]) -> None:
    live, _ = watched
    assert {one.name for one in live.machines} == {"peer-0", "peer-1"}
    assert live.machines[0].name == "peer-0"  # it leads
    machines = {one.name: one for one in live.machines}
    stage_flop = live.model.flop / 2
    for number, rate in enumerate(SAMPLES_PER_S):
        found = machines[f"peer-{number}"]
        assert found.flop_per_s == pytest.approx(rate * stage_flop, rel=0.01)
        assert found.latency_s == pytest.approx(0.002, rel=0.2)  # up one link, down the other
        assert found.up_bytes_per_s == pytest.approx(min(MBITS) * MBIT, rel=0.2)  # the slower end's rate
        assert found.down_bytes_per_s == pytest.approx(min(MBITS) * MBIT, rel=0.2)
        assert found.memory_bytes > 1e8
    assert live.now.assumed_lines == live.now.unmeasured == ()


def test_the_model_is_as_it_is(watched: tuple[LiveSwarm, Any]) -> None:
    model = watched[0].model
    assert len(model.blocks) == 4
    assert model.parameters == sum(one.numel() for one in Wide().parameters())
    row = TOKENS * WIDTH * 4
    assert {block.output_bytes for block in model.blocks} == {row}
    assert (model.input_bytes, model.input_gradient, model.extra_bytes, model.weight_bytes) == (row, False, 0, 4)
    assert model.flop == pytest.approx(3 * 4 * 2 * TOKENS * WIDTH * WIDTH)
    assert {block.graph_bytes for block in model.blocks} <= set(range(row, 3 * row))


def test_what_it_does_now_is_predicted(watched: tuple[LiveSwarm, Any]) -> None:
    """The planner predicts the current settings as well, so that users can compare it with the measurement."""
    live, _ = watched
    assert live.now.setting is not None
    assert (live.now.setting.num_stages, live.now.setting.microbatch_size) == (2, SIZE)
    assert live.now.setting.target_batch_size == live.now.setting.batch_size == ROWS
    said = predict(live.model, live.machines, live.now.setting)
    assert said == pytest.approx(live.now.samples_per_s, rel=0.3)
    plan = make_plan(live.model, live.machines)
    assert plan.best is not None
    assert plan.best.samples_per_s >= 0.9 * said


@pytest.mark.thorough
def test_what_travels_encoded_is_predicted_so(watched: Watched) -> None:
    """Peers report the bytes of their stages' raw tensors, even if they travel encoded."""
    live, _ = watch([10.0, 10.0], "8bit")
    assert live.model == watched[0].model
    assert live.compression == Compression.parse("8bit")
    assert live.now.setting is not None
    wire = WireSettings(Compression.parse("8bit")).wire
    said = predict(replace(live.model, wire=wire), live.machines, live.now.setting)
    assert said == pytest.approx(live.now.samples_per_s, rel=0.3)
    raw = predict(live.model, live.machines, live.now.setting)
    assert raw is not None
    assert raw < 0.5 * live.now.samples_per_s


# ---------------------------------------------------------------------- what peers may not know

COSTS = SampleCosts(
    flop=1e9,
    input_bytes=4096,
    extra_bytes=0,
    gradient_bytes=0,
    output_bytes=4096,
    graph_bytes=10_000,
    input_number_bytes=4,
    output_number_bytes=4,
)
HELD = HeldStage(
    index=0, num_blocks=2, num_parameters=1000, weight_bytes=4, samples_per_s=5.0, microbatch_size=2.0, costs=COSTS
)


def server(*held: HeldStage, **changes: Any) -> ServerReport:
    given = {
        "lead": "b",
        "coordinator": "a",
        "num_stages": 2,
        "stages": [one.index for one in held],
        "trainers_stage": None,
        "first_step": 0,
        "step": 3,
        "age_s": 9.0,
        "num_samples": 90,
        "queued": 0,
        "held": list(held),
        "machine": MachineReport(processor="accelerator", memory_bytes=8 << 30, host_memory_bytes=64 << 30),
    }
    return ServerReport(**{**given, **changes})


def report(one: ServerReport | None, links: Mapping[str, float] | None = None) -> PeerReport:
    ways = [
        LinkReport(peer_id=peer, round_trip_s=0.1, received=CarriedReport(num_bytes=round(rate), took_s=1.1))
        for peer, rate in (links or {}).items()
    ]
    return PeerReport(run_id="x", age_s=9.0, sent_bytes=1, received_bytes=1, server=one, links=ways)


def put_together(reports: Mapping[str, PeerReport]) -> LiveSwarm:
    by_id = {PeerId(peer): one for peer, one in reports.items()}
    return read_swarm(by_id, dict.fromkeys(by_id, at_pace(3.0, sent_gb_per_hour=3.6)), ASSUMED)


def changed(held: HeldStage, **changes: Any) -> HeldStage:
    return msgspec.structs.replace(held, **changes)


SECOND = changed(HELD, index=1)


def test_lines_are_told_by_both_ends_and_else_assumed() -> None:
    live = put_together({"a": report(server(HELD), {"b": 5e6}), "b": report(server(SECOND))})
    b, a = live.machines  # the lead first
    assert a.down_bytes_per_s == b.up_bytes_per_s == pytest.approx(5e6 / 0.94)
    assert a.up_bytes_per_s == b.down_bytes_per_s == ASSUMED.line_bytes_per_s
    assert live.now.assumed_lines == ("b", "a")
    assert a.bus_bytes_per_s == 12e9
    assert live.now.samples_per_s == 3.0
    assert live.now.sent_bytes_per_s == 2e6


def test_who_was_not_measured_is_left_out_and_named() -> None:
    silent = server(changed(HELD, samples_per_s=None, costs=None))
    live = put_together(
        {"a": report(server(HELD)), "b": report(server(SECOND)), "c": report(silent), "d": report(None)}
    )
    assert [one.name for one in live.machines] == ["b", "a"]
    assert live.now.unmeasured == ("c", "d")
    assert live.now.samples_per_s == 3.0  # the second stage's: the first has two peers
    said = describe_now(make_plan(live.model, live.machines), live.now, ASSUMED.line_bytes_per_s)
    assert "no step has been decided yet" in said
    assert "because too few measurements exist: c, d." in said
    assert "links of b, a" in said
    assert "100 Mb/s" in said


def test_a_stage_that_computes_nothing_tells_nothing_of_its_peer() -> None:
    tanh = changed(SECOND, samples_per_s=1e6, costs=msgspec.structs.replace(COSTS, flop=0.0), num_parameters=0)
    live = put_together({"a": report(server(HELD)), "b": report(server(tanh))})
    assert live.machines[0].flop_per_s == live.machines[1].flop_per_s == pytest.approx(5e9, rel=0.01)


def test_compiled_stages_are_weighed_by_their_parameters() -> None:
    hidden = msgspec.structs.replace(COSTS, flop=0.0)
    live = put_together(
        {
            "a": report(server(changed(HELD, costs=hidden))),
            "b": report(server(changed(SECOND, costs=hidden, num_parameters=3000))),
        }
    )
    assert [block.flop for block in live.model.blocks] == [3000.0, 3000.0, 9000.0, 9000.0]


@pytest.mark.parametrize(
    ("reports", "words"),
    [
        ({"a": report(None)}, "no run is under way"),
        ({"a": report(server(HELD))}, "microbatch of stage 1"),
        ({"a": report(server(HELD)), "b": report(server(changed(SECOND, costs=None)))}, "microbatch of stage 1"),
        ({"a": report(server(*(changed(one, samples_per_s=None) for one in (HELD, SECOND))))}, "four microbatches"),
    ],
    ids=["no run", "nobody holds it", "not seen", "no rate"],
)
def test_too_little_is_an_error(reports: Mapping[str, PeerReport], words: str) -> None:
    with pytest.raises(SwarmError, match=words):
        put_together(reports)


def test_a_message_that_was_hardly_longer_than_the_way_is_not_taken_at_its_word() -> None:
    quick = LinkReport(peer_id="b", round_trip_s=0.1, received=CarriedReport(num_bytes=100_000, took_s=0.1))
    at_once = LinkReport(peer_id="b", received=CarriedReport(num_bytes=100_000, took_s=0.0))
    for link, bytes_per_s in ((quick, 8e6), (at_once, 1e12)):
        told = msgspec.structs.replace(report(server(HELD)), links=[link])
        live = put_together({"a": told, "b": report(server(SECOND))})
        assert live.machines[0].up_bytes_per_s == pytest.approx(bytes_per_s / 0.94)


def test_the_best_of_a_link_counts() -> None:
    links = LinkEstimates()
    for took_s in (0.5, 0.2, 0.3):
        links.add_sample("a", sent_bytes=10, received_bytes=10, took_s=took_s)
    for num_bytes, took_s in ((10_000, 0.001), (1_000_000, 9.0), (1_000_000, 1.2), (2_000_000, 3.0)):
        links.add_sample("a", sent_bytes=10, received_bytes=num_bytes, took_s=took_s)
    assert links["a"] == LinkEstimate(round_trip_s=0.2, received=TransferSample(1_000_000, 1.2))
    links.add_sample("a", sent_bytes=1_000_000, received_bytes=10, took_s=0.3)
    assert links["a"].sent == TransferSample(1_000_000, 0.3)
    for number in range(2000):
        links.add_sample(str(number), sent_bytes=10, received_bytes=10, took_s=0.5)
    assert len(links) == 1024


# ---------------------------------------------------------------------- the command

ADDRESS = "127.0.0.1:1/12D3KooWBTrNL8qKG3wsXQvHv2sPhqYSpyrkXJ4ZNpzF9KkVTKw1"


def looks(*reports: PeerReport | None) -> Any:
    """Replace the peers' reports; both looks give the same."""

    def look(address: Address, *, every_s: float | None, timeout: float, visitor: object) -> Generator[list[Sighting]]:
        found = [
            Sighting(PeerId(f"12D3KooWBTrN-{name}"), "1.2.3.4:5", one, None if one else "hung up")
            for name, one in zip("abcdef", reports, strict=False)
        ]
        yield found
        yield found

    return look


def typed(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr("sys.argv", ["lightning-swarm", "plan", *arguments])
    return cli.main()


STEP = StepReport(num_samples=64, num_batches=2)


def test_the_command_says_both(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    found = looks(report(server(HELD, newest=STEP)), report(server(SECOND)), None)
    monkeypatch.setattr(survey, "watch_sightings", found)
    assert typed(monkeypatch, "--swarm", ADDRESS, "--line-mbit", "50") == 0
    said = capsys.readouterr().out
    for words in (
        "orth it: ",
        "Choose\n",
        "Expect\n",
        "Why\n",
        "Now\n",
        "target_batch_size  64   samples of the new",
    ):
        assert words in said
    assert "batch_size         32 " in said
    assert "links of BTrN-a, BTrN-b; 50 Mb/s is assumed" in said
    assert typed(monkeypatch, "--swarm", ADDRESS, "--json", "--target-batch-size", "16") == 0
    told = json.loads(capsys.readouterr().out)
    assert told["best"]["setting"]["target_batch_size"] == 16
    assert told["now"]["setting"]["target_batch_size"] == 64
    assert told["now"]["assumed_lines"] == ["12D3KooWBTrN-a", "12D3KooWBTrN-b"]


def test_the_command_takes_the_swarms_codecs_unless_it_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told = []
    for has in (Compression(), Compression(activations="8bit", averaging="4bit")):
        found = looks(report(server(HELD, newest=STEP, compression=has)), report(server(SECOND, compression=has)))
        monkeypatch.setattr(survey, "watch_sightings", found)
        for others in ((), ("--compression", "4bit")):
            assert typed(monkeypatch, "--swarm", ADDRESS, "--line-mbit", "1", "--json", *others) == 0
            told.append(json.loads(capsys.readouterr().out))
    plain, would, encoded, would_too = told
    assert plain["compression"] == asdict(Compression())
    assert encoded["compression"] == asdict(Compression(activations="8bit", averaging="4bit"))
    assert would["compression"] == would_too["compression"] == asdict(Compression.parse("4bit"))
    assert would["now"] == plain["now"]
    assert would_too["now"] == encoded["now"]
    assert would["best"] == would_too["best"]
    assert encoded["now"]["predicted_samples_per_s"] > 1.05 * plain["now"]["predicted_samples_per_s"]


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (("--swarm", ADDRESS, "machines.yaml"), 2, ["--swarm and MACHINES.yaml", "Leave one side out"]),
        (("--swarm", ADDRESS, "--layers", "2", "--measure"), 2, ["--swarm and --layers and --measure"]),
        (("--swarm", ADDRESS, "--boundary-ratio", "4"), 2, ["--swarm and --boundary-ratio"]),
        (("--swarm", ADDRESS, "--compression", "2bit"), 2, ["`compression`", "got '2bit'"]),
        (("--swarm", ADDRESS, "--over", "0"), 2, ["`--over`", "above 0", "got 0"]),
        (("--swarm", ADDRESS, "--target-batch-size", "0"), 2, ["--target-batch-size", "got 0"]),
        (("--swarm", "nowhere"), 2, ["nowhere"]),
        (("--layers", "2", "--width", "8", "--sequence", "8"), 2, ["got neither", "--swarm HOST:PORT/ID"]),
        (("--swarm", ADDRESS), 1, ["no run is under way", "Try again"]),
    ],
)
def test_what_cannot_be_planned_is_refused(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    status: int,
    words: list[str],
) -> None:
    monkeypatch.setattr(survey, "watch_sightings", looks(report(None)))
    assert typed(monkeypatch, *arguments) == status
    said = capsys.readouterr().err
    assert [word for word in words if word not in said] == []
