"""Weights that hooks read and write: as on one machine, though they are on the servers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from lightning_swarm.core.errors import ConfigError
from lightning_swarm.testing import FaultPlan, Phase
from tests.parity.harness import LOSS_TOLERANCE, SwarmRun, assert_exact, run_plain, run_swarm
from tests.parity.models import DigitsMLP, Net, Recipe, digits, loader
from tests.parity.standbys import Swarm
from tests.parity.test_failover import assert_same
from tests.parity.test_joining import Joining, slowly

STEPS = 9


def make() -> DigitsMLP:
    return DigitsMLP(Recipe(optimizer="adamw"))


class Hook(L.Callback):
    """Calls a function after each step, or at another hook."""

    def __init__(self, do: Callable[[Any, int], None], at: str = "on_train_batch_end") -> None:
        self.do = do
        setattr(self, at, self.run)

    def run(self, trainer: L.Trainer, pl_module: Any, *_: Any) -> None:
        with torch.no_grad():
            self.do(pl_module, trainer.global_step)


def clamp(module: Any, step: int) -> None:
    for parameter in module.parameters():
        parameter.clamp_(-0.2, 0.2)


def by_data(module: Any, step: int) -> None:
    for parameter in module.net[5].parameters():
        parameter.data = parameter.data * 0.9


def one_tensor(module: Any, step: int) -> None:
    if step % 3 == 0:
        module.net[0].weight[:4].normal_(generator=torch.Generator().manual_seed(step))


def load(module: Any, step: int) -> None:
    if step in (0, 4):
        module.load_state_dict({name: tensor * 1.5 for name, tensor in module.state_dict().items()})


def foreach(module: Any, step: int) -> None:
    torch._foreach_mul_(list(module.net.parameters()), 0.98)


def both(make: Callable[[], L.LightningModule], do: Callable[[Any, int], None], at: str, **swarm: Any) -> SwarmRun:
    options: dict[str, Any] = {"max_steps": STEPS, "max_epochs": -1}
    found = run_swarm(make, loader(digits()), callbacks=[Hook(do, at)], **options, **swarm)
    assert_exact(found, run_plain(make, loader(digits()), callbacks=[Hook(do, at)], **options))
    return found


def num_written(run: SwarmRun) -> int:
    return sum(record.change.written is not None for record in run.records)


@pytest.mark.each_value
@pytest.mark.parametrize("num_servers", [2, 4])
@pytest.mark.parametrize("do", [clamp, by_data, one_tensor, foreach])
def test_what_a_hook_writes_after_a_step_is_what_the_next_one_computes_with(
    do: Callable[[Any, int], None], num_servers: int
) -> None:
    run = both(make, do, "on_train_batch_end", num_servers=num_servers)
    assert num_written(run) == (2 if do is one_tensor else STEPS - 1)


@pytest.mark.first_cells(2)
@pytest.mark.parametrize("at", ["on_fit_start", "on_train_start", "on_train_batch_start", "on_train_epoch_start"])
def test_weights_are_loaded_in_a_hook(at: str) -> None:
    assert num_written(both(make, load, at, num_servers=4)) >= 1


def test_nothing_is_written_where_values_are_the_same() -> None:
    assert num_written(both(make, lambda module, step: module.net[0].weight.mul_(1.0), "on_train_batch_end")) == 0


def test_only_stages_that_were_written_travel() -> None:
    run = both(make, by_data, "on_train_batch_end", num_stages=3, num_servers=3)
    stages = [record.change.written.stages for record in run.records if record.change.written is not None]
    assert stages == [[2]] * (STEPS - 1)


def test_what_was_written_after_the_last_step_stays() -> None:
    run = both(make, clamp, "on_train_batch_end")
    assert max(float(tensor.abs().max()) for tensor in run.weights.values()) <= 0.2


@pytest.mark.parametrize("bytes_per_s", [2_000_000.0, 1e9])
def test_a_joiner_holds_what_hooks_wrote(bytes_per_s: float) -> None:
    joining = Joining(at=1, prepare=slowly(bytes_per_s))
    options: dict[str, Any] = {"max_steps": 12, "max_epochs": -1}
    run = run_swarm(make, loader(digits()), callbacks=[Hook(clamp), joining], num_joiners=1, latency_s=0.001, **options)
    assert_exact(run, run_plain(make, loader(digits()), callbacks=[Hook(clamp)], **options))
    assert num_written(run) == 11
    assert run.strategy.refusals == []


@pytest.mark.parametrize("phase", [Phase.FORWARD_DONE, Phase.RECEIPT_SEEN])
def test_a_server_dies_between_two_writes(phase: Phase) -> None:
    plan = FaultPlan().kill("peer-2", at=phase, step=3)
    options: dict[str, Any] = {"max_steps": STEPS, "max_epochs": -1}
    run = run_swarm(make, loader(digits()), callbacks=[Hook(clamp)], num_servers=4, num_gone=1, faults=plan, **options)
    plan.check()
    assert_exact(run, run_plain(make, loader(digits()), callbacks=[Hook(clamp)], **options))


class Momentum(Net):
    """Has a target that follows the network by momentum, as in self-supervised learning."""

    def __init__(self, at: str = "on_train_batch_end") -> None:
        super().__init__(make().net, Recipe(optimizer="adamw"))
        self.target = copy.deepcopy(self.net).requires_grad_(False)
        self.at = at

    @torch.no_grad()
    def follow(self) -> None:
        for slow, fast in zip(self.target.parameters(), self.net.parameters(), strict=True):
            slow.data = 0.7 * slow.data + 0.3 * fast.data

    @override
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if self.at == "training_step":
            self.follow()
        with torch.no_grad():
            wanted = self.target(batch[0])
        return F.mse_loss(self.net(batch[0]), wanted) + F.cross_entropy(self.net(batch[0]), batch[1])

    @override
    def on_train_batch_end(self, *_: Any) -> None:
        if self.at == "on_train_batch_end":
            self.follow()

    @override
    def on_before_zero_grad(self, *_: Any) -> None:
        if self.at == "on_before_zero_grad":
            self.follow()

    @override
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.net.parameters(), lr=3e-3)


@pytest.mark.first_cells(2)
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("at", ["training_step", "on_train_batch_end", "on_before_zero_grad"])
def test_a_target_follows_by_momentum(at: str, accumulate: int) -> None:
    options: dict[str, Any] = {"max_steps": 6, "max_epochs": -1, "accumulate_grad_batches": accumulate}
    swarm = run_swarm(partial(Momentum, at), loader(digits()), pipeline="net", num_servers=4, **options)
    assert_exact(swarm, run_plain(partial(Momentum, at), loader(digits()), **options))


def test_a_target_is_the_same_after_the_lead_died() -> None:
    swarm = Swarm(1, 1, Momentum, {4: "lead"}, swarm={"pipeline": "net"}, options={"max_steps": STEPS}).fit()
    assert swarm.leads == ["lead", "standby-0"]
    assert_same(swarm, run_plain(Momentum, loader(digits()), max_steps=STEPS, max_epochs=-1))


def test_clamped_weights_are_the_same_after_the_lead_died() -> None:
    swarm = Swarm(1, 1, make, {4: "lead"}, lambda _: [Hook(clamp)], options={"max_steps": STEPS}).fit()
    assert swarm.leads == ["lead", "standby-0"]
    options: dict[str, Any] = {"max_steps": STEPS, "max_epochs": -1, "callbacks": [Hook(clamp)]}
    assert_same(swarm, run_plain(make, loader(digits()), **options))


class Averaged(L.Callback):
    """Validates with averages of its own, as projects did before Lightning had `WeightAveraging`."""

    def __init__(self) -> None:
        self.averages: list[Tensor] = []
        self.found: list[float] = []

    def swap(self, pl_module: Any) -> None:
        for average, parameter in zip(self.averages, pl_module.parameters(), strict=True):
            parameter.data, average.data = average.data.clone(), parameter.data.clone()

    @override
    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *_: Any) -> None:
        new = [parameter.detach().clone() for parameter in pl_module.parameters()]
        self.averages = [0.5 * a + 0.5 * b for a, b in zip(self.averages, new, strict=True)] if self.averages else new

    @override
    def on_validation_epoch_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        if self.averages:
            self.swap(pl_module)

    @override
    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        self.found.append(float(trainer.callback_metrics["val_loss"]))
        if self.averages:
            self.swap(pl_module)


class Validated(DigitsMLP):
    def __init__(self) -> None:
        super().__init__(Recipe(optimizer="adamw"))

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", F.cross_entropy(self.net(batch[0]), batch[1]))


def test_averages_are_swapped_in_by_hand_to_validate() -> None:
    ours, theirs = Averaged(), Averaged()
    options: dict[str, Any] = {"max_epochs": 2, "val_check_interval": 3}
    swarm = run_swarm(Validated, loader(digits()), loader(digits()), callbacks=[ours], num_servers=4, **options)
    assert_exact(swarm, run_plain(Validated, loader(digits()), loader(digits()), callbacks=[theirs], **options))
    assert len(theirs.found) == 4
    assert ours.found == pytest.approx(theirs.found, rel=LOSS_TOLERANCE)
    assert num_written(swarm) == 0


def test_hooks_read_the_newest_weights() -> None:
    seen: dict[str, list[dict[str, Tensor]]] = {"ours": [], "theirs": []}

    def note(into: str, module: Any, step: int) -> None:
        copied = copy.deepcopy(module.net)
        assert all(type(parameter) is nn.Parameter for parameter in copied.parameters())
        seen[into] += [copied.state_dict(), {"norm": torch.stack([one.norm() for one in module.parameters()])}]

    options: dict[str, Any] = {"max_steps": 5, "max_epochs": -1}
    ours, theirs = (Hook(partial(note, name)) for name in seen)
    run_swarm(make, loader(digits()), callbacks=[ours], num_servers=4, **options)
    run_plain(make, loader(digits()), callbacks=[theirs], **options)
    torch.testing.assert_close(seen["ours"], seen["theirs"], rtol=1e-10, atol=1e-10)


def test_views_that_user_code_keeps_are_read_and_written() -> None:
    seen: dict[str, list[float]] = {"ours": [], "theirs": []}
    kept: dict[str, Any] = {}

    def use(into: str, module: Any, step: int) -> None:
        if not seen[into]:
            kept[into] = module.net[0].weight.data, module.net[4].bias.detach().numpy()
        weight, bias = kept[into]
        seen[into] += [float(weight.norm()), float(bias.sum()), float(module.net[2].weight.norm())]
        weight.mul_(0.9)
        bias *= 0.8

    options: dict[str, Any] = {"max_steps": STEPS, "max_epochs": -1}
    ours, theirs = (Hook(partial(use, name)) for name in seen)
    swarm = run_swarm(make, loader(digits()), callbacks=[ours], num_servers=2, **options)
    assert_exact(swarm, run_plain(make, loader(digits()), callbacks=[theirs], **options))
    torch.testing.assert_close(seen["ours"], seen["theirs"], rtol=1e-10, atol=1e-10)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(()))
        self.frozen = nn.Parameter(torch.ones(24), requires_grad=False)

    @override
    def forward(self, hidden: Tensor) -> Tensor:
        return hidden * self.get_buffer("scale") * self.frozen


class Annealed(DigitsMLP):
    def __init__(self) -> None:
        super().__init__(Recipe(optimizer="adamw"))
        self.net[1] = nn.Sequential(nn.Tanh(), Scaled())

    @override
    def on_train_batch_end(self, *_: Any) -> None:
        scaled = self.net[1][1]
        scaled.scale.mul_(0.9)
        scaled.frozen.sub_(0.01)


def test_buffers_and_frozen_weights_of_blocks_are_annealed() -> None:
    options: dict[str, Any] = {"max_steps": STEPS, "max_epochs": -1}
    swarm = run_swarm(Annealed, loader(digits()), num_servers=4, **options)
    assert_exact(swarm, run_plain(Annealed, loader(digits()), **options))


def test_trained_weights_do_not_change_in_the_middle_of_a_step() -> None:
    with pytest.raises(ConfigError, match=r"only between two steps.*net\.2\.bias.*in the middle of a step"):
        both(make, clamp, "on_before_zero_grad")
    with pytest.raises(ConfigError, match="only between two steps"):
        both(make, clamp, "on_train_batch_end", accumulate_grad_batches=2)


def test_parameters_stay_the_same_objects() -> None:
    def replace(module: Any, step: int) -> None:
        module.net[0].weight = nn.Parameter(module.net[0].weight * 2)

    with pytest.raises(ConfigError, match=r"must stay the same objects during `fit`: 'net\.0\.weight' was replaced"):
        both(make, replace, "on_train_batch_end")


def test_steps_that_are_delayed_take_no_writes() -> None:
    with pytest.raises(ConfigError, match="steps are not delayed"):
        both(make, clamp, "on_train_batch_end", delay_optimizer_step=True)


class Renormed(Net):
    def __init__(self) -> None:
        super().__init__(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 10)), Recipe())
        self.table = nn.Embedding(17, 8, max_norm=0.5)

    @override
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        hidden = self.table((batch[0] * 16).long()).mean(1)
        return F.cross_entropy(self.net(hidden), batch[1])


def test_a_layer_that_writes_its_weights_in_its_forward_is_named() -> None:
    with pytest.raises(ConfigError, match=r"'table\.weight' were written.*max_norm"):
        run_swarm(Renormed, loader(digits()), pipeline="net", max_steps=3)
