"""Finds suspicious gradient sums of one step: before servers' work is audited, and again as they were averaged."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from lightning_swarm.coordinator.audit.policy import Screening, StageHistory, StageProjection, Unit, screen
from lightning_swarm.coordinator.step.open_step import OpenStep
from lightning_swarm.network import PeerId
from lightning_swarm.protocol.messages.calls import Receipt


class StepScreen:
    """Compares the sums of one step with each other and with earlier steps' sums."""

    def __init__(self, step: OpenStep, histories: dict[int, StageHistory]) -> None:
        self._step, self._histories = step, histories
        self._is_recorded = False  # the histories include this step
        self._shares: dict[int, dict[PeerId, float]] = {}  # stage -> server -> weight of its claimed microbatches

    def screen(
        self, claims: Mapping[Unit, Collection[Receipt]], sums: Mapping[Unit, StageProjection]
    ) -> dict[int, Screening]:
        """Screen the projected sums of each stage, given the microbatches that each server claims."""
        num_microbatches = Counter(first for first, _, _ in self._step.counted)  # place of a batch -> its microbatches
        origins = self._step.origins
        weights = {first: origins[first].weight / number for first, number in num_microbatches.items()}
        screenings = {}
        for stage in sorted({unit.stage_index for unit in claims}):
            units = [unit for unit in claims if unit.stage_index == stage and unit in sums]
            shares = {unit.peer: sum(weights.get(first, 0.0) for first, _, _ in claims[unit]) for unit in units}
            self._shares[stage] = shares
            sketches = {unit.peer: sums[unit].values for unit in units}
            screenings[stage] = screen(sketches, shares, self._history(stage))
        return screenings

    def screen_again(self, stage_index: int, sums: Mapping[PeerId, Sequence[float]]) -> set[PeerId]:
        """Screen projections of the averaged sums; return the suspects, and servers with a sum but no claimed work."""
        shares = self._shares.get(stage_index, {})
        screened = {peer: values for peer, values in sums.items() if peer in shares}
        without_work = {peer for peer, values in screened.items() if not shares[peer] and any(values)}
        screening = screen(screened, {peer: shares[peer] for peer in screened}, self._history(stage_index))
        return without_work | screening.suspects

    def record(self, screenings: Mapping[int, Screening]) -> None:
        """Add the step to the histories, once."""
        if not self._is_recorded:
            self._is_recorded = True
            for stage, screening in screenings.items():
                self._history(stage).note(screening.norm, screening.spread)

    def _history(self, stage: int) -> StageHistory:
        return self._histories.setdefault(stage, StageHistory())
