"""What a server says of itself to whoever asks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from lightning_swarm.server.stage import Stage
from lightning_swarm.types.reports import HeldStage, StepReport
from lightning_swarm.types.runs import StageManifest
from lightning_swarm.types.steps import Record


def held(stages: Iterable[Stage], manifests: Sequence[StageManifest]) -> list[HeldStage]:
    """The stages that microbatches go through, and what these take there."""
    return [_held(stage, manifests[stage.index]) for stage in stages if not stage.on_trainers]


def _held(stage: Stage, manifest: StageManifest) -> HeldStage:
    parameters = stage.parameters.values()
    return HeldStage(
        index=stage.index,
        num_blocks=manifest.end_block - manifest.first_block,
        num_parameters=sum(one.numel() for one in parameters),
        weight_bytes=max((one.element_size() for one in parameters), default=4),
        samples_per_s=stage.load.samples_per_s,
        microbatch_size=stage.load.microbatch_size,
        costs=stage.computation.costs,
    )


def newest(record: Record | None) -> StepReport | None:
    """What the newest step was made of, if one was decided, and counted something."""
    if record is None or not record.closing.batches:
        return None
    return StepReport(num_samples=record.closing.num_samples, num_batches=len(record.closing.batches))


def num_parameters(stage: StageManifest) -> int:
    """Of a stage, as the manifest has it."""
    return sum(_product(shape) for _, shape, _ in stage.parameters)


def _product(shape: Sequence[int]) -> int:
    product = 1
    for size in shape:
        product *= size
    return product
