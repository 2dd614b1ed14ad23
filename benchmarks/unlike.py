"""Machines of several kinds in one stage: drift, the smallest fault that is found, honest replicas, and the cost.

All swarms are in memory, and an `UnlikeMachine` rounds as another kind of machine does. Without `--only`, all four
parts run.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import lightning as L
import matplotlib as mpl
import torch
from matplotlib import pyplot as plt
from typing_extensions import override

from benchmarks.liar_swarms import hush
from benchmarks.overhead import row
from benchmarks.report import OUT, median, table, write
from benchmarks.unlike_faults import measure_faults
from benchmarks.unlike_stages import NUM_KINDS, Bytes, Tiny, differences_noted, drift, fit, machines, noise
from lightning_swarm.coordinator import commit
from lightning_swarm.coordinator.membership.kinds import mixed_stages
from lightning_swarm.testing import InMemoryStrategy
from lightning_swarm.testing.local import QUIET

SMALL: Mapping[str, Any] = {"d_model": 32, "num_blocks": 1, "num_heads": 2, "context": 32}
LARGE: Mapping[str, Any] = {"d_model": 128, "num_blocks": 4, "num_heads": 4, "context": 128}
"""Of GPTs, the larger one with about a million parameters."""
WINDOWS: Final = 4 * NUM_KINDS  # in a batch of the small one
NUM_HELD_OUT = 1024  # windows
RUN_STEPS = 500  # of each run that counts honest replicas
HONEST: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "AdamW": ("AdamW", {}),
    "SGD with momentum": ("SGD", {}),
    "Adafactor": ("Adafactor", {}),
    "AdamW, clipped by norm": ("AdamW", {"gradient_clip_val": 0.1}),
}
COSTS: Sequence[tuple[str, int]] = (("AdamW", 8), ("AdamW", 32), ("AdamW", 64), ("SGD", 32), ("Adafactor", 32))
"""Optimizers and windows of a batch."""
GOAL: Final = 0.02  # of a step, that portable arithmetic may add
HEAD: Final = (
    *("optimizer", "tokens a server", "step, s", "portable / native", "quartiles"),
    *("optimizer, ms", "portable, ms", f"tokens for {GOAL:.0%}", "bytes"),
)


# ---------------------------------------------------------------------- drift


class _Drift(L.Callback):
    """Notes how far the replicas of a stage are apart after each step."""

    def __init__(self) -> None:
        self.found: list[float] = []

    @override
    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        assert isinstance(trainer.strategy, InMemoryStrategy)
        stages = [server.steps.stage(0) for server in trainer.strategy.servers]
        assert [stage.version for stage in stages] == NUM_KINDS * [trainer.global_step]
        self.found.append(drift([stage.parameters for stage in stages]))


def _model(seed: int) -> Bytes:
    torch.manual_seed(seed)
    return Bytes(**SMALL)


def portable_drift(num_steps: int, seed: int) -> tuple[Bytes, list[float]]:
    """Train in a mixed stage; return the model, and the drift after each step."""
    model, found = _model(seed), _Drift()
    size = WINDOWS // NUM_KINDS
    arguments = {"callbacks": [found]}
    data = model.batches(WINDOWS, seed)
    strategy = fit(model, data, num_steps, machines(), arguments=arguments, microbatch_size=size, seed=seed)
    assert not differences_noted(strategy)
    return model, found.found


def native_drift(num_steps: int, seed: int) -> list[float]:
    """Train as many replicas on the same batches, stepped by the kernels of their machines; return the drift.

    A swarm leaves such replicas out after the first step, so this loop averages the gradients itself.
    """
    replicas = [_model(seed) for _ in range(NUM_KINDS)]
    optimizers = [replica.configure_optimizers() for replica in replicas]
    computes = [lambda run: run(), *(machine.compute for machine in machines().values())]
    batches = itertools.chain.from_iterable(itertools.repeat(replicas[0].batches(WINDOWS, seed)))
    found = []
    for batch in itertools.islice(batches, num_steps):
        shares = zip(*(part.chunk(NUM_KINDS) for part in batch), strict=True)
        for compute, replica, share in zip(computes, replicas, shares, strict=True):
            replica.zero_grad()
            compute(lambda replica=replica, share=share: replica.loss(share).backward())
        for same in zip(*(replica.parameters() for replica in replicas), strict=True):
            mean = torch.stack([one.grad for one in same if one.grad is not None]).mean(0)
            for one in same:
                one.grad = mean.clone()
        for compute, optimizer in zip(computes, optimizers, strict=True):
            compute(optimizer.step)
        found.append(drift([dict(replica.named_parameters()) for replica in replicas]))
    return found


def plain(num_steps: int, seed: int, num_threads: int) -> Bytes:
    """Train with the plain Trainer."""
    model = _model(seed)
    torch.set_num_threads(num_threads)
    trainer = L.Trainer(**QUIET, devices=1, max_steps=num_steps, max_epochs=-1, limit_val_batches=0)
    trainer.fit(model, model.batches(WINDOWS, seed))
    torch.set_num_threads(1)
    return model


def measure_drift(num_steps: int, seeds: Sequence[int]) -> None:
    """Compare replicas step by step, and final losses with those of the plain Trainer on one thread and on two."""
    rows: list[list[object]] = [["seed", "portable", "native", "mixed swarm", "plain, 1 thread", "plain, 2 threads"]]
    for seed in seeds:
        model, portable = portable_drift(num_steps, seed)
        native = native_drift(num_steps, seed)
        trained = model, *(plain(num_steps, seed, threads) for threads in (1, 2))
        losses = [one.held_out(NUM_HELD_OUT) for one in trained]
        rows.append([seed, *(f"{max(one):.2g}" for one in (portable, native)), *(f"{loss:.4f}" for loss in losses)])
        print(*rows[-1], sep="  ", flush=True)
        if seed == seeds[0]:
            _draw(portable, native)
    title = f"Largest difference of a weight between {NUM_KINDS} replicas in {num_steps} steps; loss in nats a byte"
    write("unlike-drift", table(title, rows))


def _draw(portable: Sequence[float], native: Sequence[float]) -> None:
    mpl.use("Agg")
    figure, axes = plt.subplots(figsize=(8, 3.5), layout="constrained")
    steps = range(1, len(portable) + 1)
    axes.plot(steps, native, color="tab:gray", label="native kernels, never compared")
    axes.plot(steps, portable, color="tab:blue", linewidth=2, label="portable arithmetic: 0 in each step")
    axes.set_yscale("symlog", linthresh=1e-9)
    axes.set(xlabel="step", ylabel="largest difference of a weight", title="Three kinds of machines in one stage")
    axes.legend()
    OUT.mkdir(parents=True, exist_ok=True)
    figure.savefig(OUT / "unlike.png", dpi=120)
    plt.close(figure)


# ---------------------------------------------------------------------- honest replicas


def count_honest(num_steps: int, seeds: Sequence[int]) -> None:
    """Count steps of mixed stages, and honest replicas that were left out, with each optimizer in turn."""
    steps, left_out, moved = Counter[str](), Counter[str](), Counter[str]()
    ways = itertools.cycle(HONEST.items())
    for seed in range(seeds[0], seeds[0] + max(1, num_steps // RUN_STEPS)):
        name, (optimizer, arguments) = next(ways)
        unlike = machines()
        torch.manual_seed(seed)
        data = noise(RUN_STEPS, seed)
        strategy = fit(Tiny(optimizer), data, RUN_STEPS, unlike, arguments=arguments, microbatch_size=2, seed=seed)
        stages = [server.steps.stage(0) for server in strategy.servers if server.membership.is_member]
        steps[name] += min(stage.version for stage in stages)
        left_out[name] += NUM_KINDS - len(stages) + differences_noted(strategy)
        left_out[name] += drift([stage.parameters for stage in stages]) != 0.0
        moved[name] += sum(machine.num_moved for machine in unlike.values())
        print(f"{name}, seed {seed}: {steps.total()} steps, {left_out.total()} left out", flush=True)
    rows: list[list[object]] = [["optimizer", "steps", "honest replicas left out", "numbers rounded differently"]]
    rows += [[name, steps[name], left_out[name], moved[name]] for name in steps]
    rows.append(["all", steps.total(), left_out.total(), moved.total()])
    write("unlike-honest", table(f"Mixed stages of {NUM_KINDS} kinds", rows))


# ---------------------------------------------------------------------- cost


class Turns(L.Callback):
    """Has every other step stepped by portable arithmetic, and measures both kinds of steps."""

    def __init__(self) -> None:
        self.is_portable = False
        self.step_s, self.optimizer_s, self.sent_bytes = (defaultdict[bool, list[float]](list) for _ in range(3))
        self._began_s = self._optimizer_s = 0.0
        self._sent = 0

    # A stage of equal machines has no portable steps, and an `UnlikeMachine` takes time for each kernel. So the choice
    # of the mixed stages is replaced. Servers step as the record has it, in this run as in any.
    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        """Take turns inside."""
        commit.mixed_stages = lambda *_: [0] if self.is_portable else []  # type: ignore[attr-defined]
        try:
            yield
        finally:
            commit.mixed_stages = mixed_stages  # type: ignore[attr-defined]

    @override
    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        assert isinstance(trainer.strategy, InMemoryStrategy)
        if not trainer.global_step:
            for server in trainer.strategy.servers:
                optimizer = server.steps.stage(0).optimizer.torch_optimizer
                optimizer.register_step_pre_hook(lambda *_: self._add(-time.process_time()))
                optimizer.register_step_post_hook(lambda *_: self._add(time.process_time()))
        self.is_portable = trainer.global_step % 2 == 1
        self._sent, self._optimizer_s = _sent_bytes(trainer.strategy), 0.0
        self._began_s = time.process_time()

    @override
    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        assert isinstance(trainer.strategy, InMemoryStrategy)
        if trainer.global_step > 2:  # the first step of each kind is a warm-up
            self.step_s[self.is_portable].append(time.process_time() - self._began_s)
            self.optimizer_s[self.is_portable].append(self._optimizer_s)
            self.sent_bytes[self.is_portable].append(_sent_bytes(trainer.strategy) - self._sent)

    def _add(self, seconds: float) -> None:
        self._optimizer_s += seconds


def _sent_bytes(strategy: InMemoryStrategy) -> int:
    return sum(peer.transport.traffic.totals()[0] for peer in strategy.peers)


def measure_cost(num_steps: int, seeds: Sequence[int]) -> None:
    """Measure steps of a stage of two servers, in CPU seconds of the one thread that has the whole swarm."""
    rows: list[list[object]] = [list(HEAD)]
    for name, windows in COSTS:
        torch.manual_seed(seeds[0])
        model, turns = Bytes(name, **LARGE), Turns()
        arguments, size = {"callbacks": [turns]}, windows // 4
        with turns.taken():
            fit(model, model.batches(windows), num_steps, {}, num_servers=2, arguments=arguments, microbatch_size=size)
        pairs = zip(turns.step_s[False], turns.step_s[True], strict=True)
        _, _, ratio, quartiles = row(name, [portable / native for native, portable in pairs])
        step_s, tokens = median(turns.step_s[False]), windows * LARGE["context"] // 2
        native_s, portable_s = (median(turns.optimizer_s[way]) for way in (False, True))
        enough = tokens * (portable_s - native_s) / (GOAL * step_s)
        sent = median(turns.sent_bytes[True]) / median(turns.sent_bytes[False])
        rows.append([name, tokens, f"{step_s:.2f}", ratio, quartiles])
        rows[-1] += [f"{1e3 * native_s:.0f}", f"{1e3 * portable_s:.0f}", f"{enough:.0f}", f"{sent:.5f}"]
        print(*rows[-1], sep="  ", flush=True)
    number = sum(one.numel() for one in Bytes(**LARGE).parameters())
    write("unlike-cost", table(f"Steps of {number:,} parameters on two servers, native and portable in turns", rows))


# ----------------------------------------------------------------------


PARTS: Final[dict[str, tuple[Callable[[int, Sequence[int]], None], int]]] = {
    "drift": (measure_drift, 3_000),
    "faults": (measure_faults, 20),
    "honest": (count_honest, 20_000),
    "cost": (measure_cost, 60),
}
"""The parts, and the steps of each."""


def main(words: Sequence[str] | None = None) -> None:
    """Measure the parts that are asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--steps", type=int, help="of a run, after a fault, or of all runs with honest replicas alone")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    arguments = parser.parse_args(words)
    hush()
    torch.set_num_threads(1)
    for part in arguments.only:
        measure, num_steps = PARTS[part]
        measure(arguments.steps or num_steps, arguments.seeds)


if __name__ == "__main__":
    main()
