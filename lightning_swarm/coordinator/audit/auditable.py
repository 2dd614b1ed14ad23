"""Refuses runs and changes that cannot be audited. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_swarm.core.errors import ConfigError
from lightning_swarm.core.readable import few
from lightning_swarm.protocol.messages.run import Manifest, Selection, StageManifest, first_trained
from lightning_swarm.protocol.tied_tensors import TiedTensors


def check_auditable(manifest: Manifest) -> None:
    """Refuse an audited run if servers exchange more than gradient sums, or the first stages train nothing."""
    if manifest.is_whole:
        raise ConfigError(
            "with `trust='audited'` the model must be cut into stages, because no audit checks a trainer's own "
            "computation: this model is whole. Set `num_stages`, and `microbatch_size` if `num_stages` is 1."
        )
    stages = manifest.stages
    with_statistics = [index for index, stage in enumerate(stages) if stage.statistics]
    if with_statistics:
        raise ConfigError(
            "with `trust='audited'` blocks must keep no running statistics, because no audit checks the statistics of "
            f"servers: stages {with_statistics} keep some. Use GroupNorm or LayerNorm, or BatchNorm with "
            "`track_running_stats=False`."
        )
    ties = TiedTensors(stages)
    if ties:
        names = sorted({name for index in range(len(stages)) for name in ties.of(index)})
        raise ConfigError(
            "with `trust='audited'` no parameter may be in two stages, because no audit checks the gradient that one "
            f"stage sends to the other: {few(names)} are. Untie them, or cut the model so that one stage has them."
        )
    check_trains_from_the_start(manifest.selection, stages)


def check_trains_from_the_start(selection: Selection | None, stages: Sequence[StageManifest]) -> None:
    """Refuse a frozen first stage in an audited run, because no work there could be audited."""
    first = first_trained(selection, stages)
    if selection is not None and first > 0:
        raise ConfigError(
            "with `trust='audited'` the first stage must train a parameter, because audits check gradients: stages "
            f"0..{first - 1} train nothing. Train a parameter of the first block, such as a bias, or cut the model so "
            "that frozen blocks share a stage with trained ones (`split`)."
        )
