"""Estimates the stages' rates, and decides from them when servers move. Pure: callers pass the time."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, assert_never

from lightning_swarm.coordinator.rebalancing.policy import (
    SCATTER,
    Move,
    MoveCosts,
    StageRates,
    StageRelease,
    mean_rate,
    plan,
    plan_as_paper,
    plan_shedding,
    stage_for,
)
from lightning_swarm.coordinator.rebalancing.relief import plan_relief
from lightning_swarm.core.moving_average import MovingAverage
from lightning_swarm.network import PeerId
from lightning_swarm.protocol.settings import RebalancingRule

# Times between changes of the swarm
_FEWEST: Final = 0.01  # lower bound of the faded number of changes, which would approach 0 in a quiet swarm
_FIRST_HORIZON_S: Final = 600.0  # assumed time between changes, until more is known
_MEMORY_S: Final = 7200.0  # age at which a change counts 1/e

# Rates
_LEAST_PLAUSIBLE: Final = 1e-9  # samples/s of a peer; lower reported rates are ignored
_MOST_PLAUSIBLE: Final = 1e9  # samples/s, or waiting jobs
_SMOOTHING: Final = 0.3  # weight of the newest report in a mean that follows the reports
# Weight of the newest report in the slower mean about which the scatter is measured. Servers report moving averages, so
# successive reports are close to each other, even if both are far from the true rate.
_SCATTER_SMOOTHING: Final = 0.05
_FIRST_SCATTER: Final = 0.13  # standard deviation of a rate's logarithm that is assumed until reports show another
_REPORTS_PER_INDEPENDENT: Final = 2.0  # as they are moving averages, so many tell as much as one independent report
_SIGMAS: Final = 2.4  # standard deviations of the largest error that is considered
# Share by which a sample may cost more at one stage than at another, until a peer has served both. Partitions are that
# uneven, so equal peers of two stages may seem to differ by as much.
_WORK_SCATTER: Final = 0.3
_CORRECTED_SHARE: Final = 0.25  # each of two stages is corrected by this share of the error of their relative work
_MAX_LOG_WORK: Final = math.log(100.0)  # bound of a stage's `_log_work`

# Moves
_FIXED_S: Final = 3.0  # least duration of a move: a mover leaves by one record and enters by another
_LEAST_BUSY: Final = 1 / 3  # if the busiest stage computes a smaller share of the time, a faster stage saves little
# Mean seconds that the run loses by a change of the swarm that concerns a stage's only server. If that server dies, the
# run waits, then rolls back, which takes minutes. But most changes are servers that join, or that leave in order.
_LOST_S: Final = 100.0
_MIN_HANDOVER_SPEEDUP: Final = 1.25  # required to move the coordinator, because its successor measures all rates anew
_FIRST_BYTES_PER_S: Final = 12.5e6  # rate of a download, until one was seen
_MAX_DOWNLOADS: Final = 3  # simultaneous movers to a stage per member, because members send them its state
_GIVEN_UP: Final = 10.0  # a move is given up after this many times its expected duration


class ChurnEstimate:
    """Estimate of the time between changes of a swarm, from the last hours on the caller's clock."""

    def __init__(self, now_s: float) -> None:
        self._now_s = now_s
        self._past_s = _FIRST_HORIZON_S  # observed time, and changes in it; both fade with age
        self._num_changes = 1.0

    def note_change(self, now_s: float) -> None:
        """Record that peers came or left; several at a time are one change."""
        self._advance(now_s)
        self._num_changes += 1.0

    def horizon_s(self, now_s: float) -> float:
        """Return the mean time between two changes."""
        self._advance(now_s)
        return self._past_s / max(self._num_changes, _FEWEST)

    def _advance(self, now_s: float) -> None:
        """Add the time since the last call, and let older time and changes fade."""
        kept = math.exp((self._now_s - now_s) / _MEMORY_S)
        self._past_s = kept * self._past_s + (1.0 - kept) * _MEMORY_S
        self._num_changes *= kept
        self._now_s = now_s


@dataclass(frozen=True)
class ReportedLoad:
    """A server's report on one of its stages."""

    samples_per_s: float | None  # forward and backward, while it computes; None: not measured yet
    queued: float = 0.0  # waiting jobs, on average
    busy_share: float | None = None  # part of the last steps' time in which it computed; None: not measured yet
    lacks_memory: bool = False  # too little for one microbatch

    @classmethod
    def from_report(
        cls, samples_per_s: float | None, queued: float, busy_share: float | None, *, lacks_memory: bool = False
    ) -> ReportedLoad:
        """Read a report within plausible bounds, so that a false report cannot harm the coordinator."""
        is_plausible = samples_per_s is not None and _LEAST_PLAUSIBLE <= samples_per_s <= _MOST_PLAUSIBLE
        share = None if busy_share is None else min(busy_share, 1.0)
        return cls(samples_per_s if is_plausible else None, min(queued, _MOST_PLAUSIBLE), share, lacks_memory)


class RateEstimate:
    """Estimate of one peer's rate from its reports at each step, and of the estimate's error."""

    def __init__(self, samples_per_s: float, stage: int | None) -> None:
        self.stage = stage  # the peer's stage at its last report; None: it holds several
        self._log = self._slow_log = math.log(samples_per_s)  # fast and slow moving averages of the reports
        self._num_here = self._num_reports = 1  # reports from this stage, and from all
        self._variance = _FIRST_SCATTER**2  # variance of the reports' logarithms about the slow mean

    def update(self, samples_per_s: float, stage: int | None) -> None:
        """Add a report."""
        reported = math.log(samples_per_s)
        if stage != self.stage:  # a sample may cost more at the new stage
            self.stage, self._log, self._slow_log, self._num_here = stage, reported, reported, 1
            return
        self._num_here += 1
        self._num_reports += 1
        # The first reports have equal weights, because the smoothing alone would overweight the very first.
        self._log += max(_SMOOTHING, 1.0 / self._num_here) * (reported - self._log)
        deviation = reported - self._slow_log
        self._slow_log += max(_SCATTER_SMOOTHING, 1.0 / self._num_here) * deviation
        # Few correlated reports are close to their own mean, so their deviations are too small, and are scaled up.
        squared = deviation**2 * (1.0 + _REPORTS_PER_INDEPENDENT / self._num_here)
        self._variance += max(_SCATTER_SMOOTHING, 1.0 / self._num_reports) * (squared - self._variance)

    @property
    def samples_per_s(self) -> float:
        """Mean of the last reports, rounded so that the rates of equal peers are equal."""
        return float(f"{math.exp(self._log):.3g}")

    @property
    def scatter(self) -> float:
        """The relative error of the rate."""
        return min(max(SCATTER, _SIGMAS * math.sqrt(self._variance)), 1.0)


@dataclass(frozen=True)
class _MoveInProgress:
    """A move of a peer that has left its stage, and has not arrived at its target."""

    target: int
    began_s: float
    until_s: float  # the mover is given up if it has not arrived by then


class Balancer:
    """Decides for one run, by its rule, which peers move. Times are on the caller's clock."""

    def __init__(self, rule: RebalancingRule, interval_s: float, state_bytes: Sequence[int], *, now_s: float) -> None:
        self._rule, self._interval_s = rule, interval_s
        self._state_bytes = state_bytes  # bytes that a newcomer of each stage downloads
        self._loads: dict[PeerId, dict[int, ReportedLoad]] = {}
        self._estimates: dict[PeerId, RateEstimate] = {}  # rates of present peers, and of movers on their way
        self._log_work = [0.0] * len(state_bytes)  # stage -> log of a sample's cost, relative to the mean of all
        self._num_compared: Counter[frozenset[int]] = Counter()  # pair of stages -> measured moves between them
        self._too_large: dict[PeerId, set[int]] = {}  # stages for which each server has too little memory
        self._moving: dict[PeerId, _MoveInProgress] = {}
        self._stages_left: dict[PeerId, set[int]] = {}  # peer -> stages that it left since the swarm's last change
        self._bytes_per_s = MovingAverage(_SMOOTHING)
        self._present_at_decision: frozenset[PeerId] | None = None  # or, before any decision, at the first request
        self._peers_at_request: frozenset[PeerId] = frozenset()  # peers present or on their way at the last request
        self._churn = ChurnEstimate(now_s)
        self._step_s = MovingAverage(_SMOOTHING)
        self._asked_s: float | None = None  # time of the last request for moves
        self._decided_s = now_s  # time of the last decision; not every request leads to one

    def take_loads(self, loads: Mapping[PeerId, Mapping[int, ReportedLoad]]) -> None:
        """Record the newest loads of all servers."""
        # This rule needs no rates: no server moves, and newcomers go to the stage with the fewest servers.
        if self._rule == "none":
            return
        self._loads = {peer: dict(stages) for peer, stages in loads.items()}
        for peer, stages in self._loads.items():
            measured = {index: load.samples_per_s for index, load in stages.items() if load.samples_per_s}
            if measured and len(measured) == len(stages):
                self._update_estimate(peer, measured)
            lacking = {index for index, load in stages.items() if load.lacks_memory}
            self._too_large[peer] = (self._too_large.get(peer, set()) - stages.keys()) | lacking
        for peer in self._estimates.keys() - self._loads.keys() - self._moving.keys():
            del self._estimates[peer]
        for peer in self._too_large.keys() - self._loads.keys() - self._moving.keys():
            del self._too_large[peer]

    def _update_estimate(self, peer: PeerId, measured: Mapping[int, float]) -> None:
        """Add a peer's rates; if it has changed its stage, correct the cost of a sample at both stages."""
        # A peer of several stages computes each sample at all of them, so their times add up.
        rate = 1.0 / math.fsum(1.0 / rate for rate in measured.values())
        index = next(iter(measured)) if len(measured) == 1 else None
        estimate = self._estimates.get(peer)
        if estimate is None:
            self._estimates[peer] = RateEstimate(rate, index)
            return
        rate_before, source = estimate.samples_per_s, estimate.stage
        estimate.update(rate, index)
        # Without this correction, peers of a costly stage would count as slow, and be exchanged with equals forever.
        if index is not None and source is not None and index != source:
            self._num_compared[frozenset((index, source))] += 1
            error = math.log(rate_before / rate) - (self._log_work[index] - self._log_work[source])
            for stage, correction in ((index, error), (source, -error)):
                changed = self._log_work[stage] + _CORRECTED_SHARE * correction
                self._log_work[stage] = max(-_MAX_LOG_WORK, min(changed, _MAX_LOG_WORK))

    def _work_scatter(self, source: int, target: int) -> float:
        """Return the relative error of the ratio of two stages' work."""
        num_compared = self._num_compared[frozenset((source, target))]
        return _WORK_SCATTER * (1.0 - 2.0 * _CORRECTED_SHARE) ** num_compared  # each move corrects both stages

    def note_entered(self, peer: PeerId, stage: int, *, now_s: float) -> None:
        """Record that a mover has arrived."""
        move = self._moving.pop(peer, None)
        if move is not None and move.target == stage and self._state_bytes[stage]:
            took_s = max(now_s - move.began_s - self._between_s, 1e-3)
            self._bytes_per_s.measure(self._state_bytes[stage] / took_s)

    def moves(
        self,
        rosters: Sequence[Sequence[PeerId]],
        *,
        fixed: Collection[PeerId],
        joining: Mapping[PeerId, int],
        coordinator: PeerId | None = None,
        now_s: float,
    ) -> list[Move]:
        """Choose moves of peers that are not `fixed`, given the stages of `joining` peers."""
        if self._rule == "none":
            return []
        if self._asked_s is not None:
            self._step_s.measure(now_s - self._asked_s)
        self._asked_s = now_s
        self._drop_lost_movers(joining, now_s)
        present = frozenset(peer for roster in rosters for peer in roster)
        peers = present | self._moving.keys()
        if self._peers_at_request and peers != self._peers_at_request:
            self._churn.note_change(now_s)
            self._stages_left.clear()
        self._peers_at_request = peers
        if relief := plan_relief(rosters, self._too_large, self._state_bytes, fixed=fixed)[0]:
            return relief
        if not self._is_time(present, now_s):
            if self._present_at_decision is None:
                self._present_at_decision = present  # the first decision is due at once if peers come or leave
            return []
        if any(not any(peer in self._estimates for peer in roster) for roster in rosters):
            return []  # a stage without any measured peer
        if self._rule == "gain" and not self._computing_limits(rosters):
            return []  # computing rates mean nothing if computing is not the bottleneck
        self._present_at_decision, self._decided_s = present, now_s
        return self._bounded(rosters, self._plan(rosters, fixed, joining, coordinator, now_s))

    def releases(
        self,
        rosters: Sequence[Sequence[PeerId]],
        *,
        leaving: Collection[PeerId],
        joining: Mapping[PeerId, int],
        now_s: float,
    ) -> list[StageRelease]:
        """Choose peers that give up one of several stages, except stages that a joiner is downloading."""
        _, relief = plan_relief(rosters, self._too_large, self._state_bytes, fixed=leaving)
        if relief and self._rule != "none":
            return relief
        num_held = Counter(peer for roster in rosters for peer in roster)
        if self._rule != "gain" or max(num_held.values(), default=0) < 2 or not self._computing_limits(rosters):
            return []
        rates: list[dict[PeerId, float]] = [{} for _ in rosters]
        for index, roster in enumerate(rosters):
            for peer in roster:
                load = self._loads.get(peer, {}).get(index)
                if load is None or load.samples_per_s is None:
                    return []  # a rate is not measured yet
                rates[index][peer] = load.samples_per_s
        lone_costs = min(_LOST_S / (len(num_held) * self._churn.horizon_s(now_s)), 1.0)  # share of the run's time
        return plan_shedding(rates, kept=set(joining.values()), leaving=leaving, lone_costs=lone_costs)

    def _is_time(self, present: frozenset[PeerId], now_s: float) -> bool:
        """Return whether moves are due: after an interval or, except by the paper's rule, once peers came or left."""
        is_due = now_s >= self._decided_s + self._interval_s
        if self._rule == "paper":
            return is_due and not self._moving  # by this rule, one peer moves at a time
        return is_due or (self._present_at_decision is not None and present != self._present_at_decision)

    def _computing_limits(self, rosters: Sequence[Sequence[PeerId]]) -> bool:
        """Return whether the busiest stage computes for so much of the time that a faster stage would help."""
        busy = {
            peer: math.fsum(load.busy_share or 0.0 for load in stages.values())
            for peer, stages in self._loads.items()
            if all(load.busy_share is not None for load in stages.values())
        }
        shares = [[busy[peer] for peer in roster if peer in busy] for roster in rosters]
        means = [math.fsum(stage_shares) / len(stage_shares) for stage_shares in shares if stage_shares]
        return max(means, default=0.0) >= _LEAST_BUSY

    def _bounded(self, rosters: Sequence[Sequence[PeerId]], moves: Sequence[Move]) -> list[Move]:
        """Keep the moves whose downloads can run in parallel; later decisions plan further moves."""
        chosen: list[Move] = []
        room = [_MAX_DOWNLOADS * len(roster) for roster in rosters]
        for move in moves:
            room[move.target] -= 1
            if room[move.target] < 0:
                break
            chosen.append(move)
        return chosen

    def note_left(self, peer: PeerId, source: int, target: int, *, now_s: float) -> None:
        """Record that a peer was released by a record, in order to join another stage."""
        self._stages_left.setdefault(peer, set()).add(source)
        self._moving[peer] = _MoveInProgress(target, now_s, now_s + _GIVEN_UP * self._move_s(target))

    def stage_for(
        self, newcomer: PeerId, rosters: Sequence[Sequence[PeerId]], joining: Mapping[PeerId, int], *, now_s: float
    ) -> int:
        """Choose a newcomer's stage: the slowest, or the one with fewest peers if computing is not the bottleneck."""
        self._drop_lost_movers(joining, now_s)
        by_rates = self._rule == "paper" or self._computing_limits(rosters)
        stages = self._stages(rosters, (), joining, by_rates=by_rates)
        stages.remove(newcomer)  # if it is already on its way to a stage
        return stage_for(stages)

    def _plan(
        self,
        rosters: Sequence[Sequence[PeerId]],
        fixed: Collection[PeerId],
        joining: Mapping[PeerId, int],
        coordinator: PeerId | None,
        now_s: float,
    ) -> list[Move]:
        """Plan the moves by the run's rule, without bounds on downloads."""
        stages = self._stages(rosters, fixed if coordinator is None else {*fixed, coordinator}, joining)
        if self._rule == "gain":
            move_s = [self._move_s(index) for index in range(len(rosters))]
            costs = MoveCosts(move_s, self._churn.horizon_s(now_s), _LOST_S)
            moves = plan(stages, costs)
            # The coordinator may move, too, but only if that gains much more.
            all_stages = self._stages(rosters, fixed, joining)
            all_moves = plan(all_stages, costs)
            gains = mean_rate(all_stages, costs, all_moves) > _MIN_HANDOVER_SPEEDUP * mean_rate(stages, costs, moves)
            return all_moves if gains else moves
        if self._rule == "none":
            return []
        if self._rule != "paper":
            assert_never(self._rule)
        queues = [
            {peer: self._loads[peer][index].queued for _, peer in stages.movable(index) if peer in self._loads}
            for index in range(len(rosters))
        ]
        queued = [
            math.fsum(self._loads[peer][index].queued for peer in roster if peer in self._loads)
            for index, roster in enumerate(rosters)
        ]
        return list(filter(stages.stays_ahead, plan_as_paper(queued, queues)))

    def _stages(
        self,
        rosters: Sequence[Sequence[PeerId]],
        fixed: Collection[PeerId],
        joining: Mapping[PeerId, int],
        *,
        by_rates: bool = True,
    ) -> StageRates:
        """Collect the peers and rates of all stages. Unmeasured peers get the mean rate; all do if not `by_rates`."""
        estimates = self._estimates if by_rates else {}
        work = [math.exp(log) for log in self._log_work]
        stages = StageRates(len(rosters), work if by_rates else None, self._work_scatter)
        speeds = {  # peer -> samples/s at a stage of work 1
            peer: estimate.samples_per_s * (1.0 if estimate.stage is None else work[estimate.stage])
            for peer, estimate in estimates.items()
        }
        mean_speed = math.fsum(speeds.values()) / len(speeds) if speeds else 1.0
        num_held = Counter(peer for roster in rosters for peer in roster)
        for index, roster in enumerate(rosters):
            for peer in roster:
                # A peer of several stages is put into each of them under another name, and cannot move.
                name = PeerId(f"{peer} {index}") if num_held[peer] > 1 else peer
                stages.put(
                    name,
                    index,
                    speeds.get(peer, mean_speed),
                    movable=peer in estimates and num_held[peer] == 1 and peer not in fixed,
                    barred={*self._stages_left.get(peer, ()), *self._too_large.get(peer, ())},
                    scatter=estimates[peer].scatter if peer in estimates else SCATTER,
                )
        coming = {peer: move.target for peer, move in self._moving.items()} | dict(joining)
        for peer, index in coming.items():
            stages.expect(peer, index, speeds.get(peer, mean_speed))
        return stages

    def _move_s(self, target: int) -> float:
        return self._between_s + self._state_bytes[target] / (self._bytes_per_s.value or _FIRST_BYTES_PER_S)

    @property
    def _between_s(self) -> float:
        """Seconds of a move without its download: from the record that releases the mover to one that admits it."""
        return max(_FIXED_S, 2.0 * (self._step_s.value or 0.0))

    def _drop_lost_movers(self, joining: Collection[PeerId], now_s: float) -> None:
        """Give up movers that have not asked to join their target in time."""
        self._moving = {peer: move for peer, move in self._moving.items() if now_s < move.until_s or peer in joining}
