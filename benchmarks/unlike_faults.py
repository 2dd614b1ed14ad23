"""Spoils one replica of a stage in small ways, and looks which are found and when: for `benchmarks.unlike`."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any, Final, NamedTuple, TypeAlias

import lightning as L
import torch
from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from benchmarks.report import table, write
from benchmarks.unlike_stages import Tiny, fit, machines, noise
from lightning_swarm.testing import InMemoryStrategy

FAULT_AT = 5  # steps
AUDITED_AT, AUDITED_FOR = 25, 100  # steps; all work in a server's first 20 is audited

Fault: TypeAlias = Callable[[Optimizer], AbstractContextManager[None]]
"""Is entered before a step of the optimizer, and left after it."""


@contextlib.contextmanager
def flip(position: int, optimizer: Optimizer) -> Iterator[None]:
    """Flip a bit of one weight, counted from the lowest."""
    yield
    optimizer.param_groups[0]["params"][0].data.view(-1)[:1].view(torch.int32).bitwise_xor_(1 << position)


@contextlib.contextmanager
def flip_state(optimizer: Optimizer) -> Iterator[None]:
    """Flip the lowest bit of one second moment."""
    yield
    state = optimizer.state[optimizer.param_groups[0]["params"][0]]
    state["exp_avg_sq"].view(-1)[:1].view(torch.int32).bitwise_xor_(1)


@contextlib.contextmanager
def scale_rate(optimizer: Optimizer) -> Iterator[None]:
    """Step with another learning rate."""
    rates = [group["lr"] for group in optimizer.param_groups]
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = 1.001 * rate
    yield
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


@contextlib.contextmanager
def skip_step(optimizer: Optimizer) -> Iterator[None]:
    """Undo the step in weights and state."""
    parameters = [one for group in optimizer.param_groups for one in group["params"]]
    tensors = [tensor for one in parameters for tensor in (one.data, *optimizer.state[one].values())]
    before = [tensor.clone() for tensor in tensors]
    yield
    for tensor, old in zip(tensors, before, strict=True):
        tensor.copy_(old)


FAULTS: Mapping[str, Fault] = {
    **{f"bit {position} of a weight flipped": partial(flip, position) for position in (0, 8, 16, 22)},
    "bit 0 of a second moment flipped": flip_state,
    "learning rate 1.001 times as high": scale_rate,
    "step not applied": skip_step,
}
"""Each spoils one step of one replica."""
STAGES: Mapping[str, tuple[int, bool]] = {"3 equal": (3, False), "3 unlike": (3, True), "2 unlike": (2, True)}
"""The number of replicas, and whether they are machines of several kinds."""
NO_DROPOUT: Final[Mapping[str, dict[str, Any]]] = {
    "no dropout from a step on": {},
    "no dropout, audited run": {"trust": "audited"},
}
"""A fault of the gradients, and settings of the swarm."""


class Finding(NamedTuple):
    """The end of a fault."""

    num_steps: int | None  # until a server was left out; None: none was
    is_right: bool = False  # the broken server was left out, and no other
    is_named: bool = False  # the reason names the weight


class Spoiling(L.Callback):
    """Spoils one step of a server, or removes its dropout for good."""

    def __init__(self, number: int, at: int, fault: Fault | None) -> None:
        self._number, self._at, self._fault = number, at, fault
        self._handles: list[Any] = []
        self._stack = ExitStack()

    @override
    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        assert isinstance(trainer.strategy, InMemoryStrategy)
        for handle in self._handles:
            handle.remove()
        if trainer.global_step != self._at:
            self._handles = []
            return
        stage = trainer.strategy.servers[self._number].steps.stage(0)
        if (fault := self._fault) is not None:
            optimizer = stage.optimizer.torch_optimizer
            enter = optimizer.register_step_pre_hook(lambda *_: self._stack.enter_context(fault(optimizer)) and None)
            self._handles = [enter, optimizer.register_step_post_hook(lambda *_: self._stack.close())]
        else:
            (layer,) = [one for one in stage.module.modules() if isinstance(one, nn.Dropout)]
            layer.forward = torch.clone  # type: ignore[method-assign]  # its `p` would come with each call


def spoil(
    fault: Fault | None, stage: tuple[int, bool], *, seed: int, at: int, num_steps: int, **settings: Any
) -> Finding:
    """Train with one broken server, and find the servers that were left out."""
    num_servers, unlike = stage
    # The first server is the starter's, whose computation an audited run takes on trust.
    number = seed % num_servers if fault is not None else 1 + seed % (num_servers - 1)
    torch.manual_seed(seed)
    strategy = fit(
        Tiny(dropout=0.2),
        noise(num_steps, seed),
        num_steps,
        machines(num_servers) if unlike else {},
        num_servers=num_servers,
        arguments={"callbacks": [Spoiling(number, at, fault)]},
        microbatch_size=2,
        seed=seed,
        **settings,
    )
    events = [
        (event.step, str(event.peer), event.reason)
        for peer in strategy.peers
        for event in peer.events.newest
        if event.kind in ("gone", "convicted") and event.step is not None
    ]
    if not events:
        return Finding(None)
    step, _, reason = min(events)
    return Finding(step - at, {peer for _, peer, _ in events} == {f"peer-{number}"}, "net.0.weight" in reason)


def measure_faults(num_steps: int, seeds: Sequence[int]) -> None:
    """Spoil one replica in each way, in each kind of stage, and show when the coordinator finds it."""
    rows: list[list[object]] = [["fault", "replicas", "found", "steps until then", "weight named", "left out"]]
    runs: list[tuple[str, Fault | None, int, int, dict[str, Any]]] = [
        (name, fault, FAULT_AT, num_steps, {}) for name, fault in FAULTS.items()
    ]
    for name, settings in NO_DROPOUT.items():
        runs.append((name, None, AUDITED_AT, AUDITED_FOR if settings else num_steps, settings))
    for (name, fault, at, left, settings), (kind, stage) in itertools.product(runs, STAGES.items()):
        found = [spoil(fault, stage, seed=seed, at=at, num_steps=at + left, **settings) for seed in seeds]
        rows.append([name, kind, *_shown(found)])
        print(*rows[-1], sep="  ", flush=True)
    write("unlike-faults", table(f"A fault of one replica, in float32, with {len(seeds)} seeds", rows))


def _shown(found: Sequence[Finding]) -> list[object]:
    """Return the cells of a row."""
    steps = [one.num_steps for one in found if one.num_steps is not None]
    right = sum(one.is_right for one in found)
    left_out = f"broken {right}, honest {len(steps) - right}" if steps else "-"
    return [len(steps), ", ".join(map(str, steps)) or "-", sum(one.is_named for one in found), left_out]
