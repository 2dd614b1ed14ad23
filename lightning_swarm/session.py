"""A trainer's session in a run: batches in, records out. What the Lightning loop drives."""

from __future__ import annotations

from typing import Any

from lightning_swarm.errors import StepError
from lightning_swarm.pipeline.pipeline import BatchInHand, Pipeline
from lightning_swarm.runtime import Runtime
from lightning_swarm.selection import first_trained
from lightning_swarm.steps.client import StepClient
from lightning_swarm.types import Manifest, Record, Selection


class Session:
    """One trainer's batches.

    Args:
        runtime: The way to the swarm's loop.
        pipeline: Its data plane.
        steps: Its coordinator.
        manifest: Of the run.
    """

    def __init__(self, runtime: Runtime, pipeline: Pipeline, steps: StepClient, manifest: Manifest) -> None:
        self._runtime = runtime
        self.pipeline = pipeline
        self._steps = steps
        self._stages = manifest.stages
        self.selection = manifest.selection
        pipeline.version = steps.version
        pipeline.first_trained = first_trained(self.selection, self._stages)

    @property
    def version(self) -> int:
        """Records that were applied so far."""
        return self._steps.version

    def select(self, selection: Selection) -> None:
        """Tell the swarm what trains from the open step on. Nothing may be granted in it yet."""
        self._runtime.run(self._steps.select(selection))
        self.selection = selection
        self.pipeline.first_trained = first_trained(selection, self._stages)

    def begin_batch(self, num_samples: int, *, gradient_scale: float) -> None:
        """Get a place in the open step for the batch in hand, whose loss will be multiplied by `gradient_scale`."""
        grant = self._runtime.run(self._steps.grant(num_samples, gradient_scale))
        self.pipeline.version = self._steps.version
        self.pipeline.batch = BatchInHand(grant)

    def withdraw_batch(self) -> None:
        """The batch will not be trained on: nothing of it counts.

        Raises:
            StepError: Some of its gradients may be in the sums already.
        """
        batch = self._taken()
        if batch.backward_begun:
            raise StepError(
                f"step {batch.grant.step}: a batch failed after its backward had begun; its step cannot be decided"
            )
        self._runtime.run(self._steps.done(batch.grant.lease, [], withdrawn=True))

    def finish_batch(self, *, hyperparameters: list[dict[str, Any]]) -> bool:
        """The batch is through. True when its step closes now: then `await_record`."""
        batch = self._taken()
        return self._runtime.run(self._steps.done(batch.grant.lease, batch.completed, hyperparameters=hyperparameters))

    def close_step(self, *, window: float | None, hyperparameters: list[dict[str, Any]]) -> None:
        """Ask to close the open step with what it has."""
        self._runtime.run(self._steps.done(None, [], close=True, total_weight=window, hyperparameters=hyperparameters))

    def await_record(self) -> Record:
        """The record of the closing step, once it is applied."""
        record = self._runtime.run(self._steps.record(self._steps.version))
        self.pipeline.version = self._steps.version
        return record

    def _taken(self) -> BatchInHand:
        batch, self.pipeline.batch = self.pipeline.batch, None
        if batch is None:
            raise StepError("no batch is in hand")
        return batch
