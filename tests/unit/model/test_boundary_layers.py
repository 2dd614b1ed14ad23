"""Boundary layers: their computation, their places in a model, and refused uses."""

from __future__ import annotations

import copy
import itertools
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_swarm.core.errors import ConfigError
from lightning_swarm.model.boundary_layers import (
    SCALE,
    Bottleneck,
    Boundary,
    Maxout,
    add_hooks,
    adopt_layers,
    boundary_layers,
    insert_boundary,
    remove_hooks,
    restore_boundary,
)
from lightning_swarm.model.partition import build_stages, choose_ranges, find_blocks, insert_boundaries, layers_by_block

KINDS: tuple[Callable[..., Boundary], ...] = (Bottleneck, Maxout)


LAYER = "model.boundary_layers.parts.h.0"


def chain(depth: int = 4, width: int = 8) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(depth)))


class Wrapped(nn.Module):
    """The pipeline is inside a model inside the module, as in an existing project."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.parts = nn.ModuleDict({"h": nn.ModuleList(chain())})

    def forward(self, hidden: Tensor) -> Tensor:
        for block in self.model.parts["h"]:  # type: ignore[index,union-attr]
            hidden = block(hidden)
        return hidden


def shapes(module: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}


# ---------------------------------------------------------------------- layers


def test_a_bottleneck_is_what_its_formula_says() -> None:
    layer = Bottleneck(ratio=4).layer(8)
    x = torch.randn(3, 5, 8)
    w1, w2 = layer.compress.linear, layer.decompress.linear
    h = F.layer_norm(F.linear(F.layer_norm(x, (8,)), w1.weight, w1.bias), (2,))
    torch.testing.assert_close(layer.compress(x), h)
    torch.testing.assert_close(layer(x), F.linear(h, w2.weight, w2.bias))


def test_a_maxout_is_what_its_formula_says() -> None:
    layer = Maxout(ratio=4).layer(8)
    x = torch.randn(3, 5, 8)
    h = F.layer_norm(torch.stack([F.layer_norm(x, (8,))[..., i : i + 4].amax(-1) for i in (0, 4)], -1), (2,))
    torch.testing.assert_close(layer.compress(x), h)
    torch.testing.assert_close(layer(x), F.linear(h, layer.decompress.linear.weight, layer.decompress.linear.bias))


def test_a_new_bottleneck_projects() -> None:
    layer = Bottleneck(ratio=4).layer(64)
    there, back = layer.compress.linear, layer.decompress.linear
    product = (back.weight @ there.weight).detach() / SCALE**2
    torch.testing.assert_close(product @ product, product, atol=1e-5, rtol=0)
    torch.testing.assert_close(product, product.T, atol=1e-5, rtol=0)
    assert torch.linalg.matrix_rank(product) == 16
    assert not there.bias.any()
    assert not back.bias.any()


def test_a_new_maxout_gives_each_maximum_to_all_that_it_is_of() -> None:
    layer = Maxout(ratio=2).layer(4)
    out = layer.decompress(torch.tensor([3.0, -1.0]))
    assert (out / SCALE).tolist() == [3.0, 3.0, -1.0, -1.0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((1,), r"`\w+\.ratio` must be a whole number of at least 2, got 1\. Leave"),
        ((2.0,), r"got 2\.0\. Leave"),
        ((True,), r"got True\. Leave"),
        ((2, 0), r"`\w+\.features` must be a positive whole number or None, got 0"),
        ((4, 6), r"must divide the number of features, got 4 and 6\. Choose one of \[2, 3, 6\]"),
    ],
)
def test_arguments_out_of_range_are_refused(kind: Any, arguments: tuple[Any, ...], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        kind(*arguments)


@pytest.mark.parametrize(
    ("hidden", "words"),
    [
        ((torch.zeros(2, 8),), r"hidden state is one tensor, got a block whose output is a tuple"),
        (torch.zeros(2, 6), r"must have 8 features, got \[2, 6\]\. Set `features=6`"),
    ],
)
def test_hidden_states_that_do_not_fit_are_refused(hidden: Any, words: str) -> None:
    for kind in KINDS:
        with pytest.raises(ConfigError, match=words):
            kind(2).layer(8)(hidden)


# ---------------------------------------------------------------------- in a model


def test_names_say_what_the_layers_stand_after() -> None:
    before = chain()
    module = nn.ModuleDict({"net": before})
    own = list(module.state_dict())
    outer = nn.Module()
    outer.net = before
    insert_boundary(outer, Bottleneck(ratio=2), ["net.2", "net.0"])
    assert list(boundary_layers(outer)) == ["net.0", "net.2"]
    names = list(outer.state_dict())
    assert names[: len(own)] == own
    assert "boundary_layers.net.0.compress.linear.weight" in names
    assert "boundary_layers.net.2.decompress.linear.bias" in names


def test_parameters_are_next_to_those_of_the_blocks() -> None:
    """An optimizer over a part of the module, as in existing projects, then includes them."""
    outer = Wrapped()
    insert_boundary(outer, Maxout(ratio=2), ["model.parts.h.1"])
    assert "model.boundary_layers.parts.h.1.decompress.linear.weight" in outer.state_dict()
    assert list(boundary_layers(outer)) == ["model.parts.h.1"]


def test_a_plain_forward_goes_through_the_layers() -> None:
    outer = Wrapped()
    x = torch.randn(3, 8)
    insert_boundary(outer, Bottleneck(ratio=2), ["model.parts.h.1"])
    layer = boundary_layers(outer)["model.parts.h.1"]
    h = outer.model.parts["h"]  # type: ignore[index,union-attr]
    with_layer = h[3](h[2](layer(h[1].forward(h[0](x)))))
    assert torch.equal(outer(x), with_layer)
    for other in (copy.deepcopy(outer), pickle.loads(pickle.dumps(outer))):
        assert torch.equal(other(x), with_layer)
        nn.init.zeros_(boundary_layers(other)["model.parts.h.1"].decompress.linear.weight)
        assert not torch.equal(other(x), with_layer), "a copy has layers of its own"
        assert torch.equal(outer(x), with_layer)
    remove_hooks(outer)
    assert not torch.equal(outer(x), with_layer)
    add_hooks(outer)
    add_hooks(outer)
    assert torch.equal(outer(x), with_layer)


def test_new_layers_depend_on_seed_and_place_alone() -> None:
    def layers(seed: int, draws: int, names: list[str]) -> dict[str, Tensor]:
        module = Wrapped()
        torch.manual_seed(seed)
        torch.randn(draws)
        state = torch.get_rng_state()
        insert_boundary(module, Bottleneck(ratio=2), names)
        assert torch.equal(torch.get_rng_state(), state), "nobody else draws other numbers for it"
        return {name: one.compress.linear.weight for name, one in boundary_layers(module).items()}

    one, two = "model.parts.h.0", "model.parts.h.1"
    first = layers(0, 0, [one, two])
    assert torch.equal(first[one], layers(0, 7, [one])[one])
    assert not torch.equal(first[one], first[two])
    assert not torch.equal(first[one], layers(1, 0, [one])[one])


def test_layers_have_the_dtype_device_and_mode_of_their_block() -> None:
    module = Wrapped().double().eval()
    with torch.device("meta"):  # a large model is configured on meta
        insert_boundary(module, Bottleneck(ratio=2), ["model.parts.h.0"])
    layer = boundary_layers(module)["model.parts.h.0"]
    assert {(one.dtype, one.device.type) for one in layer.parameters()} == {(torch.float64, "cpu")}
    assert not layer.training


def test_what_was_saved_is_restored() -> None:
    for kind in KINDS:
        saved = Wrapped()
        insert_boundary(saved, kind(4), ["model.parts.h.0", "model.parts.h.2"])
        state: dict[str, Any] = {**saved.state_dict(), "metric._extra_state": {"not": "a tensor"}}
        module = Wrapped()
        restore_boundary(module, state)
        module.load_state_dict({name: one for name, one in state.items() if "extra" not in name})
        x = torch.randn(3, 8)
        assert torch.equal(module(x), saved(x))
        restore_boundary(module, state)
        assert torch.equal(module(x), saved(x)), "twice is once"


def test_a_file_without_layers_changes_nothing() -> None:
    module = Wrapped()
    restore_boundary(module, Wrapped().state_dict())
    assert not boundary_layers(module)


def test_a_peer_takes_the_layers_of_the_run_and_no_others() -> None:
    places = [f"model.parts.h.{number}" for number in range(4)]
    run, peer = Wrapped(), Wrapped()
    insert_boundary(run, Bottleneck(ratio=2), [places[0], places[2]])
    insert_boundary(peer, Bottleneck(ratio=2), [places[1], places[0]])
    kept = boundary_layers(peer)[places[0]]
    adopt_layers(peer, shapes(run))
    assert shapes(peer) == shapes(run)
    assert list(boundary_layers(peer)) == [places[0], places[2]]
    assert boundary_layers(peer)[places[0]] is kept
    adopt_layers(peer, shapes(Wrapped()))
    assert shapes(peer) == shapes(Wrapped())
    x = torch.randn(2, 8)
    assert torch.equal(peer(x), Wrapped()(x)), "nothing of them is left"


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"boundary_layers.net.9.decompress.linear.weight": (8, 4)}, r"got 'net\.9', which \w+ does not have"),
        ({"boundary_layers.model.compress.linear.weight": (4, 8)}, r"after 'model' must be a boundary layer"),
        ({"boundary_layers.model.decompress.linear.weight": (8, 0)}, r"after 'model' must be a boundary layer"),
        ({"boundary_layers.model.decompress.linear.weight": (8, 3)}, r"after 'model' must be a boundary layer"),
        # No machine has the memory for these layers; in the last case each layer alone is small.
        ({f"{LAYER}.decompress.linear.weight": (1 << 40, 1 << 39)}, r"than the model, .* after 'model\.parts\.h\.0'"),
        ({f"{LAYER}.decompress.linear.weight": (1 << 62, 1)}, r"have more numbers than the model"),
        (
            {f"{LAYER[:-1]}{n}.decompress.linear.weight": (1 << 12, 1 << 10) for n in range(4)},
            r"than the model, which has 288; got 8\.39e\+06 after",
        ),
    ],
)
def test_what_cannot_be_the_runs_layers_is_refused(state: dict[str, tuple[int, ...]], words: str) -> None:
    module = Wrapped()
    with pytest.raises(ConfigError, match=words):
        adopt_layers(module, state)
    assert shapes(module) == shapes(Wrapped())


def test_insertions_that_cannot_be_are_refused() -> None:
    module = Wrapped()
    name = "model.parts.h.1"
    insert_boundary(module, Bottleneck(ratio=2), [name])
    before, x = shapes(module), torch.randn(2, 8)
    output = module(x)
    for boundary, after, words in (
        (Bottleneck(ratio=2), [name], r"at most one .* got 'model\.parts\.h\.1' again"),
        (Bottleneck(ratio=3), ["model.parts.h.2"], r"must divide the number of features, got 3 and 8"),
        (Bottleneck(ratio=2), ["model.parts.h.2.1"], r"after 'model\.parts\.h\.2\.1' must be known, but Tanh has no"),
        (Bottleneck(ratio=2), ["model.parts.h.7"], r"stands after a submodule, got 'model\.parts\.h\.7'"),
        (Bottleneck(ratio=2), [""], r"stands after a submodule, got ''"),
        (Bottleneck(ratio=2, features=1 << 40), ["model.parts.h.2"], r"must not have more numbers than the model"),
    ):
        with pytest.raises(ConfigError, match=words):
            insert_boundary(module, boundary, after)
        assert shapes(module) == before
        assert torch.equal(module(x), output)
    with pytest.raises(ConfigError, match=r"have room for their .* got a Sequential"):
        insert_boundary(chain(), Bottleneck(ratio=2), ["0"])
    taken = Wrapped()
    taken.model.boundary_layers = nn.Linear(1, 1)
    with pytest.raises(ConfigError, match=r"under the name `boundary_layers`, got a Module that uses it otherwise"):
        insert_boundary(taken, Bottleneck(ratio=2), [name])


@pytest.mark.parametrize(
    ("block", "features"),
    [
        (nn.TransformerEncoderLayer(12, 2, 20), 12),
        (nn.Sequential(nn.Linear(4, 6), nn.ReLU()), 6),
        (nn.Embedding(50, 10), 10),
        (nn.Sequential(nn.Conv1d(3, 3, 1), nn.RMSNorm(14)), 14),
    ],
)
def test_the_last_layer_says_how_many_features_there_are(block: nn.Module, features: int) -> None:
    outer = nn.Module()
    outer.net = nn.Sequential(block, nn.Identity())
    insert_boundary(outer, Bottleneck(ratio=2), ["net.0"])
    assert boundary_layers(outer)["net.0"].decompress.linear.out_features == features
    other = nn.Module()
    other.net = nn.Sequential(block, nn.Identity())
    insert_boundary(other, Bottleneck(ratio=2, features=16), ["net.0"])
    assert boundary_layers(other)["net.0"].decompress.linear.out_features == 16


# ---------------------------------------------------------------------- at cuts


@pytest.mark.parametrize("num_stages", [1, 2, 3])
def test_stages_together_compute_what_the_model_does(num_stages: int) -> None:
    module = Wrapped()
    insert_boundary(module, Bottleneck(ratio=4), [f"model.parts.h.{number}" for number in (0, 1, 3)])
    x = torch.randn(3, 8)
    expected = module(x)
    blocks = find_blocks(module, "model.parts.h")
    for cuts in itertools.combinations((0, 1), num_stages - 1):
        begins = [0, *(place + 1 for place in cuts), 4]
        remove_hooks(module)
        stages = build_stages(module, blocks, [range(*pair) for pair in itertools.pairwise(begins)])
        held = [name for stage in stages for name, _ in stage.named_stage_parameters()]
        assert sorted(held) == sorted(shapes(module)), "each in one stage, none around"
        hidden, widths = x, []
        for stage in stages:
            hidden = stage((hidden,), {})
            widths.append(hidden.shape[-1])
        assert widths == [2] * (num_stages - 1) + [8]
        assert torch.equal(hidden, expected)
        add_hooks(module)


def test_a_layer_anywhere_else_is_refused() -> None:
    module = Wrapped()
    insert_boundary(module, Bottleneck(ratio=2), ["model.parts.h.1.0", "model.parts.h.2"])
    with pytest.raises(
        ConfigError, match=r"must stand after blocks of the pipeline, got .*\['model\.parts\.h\.1\.0'\]"
    ):
        layers_by_block(module, find_blocks(module, "model.parts.h"))


def test_a_model_is_cut_where_its_layers_stand() -> None:
    module = Wrapped()
    blocks = find_blocks(module, "model.parts.h")
    assert choose_ranges(blocks, 2, "parameters") == (range(2), range(2, 4))
    assert choose_ranges(blocks, 2, "parameters", seams={0}) == (range(1), range(1, 4))
    assert choose_ranges(blocks, 2, "parameters", seams={0, 2}) in {(range(1), range(1, 4)), (range(3), range(3, 4))}
    assert choose_ranges(blocks, 3, "parameters", seams={0, 2, 3}) == (range(1), range(1, 3), range(3, 4))
    assert choose_ranges(blocks, 2, "time", lambda: [1, 1, 1, 9], seams={0, 2}) == (range(3), range(3, 4))
    assert choose_ranges(blocks, 2, ("2",), seams={0}) == (range(2), range(2, 4)), "as the user says"
    with pytest.raises(ConfigError, match=r"where they stand: `num_stages` must be 1\.\.3, got 4\. Lower it"):
        choose_ranges(blocks, 4, "parameters", seams={0, 2})


def test_layers_are_inserted_once_and_at_every_cut() -> None:
    module = Wrapped()
    blocks = find_blocks(module, "model.parts.h")
    halves = (range(2), range(2, 4))
    with pytest.raises(ConfigError, match=r"must be at least 2, got 1\. Raise `num_stages`"):
        insert_boundaries(module, blocks, (range(4),), Bottleneck(ratio=2))
    insert_boundaries(module, blocks, halves, Bottleneck(ratio=2))
    layers = boundary_layers(module)
    assert list(layers) == ["model.parts.h.1"]
    insert_boundaries(module, blocks, halves, Bottleneck(ratio=2))
    insert_boundaries(module, blocks, (range(4),), Bottleneck(ratio=2))
    assert boundary_layers(module) == layers
    with pytest.raises(ConfigError, match=r"after blocks \['1'\], got cuts after \['0'\]\. Correct `split`"):
        insert_boundaries(module, blocks, (range(1), range(1, 4)), Bottleneck(ratio=2))
    for other in (Bottleneck(ratio=4), Maxout(ratio=2)):
        with pytest.raises(ConfigError, match=r"Bottleneck\(ratio=2, features=8\) stands after .* got \w+\(ratio=\d\)"):
            insert_boundaries(module, blocks, halves, other)


class Made(nn.Module):
    """Creates one of its blocks anew at each access."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def configure_stages(self) -> list[nn.Module]:
        return [nn.Sequential(self.first, nn.Tanh()), self.last]


def test_blocks_that_nothing_can_stand_after_are_refused() -> None:
    made = Made()
    with pytest.raises(
        ConfigError, match=r"after a module that is an attribute of the model, got block '0', a Sequential that is not"
    ):
        insert_boundaries(made, find_blocks(made, None), (range(1), range(1, 2)), Bottleneck(ratio=2))
    shared = nn.Linear(8, 8)
    outer = nn.Module()
    outer.net = nn.Sequential(shared, shared, nn.Linear(8, 8))
    with pytest.raises(ConfigError, match=r"a block that is called once, got 'net\.0', which the pipeline repeats"):
        insert_boundaries(outer, find_blocks(outer, None), (range(2), range(2, 3)), Bottleneck(ratio=2))


def test_the_one_sequential_is_still_found() -> None:
    outer = nn.Module()
    outer.net = chain()
    insert_boundary(outer, Bottleneck(ratio=2), ["net.0"])
    assert find_blocks(outer, None).root_name == "net"
