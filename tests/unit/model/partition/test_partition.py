import itertools
import random
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor, nn

from lightning_swarm.core.errors import ConfigError
from lightning_swarm.model.nn import Sequential
from lightning_swarm.model.partition import build_stages, find_blocks, twin_of
from lightning_swarm.model.partition.split import parameter_costs
from lightning_swarm.model.partition.stage_ranges import balanced_ranges, named_ranges
from lightning_swarm.model.partition.stages import StageSpec


def all_cuts(num_blocks: int, num_stages: int) -> list[tuple[range, ...]]:
    cuts = itertools.combinations(range(1, num_blocks), num_stages - 1)
    return [tuple(itertools.starmap(range, itertools.pairwise((0, *inner, num_blocks)))) for inner in cuts]


def score(costs: Sequence[int], ranges: tuple[range, ...]) -> tuple[Any, ...]:
    sums = [sum(costs[i] for i in indices) for indices in ranges]
    return max(sums), sum(s * s for s in sums), sum(len(indices) ** 2 for indices in ranges)


# --- policy ---


def test_balanced_is_the_best_of_all_cuts() -> None:
    rng = random.Random(0)
    for _ in range(300):
        num_blocks = rng.randint(1, 9)
        costs = [rng.choice((0, 1, 2, 5, rng.randint(0, 40))) for _ in range(num_blocks)]
        num_stages = rng.randint(1, num_blocks)

        ranges = balanced_ranges(costs, num_stages)

        cuts = all_cuts(num_blocks, num_stages)
        assert ranges in cuts
        assert score(costs, ranges) == min(score(costs, other) for other in cuts)


def test_equal_blocks_are_cut_evenly() -> None:
    assert balanced_ranges([1] * 6, 3) == (range(2), range(2, 4), range(4, 6))
    assert balanced_ranges([0] * 4, 2) == (range(2), range(2, 4))
    assert sorted(map(len, balanced_ranges([7] * 7, 3))) == [2, 2, 3]


def test_a_large_model_is_cut_in_no_time() -> None:
    rng = random.Random(1)
    costs = [rng.randint(1, 10**12) for _ in range(400)]

    ranges = balanced_ranges(costs, 32)

    assert [i for indices in ranges for i in indices] == list(range(400))


@pytest.mark.parametrize(("num_blocks", "num_stages"), [(3, 4), (3, 0), (3, -1), (0, 1)])
def test_too_few_blocks_are_refused(num_blocks: int, num_stages: int) -> None:
    with pytest.raises(ConfigError, match=rf"`num_stages` must be 1\.\.{num_blocks}.*got {num_stages}\. Lower it"):
        balanced_ranges([1] * num_blocks, num_stages)


def test_negative_costs_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"at least 0, got -2\. Measure"):
        balanced_ranges([1, -2], 2)


def test_named_begins_stages_where_the_user_says() -> None:
    names = ("embed", "a", "b", "head")

    assert named_ranges(names, ["b"]) == (range(2), range(2, 4))
    assert named_ranges(names, ["embed", "b"]) == (range(2), range(2, 4))
    assert named_ranges(names, []) == (range(4),)
    assert named_ranges(names, names) == tuple(range(i, i + 1) for i in range(4))


@pytest.mark.parametrize(
    ("starts", "words"),
    [
        (["c"], r"must name blocks of the model, got 'c'\. Correct it: choose from embed, a, b"),
        (["a", "a"], r"each block once, got 'a' twice\. Remove"),
        (["b", "a"], r"model's order, got 'a' after 'b'\. Sort"),
        (["a", "embed"], r"model's order, got 'embed' after 'a'\. Sort"),
    ],
)
def test_wrong_names_are_refused(starts: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        named_ranges(("embed", "a", "b"), starts)


def test_no_blocks_are_refused() -> None:
    with pytest.raises(ConfigError, match="at least one block, got none"):
        named_ranges((), [])


# --- blocks ---


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        self.loss = nn.MSELoss()


class Loose(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.drop = nn.Dropout(0.1)
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])
        self.head = nn.Linear(4, 10)


class Staged(Loose):
    def configure_stages(self) -> Any:
        return [nn.Sequential(self.embed, self.drop), *self.layers, self.head]


class StagedDict(Loose):
    def configure_stages(self) -> Any:
        return nn.ModuleDict(
            {"in": self.embed, **{f"layer{i}": m for i, m in enumerate(self.layers)}, "out": self.head}
        )


class Residual(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + super().forward(x)
        return out


def with_wrapped_forward() -> nn.Module:
    model = Net()
    model.net.forward = lambda x: x  # type: ignore[method-assign]
    return model


def stages_of(returned: Any, model: nn.Module | None = None) -> nn.Module:
    model = model or Loose()
    model.configure_stages = lambda: returned  # type: ignore[assignment]
    return model


def test_the_one_sequential_is_found() -> None:
    model = Net()
    blocks = find_blocks(model, None)

    assert blocks.root is model.net
    assert blocks.root_name == "net"
    assert blocks.names == ("0", "1", "2")
    assert blocks.modules == tuple(model.net)


def test_the_outermost_sequential_is_taken_however_deep() -> None:
    model = nn.Module()
    model.wrapper = nn.Module()
    model.wrapper.body = Sequential(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))

    assert find_blocks(model, None).root_name == "wrapper.body"
    assert find_blocks(nn.Sequential(nn.Linear(2, 2)), None).root_name == ""
    assert find_blocks(model, "wrapper.body.0").names == ("0", "1")


def test_a_named_list_is_cut_block_by_block() -> None:
    model = nn.ModuleDict({"inner": Loose()})
    blocks = find_blocks(model, "inner.layers")

    assert blocks.one_by_one
    assert (blocks.root_name, blocks.names) == ("inner.layers", ("0", "1", "2"))
    assert blocks.modules == tuple(model["inner"].layers)
    assert not find_blocks(Staged(), None).one_by_one
    with pytest.raises(ConfigError, match="at least one block, got none in 'empty'"):
        find_blocks(nn.ModuleDict({"empty": nn.ModuleList()}), "empty")


def test_a_block_that_appears_twice_is_called_twice() -> None:
    shared = nn.Linear(2, 2)
    model = nn.Sequential(shared, nn.ReLU(), shared)

    assert find_blocks(model, None).modules == (shared, model[1], shared)


def test_configure_stages_replaces_the_forward_of_the_model_or_of_the_named_module() -> None:
    model = Staged()
    blocks = find_blocks(model, None)

    assert (blocks.root, blocks.root_name) == (model, "")
    assert blocks.names == ("0", "1", "2", "3", "4")
    assert blocks.modules[-1] is model.head
    outer = stages_of(model.configure_stages(), nn.ModuleDict({"inner": model}))
    assert find_blocks(outer, "inner").root is model


def test_configure_stages_may_name_its_blocks() -> None:
    assert find_blocks(StagedDict(), None).names == ("in", "layer0", "layer1", "layer2", "out")
    model = Loose()
    assert find_blocks(stages_of(model.layers, model), None).names == ("0", "1", "2")
    assert find_blocks(stages_of(nn.Sequential(model.embed, model.head), model), None).modules[1] is model.head


@pytest.mark.parametrize(
    ("model", "pipeline", "words"),
    [
        (Loose(), None, ["one `torch.nn.Sequential`", "got none in Loose", "define `configure_stages"]),
        (nn.Module(), None, ["must have parameters", "got Module without any", "Create its layers"]),
        (Net(), "net.9", ["dotted name of a submodule of Net", "got 'net.9'", "Choose one", "net"]),
        (Loose(), "nothing", ["got 'nothing'", "Choose one of", "`ModuleList`s (layers)", "configure_stages"]),
        (nn.Linear(2, 2), "bias", ["got 'bias'", "neither a `Sequential` nor a `ModuleList`", "with `pipeline=...`"]),
        (Net(), "loss", ["'loss' is a MSELoss", "Choose one of its `Sequential`s and `ModuleList`s (net)"]),
        (
            Staged(),
            "layers",
            ["must name a module with a forward", "got the `ModuleList` 'layers' in Staged"],
        ),
        (
            Residual(nn.Linear(2, 2)),
            None,
            ["do nothing else", "Residual '' with a `forward` of its", "into a block"],
        ),
        (with_wrapped_forward(), "net", ["do nothing else", "Sequential 'net' with a `forward` of its own"]),
        (stages_of("abc"), None, ["must return a sequence of modules", "got str of str", "Return the blocks"]),
        (stages_of(None), None, ["must return a sequence of modules", "got NoneType", "[self.embed, *self.layers"]),
        (stages_of([nn.ReLU(), len]), None, ["must return a sequence", "list of", "builtin_function_or_method"]),
        (stages_of([]), None, ["at least one block", "got none in Loose", "Give it blocks"]),
    ],
    ids=lambda value: "",
)
def test_models_without_a_chain_of_blocks_are_refused(model: nn.Module, pipeline: str | None, words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        find_blocks(model, pipeline)

    assert all(word in str(error.value) for word in words), str(error.value)


def test_parameters_outside_of_the_sequential_are_named() -> None:
    model = Net()
    model.temperature = nn.Parameter(torch.ones(1))

    with pytest.raises(ConfigError, match=r"got none in Net.*Outside of 'net' are: temperature"):
        find_blocks(model, None)


def test_two_sequentials_are_ambiguous() -> None:
    model = Net()
    model.again = nn.Sequential(*model.net)

    with pytest.raises(ConfigError, match=r"got several \(net, again\).*name a `Sequential` or"):
        find_blocks(model, None)
    assert find_blocks(model, "again").root_name == "again"


def test_a_block_must_not_contain_what_it_replaces() -> None:
    model = Loose()

    with pytest.raises(ConfigError, match=r"block '0' contains Loose itself\. Return its layers"):
        find_blocks(stages_of([model], model), None)


# --- stages ---


def cut_into(model: nn.Module, num_stages: int, pipeline: str | None = None) -> Any:
    blocks = find_blocks(model, pipeline)
    return build_stages(model, blocks, balanced_ranges([1] * len(blocks.modules), num_stages))


def test_costs_count_elements_once() -> None:
    shared = nn.Linear(3, 3)
    model = nn.Sequential(nn.Sequential(shared, shared), nn.ReLU(), nn.Linear(2, 1, bias=False))

    assert parameter_costs(find_blocks(model, None)) == (12, 0, 2)


def test_stages_compute_what_the_model_computes_and_change_nothing_in_it() -> None:
    model = Net()
    keys = list(model.state_dict())
    x = torch.randn(5, 4)

    first, second = cut_into(model, 2)

    assert torch.equal(second((first((x,), {}),), {}), model.net(x))
    assert list(model.state_dict()) == keys
    assert [name for name, _ in model.named_modules()] == ["", "net", "net.0", "net.1", "net.2", "loss"]
    assert first.blocks[0] is model.net[0]


def test_specs_name_tensors_as_the_state_dict_does() -> None:
    model = Net()
    model.net[0].register_buffer("scale", torch.ones(3, dtype=torch.float64))
    model.net[0].register_buffer("cache", torch.ones(1), persistent=False)
    model.net[2].weight.requires_grad_(False)

    first, second = cut_into(model, 2)

    assert first.spec.index == 0
    assert first.spec.block_names + second.spec.block_names == ("0", "1", "2")
    specs = first.spec.parameters + second.spec.parameters
    assert [(p.name, p.shape, p.dtype, p.requires_grad) for p in specs] == [
        (name, tuple(p.shape), "float32", p.requires_grad) for name, p in model.named_parameters()
    ]
    assert [(b.name, b.dtype, b.persistent) for b in first.spec.buffers] == [
        ("net.0.scale", "float64", True),
        ("net.0.cache", "float32", False),
    ]
    assert first.named_stage_tensors()["net.0.scale"] is model.net[0].scale
    assert [name for name, _ in second.named_stage_parameters()] == [p.name for p in second.spec.parameters]
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(first.spec), type=StageSpec) == first.spec


def test_composites_map_to_the_models_names() -> None:
    model = Staged()

    stages = cut_into(model, 5)

    assert [[p.name for p in stage.spec.parameters] for stage in stages] == [
        ["embed.weight"],
        *[[f"layers.{i}.weight", f"layers.{i}.bias"] for i in range(3)],
        ["head.weight", "head.bias"],
    ]
    assert list(model.state_dict()) == list(Loose().state_dict())


def test_parameters_come_in_the_models_order_not_in_the_blocks() -> None:
    class Reversed(Loose):
        def configure_stages(self) -> Any:
            return [self.head, *reversed(self.layers), self.embed]

    (stage,) = cut_into(Reversed(), 1)

    assert [name for name, _ in stage.named_stage_parameters()] == [name for name, _ in Loose().named_parameters()]


def test_a_stage_follows_its_parameters_off_meta() -> None:
    with torch.device("meta"):
        model = Staged()
    stage = cut_into(model, 5)[1]
    assert stage.spec.parameters[0].shape == (4, 4)

    stage.to_empty(device="cpu")

    assert [p.device.type for _, p in stage.named_stage_parameters()] == ["cpu", "cpu"]
    assert stage.named_stage_parameters()[0][1] is model.layers[0].weight
    assert model.head.weight.is_meta


def test_parameters_tied_inside_a_stage_count_once() -> None:
    model = Staged()
    model.head.weight = model.embed.weight

    (stage,) = cut_into(model, 1)

    names = [name for name, _ in stage.named_stage_parameters()]
    assert names.count("embed.weight") == 1
    assert "head.weight" not in names
    assert names == [name for name, _ in model.named_parameters()]


def test_extras_reach_the_blocks_that_name_them() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, x: Tensor, other: Tensor, mask: Tensor | None = None) -> Tensor:
            return x * self.weight + other + (0 if mask is None else mask)

    class Head(nn.Module):
        def forward(self, x: Tensor, *, targets: Tensor) -> Tensor:
            return x - targets

    model = nn.Sequential(Masked(), nn.ReLU(), Sequential(nn.Identity(), Head()))
    first, second = cut_into(model, 2)
    extras = {"mask": torch.ones(3), "targets": torch.full((3,), 2.0)}

    assert first.keywords | second.keywords == {"other", "mask", "targets"}
    hidden = first((torch.ones(3), torch.ones(3)), extras)
    assert torch.equal(second((hidden,), extras), torch.ones(3))


def with_tied_weights(dtype: torch.dtype = torch.float32) -> nn.Module:
    model = Staged()
    model.head.weight = model.embed.weight
    model.head.bias = nn.Parameter(torch.zeros(model.head.out_features, dtype=dtype))
    return model


def test_parameters_tied_across_stages_are_in_each_by_one_name() -> None:
    with torch.device("meta"):
        model = with_tied_weights()
    first, *_, last = stages = cut_into(model, 3)

    names = [[name for name, _ in stage.named_stage_parameters()] for stage in stages]
    assert [one.count("embed.weight") for one in names] == [1, 0, 1]
    assert "head.weight" not in names[2]
    last.to_empty(device="cpu")
    assert dict(last.named_stage_parameters())["embed.weight"] is model.head.weight
    assert dict(first.named_stage_parameters())["embed.weight"] is model.embed.weight
    assert model.embed.weight.is_meta


class Rotate(nn.Module):
    def __init__(self, *, trained: bool) -> None:
        super().__init__()
        self.turns = nn.Parameter(torch.ones(4, dtype=torch.complex64), requires_grad=trained)


def with_outside(layer: nn.Module) -> nn.Module:
    model = Net()
    model.other = layer
    return model


def with_shared() -> nn.Module:
    model = with_outside(nn.Linear(8, 2))
    model.other.weight = model.net[2].weight  # type: ignore[union-attr, index]
    return model


def test_what_is_in_no_block_is_a_stage_of_its_own() -> None:
    model = with_outside(nn.BatchNorm1d(3))
    model.temperature = nn.Parameter(torch.ones(1), requires_grad=False)

    first, second, around = cut_into(model, 2, "net")

    assert [stage.spec.on_trainers for stage in (first, second, around)] == [False, False, True]
    assert (around.spec.index, around.spec.block_names, around.spec.buffers) == (2, (), ())
    assert [p.name for p in around.spec.parameters] == ["temperature", "other.weight", "other.bias"]


def test_composites_may_hold_what_the_model_has_elsewhere() -> None:
    class Enter(nn.Module):
        def __init__(self, place: nn.Parameter) -> None:
            super().__init__()
            self.place = place

    model = with_outside(nn.Linear(2, 2))
    model.place = nn.Parameter(torch.ones(4))
    stages = cut_into(stages_of([Enter(model.place), model.net], model), 2)

    assert [[name for name, _ in stage.named_stage_parameters()] for stage in stages][::2] == [
        ["place"],
        ["other.weight", "other.bias"],
    ]


class Keeping(nn.Identity):
    def __init__(self, kept: object) -> None:
        super().__init__()
        self.kept = kept


def with_layer(layer: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.ReLU(), layer), nn.Linear(4, 4))


@pytest.mark.parametrize(
    ("model", "pipeline", "words"),
    [
        (
            with_tied_weights(torch.float64),
            None,
            ["all have float64 parameters, or all have none", "embed.weight", "to one dtype"],
        ),
        (with_shared(), "net", ["or outside of them, where", "got other.weight outside", "Untie it"]),
        (with_outside(nn.LazyLinear(4)), "net", ["know their shapes", "other (LazyLinear)"]),
        (with_outside(Rotate(trained=True)), "net", ["must be real", "other.turns"]),
        (
            stages_of([nn.Linear(2, 2), nn.ReLU()]),
            None,
            ["must belong to the model", "weight of block '0', bias of block '0'", "Create the layers in `__init__`"],
        ),
        (with_layer(nn.Embedding(3, 4, sparse=True)), None, ["dense", "`sparse=True` in 1.1", "`sparse=False`"]),
        (with_layer(Rotate(trained=True)), None, ["must be real", "1.1.turns", "torch.view_as_real", "or freeze them"]),
        (with_layer(Keeping(torch.Generator())), None, ["not keep a random generator", "1.1.kept", "pass the numbers"]),
        (with_layer(nn.SyncBatchNorm(4)), None, ["update buffers in forward", "1.1 (SyncBatchNorm)", "Use BatchNorm"]),
        (with_layer(nn.InstanceNorm1d(4, track_running_stats=True)), None, ["update buffers", "(InstanceNorm1d)"]),
        (with_layer(nn.LazyLinear(4)), None, ["know their shapes", "1.1 (LazyLinear)", "Pass them their input sizes"]),
    ],
    ids=lambda value: "",
)
def test_what_cannot_be_trained_in_stages_is_refused(model: nn.Module, pipeline: str | None, words: list[str]) -> None:
    blocks = find_blocks(model, pipeline)

    with pytest.raises(ConfigError) as error:
        build_stages(model, blocks, balanced_ranges([1] * len(blocks.modules), 2))

    assert all(word in str(error.value) for word in words), str(error.value)


def test_layers_that_look_alike_but_work_pass() -> None:
    for layer in (nn.InstanceNorm1d(4), nn.GroupNorm(2, 4), Rotate(trained=False), nn.Embedding(3, 4)):
        assert len(cut_into(with_layer(layer), 2)) == 2


@pytest.mark.parametrize("place", ["in a block", "around", "without parameters"])
def test_scripted_layers(place: str) -> None:
    scripted = torch.jit.script(nn.Tanh() if place == "without parameters" else nn.Linear(4, 4))
    model: Any = with_outside(nn.Identity() if place == "in a block" else scripted)
    if place == "in a block":
        model.net[1] = scripted
    if place == "without parameters":
        assert len(cut_into(model, 2, "net")) == 2
        assert twin_of(model, find_blocks(model, "net"))[0].other is scripted
        return
    with pytest.raises(ConfigError, match=r"scripted or traced by `torch\.jit`.*`self\.teacher = \[scripted\]`"):
        cut_into(model, 2, "net")


def test_lazy_layers_are_refused_before_they_are_counted() -> None:
    model = with_layer(nn.LazyLinear(4))
    with pytest.raises(ConfigError, match="LazyLinear"):
        parameter_costs(find_blocks(model, None))

    model(torch.ones(2, 4))
    assert parameter_costs(find_blocks(model, None)) == (20, 20, 20)
    assert len(cut_into(model, 2)) == 2


@pytest.mark.parametrize("ranges", [(range(2),), (range(1, 3), range(1)), (range(3), range(3, 3)), ()])
def test_ranges_must_cover_the_blocks(ranges: tuple[range, ...]) -> None:
    model = Net()

    with pytest.raises(ConfigError, match=r"cover blocks 0\.\.2 in order, none empty, got .*Cut the same model"):
        build_stages(model, find_blocks(model, None), ranges)
