"""Hooks of module and callback are called as by the plain Trainer: as often, in the same order, at the same steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from typing_extensions import override

from tests.parity.harness import assert_exact, run_plain, run_swarm
from tests.parity.models import DigitsMLP, digits, loader
from tests.parity.test_whole import WHOLE, Branches

OF_BOTH = {name for name in dir(L.Callback) if name.startswith("on_")} | {"setup", "teardown", "state_dict"}
OF_MODULE = {
    *{name for name in dir(L.LightningModule) if name.startswith("on_") and name != "on_gpu"},
    *("setup", "teardown", "prepare_data", "configure_model", "configure_callbacks", "configure_optimizers"),
    *("training_step", "validation_step", "backward", "lr_scheduler_step", "transfer_batch_to_device"),
}
OF_OTHERS = ("test", "predict", "exception", "on_load_checkpoint")  # hooks that `fit` does not call
STOP_AT = 10  # batches, of 14

Call = tuple[str, int, tuple[int, ...]]
"""The hook, the global step, and its integer arguments, such as the batch index."""


OF_SNAPSHOTS = {"state_dict", "on_save_checkpoint"}
"""Hooks that the run's snapshots call in addition."""


def recording(base: type[Any], names: set[str]) -> type[Any]:
    """Derive a class that records its hooks' calls in `calls`, and the calls by snapshots in `by_snapshots`."""

    def recorded(name: str) -> Callable[..., Any]:
        own = getattr(base, name)

        def hook(self: Any, *args: Any, **kwargs: Any) -> Any:
            given = next((one for one in args if isinstance(one, L.Trainer)), None)
            trainer = self._trainer = given or getattr(self, "_trainer", None)
            numbers = tuple(one for one in (*args, *kwargs.values()) if type(one) is int)
            states = getattr(getattr(getattr(trainer, "strategy", None), "rollback", None), "states", None)
            if states is not None and states.is_saving:
                self.by_snapshots.append(name)
            else:
                step = 0 if trainer is None else trainer.global_step
                self.calls.append((f"{base.__name__}.{name}", step, numbers))
            return own(self, *args, **kwargs)

        return hook

    return type(base)(base.__name__, (base,), {name: recorded(name) for name in names})


class Stops(L.Callback):
    """Ends training in the middle of an epoch, and of an accumulation window."""

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        trainer.should_stop = trainer.should_stop or trainer.fit_loop.total_batch_idx + 1 == STOP_AT


class Validates(L.LightningModule):
    @override
    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.net(batch[0]).square().mean())

    @override
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        schedule = {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9), "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": schedule}


class Cut(Validates, DigitsMLP):
    """A module that is a chain of blocks, so it can be cut."""


class Whole(Validates, Branches):
    """A module that is no chain of blocks, so it is trained without a cut."""


@dataclass
class Seen:
    run: Any
    calls: list[Call]
    by_snapshots: list[str]


def fit(run: Callable[..., Any], make: type[Any], folder: Path) -> Seen:
    calls: list[Call] = []
    by_snapshots: list[str] = []

    def recorder(base: type[Any], names: set[str]) -> Any:
        made = recording(base, names)()  # a server's copy of the object records into lists of its own
        made.calls, made.by_snapshots = calls, by_snapshots
        return made

    found = run(
        lambda: recorder(make, OF_MODULE),
        loader(digits()),
        loader(digits()),
        max_epochs=3,
        accumulate_grad_batches=2,
        limit_val_batches=2,
        num_sanity_val_steps=1,
        enable_checkpointing=True,
        callbacks=[recorder(Stops, OF_BOTH), ModelCheckpoint(folder, every_n_train_steps=3, save_top_k=-1)],
    )
    return Seen(found, calls, by_snapshots)


@pytest.mark.parametrize(
    ("make", "swarm"),
    [(Cut, {"num_servers": 2}), (Cut, {"num_stages": 3, "num_servers": 4}), (Whole, {"num_servers": 1, **WHOLE})],
    ids=["two stages", "three stages", "no cut"],
)
def test_all_hooks_of_a_fit(make: type[Any], swarm: dict[str, Any], tmp_path: Path) -> None:
    plain, ours = fit(run_plain, make, tmp_path / "plain"), fit(partial(run_swarm, **swarm), make, tmp_path / "swarm")
    assert len(plain.run.losses) == STOP_AT
    missed = {name for name in OF_MODULE if f"{make.__name__}.{name}" not in {called for called, _, _ in plain.calls}}
    assert missed == {name for name in OF_MODULE if any(part in name for part in OF_OTHERS)}
    assert ours.calls == plain.calls
    assert {*ours.by_snapshots} <= OF_SNAPSHOTS
    assert_exact(ours.run, plain.run)
