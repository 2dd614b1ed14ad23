"""What cannot work, or not yet, is refused before anything starts: the rule, what was found, what to do.

`trainer.py` reads the Trainer and its module, `callbacks.py` and `imports.py` what is handed to it, `model.py` where a
model's weights are; `checkpoints.py` and `optimizers.py` check those, `several.py` what several trainers do together.
"""

from lightning_swarm.rules.callbacks import makes_trials as makes_trials
from lightning_swarm.rules.checkpoints import check_ckpt_path as check_ckpt_path
from lightning_swarm.rules.checkpoints import check_folder as check_folder
from lightning_swarm.rules.checkpoints import find_folder as find_folder
from lightning_swarm.rules.imports import check_data_module as check_data_module
from lightning_swarm.rules.imports import check_strategy as check_strategy
from lightning_swarm.rules.model import check_in_memory as check_in_memory
from lightning_swarm.rules.model import check_new_layers as check_new_layers
from lightning_swarm.rules.model import check_on_meta as check_on_meta
from lightning_swarm.rules.optimizers import ONE_OPTIMIZER as ONE_OPTIMIZER
from lightning_swarm.rules.optimizers import check_optimizers as check_optimizers
from lightning_swarm.rules.optimizers import hyperparameters as hyperparameters
from lightning_swarm.rules.several import check_alone as check_alone
from lightning_swarm.rules.several import check_brought_callbacks as check_brought_callbacks
from lightning_swarm.rules.several import check_servers as check_servers
from lightning_swarm.rules.several import check_trainers as check_trainers
from lightning_swarm.rules.several import may_be_shared as may_be_shared
from lightning_swarm.rules.several import refuse_collective as refuse_collective
from lightning_swarm.rules.trainer import check_compiling as check_compiling
from lightning_swarm.rules.trainer import check_data as check_data
from lightning_swarm.rules.trainer import check_interactive as check_interactive
from lightning_swarm.rules.trainer import check_trainer as check_trainer
