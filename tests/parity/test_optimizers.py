"""Each optimizer of torch and of pytorch_optimizer steps as in the plain Trainer, or is refused before it steps."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import pytorch_optimizer
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from typing_extensions import override

from lightning_swarm.core.errors import ConfigError
from tests.parity.harness import WEIGHT_TOLERANCE, Run, run_plain, run_swarm
from tests.parity.models import DigitsMLP, digits, loader
from tests.parity.test_joining import Joining
from tests.parity.trainers import default_dtype

STEPS = 7
JOINS_AT = 2
ROUNDS_OTHERWISE = 100.0
"""Largest error, in multiples of the difference between two plain runs that round differently, of unstable optimizers.
"""
MATRICES = ("torch.Muon", "spectralsphere")
"""These optimizers take matrices only."""
HYBRID = ("adago", "adamuon", "muon", "muonclip", "normuon")
"""These optimizers take matrices and other parameters in separate groups."""
ARGUMENTS: dict[str, dict[str, Any]] = {
    "ranger21": {"num_iterations": STEPS},
    "fadam": {"momentum_dtype": torch.float64, "fim_dtype": torch.float64},
    "a2grad": {"lr": None},
}
OTHERWISE = {
    "adahessian": "second derivatives",
    "adalomo": "the module, and steps in its backward",
    "adammini": "the module",
    "alig": "the loss",
    "bsam": "another torch: the plain Trainer cannot step it, either",
    "demo": "a process group",
    "distributedmuon": "a process group",
    "lomo": "the module, and steps in its backward",
    "sophiah": "second derivatives",
    "torch.SparseAdam": "sparse gradients",
}
"""Errors of optimizers that need more than a closure and a gradient; this test's plain loop cannot step them."""

Make = Callable[[nn.Module], Optimizer]


def optimizers() -> Iterator[tuple[str, Make]]:
    """Yield all optimizers of both libraries, and some that are wrapped or use all parameters."""
    for name in torch.optim.__all__:
        kind = getattr(torch.optim, name, None)
        if isinstance(kind, type) and issubclass(kind, Optimizer) and kind is not Optimizer:
            yield f"torch.{name}", making(f"torch.{name}", kind)
    for name in sorted(pytorch_optimizer.get_supported_optimizers()):
        yield name, making(name, pytorch_optimizer.load_optimizer(name))
    yield "lamb, pre_norm", lambda module: pytorch_optimizer.Lamb(module.parameters(), lr=1e-2, pre_norm=True)
    yield "lookahead", lambda module: pytorch_optimizer.Lookahead(torch.optim.AdamW(module.parameters()), k=2)


def making(name: str, kind: Callable[..., Optimizer]) -> Make:
    def make(module: nn.Module) -> Optimizer:
        parameters: Any = list(module.parameters())
        if name in HYBRID:
            ways = [
                (True, [one for one in parameters if one.dim() == 2]),
                (False, [p for p in parameters if p.dim() < 2]),
            ]
            parameters = [{"params": own, "use_muon": way} for way, own in ways]
        arguments = {"lr": 1e-2, **ARGUMENTS.get(name, {})}
        return kind(parameters, **{key: value for key, value in arguments.items() if value is not None})

    return make


OPTIMIZERS = dict(optimizers())


class Digits(DigitsMLP):
    """The model, with an optimizer of the table."""

    def __init__(self, name: str, *, in_halves: bool = False) -> None:
        super().__init__()
        if name in MATRICES:
            self.net = nn.Sequential(nn.Linear(64, 12, bias=False), nn.Tanh(), nn.Linear(12, 10, bias=False))
        self._name, self._in_halves = name, in_halves

    @override
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if not self._in_halves:
            return super().training_step(batch, batch_idx)
        sums = [
            F.cross_entropy(self.net(x), y, reduction="sum")
            for x, y in zip(*(one.chunk(2) for one in batch), strict=True)
        ]
        return (sums[0] + sums[1]) / len(batch[0])

    @override
    def configure_optimizers(self) -> Optimizer:  # type: ignore[override]
        return OPTIMIZERS[self._name](self)


def distance(one: Run, other: Run) -> float:
    return max(float((tensor - other.weights[name]).abs().max()) for name, tensor in one.weights.items())


def verdict(name: str, swarm: dict[str, Any]) -> str:
    """Check that a swarm's weights equal the plain Trainer's, or return the reason why the optimizer is refused."""
    joining = Joining(at=JOINS_AT)
    try:
        run = run_swarm(
            lambda: Digits(name), loader(digits()), max_steps=STEPS, num_joiners=1, callbacks=[joining], **swarm
        )
    except ConfigError as error:
        return str(error)
    assert joining.joiners
    # An uncut model's trainer has the precision's default dtype throughout, and so has state that its optimizer
    # creates.
    with default_dtype(torch.float64) if swarm is UNCUT else nullcontext():
        plain = run_plain(lambda: Digits(name), loader(digits()), max_steps=STEPS)
    found = distance(run, plain)
    if found > WEIGHT_TOLERANCE:
        scatter = distance(run_plain(lambda: Digits(name, in_halves=True), loader(digits()), max_steps=STEPS), plain)
        assert found <= ROUNDS_OTHERWISE * scatter, f"{name}: {found:.1e}, where rounding alone makes {scatter:.1e}"
    return "exact"


STAGES: dict[str, Any] = {"num_stages": 2}
UNCUT: dict[str, Any] = {
    "num_stages": 1,
    "num_servers": 1,
    "microbatch_size": None,
    "role": "both",
    "target_batch_size": 4,
}
REASONS = {
    "looks at others": "also reads others",
    "state of its own form": "an optimizer's state must consist of|may write only numbers into its parameter groups",
    "keeps numbers elsewhere": "may change only its parameters' state",
    "random numbers": "must draw no random numbers",
    "hyperparameters of other kinds": "hyperparameters of a parameter group must be",
    "several gradients": "from one gradient|one dense gradient",
    "cannot be stepped in parts": "must be able to step some of its parameters",
}


def reason(text: str) -> str:
    if text == "exact":
        return text
    (found,) = (name for name, pattern in REASONS.items() if re.search(pattern, text))
    return found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.first_cells(0, 200, 20)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_it_steps_as_in_one_process_or_is_refused(name: str) -> None:
    if name in OTHERWISE:
        pytest.skip(f"it asks for {OTHERWISE[name]}")
    stages, uncut = (reason(verdict(name, swarm)) for swarm in (STAGES, UNCUT))
    assert documented()[name] == (stages, uncut)


def documented() -> dict[str, Sequence[str]]:
    """Return the table of docs/optimizers.md."""
    text = (Path(__file__).parents[2] / "docs" / "optimizers.md").read_text()
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| `")]
    return {name.strip("`"): tuple(found) for name, *found in rows}


def test_the_table_has_each_of_them() -> None:
    assert set(documented()) == set(OPTIMIZERS) - set(OTHERWISE)
