"""Predicts the speed of trainers that each compute the whole model: a swarm without a cut, and DDP. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lightning_swarm.planner import cost_model
from lightning_swarm.planner.records import FAST_ENOUGH, SAME, Machine, ModelProfile, Uncut, WireFormat


def held_bytes(model: ModelProfile) -> float:
    """Return a trainer's bytes without the graph of a batch: its server's state, and the module's own weights."""
    return cost_model.state_bytes(model, model.parameters) + model.parameters * model.weight_bytes


def choose_uncut(model: ModelProfile, machines: Sequence[Machine], batch_sizes: Sequence[int]) -> Uncut | None:
    """Choose the smallest target batch that is fast enough, and its machines; None if fewer than two hold the model."""
    needed = held_bytes(model) + model.graph_bytes
    fit = [machine for machine in machines if machine.memory_bytes >= needed]
    fit.sort(key=lambda machine: -machine.flop_per_s)
    if len(fit) < 2:
        return None
    left_out = tuple(machine.name for machine in machines if machine.memory_bytes < needed)
    choices = [replace(_of_fastest(model, fit, size), left_out=left_out) for size in batch_sizes]
    fast_enough = FAST_ENOUGH * max(uncut.samples_per_s for uncut in choices)
    return next(uncut for uncut in choices if uncut.samples_per_s >= fast_enough)


def _of_fastest(model: ModelProfile, machines: Sequence[Machine], size: int) -> Uncut:
    """Predict the speed of the fastest machines, as few as reach about the best speed of any number of them."""
    counts = cost_model.machine_counts([machine.flop_per_s for machine in machines], num_stages=1)
    choices = [_predict(model, machines[:count], size) for count in sorted(counts)]
    nearly_best = SAME * max(uncut.samples_per_s for uncut in choices)
    best = next(uncut for uncut in choices if uncut.samples_per_s >= nearly_best)
    return replace(best, spared=tuple(machine.name for machine in machines[len(best.trainers) :]))


def _predict(model: ModelProfile, machines: Sequence[Machine], size: int) -> Uncut:
    """Predict steps of `size` samples with all these machines as trainers; DDP's slowest machine decides its speed."""
    rates = [machine.flop_per_s / model.flop for machine in machines]

    def averaging_s(profile: ModelProfile, *, mixed: bool) -> float:
        sent = cost_model.averaged_size(profile, profile.parameters, len(machines))
        return max(cost_model.averaging_s(machine, sent, profile.parameters, mixed=mixed) for machine in machines)

    ddp_step_s = size / len(machines) / min(rates) + averaging_s(replace(model, wire=WireFormat()), mixed=False)
    return Uncut(
        target_batch_size=size,
        computing_s=size / sum(rates),
        averaging_s=averaging_s(model, mixed=cost_model.are_mixed(machines)),
        closing_s=cost_model.closing_s(machines),
        trainers=tuple(machine.name for machine in machines),
        left_out=(),
        spared=(),
        sent_bytes=cost_model.averaged_size(model, model.parameters, len(machines)).num_bytes,
        state_bytes=held_bytes(model),
        ddp_samples_per_s=size / ddp_step_s,
    )
