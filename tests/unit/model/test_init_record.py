"""Recorded operations on meta tensors, replayed, give the same bits as on a real device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.init import orthogonal_ as imported_by_name
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from lightning_swarm.core.errors import ConfigError
from lightning_swarm.model.init_record import InitRecord

CPU = torch.device("cpu")


class Everything(nn.Module):
    """Uses all kinds of operations that constructors use."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 8, padding_idx=0)
        self.tied = nn.Linear(8, 10, bias=False)
        self.tied.weight = self.embedding.weight
        self.cloned = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)
        self.parametrized = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
        self.recurrent = nn.LSTM(4, 5)
        self.convolution = nn.Conv2d(3, 4, 3)
        self.mask = nn.Buffer(torch.tril(torch.ones(4, 4)))
        self.literal = nn.Buffer(torch.tensor([1.0, 2.0]) * 3)
        self.rotations = nn.Buffer(1.0 / (10000 ** (torch.arange(0, 8, 2).float() / 8)))
        positions, table = torch.arange(4).unsqueeze(1), torch.empty(4, 6)
        table[:, 0::2], table[:, 1::2] = torch.sin(positions * 1.5), torch.cos(positions * 1.5)
        self.positions = nn.Buffer(table, persistent=False)
        self.scaled = nn.Parameter(torch.randn(5, 3) * 0.02)
        self.shuffled = nn.Buffer(torch.randperm(9))
        self.chosen = nn.Buffer(torch.bernoulli(torch.full((7,), 0.5)))
        self.own_generator = nn.Parameter(torch.empty(6).normal_(generator=torch.Generator().manual_seed(5)))
        self.looking = nn.ParameterList(
            look(torch.empty(*shape))
            for look, shape in [
                (nn.init.orthogonal_, (6, 8)),
                (imported_by_name, (8, 6)),
                (nn.init.trunc_normal_, (33, 3)),
                (nn.init.dirac_, (3, 4, 5)),
                (lambda tensor: nn.init.sparse_(tensor, 0.3), (5, 6)),
            ]
        )
        self.apply(self._again)
        with torch.no_grad():
            self.recurrent.bias_hh_l0[5:10] = 1.0  # forget gates

    def _again(self, module: nn.Module) -> None:
        if isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, 0.0, 0.1)
            nn.init.trunc_normal_(module.weight, std=0.5)


def tensors(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def drawn_up(make: Callable[[], Any]) -> tuple[InitRecord, Any]:
    record = InitRecord()
    with record.recording(CPU), torch.device("meta"):
        made = make()
    return record, made


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_any_part_has_the_values_of_the_whole(dtype: torch.dtype) -> None:
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(dtype)
        torch.manual_seed(3)
        expected = Everything()
        after = torch.get_rng_state()
        torch.manual_seed(3)
        record, on_meta = drawn_up(Everything)
    finally:
        torch.set_default_dtype(before)
    assert torch.equal(torch.get_rng_state(), after), "other numbers would be drawn after the model was built"
    wanted, found = tensors(expected), tensors(on_meta)
    assert all(one.is_meta for one in found.values())
    assert not record.uninitialised([record.view(one) for one in found.values()])
    for name in reversed(wanted):  # each alone, in another order
        (value,) = record.values([record.view(found[name])], CPU)
        assert value.dtype == wanted[name].dtype
        assert torch.equal(value, wanted[name]), name
    values = record.values([record.view(one) for one in found.values()], CPU)
    assert all(map(torch.equal, values, wanted.values()))
    assert torch.equal(torch.get_rng_state(), after), "the user's generator was not left as it was"


def test_what_nobody_filled_is_known() -> None:
    def make() -> tuple[Tensor, ...]:
        empty = torch.empty(3)
        return empty, empty * 2, torch.zeros(3), torch.empty(3).fill_(1.0)

    record, made = drawn_up(make)
    empty, computed, zeros, filled = places = [record.view(one) for one in made]
    assert record.uninitialised(places) == [empty, computed]
    assert record.uninitialised([zeros, filled]) == []
    elsewhere = torch.zeros(3, device="meta")
    assert record.uninitialised([record.view(elsewhere)]), "it was filled where nothing was recorded"


def test_nothing_else_is_made_again() -> None:
    """For a later stage, only the tensors that it is computed from are created."""
    record, made = drawn_up(lambda: [torch.randn(4).mul_(2) for _ in range(3)])
    needed, _ = record._needed({record.view(made[1]).storage})
    assert len(needed) == 2
    assert len(record._calls) == 6


def test_what_is_overwritten_is_not_drawn_first() -> None:
    record, parameter = drawn_up(lambda: torch.empty(4).uniform_())
    value = torch.arange(4.0)
    with record.recording(CPU):
        parameter.copy_(record.stand_in(value, lambda: value))
    needed, _ = record._needed({record.view(parameter).storage})
    assert len(needed) == 1
    (found,) = record.values([record.view(parameter)], CPU)
    assert torch.equal(found, value)
    assert record.forget_sources()
    (found,) = record.values([record.view(parameter)], CPU)
    assert not torch.equal(found, value)


def test_what_it_is_made_from_must_stay() -> None:
    given = torch.arange(4.0)
    record, made = drawn_up(lambda: torch.empty(4).copy_(given))
    (found,) = record.values([record.view(made)], CPU)
    assert torch.equal(found, given)
    given += 1
    with pytest.raises(ConfigError, match=r"must not change .* shape \(4,\)"):
        record.values([record.view(made)], CPU)


class Draws(TorchDispatchMode):
    """Records the generators that are drawn from."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.given: list[torch.Generator | None] = []

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.given.append((kwargs or {}).get("generator"))
        return func(*args, **(kwargs or {}))


def test_it_draws_from_no_generator_of_others() -> None:
    """Other threads may draw meanwhile."""
    initialisers = (nn.init.normal_, nn.init.orthogonal_, nn.init.trunc_normal_, nn.init.xavier_uniform_)
    record, made = drawn_up(lambda: [torch.randn(4, 4), *(init(torch.empty(4, 4)) for init in initialisers)])
    with Draws() as draws:
        record.values([record.view(one) for one in made], CPU)
    assert len(draws.given) >= len(made)
    assert all(one is not None and one is not torch.default_generator for one in draws.given)


def test_where_nothing_is_drawn_random_values_are_refused_and_others_made() -> None:
    """For a model whose weights are in files."""
    record = InitRecord(draws=False)
    before = torch.get_rng_state()
    with record.recording(CPU), torch.device("meta"):
        linear, counted = nn.Linear(4, 4), torch.arange(4.0) * 2
    assert torch.equal(torch.get_rng_state(), before)
    (found,) = record.values([record.view(counted)], CPU)
    assert torch.equal(found, torch.arange(4.0) * 2)
    with pytest.raises(ConfigError, match="random tensors of a model must be in its files"):
        record.values([record.view(linear.weight)], CPU)
