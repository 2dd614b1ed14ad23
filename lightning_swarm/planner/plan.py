"""Which setting to choose for a swarm. Pure."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence
from typing import Final

from lightning_swarm.coordinator.rebalancing.policy import MoveCosts, StageRates, plan
from lightning_swarm.core.limits import Limits
from lightning_swarm.network import PeerId
from lightning_swarm.planner.cost_model import ADAM, cut, room_samples, state_bytes, sum_bytes
from lightning_swarm.planner.records import (
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
    travelling,
)
from lightning_swarm.planner.timeline import (
    GOODPUT,
    HANDLING_S_PER_BYTE,
    STEP_S_PER_PARAMETER,
    PipelinePass,
    Swarm,
    passage,
    phases,
    ways_of_trainer,
)
from lightning_swarm.planner.timeline import pace as pace_of

_RECOMPUTING = 4 / 3
"""Who offloads keeps no graph, and computes each forward twice."""


def fastest_alone(model: ModelProfile, machines: Iterable[Machine], batch_size: int) -> OneMachine | None:
    """The best that one of the machines can do by itself, or None if none holds the model in any memory."""
    found = [one for one in (alone(model, machine, batch_size) for machine in machines) if one is not None]
    return max(found, key=lambda one: one.samples_per_s, default=None)


def alone(model: ModelProfile, machine: Machine, batch_size: int) -> OneMachine | None:
    """What a machine can do by itself: an upper bound where it offloads, for its bus never waits.

    Args:
        model: What is trained: weights, their gradients, the optimizer's state, a sample at a time if need be.
        machine: The one.
        batch_size: Samples of a step.
    """
    held_bytes = float(model.parameters * (2 + ADAM) * model.weight_bytes)
    if held_bytes + model.graph_bytes <= machine.memory_bytes:
        return OneMachine(name=machine.name, samples_per_s=machine.flop_per_s / model.flop, offloads=False)
    parts = [*model.blocks, model.around]
    weights_bytes = 2 * max(part.parameters for part in parts) * model.weight_bytes  # in use, and on its way
    graph_bytes = max(part.graph_bytes for part in parts)
    room_bytes = machine.memory_bytes - 2 * weights_bytes
    if not machine.bus_bytes_per_s or held_bytes > machine.host_memory_bytes or room_bytes < graph_bytes:
        return None
    size = min(float(batch_size), room_bytes // graph_bytes if graph_bytes else batch_size)
    computing_s = _RECOMPUTING * model.flop * batch_size / machine.flop_per_s
    # Weights come for the forward and for the backward, gradients go, of each part and for each microbatch.
    moved_bytes = 2 * model.parameters * model.weight_bytes * batch_size / size
    bus_s = moved_bytes / machine.bus_bytes_per_s
    return OneMachine(name=machine.name, samples_per_s=batch_size / max(computing_s, bus_s), offloads=True)


def assign(rates: Sequence[float], num_stages: int) -> list[list[int]]:
    """Machines by stage, so that the slowest stage is about as fast as can be; as `rebalancing.policy` does.

    Args:
        rates: Samples/s of each machine at a stage, all of them above 0. The first one is the starter's.
        num_stages: At most as many as there are machines. They take equally long.

    Returns:
        Places in `rates`, by stage. The starter is in the last stage, as in a run.
    """
    totals = [(0.0, index) for index in range(num_stages)]
    stages = StageRates(num_stages)
    for number in sorted(range(len(rates)), key=rates.__getitem__, reverse=True):
        total, index = totals[0]
        heapq.heapreplace(totals, (total + rates[number], index))
        stages.put(PeerId(str(number)), index, rates[number], scatter=0.0)
    free = MoveCosts([0.0] * num_stages, horizon_s=1.0)
    while moves := plan(stages, free):
        for move in moves:
            stages.move(move)
    held: list[list[int]] = [[] for _ in range(num_stages)]
    for number in range(len(rates)):
        place = stages.stage_of(PeerId(str(number)))
        assert place is not None  # it was put there above
        held[place].append(number)
    starters = next(index for index, numbers in enumerate(held) if 0 in numbers)
    held[starters], held[-1] = held[-1], held[starters]
    return held


STEP_S: Final = 0.042
"""For a step of four peers that have next to nothing to average, `python -m benchmarks.steps`."""

STEP_TRIPS: Final = 6
"""Round trips one after the other in it: grant, freeze, two of the averaging, accept, decided."""


# A step is: all microbatches forward, the loss, all of them backward, the averaging within the stages, the record.
# Stages work at the same time; a machine's line and its processor take turns.
class Predictor:
    """Says for one number of stages, and of machines, what each size of batch gives.

    Args:
        model: What is trained.
        machines: All of the list, the starter first.
        num_stages: At most the model's blocks.
        limits: Of the servers.
        num_machines: The starter, and the fastest others that can hold a stage; None: all of these.

    Attributes:
        possible: Whether enough machines can hold a stage, and the starter is one of them.
        most: Samples of a microbatch that all of them have room for.
        counts: Numbers of machines that are worth a look: all, without the slowest kinds, halves.
    """

    def __init__(
        self,
        model: ModelProfile,
        machines: Sequence[Machine],
        num_stages: int,
        limits: Limits,
        num_machines: int | None = None,
    ) -> None:
        self._machines = machines
        self._stages = cut(model, num_stages)
        self._largest_bytes = max(one.state_bytes for one in self._stages)
        rooms = [min(room_samples(stage, one) for stage in self._stages) for one in machines]
        fit = [one for one, room in zip(machines, rooms, strict=True) if room >= 1.0]
        self.most = int(min((room for room in rooms if room >= 1.0), default=0.0))
        self._left_out = tuple(one.name for one, room in zip(machines, rooms, strict=True) if room < 1.0)
        self.possible = len(fit) >= num_stages and rooms[0] >= 1.0 and _trains(model, machines[0])
        if self.possible:
            used, rates = _fastest_first(fit, max(self._stages, key=lambda stage: stage.flop))
            self.counts = _counts(rates, num_stages)
            self._spared = tuple(one.name for one in used[num_machines or len(used) :])
            used, rates = used[:num_machines], rates[:num_machines]
            self._swarm = Swarm(model, used, self._stages, assign(rates, num_stages), limits)
            self._averaging_s = _averaging_s(self._swarm)
            self._passages: dict[tuple[int, int], tuple[PipelinePass, PipelinePass]] = {}

    def times(self, setting: Setting) -> Times:
        """Where the time of a step goes."""
        swarm, size = self._swarm, setting.batch_size
        forward, backward = self._both_ways(setting)
        num_batches = math.ceil(setting.target_batch_size / size)
        return Times(
            forward_s=num_batches * forward.slowest.seconds,
            backward_s=num_batches * backward.slowest.seconds,
            fill_s=num_batches * (forward.fill_s + backward.fill_s),
            around_s=num_batches * size * swarm.model.around.flop / swarm.starter.flop_per_s,
            averaging_s=self._averaging_s,
            closing_s=STEP_S + 2 * STEP_TRIPS * max(one.latency_s for one in swarm.machines),
        )

    def _both_ways(self, setting: Setting) -> tuple[PipelinePass, PipelinePass]:
        sizes = setting.microbatch_size, setting.batch_size
        if sizes not in self._passages:
            self._passages[sizes] = passage(self._swarm, 0, *sizes), passage(self._swarm, 1, *sizes)
        return self._passages[sizes]

    def predict(self, setting: Setting) -> Prediction:
        """What a setting of that number of stages gives."""
        swarm, times, size = self._swarm, self.times(setting), setting.target_batch_size
        sent = sent_bytes(swarm, size)
        slowest = max((one.slowest for one in self._both_ways(setting)), key=lambda one: one.seconds)
        flop_per_s = sum(one.flop_per_s for one in self._machines)
        return Prediction(
            setting=setting,
            samples_per_s=size / times.step_s,
            times=times,
            slowest=slowest.what,
            line_share=slowest.line_s / slowest.seconds,
            utilisation=size * swarm.model.flop / (times.step_s * flop_per_s),
            stages=tuple(tuple(swarm.machines[n].name for n in numbers) for numbers in swarm.held),
            left_out=self._left_out,
            spared=self._spared,
            boundary_bytes=tuple(round(one.output_bytes * setting.microbatch_size) for one in swarm.stages[:-1]),
            boundary_gradient_bytes=tuple(
                round(one.output_gradient_bytes * setting.microbatch_size) for one in swarm.stages[:-1]
            ),
            step_bytes=_by_name(swarm, sent),
            sent_bytes_per_s=sum(sent) / times.step_s + _snapshot_bytes_per_s(swarm),
            state_bytes=self._largest_bytes,
            recomputed=max(swarm.recomputed(index, setting.batch_size) for index in range(len(swarm.stages))),
        )


def _fastest_first(machines: Sequence[Machine], stage: StageProfile) -> tuple[list[Machine], list[float]]:
    """The starter, then the others, and what each does at a stage in samples/s."""
    rates = [
        1.0 / sum(pace_of(one, phase, USUAL_MICROBATCH).seconds for phase in phases(stage, 0.0)) for one in machines
    ]
    order = [0, *sorted(range(1, len(machines)), key=lambda number: -rates[number])]
    return [machines[number] for number in order], [rates[number] for number in order]


def _counts(rates: Sequence[float], num_stages: int) -> list[int]:
    num_machines, least = len(rates), max(2, num_stages)  # one machine is no swarm
    kinds = [number for number in range(2, num_machines) if rates[number] != rates[number - 1]]
    halves = [num_machines >> power for power in range(1, num_machines.bit_length())]
    return [num_machines, *sorted({count for count in (*kinds, *halves) if count >= least}, reverse=True)]


def _trains(model: ModelProfile, starter: Machine) -> bool:
    """Whether what is around the stages fits beside a stage, with a microbatch of one sample."""
    around = state_bytes(model, model.around.parameters)
    return around + model.around.graph_bytes <= starter.memory_bytes


def sent_bytes(swarm: Swarm, batch_size: int) -> list[float]:
    """What each machine sends in a step over its line, without snapshots and without words about the tensors."""
    sent = [0.0] * len(swarm.machines)
    for index, numbers in enumerate(swarm.held):
        known = {}
        for number, _ in swarm.kinds[index]:
            of_tensors = sum(
                swarm.share(index, number, way) * swarm.phase(index, number, way, batch_size).sent_bytes
                for way in (0, 1)
            )
            known[id(swarm.machines[number]), number == 0] = of_tensors * batch_size + averaged_bytes(swarm, index)
        for number in numbers:
            sent[number] = known[id(swarm.machines[number]), number == 0]
    sent[0] += sum(ways_of_trainer(swarm, way)[1] for way in (0, 1)) * batch_size
    return sent


def averaged_bytes(swarm: Swarm, index: int) -> float:
    """What each machine of a stage sends, and receives, to average."""
    return _averaged(swarm, index).num_bytes


def _averaged(swarm: Swarm, index: int) -> TransferSize:
    """Its part of the mean to all, and to each of the others that one's part of its sums."""
    num_machines, number_bytes = len(swarm.held[index]), sum_bytes(swarm.model)
    numbers = 2.0 * (num_machines - 1) / num_machines * swarm.stages[index].parameters
    return travelling(numbers * number_bytes, number_bytes, swarm.model.wire.averaging)


def _averaging_s(swarm: Swarm) -> float:
    """Of the slowest machine; all send and receive at the same time."""
    slowest_s = 0.0
    for index, kinds in enumerate(swarm.kinds):
        averaged = _averaged(swarm, index)
        num_bytes = averaged.num_bytes
        for number, _ in kinds:
            machine = swarm.machines[number]
            line_s = num_bytes / min(machine.up_bytes_per_s, machine.down_bytes_per_s) / GOODPUT
            busy_s = 2 * num_bytes * HANDLING_S_PER_BYTE
            busy_s += swarm.stages[index].parameters * STEP_S_PER_PARAMETER[machine.processor]
            busy_s += averaged.coding_s if machine.processor == "cpu" else 0.0
            slowest_s = max(slowest_s, line_s + busy_s)
    return slowest_s


def _snapshot_bytes_per_s(swarm: Swarm) -> float:
    """One server of each stage sends a copy of its weights and its optimizer's state to another stage's."""
    interval_s = swarm.limits.snapshot_interval
    if interval_s is None or len(swarm.stages) == 1:
        return 0.0
    parameters = sum(stage.parameters for stage in swarm.stages)
    return parameters * (1 + ADAM) * swarm.model.weight_bytes / interval_s


def _by_name(swarm: Swarm, sent: Sequence[float]) -> dict[str, int]:
    found: dict[str, int] = {}
    for machine, num_bytes in zip(swarm.machines, sent, strict=True):
        found[machine.name] = max(round(num_bytes), found.get(machine.name, 0))
    return found


LARGEST_BATCH: Final = 4096
"""Samples of a step, unless another number is given."""

_ENOUGH: Final = 0.9
"""Of the best rate that any batch gives: a larger batch than needed for that is not worth its fewer steps."""

_SAME: Final = 0.98
"""Of a rate: what is no reason for more stages, or larger microbatches."""

_MOST_STAGES: Final = 64
_LARGEST_MICROBATCH: Final = 256
_LARGEST_BATCH: Final = 1024
_MOST_COUNTS: Final = 8


def make_plan(
    model: ModelProfile,
    machines: Sequence[Machine],
    *,
    target_batch_size: int | None = None,
    largest_batch_size: int = LARGEST_BATCH,
    limits: Limits | None = None,
) -> Plan:
    """The best setting, and the best machine alone.

    Args:
        model: What is trained.
        machines: Each of them, the starter first.
        target_batch_size: Samples of a step; None: the smallest number that is nearly as fast as any.
        largest_batch_size: The largest one to look at.
        limits: Of the servers.
    """
    sizes = [target_batch_size] if target_batch_size else list(_powers(largest_batch_size))
    found = list(_predictions(model, machines, sizes, limits or Limits()))
    best = _chosen(found)
    size = best.setting.target_batch_size if best else sizes[-1]
    compared = [one for one in found if one.setting.target_batch_size == size]
    return Plan(
        best=best,
        alone=fastest_alone(model, machines, size),
        by_stages=tuple((one.setting.num_stages, one.samples_per_s) for one in compared),
    )


def predict(
    model: ModelProfile, machines: Sequence[Machine], setting: Setting, limits: Limits | None = None
) -> float | None:
    """Samples/s with a given setting, or None if no machines can do it.

    Args:
        model: What is trained.
        machines: Each of them, the starter first.
        setting: At most as many stages as there are blocks.
        limits: Of the servers.
    """
    predictor = Predictor(model, machines, setting.num_stages, limits or Limits())
    return predictor.predict(setting).samples_per_s if predictor.possible else None


def _powers(largest: int) -> Iterable[int]:
    size = 1
    while size <= largest:
        yield size
        size *= 2


def _predictions(
    model: ModelProfile, machines: Sequence[Machine], batch_sizes: Sequence[int], limits: Limits
) -> Iterable[Prediction]:
    """Of each number of stages and samples of a step, with the machines, batches and microbatches that do best."""
    for num_stages in range(1, min(len(model.blocks), len(machines), _MOST_STAGES) + 1):
        all_of_them = Predictor(model, machines, num_stages, limits)
        if not all_of_them.possible:
            continue
        fewer = [Predictor(model, machines, num_stages, limits, count) for count in all_of_them.counts[1:_MOST_COUNTS]]
        for target in batch_sizes:
            best = all_of_them.predict(_best_sizes(all_of_them, num_stages, target))
            for predictor in fewer:
                found = predictor.predict(_best_sizes(predictor, num_stages, target))
                best = found if found.samples_per_s * _SAME > best.samples_per_s else best
            yield best


def _best_sizes(predictor: Predictor, num_stages: int, target: int) -> Setting:
    """The smallest batches, and of these the smallest microbatches, that are nearly as fast as any."""
    sizes = [
        Setting(num_stages=num_stages, microbatch_size=size, batch_size=batch_size, target_batch_size=target)
        for batch_size in (*_powers(min(target - 1, _LARGEST_BATCH)), target)
        if target % batch_size == 0
        for size in _powers(min(batch_size, _LARGEST_MICROBATCH, predictor.most))
    ]
    taken_s = [predictor.times(setting).step_s for setting in sizes]
    least_s = min(taken_s)
    return next(setting for setting, step_s in zip(sizes, taken_s, strict=True) if step_s * _SAME <= least_s)


def _chosen(found: Sequence[Prediction]) -> Prediction | None:
    if not found:
        return None
    enough = _ENOUGH * max(one.samples_per_s for one in found)
    size = min(one.setting.target_batch_size for one in found if one.samples_per_s >= enough)
    these = [one for one in found if one.setting.target_batch_size == size]
    enough = _SAME * max(one.samples_per_s for one in these)
    return min((one for one in these if one.samples_per_s >= enough), key=lambda one: one.setting.num_stages)
