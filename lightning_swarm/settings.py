"""What a Trainer's settings mean for the run that it starts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.enums import GradClipAlgorithmType

from lightning_swarm import rules
from lightning_swarm.server.model import kind_of
from lightning_swarm.starting import RunSpec
from lightning_swarm.types.runs import Selection


def how_to_go_on(trainer: Trainer) -> str:
    """What to do when a run broke off."""
    saved = {
        Path(path)
        for callback in trainer.checkpoint_callbacks
        for name in ("last_model_path", "best_model_path")
        if (path := getattr(callback, name, "")) and Path(path).exists()
    }
    if not saved:
        return "No checkpoint of this run is left to go on from: start it again, with a ModelCheckpoint."
    newest = max(saved, key=lambda path: path.stat().st_mtime)
    return f"Start the run again with `ckpt_path={str(newest)!r}`: it goes on from there, with the peers that it finds."


def run_spec(
    trainer: Trainer,
    ranges: Sequence[range],
    selection: Selection | None,
    *,
    num_servers: int,
    num_trainers: int,
    open_to_trainers: bool,
    first_step: int,
) -> RunSpec:
    """What the Trainer asks for, together with what it does not know: the arguments, each as in `RunSpec`."""
    clip_at = trainer.gradient_clip_val or None  # Lightning takes 0 for not clipping
    by_norm = trainer.gradient_clip_algorithm in (None, GradClipAlgorithmType.NORM)
    return RunSpec(
        ranges=ranges,
        num_servers=num_servers,
        num_trainers=num_trainers,
        open_to_trainers=open_to_trainers and selection is not None,
        seed=torch.initial_seed() % (1 << 62),
        gradient_clip_norm=clip_at if by_norm else None,
        gradient_clip_value=None if by_norm else clip_at,
        first_step=first_step,
        selection=selection,
        # Trial steps do not count, and Lightning sets a limit of its own for them.
        max_steps=trainer.max_steps if trainer.max_steps != -1 and not rules.makes_trials(trainer) else None,
        total_steps=_total_steps(trainer) if selection is not None else None,
        optimizer=kind_of(trainer.optimizers[0]) if selection is not None else None,
    )


def _total_steps(trainer: Trainer) -> int | None:
    """Steps of the whole run, if the Trainer knows them without loading data that nobody asked for yet."""
    if trainer.max_epochs == -1:
        return trainer.max_steps if trainer.max_steps != -1 else None
    if trainer.train_dataloader is None:
        return None
    steps = trainer.estimated_stepping_batches
    return int(steps) if steps != float("inf") else None
