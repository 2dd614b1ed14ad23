"""The planner: its counts against real traffic and measurements, and the command's output."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_swarm import cli
from lightning_swarm.coordinator.rebalancing.policy import best_rate
from lightning_swarm.core.errors import ConfigError
from lightning_swarm.core.limits import Limits
from lightning_swarm.network import PeerId
from lightning_swarm.planner.cost_model import (
    Swarm,
    are_mixed,
    averaged_size,
    averaging_s,
    block,
    stage_profiles,
    trainer_bytes,
    transformer,
)
from lightning_swarm.planner.machine_files import WireSettings, read_compression, read_machines
from lightning_swarm.planner.plan import Predictor, alone, assign, averaged, make_plan
from lightning_swarm.planner.probe import count, measure_transformer
from lightning_swarm.planner.records import BlockProfile, Code, Machine, ModelProfile, Prediction, Setting, WireFormat
from lightning_swarm.planner.report import busy_share, describe
from lightning_swarm.planner.uncut import choose_uncut
from lightning_swarm.protocol.compression import CODECS
from lightning_swarm.protocol.settings import Compression
from tests.unit.conftest import MakeSwarm
from tests.unit.swarm import key, rows

MODEL = transformer(8, 512, 128)
MBIT = 1e6 / 8
KINDS = ("activations", "gradients", "averaging")
PAGE = Path(__file__).parents[3] / "docs" / "planning.md"


def machine(name: str = "one", **changes: Any) -> Machine:
    given = {
        "flop_per_s": 1e12,
        "memory_bytes": 8e9,
        "up_bytes_per_s": 100 * MBIT,
        "down_bytes_per_s": 100 * MBIT,
        "latency_s": 0.01,
    }
    return Machine(name=name, **{**given, **changes})


def setting(num_stages: int, microbatch_size: int, batch_size: int) -> Setting:
    """Return a setting with one batch per step."""
    return Setting(
        num_stages=num_stages,
        microbatch_size=microbatch_size,
        batch_size=batch_size,
        target_batch_size=batch_size,
    )


def codes_of(compression: Compression) -> dict[str, Code | None]:
    wire = WireSettings(compression).wire
    return {"activations": wire.activations, "gradients": wire.gradients}


def by(model: ModelProfile = MODEL, ratio: int | None = None, **compression: Any) -> ModelProfile:
    """Return a model with compressed or narrowed tensors."""
    return replace(model, wire=WireSettings.parse(compression, ratio).wire)


def predicted(
    num_machines: int = 4, *, model: ModelProfile = MODEL, batch_size: int = 64, **changes: Any
) -> Prediction:
    """Predict two stages."""
    machines = [machine(f"m{number}", **changes) for number in range(num_machines)]
    return Predictor(model, machines, 2, Limits()).predict(setting(2, 4, batch_size))


# ---------------------------------------------------------------------- bytes


@pytest.mark.parametrize(
    ("activations", "gradients"), [("none", "none"), ("8bit", "4bit"), ("float16", "none"), ("none", "8bit")]
)
def test_a_middle_stage_sends_what_is_said(make_swarm: MakeSwarm, activations: str, gradients: str) -> None:
    num_rows = 32_768
    compression = Compression.parse({"activations": activations, "gradients": gradients})
    swarm = make_swarm("a", "b", "c", compression=compression)
    x = rows(1, num_rows)
    swarm.run(swarm.forward(key(), x))
    swarm.run(swarm.backward(key(), x))
    sent = swarm.servers[PeerId("b")]._transport.traffic.sent_bytes
    measured = sum(num_bytes for (to, _), num_bytes in sent.items() if to != PeerId("trainer"))
    width = x.shape[1] * x.element_size()
    linear = BlockProfile(parameters=12, flop=1.0, output_bytes=width, graph_bytes=0, number_bytes=8)
    # Its samples are small, but its microbatch is large.
    codes = {kind: code and replace(code, smallest=1) for kind, code in codes_of(compression).items()}
    model = ModelProfile(
        blocks=(linear,) * 3, input_bytes=width, input_gradient=False, weight_bytes=8, wire=WireFormat(**codes)
    )
    machines = [machine(name) for name in "cab"]
    said = Predictor(model, machines, 3, Limits()).predict(setting(3, num_rows, num_rows))
    [middle] = said.stages[1]
    forward, back = (x.numel() * (code.bits / 8 if code else 8) for code in (codes["activations"], codes["gradients"]))
    assert said.boundary_bytes == (forward, forward)
    assert said.boundary_gradient_bytes == (back, back)
    assert said.step_bytes[middle] == forward + back
    assert said.step_bytes[middle] < measured < 1.01 * said.step_bytes[middle]  # and some message headers


@pytest.mark.parametrize("num_machines", [1, 2, 3, 4])
def test_averaging_sends_what_a_butterfly_sends(num_machines: int) -> None:
    # The minimum of traffic, which `test_each_peer_sends_as_little_as_there_is_to_send` measures.
    machines = [machine()] * num_machines
    swarm = Swarm(MODEL, machines, stage_profiles(MODEL, 1), [list(range(num_machines))], Limits())
    assert averaged(swarm, 0).num_bytes == pytest.approx(2 * (num_machines - 1) / num_machines * MODEL.parameters * 4)


@pytest.mark.parametrize(("codec", "bits"), [("none", 32), *((name, kind.bits) for name, kind in CODECS.items())])
def test_sums_take_their_codecs_bits(codec: str, bits: float) -> None:
    model = by(averaging=codec, activations="float16")
    swarm = Swarm(model, [machine()] * 3, stage_profiles(model, 1), [[0, 1, 2]], Limits())
    assert averaged(swarm, 0).num_bytes == pytest.approx(2 * 2 / 3 * MODEL.parameters * bits / 8)


def test_only_real_numbers_in_large_tensors_are_encoded() -> None:
    gpt2 = {"layers": 12, "width": 768, "sequence": 1024, "vocabulary": 50257}
    raw, encoded = (
        stage_profiles(model, 2) for model in (transformer(**gpt2), by(transformer(**gpt2), activations="8bit"))
    )
    assert encoded[0].input_bytes == raw[0].input_bytes == 8 * 1024  # tokens
    assert encoded[1].output_bytes == raw[1].output_bytes == 4  # a loss
    assert encoded[1].extra_bytes == raw[1].extra_bytes == 8 * 1024
    assert encoded[0].output_bytes == encoded[1].input_bytes == 1024 * 768 * 8.125 / 8
    assert encoded[1].gradient_bytes == raw[1].gradient_bytes == 1024 * 768 * 4
    outside = stage_profiles(by(transformer(**gpt2, ends="trainer"), activations="8bit", gradients="4bit"), 2)
    assert (outside[0].input_bytes, outside[0].gradient_bytes) == (1024 * 768 * 8.125 / 8, 1024 * 768 * 4.125 / 8)
    assert (outside[1].output_bytes, outside[1].output_gradient_bytes) == (
        outside[0].input_bytes,
        outside[0].gradient_bytes,
    )


def test_what_is_as_narrow_as_the_codec_stays_as_it_is() -> None:
    floats = transformer(2, 512, 128)
    block = replace(floats.blocks[0], output_bytes=floats.input_bytes // 2, number_bytes=2)
    halves = replace(floats, blocks=(block, block), input_bytes=floats.input_bytes // 2, input_number_bytes=2)
    assert stage_profiles(by(halves, activations="float16"), 2) == stage_profiles(halves, 2)
    assert stage_profiles(by(halves, activations="8bit"), 2) != stage_profiles(halves, 2)


def test_boundary_layers_narrow_what_is_between_stages() -> None:
    first, last = stage_profiles(by(ratio=4, activations="8bit"), 2)
    hidden = 128 * 512
    assert first.input_bytes == last.output_bytes == hidden * 8.125 / 8  # the trainer sends and receives them
    assert first.output_bytes == last.input_bytes == hidden / 4 * 8.125 / 8
    assert first.output_gradient_bytes == last.gradient_bytes == hidden / 4 * 4


def test_what_is_not_counted_is_said() -> None:
    model = by(averaging="powersgd", activations="8bit")
    machines = [machine(name) for name in "abc"]
    plan = make_plan(model, machines)
    assert "encoded by powersgd is unknown" in describe(model, plan)
    said = describe(model, replace(plan, uncut=None))
    assert "encoded by powersgd is unknown" in said
    assert "  bits of a number            activations 8.125\n" in said
    assert (
        averaged(Swarm(model, machines, stage_profiles(model, 1), [[0, 1, 2]], Limits()), 0).num_bytes
        > MODEL.parameters * 4
    )
    assert "not counted" not in describe(MODEL, make_plan(MODEL, machines))


def test_feedback_takes_the_memory_of_a_gradient() -> None:
    with_it, without = (stage_profiles(by(averaging="8bit", error_feedback=one), 1)[0] for one in (True, False))
    assert with_it.state_bytes - without.state_bytes == 4 * MODEL.parameters


def test_fewer_bits_are_faster_on_slow_lines_and_no_faster_where_codecs_take_the_time() -> None:
    rates = [predicted(model=by(**dict.fromkeys(KINDS, codec))).samples_per_s for codec in ("none", "float16", "8bit")]
    assert rates == sorted(rates)
    assert rates[2] > 2 * rates[0]
    fast: dict[str, Any] = {"up_bytes_per_s": 1e12, "down_bytes_per_s": 1e12, "latency_s": 0.0, "processor": "cpu"}
    raw, encoded = (predicted(model=by(**dict.fromkeys(KINDS, codec)), **fast) for codec in ("none", "8bit"))
    assert encoded.sent_bytes_per_s < raw.sent_bytes_per_s
    assert encoded.samples_per_s < 1.1 * raw.samples_per_s


def test_what_the_starter_says_to_itself_is_no_traffic() -> None:
    alone_swarm = Swarm(MODEL, [machine()], stage_profiles(MODEL, 1), [[0]], Limits())
    assert trainer_bytes(alone_swarm, 0) == trainer_bytes(alone_swarm, 1) == (0.0, 0.0)
    two = Swarm(MODEL, [machine(), machine()], stage_profiles(MODEL, 2), [[1], [0]], Limits())
    hidden = 128 * 512 * 4
    assert trainer_bytes(two, 0) == (0.0, hidden)  # it sends to the first stage; the last one is its own
    assert trainer_bytes(two, 1) == (0.0, 0.0)
    shared = Swarm(MODEL, [machine()] * 3, stage_profiles(MODEL, 2), [[1], [0, 2]], Limits())
    assert trainer_bytes(shared, 1) == (0.0, pytest.approx(hidden / 2, rel=0.3))


def test_bytes_of_the_models_page() -> None:
    gpt2 = {"layers": 12, "width": 768, "sequence": 1024, "vocabulary": 50257}
    inside, outside = transformer(**gpt2), transformer(**gpt2, ends="trainer")
    assert inside.input_bytes + inside.blocks[-1].output_bytes + inside.extra_bytes == 8 * 1024 * 2 + 4  # 16 kB
    assert 2 * outside.input_bytes + 2 * outside.blocks[-1].output_bytes == pytest.approx(12.6e6, rel=0.01)
    assert 6 * 4 * outside.around.parameters == pytest.approx(1.9e9, rel=0.02)  # not tied, so twice the page's


# ---------------------------------------------------------------------- units, limits, directions


def test_a_lone_machine_computes_as_fast_as_it_can() -> None:
    one = machine(latency_s=0.0)
    said = Predictor(MODEL, [one], 1, Limits()).predict(setting(1, 64, 64))
    whole_s = 64 * MODEL.flop / one.flop_per_s
    assert said.times.forward_s + said.times.backward_s == pytest.approx(whole_s, rel=0.02)
    assert said.times.fill_s == said.times.around_s == 0.0
    assert said.utilisation == pytest.approx(whole_s / said.times.step_s)
    assert sum(said.step_bytes.values()) == 0


@pytest.mark.parametrize(
    ("name", "better"),
    [
        ("flop_per_s", 2e12),
        ("up_bytes_per_s", 200 * MBIT),
        ("down_bytes_per_s", 200 * MBIT),
        ("latency_s", 0.0),
    ],
)
def test_better_machines_are_never_slower(name: str, better: float) -> None:
    both = {name: better}
    if name.endswith("bytes_per_s"):
        both = {"up_bytes_per_s": better, "down_bytes_per_s": better}
    assert predicted(**both).samples_per_s > predicted().samples_per_s
    assert predicted(**{name: better}).samples_per_s >= predicted().samples_per_s


def test_more_machines_and_wider_models() -> None:
    assert predicted(num_machines=8, batch_size=2048).samples_per_s > predicted(batch_size=2048).samples_per_s
    busy = [predicted(model=transformer(8, width, 128)).utilisation for width in (128, 512, 2048)]
    assert busy == sorted(busy)


def test_larger_batches_share_what_a_step_costs() -> None:
    predictor = Predictor(MODEL, [machine(f"m{n}") for n in range(4)], 2, Limits())
    rates = [predictor.predict(setting(2, 4, size)).samples_per_s for size in (8, 32, 128, 512)]
    assert rates == sorted(rates)


def test_a_machine_that_cannot_hold_a_stage_is_left_out() -> None:
    machines = [machine("big"), machine("other"), machine("small", memory_bytes=1e8)]
    best = make_plan(MODEL, machines).best
    assert best is not None
    assert best.left_out == ("small",)
    assert sum(map(len, best.stages)) == 2


def test_more_replicas_than_a_small_step_is_worth_are_spared() -> None:
    machines = [machine(f"m{number}") for number in range(8)]
    wide = {"up_bytes_per_s": 1e10, "down_bytes_per_s": 1e10}
    small = make_plan(MODEL, machines, target_batch_size=32).best
    large = make_plan(MODEL, [replace(one, **wide) for one in machines], target_batch_size=4096).best
    assert small is not None
    assert large is not None
    assert len(small.spared) + sum(map(len, small.stages)) == 8
    assert small.spared
    assert not large.spared
    slow = machine("slow", up_bytes_per_s=0.1 * MBIT)
    best = make_plan(MODEL, [*(replace(one, **wide) for one in machines[:4]), slow], target_batch_size=1024).best
    assert best is not None
    assert best.spared == ("slow",)


def test_what_no_cut_fits_is_not_planned() -> None:
    plan = make_plan(MODEL, [machine(memory_bytes=1e6)] * 3)
    assert plan.best is None
    assert plan.alone is None
    assert not plan.worth_it


def test_activations_beyond_memory_are_computed_again() -> None:
    assert predicted().recomputed == 0.0
    tight = predicted(memory_bytes=6e8)
    assert 0.0 < tight.recomputed < 1.0
    assert tight.samples_per_s < predicted().samples_per_s


@pytest.mark.parametrize("num_stages", [1, 2, 3])
def test_stages_get_machines_as_the_yardstick_has_it(num_stages: int) -> None:
    rates = [10.0, 7.0, 5.0, 5.0, 3.0, 2.0, 1.0]
    held = assign(rates, num_stages)
    assert min(sum(rates[n] for n in numbers) for numbers in held) == pytest.approx(best_rate(rates, num_stages))
    assert 0 in held[-1]
    assert sorted(n for numbers in held for n in numbers) == list(range(len(rates)))


def test_the_chosen_batch_is_the_smallest_that_is_nearly_as_fast() -> None:
    machines = [machine(f"m{n}") for n in range(4)]
    best = make_plan(MODEL, machines).best
    assert best is not None
    half = make_plan(MODEL, machines, target_batch_size=best.setting.target_batch_size // 2).best
    most = make_plan(MODEL, machines, target_batch_size=4096).best
    assert half is not None
    assert most is not None
    assert half.samples_per_s < 0.9 * most.samples_per_s <= best.samples_per_s / 0.98


# ---------------------------------------------------------------------- one machine alone


def test_alone_as_fast_as_it_computes_or_as_its_bus_carries() -> None:
    plain = alone(MODEL, machine(), 64)
    assert plain is not None
    assert plain.samples_per_s == machine().flop_per_s / MODEL.flop
    small = machine(memory_bytes=3e8)
    assert alone(MODEL, small, 64) is None
    roomy = replace(small, host_memory_bytes=64e9, bus_bytes_per_s=1e6)
    slow = alone(MODEL, roomy, 64)
    fast = alone(MODEL, replace(roomy, bus_bytes_per_s=1e12), 64)
    assert slow is not None
    assert fast is not None
    assert slow.offloads
    assert slow.samples_per_s < fast.samples_per_s < plain.samples_per_s
    assert alone(MODEL, replace(roomy, host_memory_bytes=1e6), 64) is None


# ---------------------------------------------------------------------- against what was measured

LINKS = [  # d_model, Mb/s, samples/s of one host, the swarm's relative to it: docs/performance.md
    (64, 1000, 430.4, 0.40),
    (64, 100, 457.9, 0.37),
    (64, 20, 498.3, 0.11),
    (256, 1000, 55.8, 0.92),
    (256, 100, 57.8, 0.68),
    (256, 20, 49.7, 0.25),
    (512, 1000, 14.9, 1.03),
    (512, 100, 13.4, 0.89),
    (512, 20, 13.0, 0.44),
]


@pytest.mark.parametrize(("width", "mbit", "plain", "ratio"), LINKS)
def test_slow_lines_are_predicted_as_the_page_says(width: int, mbit: int, plain: float, ratio: float) -> None:
    model = transformer(4, width, 64)
    line = mbit * MBIT
    hosts = [
        machine(
            name,
            flop_per_s=plain * model.flop,
            up_bytes_per_s=line,
            down_bytes_per_s=line,
            latency_s=0.0,
            processor="cpu",
        )
        for name in "ab"
    ]
    said = Predictor(model, hosts, 2, Limits(snapshot_interval=None)).predict(setting(2, 2, 32))
    found = said.samples_per_s / plain
    assert found == pytest.approx(ratio, rel=0.3 if (width, mbit) == (64, 100) else 0.15)
    assert f"| {width} | {mbit} Mb/s | {ratio:.2f} | {found:.2f} |" in PAGE.read_text()


def test_two_stages_on_two_cores_are_predicted_as_the_page_says() -> None:
    found = []
    for core in (13.0, 14.9):  # samples/s of half as many blocks, in the same rows
        twins = [
            machine(
                name,
                flop_per_s=core * transformer(4, 512, 64).flop,
                up_bytes_per_s=3e9,
                down_bytes_per_s=3e9,
                latency_s=0.0,
                processor="cpu",
            )
            for name in "ab"
        ]
        predictor = Predictor(transformer(8, 512, 64), twins, 2, Limits(snapshot_interval=None))
        found.append(predictor.predict(setting(2, 4, 128)).samples_per_s)
    assert f"{found[0]:.1f} and {found[1]:.1f} samples/s" in PAGE.read_text()
    assert found[0] < 11.9 < found[1]


def test_codecs_make_the_page_s_plan_so_much_faster(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    page = PAGE.read_text()
    Path("machines.yaml").write_text(page.partition("```yaml\n")[2].partition("```")[0])
    lines = page.replace("\\\n", " ").splitlines()
    [words] = [line.split() for line in lines if line.endswith("--vocabulary 50257 --compression 8bit")]
    monkeypatch.setattr(sys, "argv", [*words, "--json"])
    assert cli.main() == 0
    best = json.loads(capsys.readouterr().out)["best"]
    gb_per_hour = best["sent_bytes_per_s"] * 3600 / 1e9
    assert f"it is {best['samples_per_s']:.3g} samples/s and {gb_per_hour:.4g} GB an hour." in page


# ---------------------------------------------------------------------- models


class Listed(L.LightningModule):
    example_input_array = torch.zeros(4, 16, dtype=torch.long)

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 2, 4 * width, dropout=0.0, batch_first=True) for _ in range(3)
        )
        self.head = nn.Linear(width, 64)

    @override
    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)  # type: ignore[no-any-return]

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self(batch).mean()  # type: ignore[no-any-return]

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters())


class Blind(Listed):
    example_input_array = None  # type: ignore[assignment]


def test_a_module_is_counted_without_numbers() -> None:
    counted = count(Listed(), "layers", Listed.example_input_array)
    said = transformer(3, 32, 16)
    assert len(counted.blocks) == 3
    for found, expected in zip(counted.blocks, said.blocks, strict=True):
        assert found.parameters == pytest.approx(expected.parameters, rel=0.01)
        assert found.output_bytes == expected.output_bytes == 16 * 32 * 4
        assert found.flop == pytest.approx(expected.flop, rel=0.1)
        assert found.graph_bytes == pytest.approx(expected.graph_bytes, rel=0.5)
    assert counted.input_bytes == 16 * 32 * 4
    assert counted.input_gradient
    assert {counted.input_number_bytes, *(block.number_bytes for block in counted.blocks)} == {4}
    assert counted.around.parameters == 64 * 32 + 32 * 64 + 64
    assert counted.around.flop == pytest.approx(6 * 16 * 32 * 64, rel=0.01)


def test_tokens_are_no_numbers_that_a_codec_takes() -> None:
    tokens = count(
        nn.Sequential(nn.Embedding(64, 32), nn.Linear(32, 8).bfloat16()).bfloat16(), "", torch.zeros(4, 16).long()
    )
    assert (tokens.input_number_bytes, [block.number_bytes for block in tokens.blocks]) == (0, [2, 2])


def test_this_machine_is_measured() -> None:
    assert 1e7 < measure_transformer(32, 16) < 1e14


def test_compute_grows_faster_than_traffic() -> None:
    narrow, wide = block(1024, 1), block(2048, 1)
    assert wide.flop / narrow.flop == pytest.approx(4.0, rel=0.01)
    assert wide.output_bytes / narrow.output_bytes == 2.0
    shares = [busy_share(width, 512, 1e13, 100 * MBIT, 0.01) for width in (256, 1024, 4096)]
    assert shares == sorted(shares)
    assert busy_share(1024, 512, 1e13, 100 * MBIT, 0.1) < shares[1] < busy_share(1024, 512, 1e13, 1000 * MBIT, 0.01)


# ---------------------------------------------------------------------- the list of machines

GOOD = "{tflops: 2, memory_gb: 8, up_mbit: 100, down_mbit: 200}"


def written(path: Path, *entries: str) -> Path:
    file = path / "machines.yaml"
    file.write_text("machines:\n" + "".join(f"  - {entry}\n" for entry in entries))
    return file


def test_machines_are_read_in_their_units(tmp_path: Path) -> None:
    more = (
        "{name: b, count: 2, samples_per_s: 5, memory_gb: 1, up_mbit: 8, down_mbit: 8, latency_ms: 20, processor: cpu, "
        "host_memory_gb: 3, bus_gb_per_s: 4}"
    )
    here = "{tflops: here, memory_gb: 1, up_mbit: 8, down_mbit: 8}"
    found = read_machines(written(tmp_path, GOOD, more, here), 1e9, lambda: 7e9)
    first = Machine(name="machine 1", flop_per_s=2e12, memory_bytes=8e9, up_bytes_per_s=12.5e6, down_bytes_per_s=25e6)
    second = Machine(
        name="b",
        flop_per_s=5e9,
        memory_bytes=1e9,
        up_bytes_per_s=1e6,
        down_bytes_per_s=1e6,
        latency_s=0.02,
        processor="cpu",
        host_memory_bytes=3e9,
        bus_bytes_per_s=4e9,
    )
    assert found[:3] == [first, second, second]
    assert (found[3].flop_per_s, found[3].processor) == (7e9, "cpu")


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ("3", ["machine 1 of", "a mapping", "got 3"]),
        (GOOD.replace("tflops", "tflop"), ["unknown key 'tflop'", "tflops"]),
        (GOOD.replace("tflops: 2, ", ""), ["tflops", "samples_per_s", "got none"]),
        (GOOD.replace("tflops: 2", "tflops: 2, samples_per_s: 3"), ["one of", "tflops and samples_per_s"]),
        (GOOD.replace("tflops: 2", "tflops: fast"), ["`tflops` of machine 1", "above 0", "'fast'"]),
        (GOOD.replace("tflops: 2", "tflops: .nan"), ["above 0", "nan"]),
        (GOOD.replace("tflops: 2", "tflops: here"), ["--measure"]),
        (GOOD.replace("memory_gb: 8, ", ""), ["must have `memory_gb`", "Add it"]),
        (GOOD.replace("up_mbit: 100", "up_mbit: 0"), ["`up_mbit`", "above 0", "got 0"]),
        (GOOD.replace("}", ", latency_ms: -1}"), ["`latency_ms`", "at least 0", "got -1"]),
        (GOOD.replace("}", ", count: 0}"), ["`count`", "from 1 to 10000", "got 0"]),
        (GOOD.replace("}", ", processor: gpu}"), ["accelerator", "'gpu'"]),
    ],
)
def test_what_cannot_be_a_machine_is_refused(tmp_path: Path, entry: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        read_machines(written(tmp_path, entry), 1e9, None)
    assert [word for word in words if word not in str(caught.value)] == []


@pytest.mark.parametrize("text", ["", "machines: []", "machines: 3", "3", "{"])
def test_what_is_no_list_of_machines_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "machines.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"machines"):
        read_machines(file, 1e9, None)


# ---------------------------------------------------------------------- without a cut


def test_trainers_of_a_whole_model_compute_together_then_average() -> None:
    model, size = transformer(4, 256, 64), 512
    uncut = choose_uncut(model, [machine("a"), machine("b", flop_per_s=3e12)], [size])
    assert uncut is not None
    assert uncut.trainers == ("b", "a")
    assert uncut.computing_s == pytest.approx(size * model.flop / 4e12)
    assert uncut.sent_bytes == 4 * model.parameters, "half of the sums, and half of the mean"
    assert uncut.ddp_samples_per_s == pytest.approx(size / (size / 2 * model.flop / 1e12 + uncut.averaging_s))


def test_a_gpu_beside_a_cpu_pays_for_portable_arithmetic() -> None:
    model, size = transformer(4, 256, 64), averaged_size(MODEL, 1, 2)
    cpu, gpu = machine("cpu", processor="cpu"), machine("gpu", processor="accelerator")
    assert [are_mixed(pair) for pair in ([cpu, gpu], [cpu, cpu], [gpu, gpu])] == [True, False, False]
    mixed, plain = ([averaging_s(one, size, 10**7, mixed=is_it) for one in (cpu, gpu)] for is_it in (True, False))
    assert [slow - fast for slow, fast in zip(mixed, plain, strict=True)] == pytest.approx([0.12, 0.006])
    alike, unlike = (
        choose_uncut(model, [cpu, other], [512]) for other in (replace(cpu, name="b"), replace(gpu, name="b"))
    )
    assert alike is not None
    assert unlike is not None
    assert unlike.averaging_s > alike.averaging_s


def test_who_cannot_hold_the_model_or_slows_it_down_is_not_asked() -> None:
    model = transformer(4, 256, 64)
    small, slow = machine("small", memory_bytes=5e7), machine("slow", flop_per_s=1e9, up_bytes_per_s=1e3)
    uncut = choose_uncut(model, [machine("a"), small, slow, machine("b")], [512])
    assert uncut is not None
    assert (uncut.trainers, uncut.left_out, uncut.spared) == (("a", "b"), ("small",), ("slow",))
    assert choose_uncut(model, [machine("a"), small], [512]) is None


@pytest.mark.first_cells(2)
@pytest.mark.parametrize(
    ("count", "flop_per_s", "words", "others"),
    [
        (4, 1e12, ["If no machine comes or goes, choose it"], ["hivemind.Optimizer"]),
        (4, 8e12, ["equal shares of a step"], ["choose it", "hivemind.Optimizer"]),
        pytest.param(120, 8e12, ["averages in groups"], [], marks=pytest.mark.exhaustive),
    ],
)
def test_what_else_would_do_is_said(count: int, flop_per_s: float, words: list[str], others: list[str]) -> None:
    """Equal machines, unequal machines, and many machines."""
    model = transformer(12, 768, 1024, 50257)
    machines = [machine("first", flop_per_s=flop_per_s), *(machine("other") for _ in range(count - 1))]
    plan = make_plan(model, machines, target_batch_size=4096)
    assert plan.stays_whole
    said = " ".join(describe(model, plan).split())
    assert all(word in said for word in words)
    assert not any(word in said for word in others)


# ---------------------------------------------------------------------- the command


@pytest.fixture(autouse=True)
def _elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)


NUMBERS = ("--layers", "4", "--width", "256", "--sequence", "64")
DESK = "{name: desk, tflops: 2, memory_gb: 8, up_mbit: 100, down_mbit: 200}"
TWINS = "{name: twin, count: 2, tflops: 2, memory_gb: 8, up_mbit: 100, down_mbit: 200}"


def command(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["lightning-swarm", "plan", "machines.yaml", *arguments])
    return cli.main()


def test_the_command_says_what_to_choose_and_why(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    written(tmp_path, DESK, TWINS)
    assert command(monkeypatch, *NUMBERS) == 0
    said = capsys.readouterr().out
    for word in ("Not worth it: desk alone reaches", "num_stages", "2 x twin", "GB an hour", "Why", "without a cut"):
        assert word in said
    written(tmp_path, *[DESK.replace("memory_gb: 8", "memory_gb: 0.06")] * 3)
    assert command(monkeypatch, *NUMBERS) == 0
    assert "slowest machine" in capsys.readouterr().out, "none of them holds a trainer's model and its server's"


def test_worth_it_where_no_machine_holds_the_model(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    written(tmp_path, DESK, TWINS)
    assert command(monkeypatch, "--layers", "12", "--width", "2048", "--sequence", "256") == 0
    assert "Worth it: no machine of the list holds the model by itself" in capsys.readouterr().out


def test_nothing_can_train_is_an_exit_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    written(tmp_path, DESK)
    assert command(monkeypatch, "--layers", "12", "--width", "8192", "--sequence", "256") == 1
    assert "No swarm of these machines can train it. Nor can any of them alone." in capsys.readouterr().out


def test_json_has_the_same(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    written(tmp_path, DESK, TWINS)
    assert command(monkeypatch, *NUMBERS, "--json", "--target-batch-size", "64") == 0
    said = json.loads(capsys.readouterr().out)
    assert said["best"]["setting"]["target_batch_size"] == 64
    assert said["alone"] == {
        "name": "desk",
        "samples_per_s": pytest.approx(2e12 / transformer(4, 256, 64).flop),
        "offloads": False,
    }
    assert said["gain"] == pytest.approx(said["best"]["samples_per_s"] / said["alone"]["samples_per_s"])
    assert said["worth_it"] is False


def crossing(said: Any) -> tuple[float, float]:
    """Return the bytes of a sample from the first stage to the second, and back."""
    best, size = said["best"], said["best"]["setting"]["microbatch_size"]
    return best["boundary_bytes"][0] / size, best["boundary_gradient_bytes"][0] / size


def test_a_list_says_how_tensors_travel_and_the_command_otherwise(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def planned(*arguments: str) -> Any:
        assert command(monkeypatch, *NUMBERS, "--json", "--target-batch-size", "64", *arguments) == 0
        return json.loads(capsys.readouterr().out)

    file = written(tmp_path, *[DESK.replace("memory_gb: 8", "memory_gb: 0.06")] * 3)
    plain = planned()
    assert plain["compression"] == asdict(Compression())
    file.write_text(f"{file.read_text()}compression: {{activations: 8bit}}\nboundary_ratio: 2\n")
    listed = planned()
    assert listed["compression"] == asdict(Compression(activations="8bit"))
    assert (plain["boundary_ratio"], listed["boundary_ratio"]) == (None, 2)
    row = 64 * 256 * 4
    assert crossing(plain) == (row, row)
    assert crossing(listed) == (row / 2 * 8.125 / 32, row / 2)
    told = planned(
        "--compression", "float16", "--compression.averaging", "4bit", "--compression.error_feedback", "true"
    )
    assert told["compression"] == asdict(
        Compression(activations="float16", gradients="float16", averaging="4bit", error_feedback=True)
    )
    assert crossing(told) == (row / 4, row / 4)
    assert crossing(planned("--compression", "none", "--boundary-ratio", "4")) == (row / 4, row / 4)
    low_rank = planned("--compression.averaging", "powersgd", "--compression.rank", "2")["compression"]
    assert low_rank == asdict(Compression(averaging="powersgd", rank=2))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--compression", "7bit"), ["`compression` must name one of", "got '7bit' for activations"]),
        (("--compression.gradients", "8"), ["`compression` must name one of", "got 8 for gradients"]),
        (("--compression.rank", "0"), ["`rank`", "got 0"]),
        (("--compression.error_feedback", "true"), ["`error_feedback`", "with 'none'"]),
        (("--boundary-ratio", "1"), ["`Bottleneck.ratio`", "at least 2, got 1"]),
    ],
)
def test_tensors_cannot_travel_so(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    arguments: tuple[str, ...],
    words: list[str],
) -> None:
    written(tmp_path, DESK)
    assert command(monkeypatch, *NUMBERS, *arguments) == 2
    said = capsys.readouterr().err
    assert [word for word in words if word not in said] == []


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("compression: {averagin: 8bit}", r"`compression` has activations, .* got \['averagin'\]"),
        ("compression: 8", r"got '8' for activations"),
        ("compression: [8bit]", r"must name one of"),
        ("boundary_ratio: 1.5", r"got 1\.5"),
        ("compresion: 8bit", r"unknown key 'compresion'. Choose from machines, compression, boundary_ratio"),
    ],
)
def test_a_list_cannot_say_so(tmp_path: Path, line: str, words: str) -> None:
    file = written(tmp_path, GOOD)
    file.write_text(f"{file.read_text()}{line}\n")
    with pytest.raises(ConfigError, match=words):
        read_compression(file)


def test_a_bare_list_says_nothing_of_it(tmp_path: Path) -> None:
    file = tmp_path / "machines.yaml"
    file.write_text(f"- {GOOD}\n")
    assert read_compression(file) == WireSettings()


@pytest.mark.first_cells(1)
@pytest.mark.parametrize("measured", [False, True])
def test_the_model_of_a_file(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, measured: bool
) -> None:
    written(tmp_path, DESK.replace("tflops: 2", "tflops: here") if measured else DESK, TWINS)
    compression = "{class_path: lightning_swarm.Compression, init_args: {gradients: 4bit}}"
    boundary = "{class_path: lightning_swarm.Maxout, init_args: {ratio: 4}}"
    options = f"{{pipeline: layers, num_stages: 2, compression: {compression}, boundary: {boundary}}}"
    strategy = f"{{class_path: lightning_swarm.SwarmStrategy, init_args: {options}}}"
    Path("run.yaml").write_text(
        f"model: {{class_path: {__name__}.Listed, init_args: {{width: 64}}}}\n"
        f"trainer: {{accelerator: cpu, logger: false, strategy: {strategy}}}\n"
    )
    assert command(monkeypatch, "--config", "run.yaml", "--json", *(["--measure"] if measured else [])) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["best"]["setting"]["num_stages"] in (1, 2, 3)
    assert said["best"]["times"]["around_s"] > 0.0
    assert (said["compression"]["gradients"], said["boundary_ratio"]) == ("4bit", 4)


def test_a_picture_of_the_square_cube_law(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    written(tmp_path, DESK, TWINS)
    assert command(monkeypatch, *NUMBERS, "--picture", "law.png") == 0
    assert Path("law.png").read_bytes().startswith(b"\x89PNG")
    assert command(monkeypatch, *NUMBERS, "--picture", "nowhere/law.png") == 2
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert command(monkeypatch, *NUMBERS, "--picture", "law.png") == 2
    assert 'pip install "lightning-swarm[demo]"' in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), ["one model", "got none"]),
        (("--layers", "2"), ["all three", "got --layers"]),
        ((*NUMBERS, "--config", "run.yaml"), ["one model", "--config and --layers"]),
        ((*NUMBERS[:-1], "0"), ["--sequence", "at least 1", "got 0"]),
        ((*NUMBERS, "--vocabulary", "-1"), ["--vocabulary", "got -1"]),
        ((*NUMBERS, "--target-batch-size", "0"), ["--target-batch-size", "got 0"]),
        (("--config", "none.yaml"), ["none.yaml", "fit --config"]),
        (("--config", "blind.yaml"), ["Blind.example_input_array is None", "--layers"]),
    ],
)
def test_what_cannot_be_planned_is_refused(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    arguments: tuple[str, ...],
    words: list[str],
) -> None:
    written(tmp_path, DESK)
    strategy = "{class_path: lightning_swarm.SwarmStrategy, init_args: {pipeline: layers}}"
    Path("blind.yaml").write_text(
        f"model: {{class_path: {__name__}.Blind}}\ntrainer: {{accelerator: cpu, logger: false, strategy: {strategy}}}\n"
    )
    assert command(monkeypatch, *arguments) == 2
    said = capsys.readouterr().err
    assert [word for word in words if word not in said] == []


def test_help_shows_a_list_that_can_be_read(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with pytest.raises(SystemExit):
        command(monkeypatch, "--help")
    said = capsys.readouterr().out
    shown = said[said.index("    machines:\n") : said.index("Predictions are computed")]
    Path("shown.yaml").write_text("\n".join(line[4:] for line in shown.splitlines()))
    assert len(read_machines(tmp_path / "shown.yaml", 1e9, None)) == 3
