"""Every block of code in the documentation is run, and its stated outcome is compared with the real one."""

from __future__ import annotations

import contextlib
import io
import re
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
import yaml
from lightning.pytorch.callbacks import ProgressBar
from msgspec import UNSET

import lightning_swarm
from lightning_swarm import cli
from lightning_swarm.cli import SwarmCLI, simulate
from lightning_swarm.core.errors import ConfigError
from lightning_swarm.monitor.membership import Membership
from lightning_swarm.monitor.model_report import coverage
from lightning_swarm.network import PeerId
from lightning_swarm.network.addresses import Address
from lightning_swarm.peer.entry import entry_of
from lightning_swarm.peer.process import how_to_join
from lightning_swarm.planner import report
from lightning_swarm.planner.machine_files import read_machines
from lightning_swarm.planner.simulator.scenario import ScenarioRuns
from lightning_swarm.strategy import checks
from lightning_swarm.strategy.launcher import SwarmLauncher
from lightning_swarm.testing import InMemoryStrategy
from tests.docs import my_project
from tests.docs.commands import PEER_ID, lines
from tests.docs.pages import PAGES, ROOT, Block, blocks, shown, spans

pytest_plugins = ["lightning_swarm.testing.plugin"]

RULES = {
    "python": "run here, all of a page in order",
    "sh": "test_commands.py",
    "yaml": "read here by SwarmCLI, as a scenario, or by the planner",
    "diff": "compared here with the file of examples/ that a test applies",
    "text": "compared here with what is really said; pages wrap its lines",
    "none": "as `text`, in columns; pages do not wrap its lines",
    "{toctree}": "Sphinx",
    "{eval-rst}": "Sphinx",
    "{literalinclude}": "Sphinx; tests/p2p/test_serving.py runs the file",
}
"""Treatment of each kind of block."""

NUM_SWARMS = {
    "README.md": 1,
    "docs/boundary.md": 2,
    "docs/models.md": 7,
    "docs/faults.md": 5,
    "docs/memory.md": 1,
    "docs/large.md": 1,
    "docs/checkpoints.md": 2,
    "docs/inference.md": 1,
    "docs/notebooks.md": 1,
    "docs/whole.md": 1,
}
"""Number of runs by the blocks of a page, its tests included."""

COMPLETE = ("docs/quickstart.md", "docs/checkpoints.md")
"""These pages run for as long as they say; the other pages' runs end after a few steps."""


def quick(page: str) -> Callable[..., L.Trainer]:
    """Return a Trainer of few steps with little output."""
    real = L.Trainer

    def make(**given: Any) -> L.Trainer:
        if given.get("strategy") == "auto":
            given["devices"] = 1  # the plain Trainer
        if page not in COMPLETE:
            given["max_steps"] = min(given.get("max_steps", 3), 3)
        has_bar = any(isinstance(callback, ProgressBar) for callback in given.get("callbacks", ()))
        given = {"accelerator": "cpu", "enable_progress_bar": has_bar, "enable_model_summary": False, **given}
        return real(**{**given, "logger": False, "enable_checkpointing": False})

    return make


@pytest.fixture
def _small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run scripts in a temporary folder, on swarms in memory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "my_project", my_project)
    monkeypatch.setattr(SwarmLauncher, "_first_module", None)
    monkeypatch.setattr(lightning_swarm, "SwarmStrategy", InMemoryStrategy)
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):
        monkeypatch.setenv(name, "0")


def preamble(page: str) -> dict[str, Any]:
    """Return the names that a page's blocks assume."""
    names: dict[str, Any] = {"__name__": "__main__", "MyModel": my_project.MyModel, "my_data": my_project.my_data}
    if page == "docs/checkpoints.md":
        trainer = L.Trainer(max_epochs=1)
        trainer.fit(my_project.MyModel(), my_project.MyData())
        trainer.save_checkpoint("last.ckpt")
        names.update(model=my_project.MyModel(), data=my_project.MyData(), trainer=L.Trainer(max_epochs=2))
    return names


def run(page: str, request: pytest.FixtureRequest) -> dict[str, Any]:
    """Run a page's blocks, then the tests that they define."""
    names = preamble(page)
    for block in blocks(page):
        if block.kind == "python":
            text = block.text.replace("12D3KooW...", PEER_ID)
            exec(compile("\n" * block.line + text, ROOT / page, "exec"), names)
    for name in [name for name in names if name.startswith("test_")]:
        arguments = names[name].__code__.co_varnames[: names[name].__code__.co_argcount]
        names[name](*map(request.getfixturevalue, arguments))
    return names


OF_ITS_OWN = ("docs/quickstart.md",)
"""Run by a test that checks the final values."""

WITH_PYTHON = [
    page for page in PAGES if page not in OF_ITS_OWN and any(block.kind == "python" for block in blocks(page))
]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[InMemoryStrategy]:
    """The swarms that ran."""
    found: list[InMemoryStrategy] = []
    prepare = InMemoryStrategy.prepare
    monkeypatch.setattr(InMemoryStrategy, "prepare", lambda self: [found.append(self), prepare(self)])
    return found


@pytest.mark.usefixtures("_small")
@pytest.mark.parametrize("page", WITH_PYTHON)
def test_python_runs(
    page: str,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    launched: list[InMemoryStrategy],
) -> None:
    monkeypatch.setattr(L, "Trainer", quick(page))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The number of training batches")
        run(page, request)
    assert len(launched) == NUM_SWARMS.get(page, 0)
    # In an uncut model the trainer computes, on the other pages the servers of the stages.
    computed = [sum(server.calls.num_forwards for server in strategy.servers) > 0 for strategy in launched]
    assert computed == [page != "docs/whole.md"] * len(launched)


@pytest.mark.usefixtures("_small")
def test_quickstart_says_what_it_ends_with_and_so_does_the_plain_trainer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], launched: list[InMemoryStrategy]
) -> None:
    page = "docs/quickstart.md"
    monkeypatch.setattr(L, "Trainer", quick(page))
    script = shown(page)["train.py"]
    arguments = "devices=4, strategy=SwarmStrategy(num_stages=2)"
    [taken_out] = [block for block in spans(page) if block in arguments and "strategy" in block]
    assert taken_out == arguments
    plain = script.replace(f"{arguments},", "")
    assert plain != script
    said = [next(block.text for block in blocks(page) if block.kind == "text")]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The number of training batches")
        for text in (script, plain):
            exec(text, {"__name__": "__main__"})
            said.append(capsys.readouterr().out)
    [swarm] = launched
    assert [server.calls.num_forwards > 0 for server in swarm.servers] == [True] * 4
    words, losses = zip(*(one.splitlines()[-1].rsplit(maxsplit=1) for one in said), strict=True)
    assert set(words) == {"loss after 100 steps:"}
    assert list(map(float, losses)) == pytest.approx([float(losses[0])] * 3, rel=1e-2)


@pytest.mark.usefixtures("_small")
@pytest.mark.parametrize(("name", "pipeline"), [("Model", "layers"), ("Staged", None)])
def test_models_of_the_page_train_as_without(name: str, pipeline: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(L, "Trainer", quick("docs/models.md"))
    found: dict[str, Any] = {}
    for block in blocks("docs/models.md"):
        if "class " in block.text:
            exec(block.text.partition("\n\n\ntrain(")[0], found)
    weights = []
    for strategy in (InMemoryStrategy(num_stages=2, pipeline=pipeline), "auto"):
        torch.manual_seed(0)
        model = found[name]()
        before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The number of training batches")
            found["train"](model, strategy)
        weights.append(model.state_dict())
    for key, tensor in weights[0].items():
        assert not torch.equal(before[key], tensor)
        torch.testing.assert_close(tensor, weights[1][key], rtol=0.0, atol=1e-4)


def without_a_rule(page: str) -> list[str]:
    return [str(block) for block in blocks(page) if block.kind not in RULES]


@pytest.mark.parametrize("page", PAGES)
def test_every_block_has_a_rule(page: str) -> None:
    assert not without_a_rule(page), "no rule says how these blocks are checked"


def test_a_block_without_a_rule_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```python\n1\n```\n\n```rust\n1\n```\n\n- one\n\n  ```\n  1\n  ```\n\nend\n\n    indented\n")
    assert without_a_rule(str(page)) == [f"{page}:5", f"{page}:11", f"{page}:17"]


# ---------------------------------------------------------------------- what a page says that one sees


def peers_can_join(block: Block) -> None:
    """Compare the lines that a starter of the quickstart's script prints."""
    said = block.text.replace("12D3KooW...", PEER_ID)
    address = Address.parse(said.partition("lightning-swarm join ")[2].split()[0])
    is_invited = not address.host_port.is_loopback
    config = lightning_swarm.SwarmStrategy(listen="0.0.0.0:31337" if is_invited else "127.0.0.1").config
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        patch.setattr(sys, "argv", ["train.py"])
        patch.setattr(sys.modules["__main__"], "__spec__", None)
        patch.setattr(sys.modules["__main__"], "__file__", "train.py", raising=False)  # a test worker has none
        lines = how_to_join(config, [address], entry_of(config, lambda: Path(folder), now_s=0.0), num_peers=4)
        assert said.startswith(f"{lines}\n")
        assert len(said.splitlines()) == len(lines.splitlines()) + (not is_invited), "the script's own line"


def simulated(block: Block, name: str = "scenario", rel: float = 0.0) -> None:
    """Compare the table of the example; its numbers may differ by the share `rel`.

    A swarm's decisions depend on the last bits that a processor computes, so a simulation of each message does, too.
    """
    runs = ScenarioRuns(ROOT / f"examples/spot/{name}.yaml")
    number = re.compile(r"\d+\.\d+")
    table, expected = report.span_table(simulate.simulated(runs)), block.text.rstrip("\n")
    assert number.sub("0", table) == number.sub("0", expected)
    # The last digit of a number may differ, too, by its rounding.
    assert [*map(float, number.findall(table))] == pytest.approx(
        [*map(float, number.findall(expected))], rel=rel, abs=0.1 if rel else 0.0
    )


def planned(block: Block) -> None:
    """Compare the output of `plan` for the page's machines."""
    command = next(lines(next(found for found in blocks(block.page) if found.kind == "sh").text))
    said = io.StringIO()
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder), pytest.MonkeyPatch.context() as patch:
        Path("machines.yaml").write_text(shown(block.page)["machines.yaml"])
        patch.setattr(sys, "argv", command)
        with contextlib.redirect_stdout(said):
            assert cli.main() == 0
    assert said.getvalue() == block.text


def anyone_can_join(block: Block) -> None:
    """Compare the line that a notebook prints, which is no script."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "__main__", ModuleType("__main__"))
        config = lightning_swarm.SwarmStrategy().config
        address = Address.parse(
            block.text.partition("lightning-swarm join ")[2].split()[0].replace("12D3KooW...", PEER_ID)
        )
        assert how_to_join(config, [address], None) == block.text.rstrip("\n").replace("12D3KooW...", PEER_ID)


def devices_refused(block: Block) -> None:
    """Compare the error for several devices in a notebook."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checks, "_IS_INTERACTIVE", True)
        with pytest.raises(ConfigError) as caught:
            L.Trainer(accelerator="cpu", devices=4, strategy=lightning_swarm.SwarmStrategy(), logger=False)
    assert str(caught.value) == block.text.rstrip("\n")


def member_changes(block: Block) -> None:
    """Compare the line about a peer that joins or leaves, reconstructing the run from its numbers."""
    found = re.fullmatch(
        r"Peer (\w+) \((\S+):(\d+)\) (joined|died or was cut off): stage (\d) .*?(\d) servers?.*, (\d) peers in all\n",
        block.text,
    )
    assert found is not None
    name, host, port, verb, *numbers = found.groups()
    stage, num_servers, num_peers = map(int, numbers)
    peer = PeerId(f"{PEER_ID[: -len(name)]}{name}")
    joins = verb == "joined"
    member = SimpleNamespace(peer_id=peer)
    mates = [SimpleNamespace(peer_id=f"mate {number}") for number in range(num_servers - joins)]
    others = [SimpleNamespace(peer_id=f"other {number}") for number in range(num_peers - num_servers)]
    rosters = [others, others]
    rosters[stage] = [*mates, *([] if joins else [member])]
    run: Any = SimpleNamespace(
        manifest=SimpleNamespace(is_whole=False),
        bans=(),
        invitations=(),
        rosters=rosters,
        trainers=["mate 0"],
        ties=SimpleNamespace(groups=list),  # no stages share parameters
    )
    address = f"/ip4/{host}/tcp/{port}/p2p/{peer}"
    place = SimpleNamespace(member=member, stage_index=stage, addresses=[address], reason=UNSET)
    record: Any = SimpleNamespace(
        newcomers=[place] if joins else [],
        left=[] if joins else [place],
        closing=SimpleNamespace(absent=[peer]),
        **dict.fromkeys(("enlisted", "retired", "departures", "convicted", "portable"), ()),
    )
    (line,) = Membership(run, {peer: [address]}).follow(record, run)
    assert f"{line.text}\n" == block.text


def model_needs(block: Block) -> None:
    """Compare the line about memory of a server of a model."""
    assert coverage([578_125_000] * 16, [range(7), range(7, 14)]) == block.text.rstrip()


SAID: Mapping[tuple[str, str], Callable[[Block], None]] = {
    ("docs/quickstart.md", "Peers of this machine only"): peers_can_join,
    ("docs/quickstart.md", "Peer vsCUEo"): member_changes,
    ("docs/operate.md", "Peer Sow8nd"): member_changes,
    ("docs/notebooks.md", "Peers of this machine only"): anyone_can_join,
    ("docs/notebooks.md", "in a notebook"): devices_refused,
    ("docs/join.md", "Peers can join this run"): peers_can_join,
    ("docs/two_machines.md", "Peers can join this run"): peers_can_join,
    ("docs/serving.md", "The model needs"): model_needs,
    ("docs/simulate.md", "rule   samples"): simulated,
    ("docs/simulate.md", "rule  samples"): partial(simulated, name="microbatches", rel=0.05),
    ("docs/planning.md", "1416.5M parameters"): planned,
}
"""(page, beginning of the block) -> function that compares the block with the real output."""


@pytest.mark.thorough
def test_text_is_what_is_said() -> None:
    left = dict(SAID)
    for page in PAGES:
        for block in blocks(page):
            if block.kind in ("text", "none"):
                [key] = [key for key in SAID if key[0] == page and block.text.startswith(key[1])] or [None]
                assert key is not None, f"{block}: nothing says how this text is checked"
                left.pop(key)(block)
    assert not left


def test_diffs_are_those_of_the_examples() -> None:
    diffs = {path.read_text() for path in (ROOT / "examples").rglob("*.diff")}
    found = [block.text for page in PAGES for block in blocks(page) if block.kind == "diff"]
    assert found
    assert set(found) <= diffs


def test_yaml_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):
        monkeypatch.setenv(name, "0")
    monkeypatch.setitem(sys.modules, "my_project", my_project)
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "run.yaml"
    for page in PAGES:
        for block in blocks(page):
            if block.kind == "yaml":
                file.write_text(block.text)
                if block.shown == "scenario.yaml":
                    assert ScenarioRuns(file).file == ScenarioRuns(ROOT / "examples/spot/scenario.yaml").file
                    continue
                if block.shown == "prometheus.yaml":
                    names = yaml.safe_load(block.text)["rule_files"]
                    assert names
                    assert all((ROOT / "docs" / "monitoring" / name).is_file() for name in names)
                    continue
                if block.shown == "machines.yaml":
                    assert read_machines(file, 1e9, None)
                    continue
                made = SwarmCLI(run=False, save_config_callback=None, args=["--config", str(file)])
                assert isinstance(made.trainer.strategy, lightning_swarm.SwarmStrategy)
