"""A user's own forward calls the blocks of a list one by one."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_swarm.client.pipeline.interception import intercept
from lightning_swarm.client.pipeline.leftovers import Leftovers
from lightning_swarm.core.errors import ConfigError
from lightning_swarm.model.nn import Sequential
from lightning_swarm.model.partition import CALLS, BlockCall, Blocks, argument_of, bind, find_blocks, twin_of
from lightning_swarm.model.partition.call_binding import CARRIED, call_bound, extras_for
from lightning_swarm.protocol import serialization


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, hidden: Tensor, mask: Tensor | None = None, *, scale: float = 1.0) -> Tensor:
        out: Tensor = hidden + scale * torch.tanh(self.inner(hidden))
        return out if mask is None else out * mask


class Model(nn.Module):
    """Has blocks between two layers, deep inside of dicts."""

    def __init__(self, num_blocks: int = 3) -> None:
        super().__init__()
        self.enter = nn.Linear(4, 4)
        self.parts = nn.ModuleDict({"h": nn.ModuleList([Block() for _ in range(num_blocks)])})
        self.leave = nn.Linear(4, 2)

    def forward(self, x: Tensor, run: Callable[[Any, Tensor], Any] | None = None) -> Tensor:
        out: Tensor = self.leave((run or loop)(self.parts["h"], self.enter(x)))
        return out


def loop(blocks: Any, x: Any) -> Any:
    for block in blocks:
        x = block(x)
    return x


class FakePipeline:
    """Computes the blocks locally, and counts calls."""

    config = SimpleNamespace(device=torch.device("cpu"), shared=("table",))
    leftovers = Leftovers({})

    def __init__(self, blocks: Blocks) -> None:
        self._blocks = blocks
        self.calls: list[dict[str, Any]] = []

    def __call__(self, *inputs: Any, **extras: Any) -> Any:
        self.calls.append(extras)
        return call_bound(self._blocks.modules, self._blocks.names, inputs, extras)


class Patched:
    """A model whose list is pipelined, and an untouched copy of it."""

    def __init__(self, model: nn.Module, pipeline: str = "parts.h") -> None:
        self.plain = copy.deepcopy(model)
        self.model = model
        blocks = find_blocks(model, pipeline)
        self.pipeline = FakePipeline(twin_of(model, blocks)[1])  # a server has its own copy
        self.interception = intercept(blocks, self.pipeline)  # type: ignore[arg-type]


@pytest.fixture
def patch() -> Iterator[Callable[..., Patched]]:
    made: list[Patched] = []

    def make(*arguments: Any) -> Patched:
        torch.manual_seed(0)
        made.append(Patched(*(arguments or (Model(),))))
        return made[-1]

    yield make
    for one in made:
        one.interception.remove()


ROWS = torch.arange(12.0).view(3, 4) / 10
MASK = torch.tensor([1.0, 0.0, 2.0, 1.0])


def with_extras(blocks: Any, x: Tensor) -> Any:
    for i, block in enumerate(blocks):
        x = block(x, MASK, scale=0.5) if i % 2 else block(scale=0.5, mask=MASK, hidden=x)
    return x


def twice(blocks: Any, x: Tensor) -> Any:
    return loop(blocks, torch.sin(loop(blocks, x)))


def checkpointed(blocks: Any, x: Tensor) -> Any:
    for block in blocks:
        x = checkpoint(block, x, use_reentrant=False)
    return x


def checkpointed_as_one(blocks: Any, x: Tensor) -> Any:
    return checkpoint(loop, blocks, x, use_reentrant=True)


def with_checks(blocks: Any, x: Any) -> Any:
    for block in blocks:
        x = block(x)
        assert x is not None
        assert not isinstance(x, tuple)
        assert str(x)
    return x


@pytest.mark.parametrize(
    ("run", "num_calls"),
    [
        (loop, 1),
        (with_extras, 1),
        (twice, 2),
        (checkpointed, 1),
        (checkpointed_as_one, 2),
        (with_checks, 1),
    ],
)
def test_a_forward_gives_what_it_gave(
    patch: Callable[..., Patched], run: Callable[[Any, Tensor], Any], num_calls: int
) -> None:
    patched = patch()
    results = []
    for model in (patched.plain, patched.model):
        x = ROWS.clone().requires_grad_()
        output = model(x, run)
        output.square().sum().backward()
        results.append([output, x.grad, *(parameter.grad for parameter in model.parameters())])
    assert len(patched.pipeline.calls) == num_calls
    torch.testing.assert_close(results[1], results[0], rtol=0.0, atol=0.0)


def test_extras_reach_the_blocks_that_name_them(patch: Callable[..., Patched]) -> None:
    class Plain(nn.Module):
        def forward(self, hidden: Tensor) -> Tensor:
            return hidden.cos()

    class Takes(nn.Module):
        def forward(self, hidden: Tensor, **kwargs: Tensor) -> Tensor:
            return hidden

    mixed = nn.ModuleList([Block(), Plain(), nn.Sequential(nn.Linear(4, 4)), Sequential(Block(), Block()), Takes()])

    def run(blocks: Any) -> Any:
        x = ROWS
        for block in blocks:
            x = block(x, mask=MASK) if isinstance(block, (Block, Sequential)) else block(x)
        return x

    patched = patch(nn.ModuleDict({"h": mixed}), "h")
    assert torch.equal(run(patched.model["h"]), run(patched.plain["h"]))  # type: ignore[index]
    assert [list(extras) for extras in patched.pipeline.calls] == [["mask", CALLS]]


class Takes(nn.Module):
    """Applies all its arguments."""

    def forward(self, hidden: Tensor, /, first: float, *, mask: Tensor | None = None, **kwargs: Any) -> Tensor:
        hidden = hidden * first if mask is None else hidden + mask
        return hidden + sum(kwargs.values())


def test_each_block_is_called_as_the_forward_calls_it(patch: Callable[..., Patched]) -> None:
    def run(blocks: Any) -> Any:
        window, scale = MASK * 2, torch.tensor(3.0)
        x = blocks[0](ROWS, 2.0, mask=MASK, late=scale)
        x = blocks[1](x, 0.5, mask=window)
        x = blocks[2](x, mask=MASK, first=2.0)
        return blocks[3](x, 2.0, other=MASK, late=scale)

    patched = patch(nn.ModuleDict({"h": nn.ModuleList([Takes() for _ in range(4)])}), "h")
    assert torch.equal(run(patched.model["h"]), run(patched.plain["h"]))  # type: ignore[index]
    (extras,) = patched.pipeline.calls
    assert sorted(extras) == [CALLS, "first", "first#2", "late", "mask", "mask#2", "other"], "each value travels once"
    assert [extras[name] for name in ("first", "first#2")] == [2.0, 0.5]
    own = extras_for(extras, ["1"])
    assert sorted(own) == [CALLS, "first#2", "mask#2"], "a stage gets what its own blocks take"
    assert list(own[CALLS]) == ["1"]
    serialization.flatten(extras)  # all extras can be serialized


def test_masks_of_their_own_are_shared_by_the_arguments_name() -> None:
    assert [argument_of(name) for name in ("mask", "mask#2")] == ["mask", "mask"]


class Wraps(nn.Module):
    """Returns its hidden state in a tuple, possibly nested."""

    def __init__(self, wrap: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.wrap = wrap

    def forward(self, hidden: Tensor) -> Any:
        return self.wrap(hidden + 1)


def test_what_is_taken_of_a_blocks_output(patch: Callable[..., Patched]) -> None:
    wraps: list[Callable[[Tensor], Any]] = [
        lambda x: (x,),
        lambda x: {"a": (x, x * 2), "b": 1},
        lambda x: [x, None],
        lambda x: (x, x),
    ]

    def run(blocks: Any) -> Any:
        x = blocks[0](ROWS)[0]
        outputs = blocks[1](x)
        x = blocks[2](outputs["a"][1])[-2]
        return blocks[3](x)[0]

    patched = patch(nn.ModuleDict({"h": nn.ModuleList([Wraps(wrap) for wrap in wraps])}), "h")
    assert torch.equal(run(patched.model["h"]), run(patched.plain["h"]))  # type: ignore[index]


def test_what_is_unpacked(patch: Callable[..., Patched]) -> None:
    wraps: list[Callable[[Tensor], Any]] = [lambda x: (x, x * 2), lambda x: [1, (x, {"a": x * 3})], lambda x: (x, None)]

    def run(blocks: Any) -> Any:
        x, _ = blocks[0](ROWS)
        _, (_, inner) = blocks[1](x)
        x, nothing = blocks[2](inner["a"])
        assert nothing is None
        return x

    patched = patch(nn.ModuleDict({"h": nn.ModuleList([Wraps(wrap) for wrap in wraps])}), "h")
    for _ in range(50):  # often enough for the interpreter to specialize the code
        assert torch.equal(run(patched.model["h"]), run(patched.plain["h"]))  # type: ignore[index]

    def wrongly(blocks: Any) -> Any:
        first, _, _ = blocks[0](ROWS)
        return loop(blocks[1:], first)

    with pytest.raises(ConfigError, match=r"as many values as the forward unpacks, 3; block '0' returned 2"):
        wrongly(patched.model["h"])  # type: ignore[index]


def test_a_sample_is_not_taken_of_a_tensor(patch: Callable[..., Patched]) -> None:
    with pytest.raises(
        ConfigError, match=r"got \[0\] of block '1', which returned a Tensor. The index of a tensor would select a s"
    ):
        patch().model(ROWS, between(lambda x: x[0]))


def test_what_cannot_travel_is_refused_by_the_arguments_name(patch: Callable[..., Patched]) -> None:
    message = r"block 'parts.h.0' got a dict_keys as `scale`, and .*otherwise set `use_cache=False`"
    with pytest.raises(ConfigError, match=message):
        patch().model(ROWS, other_extras({"scale": {}.keys()}))


def test_arguments_without_names_are_refused(patch: Callable[..., Patched]) -> None:
    class Unnamed(nn.Module):
        def forward(self, hidden: Tensor, *masks: Tensor) -> Tensor:
            return hidden

    patched = patch(nn.ModuleDict({"h": nn.ModuleList([Unnamed(), Unnamed()])}), "h")
    first: Any = patched.model["h"][0]  # type: ignore[index]
    with pytest.raises(ConfigError, match=r"'h.0' was called with 2 arguments without names, but only the hidd"):
        first(ROWS, MASK)


def test_a_block_that_stands_in_the_list_twice(patch: Callable[..., Patched]) -> None:
    shared = Block()
    patched = patch(nn.ModuleDict({"h": nn.ModuleList([shared, Block(), shared])}), "h")
    assert torch.equal(loop(patched.model["h"], ROWS), loop(patched.plain["h"], ROWS))  # type: ignore[index]


def test_trees_between_the_blocks(patch: Callable[..., Patched]) -> None:
    class Pair(nn.Module):
        def forward(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
            return pair[1] + 1, pair[0]

    patched = patch(nn.ModuleDict({"h": nn.ModuleList([Pair(), Pair(), Pair()])}), "h")
    first, second = loop(patched.model["h"], (ROWS, MASK))  # type: ignore[index]
    assert torch.equal(first, MASK + 2)
    assert torch.equal(second, ROWS + 1)


def skipping(blocks: Any, x: Tensor) -> Any:
    return loop([blocks[0], blocks[2]], x)


def reordered(blocks: Any, x: Tensor) -> Any:
    return loop([blocks[0], blocks[2], blocks[1]], x)


def from_the_middle(blocks: Any, x: Tensor) -> Any:
    return loop(blocks[1:], x)


def early_exit(blocks: Any, x: Tensor) -> Any:
    return loop(blocks[:2], x)


def between(use: Callable[[Any], Any]) -> Callable[[Any, Tensor], Any]:
    """Return a loop that applies `use` to the hidden state after the second block."""

    def run(blocks: Any, x: Tensor) -> Any:
        return blocks[2](use(blocks[1](blocks[0](x))))

    return run


def other_extras(*extras: dict[str, Any]) -> Callable[[Any, Tensor], Any]:
    def run(blocks: Any, x: Tensor) -> Any:
        for block, own in zip(blocks, extras, strict=True):
            x = block(x, **{name: value() if callable(value) else value for name, value in own.items()})
        return x

    return run


def crossing(blocks: Any, x: Tensor) -> Any:
    hidden = blocks[0](x)
    return blocks[1](x, mask=hidden)


def without_gradient(blocks: Any, x: Tensor) -> Any:
    with torch.no_grad():
        x = blocks[0](x)
    return loop(blocks[1:], x)


def under_autocast(blocks: Any, x: Tensor) -> Any:
    x = blocks[0](x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return loop(blocks[1:], x)


def in_place(blocks: Any, x: Tensor) -> Any:
    x = x.clone()
    hidden = blocks[0](x)
    x += 1
    return loop(blocks[1:], hidden)


def checkpointed_one_by_one(blocks: Any, x: Tensor) -> Any:
    for block in blocks:
        x = checkpoint(block, x, use_reentrant=True)
    return x


REFUSED: dict[str, tuple[Callable[[Any, Tensor], Any], str]] = {
    "skipped": (skipping, r"block 'parts.h.2' was called with the output of block 'parts.h.0'"),
    "reordered": (reordered, r"block 'parts.h.2' was called with the output of block 'parts.h.0'"),
    "begun in the middle": (from_the_middle, r"block 'parts.h.1' was called with something else"),
    "the same block again": (
        lambda blocks, x: blocks[0](blocks[0](x)),
        r"block 'parts.h.0' was called with the output of block 'parts.h.0'",
    ),
    "left early": (early_exit, r"output of block 'parts.h.1' went to `torch.nn.functional.linear`"),
    "added": (between(lambda x: x + 1), r"output of block 'parts.h.1' went to `__add__` before"),
    "added from the right": (between(lambda x: 1.0 * x), r"went to `__rmul__`"),
    "added to a tensor": (between(lambda x: ROWS + x), r"went to `torch.Tensor.(__add__|add)`"),
    "compared": (between(lambda x: x == 1), r"went to `__eq__`"),
    "sliced": (between(lambda x: x[:1]), r"went to `__getitem__`"),
    "indexed by a tensor": (between(lambda x: x[x > 0]), r"went to `__gt__`"),
    "gone through": (between(lambda x: tuple(x)), r"went to `__iter__`"),
    "unpacked in part": (between(lambda x: next(first for first, *_ in [x])), r"went to `__iter__`"),
    "asked for its shape": (between(lambda x: x.shape), r"went to `.shape`"),
    "asked for its truth": (between(lambda x: x or x), r"went to `__bool__`"),
    "given to torch": (between(lambda x: F.dropout(x, 0.1)), r"went to `torch.nn.functional.dropout`"),
    "stacked": (between(lambda x: torch.stack([x, x])), r"went to `torch.stack`"),
    "in a tuple": (between(lambda x: (x, x)), r"block 'parts.h.2' was called with something else"),
    "as another argument": (crossing, r"block 'parts.h.1' got the output of block 'parts.h.0' as `mask`"),
    "no gradient": (without_gradient, r"`no_grad`, autocast .* between block 'parts.h.0' and 'parts.h.1'"),
    "autocast": (under_autocast, r"`no_grad`, autocast .* between block 'parts.h.0' and 'parts.h.1'"),
    "changed in place": (in_place, r"an argument was changed in place between"),
}


@pytest.mark.parametrize(("run", "message"), REFUSED.values(), ids=list(REFUSED))
def test_what_is_no_loop_is_refused(
    patch: Callable[..., Patched], run: Callable[[Any, Tensor], Any], message: str
) -> None:
    patched = patch()
    rule = r"forward around 'parts.h' must call its blocks one after the other, .*"
    with pytest.raises(ConfigError, match=rule + message + r".*or define `configure_stages\(self\)`"):
        patched.model(ROWS, run)
    assert not patched.pipeline.calls
    if run not in (in_place, under_autocast):
        patched.plain.parts["h"][0].inner.weight.grad = None  # type: ignore[union-attr, index]
        assert torch.equal(patched.model(ROWS), patched.plain(ROWS)), "the next batch is as good as any"


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
def test_checkpoints_that_would_lose_the_gradient_are_refused(patch: Callable[..., Patched]) -> None:
    with pytest.raises(
        ConfigError, match=r"requires `use_reentrant=False`, got `use_reentrant=True` around .*'parts.h.1'"
    ):
        patch().model(ROWS, checkpointed_one_by_one)


def test_what_wants_a_gradient_goes_with_the_hidden_state(patch: Callable[..., Patched]) -> None:
    patched = patch()
    found = []
    for model in (patched.plain, patched.model):
        each, one = (torch.ones(rows, 4, requires_grad=True) for rows in (3, 1))
        extras = [{"mask": each}, {"mask": one, "scale": 2.0}, {"mask": each}]
        model(ROWS, other_extras(*extras)).square().sum().backward()
        found.append([each.grad, one.grad])
    assert list(patched.pipeline.calls[0]) == ["scale", CALLS, CARRIED]
    assert [None if one is None else one.shape for one in found[0]] == [(3, 4), (1, 4)]
    torch.testing.assert_close(found[1], found[0], rtol=0.0, atol=1e-6)


def test_it_goes_through_every_stage_but_the_last() -> None:
    blocks = nn.ModuleList([Block() for _ in range(3)])
    mask = torch.ones(3, 4, requires_grad=True)
    names = ("0", "1", "2")
    carried, extras = bind(names, [BlockCall({"mask": mask}), BlockCall({}), BlockCall({"mask": mask})])
    expected = call_bound(blocks, names, (ROWS, *carried), extras)
    value: Any = (ROWS, *carried)
    for index, name in enumerate(names):
        value = call_bound(
            blocks[index : index + 1], [name], value if index == 0 else (value,), extras_for(extras, [name])
        )
        assert isinstance(value, tuple) == (name != "2")
    assert torch.equal(value, expected)


def test_no_gradient_comes_back_for_what_is_shared() -> None:
    table = torch.ones(3, 4, requires_grad=True)
    carried, extras = bind(("0",), [BlockCall({"table": table})], shared=("table",))
    assert not carried
    assert extras["table"] is table, "which the pipeline refuses"


def test_parts_of_blocks_are_guarded(patch: Callable[..., Patched]) -> None:
    patched = patch()
    with pytest.raises(ConfigError, match="got a call of Linear"):
        patched.model.parts["h"][1].inner(ROWS)  # type: ignore[union-attr, index]


def own_forwards(model: Any) -> Sequence[bool]:
    return ["forward" in vars(block) for block in model.parts["h"]]


def test_copies_and_pickles_of_a_patched_model(patch: Callable[..., Patched]) -> None:
    patched = patch()
    expected = patched.plain(ROWS)
    twin = copy.deepcopy(patched.model)
    other: Any = pickle.loads(pickle.dumps(patched.model))
    with torch.no_grad():
        for model in (twin, other):
            assert torch.equal(model(ROWS), expected)
            for parameter in model.parameters():
                parameter.zero_()
            for block in model.parts["h"]:  # type: ignore[union-attr]
                assert torch.equal(block(ROWS), ROWS), "it has weights of its own"
                block.inner(ROWS)  # type: ignore[operator, union-attr]
    assert not patched.pipeline.calls
    with pytest.raises(ConfigError, match="got a call of Linear"):
        patched.model.parts["h"][1].inner(ROWS)  # type: ignore[union-attr, index]
    patched.interception.remove()
    assert not any(own_forwards(patched.model))
    assert torch.equal(patched.model(ROWS), expected)
    assert not patched.pipeline.calls


def test_a_blocks_own_forward_comes_back(patch: Callable[..., Patched]) -> None:
    model = Model()
    first: Any = model.parts["h"][0]  # type: ignore[index]
    own = first.forward
    first.forward = lambda hidden: own(hidden) * 2
    mine, expected = first.forward, model(ROWS)
    patched = patch(model)
    assert first.forward is not mine
    assert torch.equal(model(ROWS), expected)
    patched.interception.remove()
    patched.interception.remove()
    assert first.forward is mine
    assert own_forwards(model) == [True, False, False]
