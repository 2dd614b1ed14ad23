"""Where a LightningModule is cut into stages, and the layers that are put in there."""

from __future__ import annotations

from collections.abc import Sequence

from lightning.pytorch import Trainer

from lightning_swarm import rules
from lightning_swarm.boundary import boundary_layers
from lightning_swarm.config import SwarmConfig
from lightning_swarm.errors import ConfigError
from lightning_swarm.framework import framework_of
from lightning_swarm.partition import (
    Blocks,
    check_cuts,
    choose_ranges,
    find_blocks,
    insert_at_cuts,
    layers_behind,
    time_costs,
)


def check(trainer: Trainer, config: SwarmConfig, num_stages: int, *, restored: bool) -> None:
    """Refuse what cannot be cut, as far as it can be seen before the model is configured.

    Args:
        trainer: Whose module it is.
        config: The user's settings.
        num_stages: Into how many.
        restored: Whether the model comes from a checkpoint, which may bring layers.

    Raises:
        ConfigError: With the remedy.
    """
    module, is_overridden = trainer.lightning_module, framework_of(trainer).is_overridden
    if is_overridden("setup", module) or is_overridden("configure_model", module):
        return
    # The model is what it will be. How a cut is balanced may cost time; whether there is one does not.
    named = config.split if not isinstance(config.split, str) else "parameters"
    blocks = find_blocks(module, config.pipeline)
    ranges = choose_ranges(blocks, num_stages, named, seams=layers_behind(module, blocks))
    if config.split == named and not restored and config.boundary is not None:
        if not boundary_layers(module):
            rules.check_new_layers(trainer, restored=False)
        check_cuts(module, blocks, ranges, config.boundary)


def choose(trainer: Trainer, blocks: Blocks, config: SwarmConfig, num_stages: int) -> Sequence[range]:
    """The blocks of each stage, where no run says so."""
    return choose_ranges(
        blocks,
        num_stages,
        config.split,
        lambda: _block_costs(trainer, blocks),
        seams=layers_behind(trainer.lightning_module, blocks),
    )


def insert_layers(
    trainer: Trainer, blocks: Blocks, config: SwarmConfig, ranges: Sequence[range], *, restored: bool
) -> None:
    """Put the boundary layers in that the user asks for. A model that has such layers is cut where they stand.

    Args:
        trainer: Whose module it is.
        blocks: Of the module.
        config: The user's settings.
        ranges: The blocks of each stage.
        restored: Whether the model comes from a checkpoint.

    Raises:
        ConfigError: They cannot be put in there, or by now.
    """
    if config.boundary is not None:
        if not boundary_layers(trainer.lightning_module):
            rules.check_new_layers(trainer, restored=restored)
        insert_at_cuts(trainer.lightning_module, blocks, ranges, config.boundary)


def _block_costs(trainer: Trainer, blocks: Blocks) -> Sequence[int]:
    """What each block of the Trainer's module costs on this machine, for ``split="time"``.

    Raises:
        ConfigError: There is no example to measure with.
    """
    module, strategy = trainer.lightning_module, trainer.strategy
    example = module.example_input_array
    if example is None:
        raise ConfigError(
            "`split='time'` measures the blocks with an example, so `example_input_array` must be set: "
            f"{type(module).__name__} has none. Set it in `__init__` to what `forward` takes, a batch of a usual "
            "size, or use `split='parameters'`."
        )
    example = strategy.batch_to_device(strategy.precision_plugin.convert_input(example), strategy.root_device)
    return time_costs(module, blocks, example, context=strategy.precision_plugin.forward_context)
