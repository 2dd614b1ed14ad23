"""Refuses what cannot work, or not yet, before anything starts: each error states the rule, the value, the remedy.

`trainer.py` checks the Trainer, its callbacks and what is handed to it; `model.py` the model, its optimizers and its
checkpoints; `multi_trainer.py` what several trainers cannot do together.
"""

from lightning_swarm.strategy.checks.model import (
    ONE_OPTIMIZER,
    check_ckpt_path,
    check_folder,
    check_in_memory,
    check_new_layers,
    check_new_selection,
    check_on_meta,
    check_optimizers,
    check_untouched,
    find_folder,
    hyperparameters,
)
from lightning_swarm.strategy.checks.multi_trainer import (
    check_alone,
    check_brought_callbacks,
    check_servers,
    check_trainers,
    may_be_shared,
    refuse_collective,
)
from lightning_swarm.strategy.checks.trainer import (
    check_compiling,
    check_data,
    check_data_module,
    check_interactive,
    check_strategy,
    check_trainer,
    makes_trials,
)

__all__ = [
    "ONE_OPTIMIZER",
    "check_alone",
    "check_brought_callbacks",
    "check_ckpt_path",
    "check_compiling",
    "check_data",
    "check_data_module",
    "check_folder",
    "check_in_memory",
    "check_interactive",
    "check_new_layers",
    "check_new_selection",
    "check_on_meta",
    "check_optimizers",
    "check_servers",
    "check_strategy",
    "check_trainer",
    "check_trainers",
    "check_untouched",
    "find_folder",
    "hyperparameters",
    "makes_trials",
    "may_be_shared",
    "refuse_collective",
]
