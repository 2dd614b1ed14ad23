"""Compiling."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from lightning.pytorch.callbacks import ModelCheckpoint
from torch._dynamo.backends.common import aot_autograd
from typing_extensions import override

from lightning_swarm.client.pipeline.row_check import NUM_PROBES
from lightning_swarm.core.errors import ConfigError
from lightning_swarm.core.limits import Limits
from lightning_swarm.strategy import model_setup
from tests.features.both import STEPS, Evaluated, Trained, approx, fit_both, trainers
from tests.features.mark import PARTLY, REFUSED, WORKS, feature
from tests.parity.harness import WEIGHT_TOLERANCE, assert_exact, quiet_warnings, run_plain, run_swarm
from tests.parity.models import DigitsMLP, NanoGPT, Net, Recipe, TinyGPT, TinyGPTWithLosses, digits, loader, sentences
from tests.parity.test_whole import WHOLE, Branches, Images

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # dynamo reads it


class Counting:
    """A backend that compiles a graph to itself and counts its runs; code that runs eagerly is not counted."""

    def __init__(self) -> None:
        self.ran: Counter[str] = Counter()
        self.num_graphs = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Any:
        self.num_graphs += 1
        compile_ = aot_autograd(fw_compiler=self._counted("forward"), bw_compiler=self._counted("backward"))
        return compile_(graph, inputs)

    def _counted(self, direction: str) -> Callable[..., Any]:
        def compile_(graph: torch.fx.GraphModule, _: Any) -> Any:
            def run(*args: Any) -> Any:
                self.ran[direction] += 1
                return graph(*args)

            return make_boxed_func(run)

        return compile_


@pytest.fixture(autouse=True)
def _forgets() -> Any:
    torch._dynamo.reset()  # of graphs that tests of other files compiled
    # One code object serves the stages of all peers of this thread, with and without gradients, of all batch sizes.
    with torch._dynamo.config.patch(recompile_limit=64):
        yield
    torch._dynamo.reset()


def compiled_runs(make_module: Callable[[], Any], data: Any, **options: Any) -> tuple[Any, Any, Counting]:
    """Train the plain run without a compiler; check that each microbatch and stage of the swarm ran compiled."""
    backend = Counting()
    plain = run_plain(make_module, data, max_steps=STEPS)
    swarm = run_swarm(
        lambda: torch.compile(make_module(), backend=backend, fullgraph=True), data, max_steps=STEPS, **options
    )
    num_stages = len(swarm.status.stages)
    assert backend.ran == {
        "forward": num_stages * swarm.num_microbatches,
        "backward": num_stages * swarm.num_microbatches,
    }
    assert backend.num_graphs >= num_stages
    return plain, swarm, backend


@pytest.mark.thorough
@feature(
    "`trainer.fit(torch.compile(module, ...))`",
    WORKS,
    "each stage is compiled where it is computed, with the given options; the trainer's own hooks are not compiled",
)
@pytest.mark.parametrize(
    ("make_module", "data"), [(Trained, digits), (TinyGPTWithLosses, sentences)], ids=["digits", "gpt"]
)
def test_compiled_stages(make_module: Any, data: Any) -> None:
    plain, swarm, _ = compiled_runs(make_module, loader(data()))
    swarm.weights = {name.removeprefix("_orig_mod."): tensor for name, tensor in swarm.weights.items()}
    assert_exact(swarm, plain)


class CompiledBranches(Branches):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.compile(self.net, backend="eager")  # type: ignore[assignment]


class CompiledImages(Images):
    """Has a compiled batch norm."""

    def __init__(self) -> None:
        super().__init__(Recipe(optimizer="sgd"))
        self.net = torch.compile(self.net, backend="eager")  # type: ignore[assignment]


@feature("compiled layers in an uncut model", WORKS)
@pytest.mark.parametrize("model", [CompiledBranches, CompiledImages])
def test_compiled_layers(model: type[Net]) -> None:
    """The last batch of an epoch is smaller, and compiled anew."""
    plain = run_plain(model, loader(digits()), max_steps=10)
    assert_exact(run_swarm(model, loader(digits()), num_servers=1, max_steps=10, **WHOLE), plain)


@feature(
    "`trainer.fit(torch.compile(module, ...))` of an uncut model",
    PARTLY,
    "works on one device without a swarm; otherwise it runs uncompiled, with a warning. Compile its layers instead",
)
def test_compiled_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(model_setup, "rank_zero_warn", said.append)
    backend = Counting()
    run_swarm(lambda: torch.compile(Branches(), backend=backend), loader(digits()), num_servers=1, max_steps=2, **WHOLE)
    (warning,) = said
    assert "it runs uncompiled. Compile its layers" in warning
    assert backend.ran["forward"] == 0


@pytest.mark.thorough
@feature(
    "dropout in compiled stages",
    WORKS,
    "keyed by microbatch, also when recomputed; `inductor` draws different masks than eager code",
)
def test_dropout_in_compiled_stages() -> None:
    def make() -> DigitsMLP:
        return DigitsMLP(dropout=0.3)

    eager = run_swarm(make, loader(digits()), max_steps=STEPS)
    _, swarm, _ = compiled_runs(make, loader(digits()))
    assert swarm.losses == eager.losses
    backend = Counting()
    again = run_swarm(
        lambda: torch.compile(make(), backend=backend),
        loader(digits()),
        max_steps=STEPS,
        limits=Limits(cache_bytes=9000),
    )
    assert again.num_dropped_graphs > 0
    assert backend.ran["forward"] > backend.ran["backward"], "nothing was computed again"
    assert again.losses == eager.losses
    torch.testing.assert_close(list(again.weights.values()), list(eager.weights.values()), rtol=0.0, atol=0.0)


class CompilesItsBlocks(TinyGPT):
    """Compiles in `configure_model`, as Lightning and torch recommend."""

    backend: Any

    @override
    def configure_model(self) -> None:
        self.net[1] = torch.compile(self.net[1], backend=self.backend)
        self.net[2].compile(backend=self.backend)


@pytest.mark.thorough
@feature(
    "`block.compile()` and `torch.compile(block)` in `configure_model`",
    WORKS,
    "the state dict has the same names as with the plain Trainer",
)
def test_compiled_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = Counting()
    monkeypatch.setattr(CompilesItsBlocks, "backend", backend, raising=False)
    ran = {}

    def counted(name: str) -> list[Any]:
        ran[name] = backend.ran.copy()
        return [ModelCheckpoint(tmp_path / name, "last")]

    both = fit_both(
        CompilesItsBlocks,
        data=lambda: loader(sentences()),
        made={"callbacks": counted},
        max_epochs=1,
        enable_checkpointing=True,
    )
    assert any("_orig_mod." in name for name in both.plain.weights)
    num_plain = ran["swarm"]["forward"]
    assert num_plain == 2 * len(both.plain.losses)
    assert backend.ran["forward"] - num_plain == 2 * (both.swarm.num_microbatches + NUM_PROBES), (
        "what was compiled did not run"
    )
    plain, swarm = (torch.load(tmp_path / name / "last.ckpt", weights_only=True) for name in ("plain", "swarm"))
    torch.testing.assert_close(swarm["state_dict"], plain["state_dict"], rtol=0.0, atol=WEIGHT_TOLERANCE)


@pytest.mark.thorough
@feature("`torch.compile(module)` of a model with a `ModuleList`", WORKS, "without `fullgraph=True`")
def test_compiled_lists() -> None:
    backend = Counting()
    plain = run_plain(NanoGPT, loader(sentences()), max_steps=STEPS)
    swarm = run_swarm(
        lambda: torch.compile(NanoGPT(), backend=backend),
        loader(sentences()),
        max_steps=STEPS,
        pipeline="transformer.h",
    )
    swarm.weights = {name.removeprefix("_orig_mod."): tensor for name, tensor in swarm.weights.items()}
    assert_exact(swarm, plain)
    assert backend.ran["forward"] >= len(swarm.status.stages) * swarm.num_microbatches


@feature("validation and `Trainer.test` of a compiled module", WORKS)
def test_evaluating_compiled_stages() -> None:
    backend = Counting()
    results = []
    for trainer, module in zip(trainers(), (Evaluated(), torch.compile(Evaluated(), backend=backend)), strict=True):
        torch.manual_seed(0)
        for parameter in module.parameters():
            torch.nn.init.normal_(parameter)
        with quiet_warnings():
            results.append(trainer.test(module, loader(digits())))
    assert results[1] == [approx(results[0][0])]
    assert backend.ran["forward"] > 0


@feature("`torch.compile` with an older torch", REFUSED, "if that version compiles nothing under a dispatch mode")
def test_older_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.utils._python_dispatch.TorchDispatchMode, "ignore_compile_internals")
    _, trainer = trainers(max_steps=1)
    with pytest.raises(
        ConfigError, match=r"needs a torch that compiles.*got the older 2\..*pass the module uncompiled"
    ):
        trainer.fit(torch.compile(DigitsMLP(), backend=Counting()), loader(digits()))
