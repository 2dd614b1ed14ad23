"""Writes the table of features from the marks of this folder's tests: ``python -m tests.features.table``."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from tests.features.mark import Verdict

FILE = Path(__file__).parents[2] / "docs" / "features.md"

_HEAD = """# Lightning's features in a swarm

**The contract: whatever a module, hook or callback may do in plain Lightning has the plain Trainer's result, or is
refused before or at the moment it happens.** The error is a `ConfigError`: it gives the rule, the value that it found, and
the remedy.

Each row of the tables is a test in `tests/features`. Most of these tests compare a swarm of two stages with the plain
Trainer in float64: losses, weights, and the result of the feature itself. *Works* means: as with the plain Trainer.
*Partly*: the note says what differs. *Refused*: an error before training starts, or when it happens, and the note names
the remedy.

This file is written by `python -m tests.features.table > docs/features.md`; edit the tests.

## What user code can touch

*Blocks* are the parts of the pipelined module; stages of them live on servers. *Layers around them* are the rest of the
LightningModule, which each trainer computes itself. All hooks and callbacks run on the trainers, on their own module.

| what | who holds the truth | how a change is noticed | what happens |
|---|---|---|---|
| parameters | the servers of each stage; for layers around the blocks the trainers, whose own servers step copies of them | those of blocks tell of each use, and are then compared with what they were; the others are compared after each step | a use of a block's parameter first gathers the newest weights; what was written between two steps goes to the servers with the next step, and evaluations before that compute with it; in mid-step it is refused |
| buffers of blocks | the servers | like parameters | like parameters; running statistics of `BatchNorm` are part of the step |
| buffers of other layers | the trainer's module | they are its own | as with the plain Trainer |
| attributes of blocks | the trainer | compared with the last call's, at each call | plain values travel with the call; others are refused by name |
| what a forward leaves on blocks | the servers that ran it | blocks are compared before and after their forward | the values of all microbatches are put together on the trainer's module, with their gradients; what cannot be is refused when it is read |
| gradients | the servers' sums | backwards pass through the call of the pipeline; `.grad` of blocks is looked at after each batch | only Lightning's own backward adds to the step; gradients by the input are given, those by weights of blocks are refused |
| what trains: `requires_grad`, parameter groups | the trainer's module and optimizer | read before each batch, and at each call | the step begins with it; changes within a step are refused, unless all weights are frozen for one call |
| optimizer | hyperparameters: the lead's optimizer; its state: the servers | the record of each step takes the hyperparameters as they are then | servers step copies of it with them; the trainer's object gets the state when `fit` ends, and checkpoints have it |
| schedulers | the lead's | they change the lead's optimizer | moved once for each decided step; those that the module keeps and steps itself work, too |
| random numbers | outside of blocks: the trainer's generators; within blocks: a key of the run's seed, the microbatch and the stage | random operations in blocks are intercepted | outside of blocks the same numbers as with the plain Trainer; within blocks others, the same ones at each repetition |
| the graph of blocks | Python on each peer: all run the same script | modules are compared at each call, and structures when a peer joins | a module that was replaced or hooks that only one peer has are refused; copies of the pipelined module are the trainer's own |
| modes: `train()`, `eval()` | the trainer's module, module by module | read at each call | they travel with the call |
| forward hooks on blocks | the trainer's, if they take note of values; every peer's, if they change them | read at each call | the first are called on the trainer with values of the whole batch; the second run where the block does |
| hooks of Lightning | the trainer | they are its own | called in plain Lightning's order and number |
| batches | the trainer that reads them | the call copies what it sends | a batch may be changed before and after the call |
| checkpoints | the trainer writes ordinary files, from weights that it gathers | what hooks wrote since the last step is in them | a plain Trainer goes on from them, and the other way round |

## What is checked while training

| check | when | cost | what the error says |
|---|---|---|---|
| blocks compute each sample by itself | at the first call of each kind (train or eval, dtypes, ranks) that is cut | five microbatches without gradients | by how much outputs changed beside other rows; `microbatch_size` = the whole batch, or samples in dimension 0 |
| a forward starts from nothing that an earlier one left | at each forward on a server | one comparison of the block's attributes | the attribute and the block; return the value, or keep it in `training_step` |
| what forwards left can be put together | when it is left; rules are learnt from two microbatches of the first batch | once, three microbatches without gradients | the attribute and the block; one value for each sample, or whole batches as microbatches |
| attributes and modules of blocks | at each call | one comparison for each stage | the attribute, and what it became |
| watched weights | at each use by user code | nothing without a use; a gather for the first use after a step, then a comparison of what was used | which weights were written in mid-step, and where they may be |
| replaced parameters | before each batch and at each call | one pass over the names | the parameter; write into it by `copy_` |
| weights of layers around the blocks | after each step, and before the next batch | one comparison | as for watched weights |
| weights reached without the pipeline (a penalty, a block called alone) | after each batch's backward | one pass over the parameters | which parameters; `weight_decay`, or call the whole pipelined module |
| transforms and gradients of second order | at the call or its backward | nothing | `create_graph`, `torch.func` or forward-mode AD by its name |
| backwards of one's own where plain Lightning would add them | at that backward | nothing | return the sum of all losses |
| what trains | before each batch, and at each call with gradients | one pass over the parameters | which parameters changed within the step |
| hooks on modules of blocks | at each call, and on each server | one pass over the modules | the hook by its name |
| replicas of a stage are equal to the bit | at each step, where a stage has several servers or one is to join | one hash of weights and optimizer state | which tensor differs, and likely causes |
"""

# In the order of the table. A module's docstring is its heading; `test_table` has no rows.
_MODULES = (
    "test_models",
    "test_loop",
    "test_data",
    "test_optimization",
    "test_gradients",
    "test_weights",
    "test_finetuning",
    "test_modes",
    "test_precision",
    "test_compiling",
    "test_logging",
    "test_checkpoints",
    "test_averaging",
    "test_callbacks",
    "test_trainers",
    "test_trainers_metrics",
)

Row = tuple[str, Verdict, str]


def render() -> str:
    """The whole file."""
    parts = [_HEAD]
    for name in _MODULES:
        module = importlib.import_module(f"tests.features.{name}")
        assert module.__doc__ is not None
        rows = [f"| {one} | {verdict} | {note} |" for one, verdict, note in rows_of(module)]
        heading = module.__doc__.splitlines()[0].rstrip(".")
        parts.append("\n".join([f"## {heading}", "", "| feature | verdict | note |", "|---|---|---|", *rows, ""]))
    return "\n".join(parts)


def rows_of(module: ModuleType) -> list[Row]:
    """The rows of one module's tests, in their order.

    Raises:
        ValueError: A test has no mark.
    """
    rows: list[Row] = []
    for name, test in vars(module).items():
        if name.startswith("test_"):
            marks = list(_marks(test))
            if not marks:
                raise ValueError(f"`{name}` in {module.__name__} needs a mark that says which feature it shows")
            rows += [(mark.args[0], mark.args[1], mark.args[2]) for mark in marks]
    return rows


def _marks(test: object) -> Iterator[pytest.Mark]:
    for mark in reversed(getattr(test, "pytestmark", [])):
        if mark.name == "feature":
            yield mark
        elif mark.name == "parametrize":
            for parameters in mark.args[1]:
                yield from (inner for inner in getattr(parameters, "marks", ()) if inner.name == "feature")


if __name__ == "__main__":
    print(render(), end="")
