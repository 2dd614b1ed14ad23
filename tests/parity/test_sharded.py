"""Checkpoints as folders that servers write: any run resumes from them with one curve, and no peer holds all of it."""

from __future__ import annotations

import pickle
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import msgspec
import pytest
import torch
from lightning.fabric.utilities.load import _load_distributed_checkpoint
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.consolidate_checkpoint import _format_checkpoint
from pytorch_optimizer import Lamb
from torch import Tensor
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from typing_extensions import override

from lightning_swarm.core.errors import ConfigError, ProtocolError
from lightning_swarm.model import sharded_format
from lightning_swarm.model.export import join_shards
from lightning_swarm.testing import InMemoryStrategy
from tests.parity.harness import QUIET, Run, assert_exact, quiet_warnings, run_plain, run_swarm
from tests.parity.models import digits, loader, sentences
from tests.parity.test_meta import Net, in_memory, on_meta
from tests.parity.test_resume import Matrices, adam_8bit
from tests.parity.test_tied import TiedGPT

pytestmark = [
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
    pytest.mark.filterwarnings("ignore:The dirpath has changed"),
]

EPOCH = 7
SHARDED: dict[str, Any] = {"state_dict_type": "sharded", "pipeline": "net"}


def saving(folder: Path, **options: Any) -> dict[str, Any]:
    every = ModelCheckpoint(folder, "{step:03d}", auto_insert_metric_name=False, every_n_epochs=1, save_top_k=-1)
    return {"enable_checkpointing": True, "callbacks": [every], **options}


@pytest.mark.first_cells(1)
@pytest.mark.parametrize(("first", "second"), [(on_meta, on_meta), (in_memory, in_memory), (in_memory, on_meta)])
def test_it_goes_on_with_other_stages(first: Any, second: Any, tmp_path: Path) -> None:
    plain = run_plain(in_memory, loader(digits()), max_epochs=3)
    begun = run_swarm(first, loader(digits()), max_epochs=1, num_stages=2, num_servers=3, **saving(tmp_path), **SHARDED)
    folder = tmp_path / "007.ckpt"
    assert sorted(path.name for path in folder.iterdir()) == [
        ".metadata", *(f"__{part}_0.distcp" for part in range(4)), "meta.pt"
    ]  # fmt: skip
    rest = run_swarm(
        second,
        loader(digits()),
        max_epochs=3,
        num_stages=4,
        num_servers=2,
        ckpt_path=folder,
        **saving(tmp_path),
        **SHARDED,
    )
    assert [*begun.losses, *rest.losses] == pytest.approx(plain.losses, rel=1e-11)
    assert [*begun.learning_rates, *rest.learning_rates] == pytest.approx(plain.learning_rates, rel=1e-12)
    saved = sharded_format.ShardedCheckpoint(tmp_path / "021.ckpt")
    found = saved.read_weights(saved.weights)
    torch.testing.assert_close(found, dict(plain.weights), rtol=0.0, atol=1e-10)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")], "parts are left"


def go(run: Any, make: Any, folder: Path, num_epochs: int, **options: Any) -> Run:
    done: Run = run(make, loader(digits()), max_epochs=num_epochs, **saving(folder, **options))
    return done


@pytest.mark.first_cells(1)
@pytest.mark.parametrize(
    "optimizer", [adam_8bit, Lamb, torch.optim.Adagrad, torch.optim.ASGD, partial(torch.optim.SGD, momentum=0.9)]
)
def test_every_optimizers_state_comes_back(optimizer: Any, tmp_path: Path) -> None:
    """The state also loads from a single file that was converted from the folder."""

    def make() -> L.LightningModule:
        return Matrices(optimizer).double()

    for name in ("ordinary", "sharded"):
        (tmp_path / name).mkdir()
    ordinary, folder = tmp_path / "ordinary/007.ckpt", tmp_path / "sharded/007.ckpt"
    go(run_swarm, make, ordinary.parent, 1)
    go(run_swarm, make, folder.parent, 1, state_dict_type="sharded")
    assert join_shards(folder, tmp_path / "one.ckpt") == 3
    theirs, ours = (torch.load(path, weights_only=True) for path in (ordinary, tmp_path / "one.ckpt"))
    assert ours.keys() == theirs.keys()
    for key in ("state_dict", "optimizer_states"):
        torch.testing.assert_close(ours[key], theirs[key], rtol=0.0, atol=0.0)
    plain = go(run_plain, make, ordinary.parent, 2, ckpt_path=ordinary)
    exported = go(run_plain, make, ordinary.parent, 2, ckpt_path=tmp_path / "one.ckpt")
    assert exported.losses == plain.losses
    swarm = go(run_swarm, make, folder.parent, 2, ckpt_path=folder, num_stages=3, num_servers=3)
    assert_exact(swarm, plain)


def test_torch_and_lightning_read_it(tmp_path: Path) -> None:
    swarm = run_swarm(in_memory, loader(digits()), max_epochs=1, **saving(tmp_path), **SHARDED)
    folder = tmp_path / "007.ckpt"
    dcp_to_torch_save(folder, tmp_path / "torch.pt")
    whole = torch.load(tmp_path / "torch.pt", weights_only=False)
    torch.testing.assert_close(whole["model"], dict(swarm.weights), rtol=0.0, atol=0.0)  # tied weights under both names
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        read = _format_checkpoint(_load_distributed_checkpoint(folder))
    torch.testing.assert_close(read["state_dict"], dict(swarm.weights), rtol=0.0, atol=0.0)
    assert read["global_step"] == EPOCH
    (state,) = read["optimizer_states"]
    assert set(state["state"]) == {name for group in state["param_groups"] for name in group["params"]}
    assert set(state["state"]) == {name for name, _ in swarm.module.named_parameters()}


class TiedOnMeta(TiedGPT):
    """Shares one weight between embeddings and head, which are in different stages."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device_of_late: str | None = device

    @override
    def configure_model(self) -> None:
        if self.device_of_late is not None:
            with torch.device(self.device_of_late):
                self.net = TiedGPT().net
            self.device_of_late = None


def test_what_several_stages_hold_is_written_once(tmp_path: Path) -> None:
    plain = run_plain(partial(TiedOnMeta, "cpu"), loader(sentences()), max_epochs=2)
    options = {"state_dict_type": "sharded", "num_stages": 3, "num_servers": 3}
    begun = run_swarm(partial(TiedOnMeta, "meta"), loader(sentences()), max_epochs=1, **options, **saving(tmp_path))
    folder = sharded_format.ShardedCheckpoint(tmp_path / "007.ckpt")
    assert set(folder.weights) == set(plain.weights), "both names"
    assert set(folder.read_state(None)) == {name for name, _ in begun.module.named_parameters()}
    path = tmp_path / "007.ckpt"
    rest = run_swarm(
        partial(TiedOnMeta, "meta"), loader(sentences()), max_epochs=2, ckpt_path=path, **options, **saving(tmp_path)
    )
    assert [*begun.losses, *rest.losses] == pytest.approx(plain.losses, rel=1e-11)


def test_who_does_not_see_the_folder_sends_what_it_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers on another machine cannot see the folder, so the lead writes their stages, one at a time."""
    plain = run_plain(in_memory, loader(digits()), max_epochs=2)
    asked: list[str] = []

    async def is_there(function: Any, *args: Any) -> Any:
        if getattr(function, "__name__", "") == "is_dir":
            asked.append(str(function.__self__))
            return False
        return function(*args)

    monkeypatch.setattr("lightning_swarm.server.state_transfer.handlers.asyncio.to_thread", is_there)
    begun = run_swarm(on_meta, loader(digits()), max_epochs=1, num_servers=4, **saving(tmp_path), **SHARDED)
    assert len(asked) == 2 * 2 + 1, "each server was to be asked, and the trainer for what it computes"
    monkeypatch.undo()
    rest = run_swarm(
        on_meta, loader(digits()), max_epochs=2, ckpt_path=tmp_path / "007.ckpt", **saving(tmp_path), **SHARDED
    )
    assert [*begun.losses, *rest.losses] == pytest.approx(plain.losses, rel=1e-11)


def test_weights_alone_and_what_is_saved_after_fit(tmp_path: Path) -> None:
    run = run_swarm(in_memory, loader(digits()), max_steps=3, **SHARDED)
    assert run.trainer is not None
    run.trainer.save_checkpoint(tmp_path / "all.ckpt")
    run.trainer.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
    run.trainer.save_checkpoint(tmp_path / "all.ckpt")  # replaces the first
    everything, weights = (sharded_format.ShardedCheckpoint(tmp_path / name) for name in ("all.ckpt", "weights.ckpt"))
    for folder in (everything, weights):
        torch.testing.assert_close(folder.read_weights(folder.weights), dict(run.weights), rtol=0.0, atol=0.0)
    assert everything.has_optimizer
    assert set(everything.read_state(None)) == {name for name, _ in run.module.named_parameters()}
    assert not weights.has_optimizer
    assert sorted(path.name for path in tmp_path.iterdir()) == ["all.ckpt", "weights.ckpt"]
    with quiet_warnings():
        strategy = InMemoryStrategy(num_stages=2, pipeline="net")
        swarm = L.Trainer(**QUIET, devices=2, strategy=strategy)
        swarm.validate(Checked(on_meta=True), loader(digits()), ckpt_path=str(tmp_path / "weights.ckpt"), verbose=False)
        plain = L.Trainer(**QUIET)
        module = Checked(on_meta=False)
        with plain.precision_plugin.module_init_context():
            module.configure_model()
        module.load_state_dict(run.weights)
        plain.validate(module, loader(digits()), verbose=False)
    assert float(swarm.callback_metrics["loss"]) == pytest.approx(float(plain.callback_metrics["loss"]), rel=1e-11)


class Checked(Net):
    @override
    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("loss", self.training_step(batch, batch_idx))


def broken(folder: Path, how: str) -> None:
    part = folder / "__0_0.distcp"
    if how == "missing":
        part.unlink()
    elif how == "short":
        part.write_bytes(part.read_bytes()[:-1])
    elif how == "no index":
        (folder / ".metadata").unlink()
    else:
        (folder / ".metadata").write_bytes(pickle.dumps(Trap()))


class Trap:
    """Runs code when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path("sprung"),)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("missing", r"all of its files in one folder; in .* __0_0\.distcp is missing\. Copy the files into it"),
        ("short", r"__0_0\.distcp is cut off"),
        ("no index", r"is a folder without the index `\.metadata`"),
        ("trap", r"cannot be read: it names pathlib\.(_local\.)?Path\.touch"),
    ],
)
def test_a_broken_folder_is_refused_before_anything_starts(
    how: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = run_swarm(in_memory, loader(digits()), max_steps=2, **SHARDED)
    assert run.trainer is not None
    run.trainer.save_checkpoint("one.ckpt")
    broken(tmp_path / "one.ckpt", how)
    with pytest.raises(ConfigError, match=message):
        run_swarm(in_memory, loader(digits()), max_steps=4, ckpt_path="one.ckpt", **SHARDED)
    assert not Path("sprung").exists()
    if how != "no index":
        with pytest.raises(ConfigError, match=message):
            join_shards(Path("one.ckpt"), Path("out.ckpt"))
    assert not Path("out.ckpt").exists()


@pytest.mark.parametrize(
    ("path", "options", "message"),
    [("s3://bucket/one.ckpt", None, "a local folder, got 's3"), ("one.ckpt", {}, "`storage_options` are for a")],
)
def test_where_no_folder_can_be_written(path: str, options: Any, message: str) -> None:
    run = run_swarm(in_memory, loader(digits()), max_steps=2, **SHARDED)
    assert run.trainer is not None
    with pytest.raises(ConfigError, match=message):
        run.trainer.save_checkpoint(path, storage_options=options)


def test_nothing_else_is_written_and_no_other_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed save leaves the previous folder; a server writes no part but its own."""
    run = run_swarm(in_memory, loader(digits()), max_steps=2, **SHARDED)
    assert run.trainer is not None
    run.trainer.save_checkpoint(tmp_path / "one.ckpt")
    before = {path.name: path.read_bytes() for path in (tmp_path / "one.ckpt").iterdir()}
    monkeypatch.setattr(sharded_format, "finish", full)
    with pytest.raises(OSError, match="full"):
        run.trainer.save_checkpoint(tmp_path / "one.ckpt")
    assert {path.name: path.read_bytes() for path in (tmp_path / "one.ckpt").iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["one.ckpt"]
    (written,) = sharded_format.write(tmp_path, 1, {"model": {"a": torch.zeros(2)}})
    sharded_format.check([written], 1, {"a"})
    for part, names in ((0, {"a"}), (1, {"b"})):
        with pytest.raises(ProtocolError, match=f"part {part} of a checkpoint may have only its own state"):
            sharded_format.check([written], part, names)
    for changed in ({"file": "../__1_0.distcp"}, {"path": ["loops", "a"]}, {"path": ["model"]}, {"dtype": "nn"}):
        with pytest.raises(ProtocolError):
            sharded_format.check([msgspec.structs.replace(written, **changed)], 1, {"a"})


def full(*args: Any) -> None:
    raise OSError("the disk is full")


def test_where_steps_are_late_it_holds_the_newest(tmp_path: Path) -> None:
    options: dict[str, Any] = {"max_epochs": 1, "num_servers": 3, "delay_optimizer_step": True, "pipeline": "net"}
    for name in ("ordinary", "sharded"):
        (tmp_path / name).mkdir()
    ordinary = run_swarm(in_memory, loader(digits()), **saving(tmp_path / "ordinary", **options))
    late = run_swarm(on_meta, loader(digits()), **saving(tmp_path / "sharded", **options), state_dict_type="sharded")
    assert late.losses == pytest.approx(ordinary.losses, rel=1e-11)
    assert join_shards(tmp_path / "sharded/007.ckpt", tmp_path / "one.ckpt") == len(ordinary.weights)
    paths = (tmp_path / "one.ckpt", tmp_path / "ordinary/007.ckpt")
    ours, theirs = (torch.load(path, weights_only=True) for path in paths)
    for key in ("state_dict", "optimizer_states"):
        torch.testing.assert_close(ours[key], theirs[key], rtol=0.0, atol=1e-12)
