import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_swarm.model.nn import Sequential, accepted_keywords


class Embed(nn.Module):
    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        return tokens if positions is None else tokens + positions


class Masked(nn.Module):
    def forward(self, x: Tensor, mask: Tensor | None = None, **rest: Any) -> Tensor:
        assert not rest
        return x if mask is None else x * mask


class Head(nn.Module):
    def forward(self, x: Tensor, *, targets: Tensor, scale: float = 1.0) -> Tensor:
        return (x - targets) * scale


class Two(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x + 1


class TakesPair(nn.Module):
    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        return pair[0] * pair[1]


X = torch.arange(4.0)


def test_each_keyword_goes_to_the_blocks_that_name_it() -> None:
    net = Sequential(Embed(), Masked(), nn.Identity(), Masked(), Head())

    out = net(X, X, mask=torch.tensor(2.0), targets=torch.ones(4))

    assert torch.equal(out, (X + X) * 4 - 1)
    assert torch.equal(net(X, positions=X, targets=X), X)


def test_it_is_a_torch_sequential() -> None:
    layers = [nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)]

    assert torch.equal(Sequential(*layers)(X), nn.Sequential(*layers)(X))
    assert list(Sequential(*layers).state_dict()) == list(nn.Sequential(*layers).state_dict())
    assert isinstance(Sequential(*layers)[:2], Sequential)


def test_a_tuple_between_blocks_is_one_value() -> None:
    assert torch.equal(Sequential(Two(), TakesPair())(X), X * (X + 1))


def test_an_unknown_keyword_is_a_type_error() -> None:
    with pytest.raises(
        TypeError, match=r"Sequential\.forward\(\) got an unexpected keyword argument 'target'.*name: mask"
    ):
        Sequential(Masked())(X, target=X)


def test_a_missing_keyword_is_the_blocks_own_type_error() -> None:
    with pytest.raises(TypeError, match="missing 1 required keyword-only argument: 'targets'"):
        Sequential(nn.Identity(), Head())(X)


def test_a_positional_and_a_keyword_for_one_parameter_collide_as_in_python() -> None:
    with pytest.raises(TypeError, match="multiple values for argument 'positions'"):
        Sequential(Embed())(X, X, positions=X)


def test_nested_sequentials_pass_keywords_on() -> None:
    inner = Sequential(Masked(), Head())

    assert accepted_keywords(inner) == {"mask", "targets", "scale"}
    assert torch.equal(Sequential(Embed(), inner)(X, targets=X), torch.zeros(4))
    assert accepted_keywords(nn.Sequential(Masked())) == frozenset()


def test_an_empty_chain_returns_its_input() -> None:
    assert Sequential()(X) is X
    with pytest.raises(TypeError, match="takes one input, got 2"):
        Sequential()(X, X)


def test_accepted_keywords_of_plain_forwards() -> None:
    assert accepted_keywords(Embed()) == {"positions"}
    assert accepted_keywords(Masked()) == {"mask"}
    assert accepted_keywords(Head()) == {"targets", "scale"}
    assert accepted_keywords(nn.Linear(2, 2)) == frozenset()
    assert accepted_keywords(nn.MultiheadAttention(4, 2)) >= {"key", "value", "attn_mask"}


def test_accepted_keywords_of_wrapped_forwards() -> None:
    block = Masked()
    original = block.forward

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Tensor:
        return original(*args, **kwargs)

    block.forward = wrapper  # type: ignore[method-assign]
    assert accepted_keywords(block) == {"mask"}
    block.forward = functools.partial(original, mask=None)  # type: ignore[method-assign]
    assert accepted_keywords(block) == {"mask"}
    block.forward = print  # type: ignore[assignment]
    assert accepted_keywords(block) <= {"sep", "end", "file", "flush"}
    # The other instances of the class are unchanged.
    assert accepted_keywords(Masked()) == {"mask"}


def test_a_replaced_class_forward_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    assert accepted_keywords(Masked()) == {"mask"}
    monkeypatch.setattr(Masked, "forward", Head.forward)
    assert accepted_keywords(Masked()) == {"targets", "scale"}


def test_a_variadic_forward_accepts_no_keyword() -> None:
    class Variadic(nn.Module):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            assert not kwargs
            return args[0]

    class Later(nn.Module):
        def forward(self, *args: Any, flag: bool = False) -> Any:
            return args[0]

    assert accepted_keywords(Variadic()) == frozenset()
    assert accepted_keywords(Later()) == {"flag"}
    assert Sequential(Variadic(), Masked())(X, mask=None) is X
