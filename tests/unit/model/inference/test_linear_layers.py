"""Linear layers by oneDNN: equal up to rounding in joint steps, and to the bit elsewhere."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lightning_swarm.model.inference import linear_layers


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let oneDNN be faster here; return the list of the rows that it computes."""
    found, product = list[int](), linear_layers._product

    def counted(hidden: Tensor, *weights: Tensor) -> Tensor:
        found.append(hidden.numel() // hidden.shape[-1])
        return product(hidden, *weights)

    monkeypatch.setattr(linear_layers, "is_onednn_faster", lambda: True)
    monkeypatch.setattr(linear_layers, "_product", counted)
    return found


def changed(layer: nn.Linear) -> nn.Linear:
    """Return a copy of a layer that oneDNN may compute."""
    own = nn.Sequential(copy.deepcopy(layer))
    linear_layers.use_onednn(own.modules())
    return copy.deepcopy(own)[0]  # type: ignore[return-value]  # a copied layer computes with its own weight


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(2, 1, 48), (1, 5, 48), (17, 48)])
def test_several_rows_are_equal_up_to_rounding(rows: list[int], shape: tuple[int, ...], *, bias: bool) -> None:
    layer, hidden = nn.Linear(48, 80, bias=bias), torch.randn(shape)
    own = changed(layer)
    with torch.no_grad(), linear_layers.joint_step():
        own.weight.mul_(2.0)
        layer.weight.mul_(2.0)
        torch.testing.assert_close(own(hidden), layer(hidden), rtol=1e-5, atol=1e-5)
    assert rows == [hidden.numel() // 48]


@pytest.mark.parametrize(
    "compute",
    [
        lambda layer: layer(torch.randn(1, 1, 48, generator=torch.Generator().manual_seed(1))),  # a single row
        lambda layer: torch.autocast("cpu", torch.bfloat16)(layer)(torch.ones(4, 48)),
        lambda layer: layer.double()(torch.ones(4, 48, dtype=torch.float64)),
        lambda layer: layer(torch.ones(0, 48)),
    ],
)
def test_other_forwards_are_equal_to_the_bit(rows: list[int], compute: Callable[[nn.Module], Tensor]) -> None:
    layer = nn.Linear(48, 80)
    with torch.no_grad(), linear_layers.joint_step():
        assert torch.equal(compute(changed(layer)), compute(layer))
    assert not rows


def test_steps_of_one_text_are_equal_to_the_bit(rows: list[int]) -> None:
    layer, prompt = nn.Linear(48, 80), torch.randn(1, 5, 48)
    with torch.no_grad():
        assert torch.equal(changed(layer)(prompt), layer(prompt))
    assert not rows


def test_gradients_are_those_of_the_plain_layer(rows: list[int]) -> None:
    layer, hidden = nn.Linear(48, 80), torch.randn(4, 48)
    own = changed(layer)
    with linear_layers.joint_step():
        for one in (own, layer):
            one(hidden).square().sum().backward()
    assert torch.equal(own.weight.grad, layer.weight.grad)  # type: ignore[arg-type]
    assert not rows


def test_other_layers_stay_as_they_are(rows: list[int]) -> None:
    class Own(nn.Linear):
        pass

    layers = [Own(8, 8), nn.Linear(8, 8, dtype=torch.bfloat16), nn.Linear(8, 8, device="meta"), nn.Conv1d(1, 1, 1)]
    linear_layers.use_onednn(layers)
    assert not any("forward" in vars(layer) for layer in layers)


def test_the_faster_product_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [0.0]
    plain, product = nn.functional.linear, linear_layers._product

    def taking(seconds: float, compute: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def slow(*arguments: Tensor) -> Tensor:
            now_s[0] += seconds
            return compute(*arguments)

        return slow

    monkeypatch.setattr(linear_layers, "thread_time", lambda: now_s[0])
    monkeypatch.setattr(nn.functional, "linear", taking(2.0, plain))
    for seconds, expected in ((1.0, True), (3.0, False)):
        monkeypatch.setattr(linear_layers, "_product", taking(seconds, product))
        assert linear_layers.is_onednn_faster.__wrapped__() is expected
