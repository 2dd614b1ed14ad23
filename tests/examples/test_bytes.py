"""The byte-level GPT that the demo trains: its data, its model, and the peer that is replaced."""

from pathlib import Path

import lightning as L
import pytest
import torch

from examples.bytes.data import PythonSource, Windows, read_bytes, source_files
from examples.bytes.demo import draw, read_peers
from examples.bytes.model import ByteGPT, warmup_cosine
from examples.bytes.replacement import Replacement
from lightning_swarm.testing import FaultPlan, InMemoryStrategy, Phase, local_swarm
from tests.parity.harness import quiet_warnings
from tests.parity.models import DigitsMLP, digits, loader


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A library of forty modules, beside files that must be left out."""
    library = tmp_path / "lib"
    for i in range(40):
        folder = library / ("package" if i % 2 else "")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"module_{i}.py").write_text(f"def number_{i}():\n    return {i}\n" * 5)
    for folder in ("site-packages/other", "test", "package/tests"):
        (library / folder).mkdir(parents=True)
        (library / folder / "left_out.py").write_text("left_out = True\n")
    (library / "notes.txt").write_text("left_out")
    return library


@pytest.fixture
def data(root: Path) -> PythonSource:
    data = PythonSource(context=16, batch_size=4, root=root)
    data.setup("fit")
    return data


@pytest.fixture
def model() -> ByteGPT:
    torch.manual_seed(0)
    return ByteGPT(d_model=16, num_blocks=2, num_heads=2, context=16, warmup_steps=2)


def text_of(windows: Windows) -> bytes:
    return bytes(windows.text.tolist())


def quiet_trainer(folder: Path, **options: object) -> L.Trainer:
    return L.Trainer(
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        **options,
    )


def test_only_the_library_itself_is_read(root: Path) -> None:
    names = [path.name for path in source_files(root)]
    assert sorted(names) == sorted(f"module_{i}.py" for i in range(40))


def test_order_of_files_depends_on_names_alone(root: Path, tmp_path: Path) -> None:
    first = [path.relative_to(root) for path in source_files(root)]
    moved = root.rename(tmp_path / "elsewhere")
    assert [path.relative_to(moved) for path in source_files(moved)] == first
    assert first != sorted(first)


def test_no_byte_is_in_both_splits(data: PythonSource, root: Path) -> None:
    train, val = text_of(data.train_windows), text_of(data.val_windows)
    for path in source_files(root):
        assert (path.read_bytes() in train) != (path.read_bytes() in val), path.name


def test_text_is_cut_at_the_cap(root: Path) -> None:
    whole = read_bytes(source_files(root), 10**9)
    assert torch.equal(read_bytes(source_files(root), 100), whole[:100])


def test_windows_are_neighbours_and_targets_one_byte_later() -> None:
    windows = Windows(torch.arange(10, dtype=torch.uint8), context=3)
    pairs = [(tokens.tolist(), targets.tolist()) for tokens, targets in (windows[i] for i in range(len(windows)))]
    assert pairs == [([0, 1, 2], [1, 2, 3]), ([3, 4, 5], [4, 5, 6]), ([6, 7, 8], [7, 8, 9])]


def test_text_shorter_than_a_window_is_refused() -> None:
    with pytest.raises(ValueError, match="longer than `context`"):
        Windows(torch.zeros(3, dtype=torch.uint8), context=3)


def test_batches_depend_on_the_seed_alone(root: Path) -> None:
    def batches(seed: int) -> torch.Tensor:
        data = PythonSource(context=16, batch_size=4, seed=seed, root=root)
        data.setup("fit")
        return torch.stack([tokens for tokens, _ in data.train_dataloader()])

    torch.manual_seed(1)
    first = batches(seed=0)
    torch.manual_seed(2)
    assert torch.equal(batches(seed=0), first)
    assert not torch.equal(batches(seed=3), first)


def test_a_byte_sees_only_those_before_it(model: ByteGPT) -> None:
    tokens = torch.randint(256, (2, 16))
    changed = tokens.clone()
    changed[:, 9] = (changed[:, 9] + 1) % 256
    before, after = model(tokens), model(changed)
    assert before.shape == (2, 16, 256)
    torch.testing.assert_close(after[:, :9], before[:, :9])
    assert not torch.equal(after[:, 9:], before[:, 9:])


def test_all_parameters_are_in_the_sequential_and_in_one_group(model: ByteGPT, tmp_path: Path) -> None:
    model.trainer = quiet_trainer(tmp_path, max_steps=3)
    optimizer = model.configure_optimizers()["optimizer"]
    grouped = [p for group in optimizer.param_groups for p in group["params"]]
    assert len(grouped) == len(set(grouped))
    assert set(grouped) == set(model.parameters()) == set(model.net.parameters())
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]


def test_learning_rate_warms_up_and_falls() -> None:
    shares = [warmup_cosine(step, 4, 20) for step in range(21)]
    assert shares[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert shares[4:] == sorted(shares[4:], reverse=True)
    assert shares[20] == pytest.approx(0.1)
    assert warmup_cosine(10**6, 4, float("inf")) == 1.0


def test_it_learns_and_its_checkpoint_loads(model: ByteGPT, data: PythonSource, tmp_path: Path) -> None:
    trainer = quiet_trainer(tmp_path, max_steps=30, val_check_interval=10, limit_val_batches=2)
    trainer.fit(model, data)
    # An untrained model's loss is log(256) = 5.5.
    assert trainer.callback_metrics["val_loss"] < 4.5
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    loaded = ByteGPT.load_from_checkpoint(tmp_path / "last.ckpt")
    assert loaded.generate(b"def ", 8, temperature=0) == model.generate(b"def ", 8, temperature=0)


def test_generate_continues_a_prompt_longer_than_the_context(model: ByteGPT) -> None:
    def sample(seed: int) -> bytes:
        return model.generate(b"x" * 40, 30, generator=torch.Generator().manual_seed(seed))

    assert len(sample(0)) == 30
    assert sample(0) == sample(0)
    assert sample(0) != sample(1)


def test_generate_refuses_an_empty_prompt(model: ByteGPT) -> None:
    with pytest.raises(ValueError, match="at least one byte"):
        model.generate(b"", 1)


class Staged(Replacement):
    """Runs without processes: a planned fault kills the peer, and another one joins the swarm in memory."""

    def __init__(self, at_step: int, out: Path, *, joins: bool = True) -> None:
        super().__init__(at_step, out, ["-m", "examples.bytes.train"])
        self.joins = joins

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: object) -> None:
        """Continue until the joiner has been a member for some steps: if it met the dead peer, it tries again later."""
        super().on_train_batch_end(trainer, pl_module, *args)
        trainer.should_stop = any(event == "joined" and trainer.global_step >= step + 5 for step, _, event in self.rows)

    def _kill(self, process: int, step: int) -> None:
        assert (process, step) == (4242, self.at_step)

    def _start(self, address: str) -> None:
        assert address
        if self.joins:
            self.strategy.join()


def train_with(replacement: Staged, monkeypatch: pytest.MonkeyPatch, *, steps: int) -> None:
    plan = FaultPlan().kill("peer-3", at=Phase.BACKWARD, step=replacement.at_step)
    monkeypatch.setattr(InMemoryStrategy, "local_processes", [17, 4242])
    monkeypatch.setattr(InMemoryStrategy, "address", "127.0.0.1:1/peer-0")
    with local_swarm(4, num_stages=2, faults=plan, latency_s=0.01) as swarm, quiet_warnings():
        trainer = swarm.trainer(max_steps=steps, max_epochs=-1, callbacks=[replacement])
        replacement.strategy = swarm.strategies[0]
        trainer.fit(DigitsMLP(), loader(digits(), 20))


def test_a_peer_is_killed_and_replaced_and_the_demo_can_draw_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train_with(Staged(3, tmp_path), monkeypatch, steps=200)
    peers = read_peers(tmp_path)
    assert peers.events["killed"] == 3 < peers.events["gone"] <= peers.events["joined"]
    assert (peers.counts[0], peers.counts[-1]) == (4, 4)
    assert (min(peers.steps), max(peers.steps)) == (1, peers.events["joined"] + 5)
    said = capsys.readouterr().out
    assert "the run goes on without peer peer-3; 3 are left" in said
    assert "the new peer peer-4 is in; 4 peers train" in said
    losses = {step: 3.0 / (1 + step) for step in range(30)}
    draw(tmp_path / "curves.png", losses, losses, [0.0] * 30, peers)
    assert (tmp_path / "curves.png").stat().st_size > 10_000


def test_a_demo_in_which_nobody_joins_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="what did not happen: joined"):
        train_with(Staged(3, tmp_path, joins=False), monkeypatch, steps=8)
    with pytest.raises(RuntimeError, match="another to join"):
        read_peers(tmp_path)
