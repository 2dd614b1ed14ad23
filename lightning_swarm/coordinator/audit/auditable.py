"""Refuses runs and changes that cannot be audited. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_swarm.core.errors import ConfigError
from lightning_swarm.core.readable import few
from lightning_swarm.protocol.messages.run import Manifest, Selection, StageManifest, first_trained
from lightning_swarm.protocol.tied_tensors import TiedTensors


def check_auditable(manifest: Manifest) -> None:
    """Refuse an audited run whose servers exchange more than gradient sums, or some of which train nothing."""
    if manifest.is_whole:
        raise ConfigError(
            "with `trust='audited'` the model is cut into stages, for what a trainer computes itself nobody audits: "
            "this one is whole. Set `num_stages`, and `microbatch_size` where that is 1."
        )
    stages = manifest.stages
    seeing = [index for index, stage in enumerate(stages) if stage.statistics]
    if seeing:
        raise ConfigError(
            "with `trust='audited'` blocks keep no running statistics, for nobody checks what a server says that its "
            f"batch norms saw: the stages {seeing} have some. Use GroupNorm or LayerNorm, or BatchNorm with "
            "`track_running_stats=False`."
        )
    ties = TiedTensors(stages)
    if ties:
        names = sorted({name for index in range(len(stages)) for name in ties.of(index)})
        raise ConfigError(
            "with `trust='audited'` no parameter is in two stages, for nobody checks what one stage tells the other of "
            f"its gradient: {few(names)} are. Untie them, or cut the model so that one stage has them."
        )
    check_trains_from_the_start(manifest.selection, stages)


def check_trains_from_the_start(selection: Selection | None, stages: Sequence[StageManifest]) -> None:
    """Refuse to freeze all of the first stages of an audited run, because no work there could be audited."""
    first = first_trained(selection, stages)
    if selection is not None and first > 0:
        raise ConfigError(
            "with `trust='audited'` the first stage trains something, for audits look into gradients: stages "
            f"0..{first - 1} train nothing. Train a parameter of the first block, such as a bias, or cut the model so "
            "that what is frozen is in a stage that trains (`split`)."
        )
