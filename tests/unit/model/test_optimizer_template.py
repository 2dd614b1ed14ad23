"""Stages' optimizers are copies of the user's optimizer over their own parameters."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, Optimizer
from torch.optim.lr_scheduler import StepLR
from typing_extensions import override

from lightning_swarm.core.errors import ConfigError
from lightning_swarm.model.optimizer_template import OptimizerTemplate, replace_parameters


class Scaled(SGD):
    """Has an attribute of its own."""

    def __init__(self, params: Any, lr: float, scales: dict[Any, float], model: nn.Module) -> None:
        super().__init__(params, lr)
        self.scales = scales
        self.model = model

    @override
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad *= self.scales[parameter]
        super().step(closure)


class Wrapper(Optimizer):
    """Steps another optimizer, with which it shares groups and state."""

    def __init__(self, base: Optimizer) -> None:
        self.base = base
        super().__init__(base.param_groups, base.defaults)
        self.param_groups, self.state = base.param_groups, base.state

    @override
    def step(self, closure: Any = None) -> None:
        self.base.step()


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))


def groups(module: nn.Module) -> list[dict[str, Any]]:
    return [{"params": [p for p in module.parameters() if p.dim() == dim], "lr": 0.1 * dim} for dim in (1, 2)]


def sgd(module: nn.Module) -> Optimizer:
    return SGD(groups(module), lr=1.0, momentum=0.9)


def scaled(module: nn.Module) -> Optimizer:
    return Scaled(groups(module), 0.1, {p: i + 1.0 for i, p in enumerate(module.parameters())}, module)


def wrapped(module: nn.Module) -> Optimizer:
    return Wrapper(scaled(module))


def scheduled(module: nn.Module) -> Optimizer:
    optimizer = sgd(module)
    StepLR(optimizer, 1)
    return optimizer


def hooked(module: nn.Module) -> Optimizer:
    optimizer = sgd(module)
    optimizer.register_step_pre_hook(_double)
    return optimizer


def _double(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad *= 2


@pytest.mark.parametrize("make", [sgd, scaled, wrapped, scheduled, hooked])
def test_stages_step_as_the_whole(make: Any) -> None:
    """Two stages' optimizers together apply the user's step, and leave the user's optimizer unchanged."""
    whole, theirs = model(), model()
    optimizer, untouched = make(whole), make(theirs)
    before = copy.deepcopy(untouched.state_dict()), vars(untouched).copy()
    stages = copy.deepcopy(theirs)
    template = OptimizerTemplate(untouched, {id(p): name for name, p in theirs.named_parameters()})
    cuts = [template.cut({n: p for n, p in stages.named_parameters() if n.startswith(stage)}) for stage in "01"]
    assert all(type(cut) is type(optimizer) and len(cut.param_groups) == 2 for cut in cuts)
    for _ in range(2):
        for parameter in (*whole.parameters(), *stages.parameters()):
            parameter.grad = torch.ones_like(parameter)
        for one in (optimizer, *cuts):
            one.step()
    torch.testing.assert_close(stages.state_dict(), whole.state_dict())
    torch.testing.assert_close(theirs.state_dict(), model().state_dict())
    assert (untouched.state_dict(), vars(untouched)) == before


def test_state_before_the_first_step_of_a_module_on_meta() -> None:
    with torch.device("meta"):
        module = model()
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    own = nn.Parameter(torch.ones(2))
    optimizer = Adagrad(module.parameters(), initial_accumulator_value=0.5)
    assert OptimizerTemplate(optimizer, names).cut({"0.bias": own}).state[own]["sum"].tolist() == [0.5, 0.5]

    class Other(Adagrad):
        def __init__(self, module: nn.Module) -> None:
            super().__init__(module.parameters())

    with pytest.raises(ConfigError, match="meta device must have no state before its first step"):
        OptimizerTemplate(Other(module), names).cut({"0.bias": own})


def test_an_optimizer_follows_parameters_that_are_replaced() -> None:
    module, new = model(), nn.Parameter(torch.zeros(2))
    optimizer = Adagrad(module.parameters())
    replace_parameters(optimizer, {id(module[0].bias): new})
    assert optimizer.param_groups[0]["params"][1] is new
    assert len(optimizer.state) == 3


def test_an_override_of_a_parameter_that_is_gone_is_no_other_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bitsandbytes keeps overrides by the parameters' ids, which Python reuses."""
    optim = pytest.importorskip("bitsandbytes.optim")
    monkeypatch.setattr(optim.GlobalOptimManager, "_instance", None)
    manager = optim.GlobalOptimManager.get_instance()
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    manager.register_module_override(net[0], "weight", {"optim_bits": 32})
    names = {id(own): name for name, own in net.named_parameters()}
    template = OptimizerTemplate(optim.AdamW8bit(net.parameters()), names)
    made = {name: nn.Parameter(torch.zeros(4, 4)) for name in ("0.weight", "1.weight")}
    manager.pid2config[id(made["1.weight"])] = {"optim_bits": 32}
    template.cut(made)
    assert manager.pid2config[id(made["0.weight"])] == {"optim_bits": 32}
    assert id(made["1.weight"]) not in manager.pid2config
