"""Predicts the speed of swarms and of single machines, and chooses the best setting. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import cache, partial
from typing import Final

from lightning_swarm.coordinator.rebalancing import policy
from lightning_swarm.core.limits import Limits
from lightning_swarm.network import PeerId
from lightning_swarm.planner import cost_model
from lightning_swarm.planner.cost_model import ADAM, PipelinePass, Swarm
from lightning_swarm.planner.records import (
    FAST_ENOUGH,
    LARGEST_BATCH,
    SAME,
    USUAL_MICROBATCH,
    Machine,
    ModelProfile,
    OneMachine,
    Plan,
    Prediction,
    Setting,
    StageProfile,
    Times,
    TransferSize,
)
from lightning_swarm.planner.uncut import choose_uncut

_LIMITS: Final = Limits()
_RECOMPUTING = 4 / 3  # factor of the work of a machine that offloads: it keeps no graph, so it computes forwards twice


def alone(model: ModelProfile, machine: Machine, batch_size: int) -> OneMachine | None:
    """Predict the speed of one machine with steps of `batch_size` samples; None if it cannot hold the model."""
    # Weights, their gradients and the optimizer's state, with room for the graph of at least one sample.
    held_bytes = float(model.parameters * (2 + ADAM) * model.weight_bytes)
    if held_bytes + model.graph_bytes <= machine.memory_bytes:
        return OneMachine(name=machine.name, samples_per_s=machine.flop_per_s / model.flop, offloads=False)
    parts = [*model.blocks, model.around]
    weights_bytes = 2 * max(part.parameters for part in parts) * model.weight_bytes  # one part in use, one on its way
    graph_bytes = max(part.graph_bytes for part in parts)
    room_bytes = machine.memory_bytes - 2 * weights_bytes
    if not machine.bus_bytes_per_s or held_bytes > machine.host_memory_bytes or room_bytes < graph_bytes:
        return None
    size = min(float(batch_size), room_bytes // graph_bytes if graph_bytes else batch_size)
    computing_s = _RECOMPUTING * model.flop * batch_size / machine.flop_per_s
    # For each microbatch, the bus carries each part's weights for the forward and for the backward, and its gradients
    # the other way, which overlaps.
    moved_bytes = 2 * model.parameters * model.weight_bytes * batch_size / size
    bus_s = moved_bytes / machine.bus_bytes_per_s  # lower bound, with a bus that never waits
    return OneMachine(name=machine.name, samples_per_s=batch_size / max(computing_s, bus_s), offloads=True)


def assign(rates: Sequence[float], num_stages: int) -> list[list[int]]:
    """Assign machines with these rates in samples/s to stages, and return each stage's machine indices."""
    stages = policy.assign(rates, num_stages)
    held: list[list[int]] = [[] for _ in range(num_stages)]
    for number in range(len(rates)):
        stage = stages.stage_of(PeerId(str(number)))
        assert stage is not None  # the peer has a stage
        held[stage].append(number)
    # The starter, whose number is 0, is in the last stage, as in a run.
    starter_stage = next(index for index, numbers in enumerate(held) if 0 in numbers)
    held[starter_stage], held[-1] = held[-1], held[starter_stage]
    return held


# A step consists of all microbatches forward, the loss, all microbatches backward, averaging within the stages, and the
# record. Stages work at the same time; a machine's link and its processor take turns.
class Predictor:
    """Predicts the speed of a swarm with a fixed number of stages and of machines, for any batch sizes."""

    def __init__(
        self,
        model: ModelProfile,
        machines: Sequence[Machine],  # the starter first
        num_stages: int,
        limits: Limits = _LIMITS,
        num_machines: int | None = None,  # starter and fastest machines that can hold a stage; None: all
    ) -> None:
        self._machines = machines
        self._stages = cost_model.stage_profiles(model, num_stages)
        self._largest_bytes = max(stage.state_bytes for stage in self._stages)
        capacities = [min(cost_model.graph_capacity(stage, machine) for stage in self._stages) for machine in machines]
        pairs = list(zip(machines, capacities, strict=True))
        fit = [machine for machine, capacity in pairs if capacity >= 1.0]
        # Samples of the largest microbatch that all fitting machines can hold.
        self.largest_microbatch = int(min((capacity for capacity in capacities if capacity >= 1.0), default=0.0))
        self._left_out = tuple(machine.name for machine, capacity in pairs if capacity < 1.0)
        # Beside its stage, the starter holds the layers around the stages, and a sample's graph of them.
        around_bytes = cost_model.state_bytes(model, model.around.parameters) + model.around.graph_bytes
        trains = capacities[0] >= 1.0 and around_bytes <= machines[0].memory_bytes
        self.possible = len(fit) >= num_stages and trains
        if self.possible:
            used, rates = _fastest_first(fit, max(self._stages, key=lambda stage: stage.flop))
            self.counts = cost_model.machine_counts(rates, num_stages)
            self._spared = tuple(machine.name for machine in used[num_machines or len(used) :])
            used, rates = used[:num_machines], rates[:num_machines]
            self._swarm = Swarm(model, used, self._stages, assign(rates, num_stages), limits)
            self._averaging_s = _averaging_s(self._swarm)
            # Arguments: the direction, the microbatch size and the batch size.
            self._pass = cache(partial(cost_model.pipeline_pass, self._swarm))

    def times(self, setting: Setting) -> Times:
        """Return the seconds of each part of a step."""
        swarm, size = self._swarm, setting.batch_size
        forward, backward = self._passes(setting)
        num_batches = math.ceil(setting.target_batch_size / size)
        return Times(
            forward_s=num_batches * forward.slowest.seconds,
            backward_s=num_batches * backward.slowest.seconds,
            fill_s=num_batches * (forward.fill_s + backward.fill_s),
            around_s=num_batches * size * swarm.model.around.flop / swarm.starter.flop_per_s,
            averaging_s=self._averaging_s,
            closing_s=cost_model.closing_s(swarm.machines),
        )

    def _passes(self, setting: Setting) -> list[PipelinePass]:
        return [self._pass(direction, setting.microbatch_size, setting.batch_size) for direction in (0, 1)]

    def predict(self, setting: Setting) -> Prediction:
        """Predict the swarm's speed, traffic and memory with a setting of this number of stages."""
        swarm, times, size = self._swarm, self.times(setting), setting.target_batch_size
        microbatch, inner = setting.microbatch_size, self._stages[:-1]
        sent = sent_bytes(swarm, size)
        slowest = max((one_pass.slowest for one_pass in self._passes(setting)), key=lambda time: time.seconds)
        flop_per_s = sum(machine.flop_per_s for machine in self._machines)
        return Prediction(
            setting=setting,
            samples_per_s=size / times.step_s,
            times=times,
            slowest=slowest.machine,
            line_share=slowest.line_s / slowest.seconds,
            utilisation=size * swarm.model.flop / (times.step_s * flop_per_s),
            stages=tuple(tuple(swarm.machines[n].name for n in numbers) for numbers in swarm.held),
            left_out=self._left_out,
            spared=self._spared,
            boundary_bytes=tuple(round(stage.output_bytes * microbatch) for stage in inner),
            boundary_gradient_bytes=tuple(round(stage.output_gradient_bytes * microbatch) for stage in inner),
            step_bytes=_by_name(swarm, sent),
            sent_bytes_per_s=sum(sent) / times.step_s + _snapshot_bytes_per_s(swarm),
            state_bytes=self._largest_bytes,
            recomputed=max(swarm.recomputed(index, setting.batch_size) for index in range(len(swarm.stages))),
        )


def _fastest_first(machines: Sequence[Machine], stage: StageProfile) -> tuple[list[Machine], list[float]]:
    """Sort all machines except the first, the starter, by speed; return them and their samples/s at a stage."""
    forward_and_backward = cost_model.phases(stage, 0.0)
    rates = [
        1.0 / sum(cost_model.sample_time(machine, phase, USUAL_MICROBATCH).seconds for phase in forward_and_backward)
        for machine in machines
    ]
    order = [0, *sorted(range(1, len(machines)), key=lambda number: -rates[number])]
    return [machines[number] for number in order], [rates[number] for number in order]


def sent_bytes(swarm: Swarm, batch_size: int) -> list[float]:
    """Return the bytes that each machine sends over its link in a step, without snapshots and control messages."""
    sent = [0.0] * len(swarm.machines)
    for index, kinds in enumerate(swarm.kinds):
        for kind in kinds:
            sample_bytes = sum(
                swarm.share(index, kind[0], direction) * swarm.phase(index, kind[0], direction, batch_size).sent_bytes
                for direction in (0, 1)
            )
            for number in kind:
                sent[number] = sample_bytes * batch_size + averaged(swarm, index).num_bytes
    sent[0] += sum(cost_model.trainer_bytes(swarm, direction)[1] for direction in (0, 1)) * batch_size
    return sent


def averaged(swarm: Swarm, index: int) -> TransferSize:
    """Return the size that a machine of a stage sends, and receives, to average."""
    return cost_model.averaged_size(swarm.model, swarm.stages[index].parameters, len(swarm.held[index]))


def _averaging_s(swarm: Swarm) -> float:
    """Return the slowest machine's seconds to average, while all machines send and receive at once."""
    mixed = [cost_model.are_mixed(swarm.machines[number] for number in numbers) for numbers in swarm.held]

    def seconds(index: int, number: int) -> float:
        size, parameters = averaged(swarm, index), swarm.stages[index].parameters
        return cost_model.averaging_s(swarm.machines[number], size, parameters, mixed=mixed[index])

    return max(seconds(index, kind[0]) for index, kinds in enumerate(swarm.kinds) for kind in kinds)


def _snapshot_bytes_per_s(swarm: Swarm) -> float:
    """Return the bytes/s of snapshots: a server of each stage sends weights and optimizer state to another stage."""
    interval_s = swarm.limits.snapshot_interval
    if interval_s is None or len(swarm.stages) == 1:
        return 0.0
    parameters = sum(stage.parameters for stage in swarm.stages)
    return parameters * (1 + ADAM) * swarm.model.weight_bytes / interval_s


def _by_name(swarm: Swarm, sent: Sequence[float]) -> dict[str, int]:
    """Return machine name -> bytes, the maximum of machines with that name."""
    bytes_by_name: dict[str, int] = {}
    for machine, num_bytes in zip(swarm.machines, sent, strict=True):
        bytes_by_name[machine.name] = max(round(num_bytes), bytes_by_name.get(machine.name, 0))
    return bytes_by_name


# Bounds of the search for settings.
_MAX_STAGES: Final = 64
_LARGEST_MICROBATCH: Final = 256
_LARGEST_DATALOADER_BATCH: Final = 1024
_MAX_COUNTS: Final = 8  # numbers of machines to compare


def make_plan(
    model: ModelProfile,
    machines: Sequence[Machine],
    *,
    target_batch_size: int | None = None,
    largest_batch_size: int = LARGEST_BATCH,
) -> Plan:
    """Choose the best setting, and the best machine alone; the first of `machines` is the starter."""
    # Without `target_batch_size`, choose the smallest that is nearly as fast as any other up to the largest.
    sizes = [target_batch_size] if target_batch_size else _powers(largest_batch_size)
    predictions = list(_predictions(model, machines, sizes))
    best = _best(predictions)
    uncut = choose_uncut(model, machines, sizes)
    size = best.setting.target_batch_size if best else uncut.target_batch_size if uncut else sizes[-1]
    compared = [prediction for prediction in predictions if prediction.setting.target_batch_size == size]
    possible = filter(None, (alone(model, machine, size) for machine in machines))
    return Plan(
        best=best,
        alone=max(possible, key=lambda machine: machine.samples_per_s, default=None),
        uncut=uncut,
        by_stages=tuple((prediction.setting.num_stages, prediction.samples_per_s) for prediction in compared),
    )


def predict(model: ModelProfile, machines: Sequence[Machine], setting: Setting) -> float | None:
    """Predict the samples/s with a setting; None if the machines, the starter first, cannot train with it."""
    predictor = Predictor(model, machines, setting.num_stages)
    return predictor.predict(setting).samples_per_s if predictor.possible else None


def _powers(largest: int) -> list[int]:
    return [1 << power for power in range(largest.bit_length())]  # powers of 2, up to the largest


def _predictions(model: ModelProfile, machines: Sequence[Machine], batch_sizes: Sequence[int]) -> Iterable[Prediction]:
    """Predict the speed for each number of stages and target batch size, with the best machines and smaller batches."""
    for num_stages in range(1, min(len(model.blocks), len(machines), _MAX_STAGES) + 1):
        all_machines = Predictor(model, machines, num_stages)
        if not all_machines.possible:
            continue
        fewer = [Predictor(model, machines, num_stages, _LIMITS, count) for count in all_machines.counts[1:_MAX_COUNTS]]
        for target in batch_sizes:
            best = all_machines.predict(_best_sizes(all_machines, num_stages, target))
            for predictor in fewer:
                prediction = predictor.predict(_best_sizes(predictor, num_stages, target))
                # Machines are left unused only if that is clearly faster.
                best = prediction if prediction.samples_per_s * SAME > best.samples_per_s else best
            yield best


def _best_sizes(predictor: Predictor, num_stages: int, target: int) -> Setting:
    """Choose the smallest batches, and with them the smallest microbatches, that are nearly as fast as the best."""
    settings = [
        Setting(num_stages=num_stages, microbatch_size=size, batch_size=batch_size, target_batch_size=target)
        for batch_size in (*_powers(min(target - 1, _LARGEST_DATALOADER_BATCH)), target)
        if target % batch_size == 0
        for size in _powers(min(batch_size, _LARGEST_MICROBATCH, predictor.largest_microbatch))
    ]
    steps_s = [predictor.times(setting).step_s for setting in settings]
    least_s = min(steps_s)
    return next(setting for setting, step_s in zip(settings, steps_s, strict=True) if step_s * SAME <= least_s)


def _best(predictions: Sequence[Prediction]) -> Prediction | None:
    """Choose the smallest target batch that is fast enough, then the fewest stages that are nearly as fast."""
    if not predictions:
        return None
    fast = _at_least(predictions, FAST_ENOUGH)
    size = min(prediction.setting.target_batch_size for prediction in fast)
    compared = [prediction for prediction in predictions if prediction.setting.target_batch_size == size]
    return min(_at_least(compared, SAME), key=lambda prediction: prediction.setting.num_stages)


def _at_least(predictions: Sequence[Prediction], share: float) -> list[Prediction]:
    """Return the predictions whose speed is at least this share of the fastest."""
    fastest = max(prediction.samples_per_s for prediction in predictions)
    return [prediction for prediction in predictions if prediction.samples_per_s >= share * fastest]
