"""The wheel, installed into an environment of its own outside the repository, runs the quickstart and the doctor.

`make wheel` sets the variables below: the environment then is complete, with all dependencies from the package index.
Without them the tests build here, and install into an environment that borrows the dependencies of this one.
"""

from __future__ import annotations

import email
import hashlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
from packaging.metadata import Metadata
from packaging.requirements import Requirement

import lightning_swarm
from tests.docs.pages import ROOT, blocks, shown

pytestmark = pytest.mark.thorough

# Cold starts in this file: four peers that import torch at once, and the doctor.

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
DIST = os.environ.get("SWARM_DIST")
PYTHON = os.environ.get("SWARM_WHEEL_PYTHON")


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the sdist, built from the repository, and the wheel, built from the sdist."""
    if DIST is not None:
        return Path(DIST)
    folder = tmp_path_factory.mktemp("dist")
    run([sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", str(folder)], cwd=ROOT)
    # Without isolation pip builds with this environment's hatchling, and asks no index for another one.
    pip = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-index", "--no-build-isolation"]
    run([*pip, "--wheel-dir", str(folder), str(only(folder, "*.tar.gz"))], cwd=folder)
    return folder


@pytest.fixture(scope="module")
def python(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment in which the wheel is installed."""
    if PYTHON is not None:
        return Path(PYTHON)
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps", "--no-index"]
    run([*pip, str(only(dist, "*.whl"))], cwd=folder)
    # Borrowing this environment's dependencies spares a download of minutes. A .pth file adds their folders behind the
    # new environment's own packages. Python reads no .pth files in folders added like that, so the editable
    # installation of the repository, which is such a file, cannot be imported in the new environment.
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
    borrowed = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (packages / "dependencies.pth").write_text("".join(f"{path}\n" for path in borrowed))
    return python


def only(folder: Path, pattern: str) -> Path:
    [path] = folder.glob(pattern)
    return path


def run(command: list[str], cwd: Path, environment: dict[str, str] | None = None) -> str:
    """Run a command to its end and return its output; fail with the output if the command fails."""
    done = subprocess.run(
        command, cwd=cwd, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=240,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{command}\n{done.stdout}"
    return done.stdout


def run_installed(command: list[str], cwd: Path) -> str:
    """Run a command of the new environment, where neither the folder nor a variable leads to the repository."""
    assert not cwd.is_relative_to(ROOT)
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return run(command, cwd, {**inherited, "OMP_NUM_THREADS": "1"})


def test_metadata_is_that_of_pyproject(dist: Path) -> None:
    with zipfile.ZipFile(only(dist, "*.whl")) as wheel:
        [name] = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
        text = wheel.read(name)
        folder = name.rpartition("/")[0]
        entry_points = wheel.read(f"{folder}/entry_points.txt").decode()
        licence = wheel.read(f"{folder}/licenses/LICENSE").decode()
    metadata = Metadata.from_email(text, validate=True)
    assert metadata.name == PROJECT["name"] == "lightning-swarm"
    assert str(metadata.version) == lightning_swarm.__version__
    assert metadata.requires_python == PROJECT["requires-python"]
    assert metadata.license_expression == PROJECT["license"]
    assert metadata.license_files == ["LICENSE"]
    assert licence == (ROOT / "LICENSE").read_text()
    assert metadata.description_content_type == "text/markdown"
    assert email.message_from_bytes(text).get_payload() == (ROOT / "README.md").read_text()
    assert set(metadata.provides_extra or ()) == set(PROJECT["optional-dependencies"])
    required = {requirement for requirement in metadata.requires_dist or () if "extra" not in str(requirement.marker)}
    assert required == set(map(Requirement, PROJECT["dependencies"]))
    assert "lightning-swarm = lightning_swarm.cli:main" in entry_points.splitlines()


def test_the_wheel_has_the_package_and_nothing_else(dist: Path) -> None:
    files = [path for kind in ("*.py", "*.html", "*.css", "*.js") for path in (ROOT / "lightning_swarm").rglob(kind)]
    tracked = {str(path.relative_to(ROOT)) for path in files}
    with zipfile.ZipFile(only(dist, "*.whl")) as wheel:
        inside = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert inside == {*tracked, "lightning_swarm/py.typed"}


def test_the_sdist_has_what_its_own_tests_and_pages_need(dist: Path) -> None:
    with tarfile.open(only(dist, "*.tar.gz")) as sdist:
        inside = {name.partition("/")[2] for name in sdist.getnames()}
    for name in ("pyproject.toml", "setup.cfg", "Makefile", ".ci/constraints.txt", "LICENSE", "README.md"):
        assert name in inside
    for folder in ("lightning_swarm", "tests", "docs", "examples", "benchmarks"):
        expected = {str(path.relative_to(ROOT)) for path in (ROOT / folder).rglob("*.py")}
        assert expected <= inside
    assert not {name for name in inside if "__pycache__" in name or name.startswith(("runs/", "dist/"))}


def test_a_second_build_gives_the_same_bytes(dist: Path, tmp_path: Path) -> None:
    with tarfile.open(only(dist, "*.tar.gz")) as sdist:
        sdist.extractall(tmp_path, filter="data")
    [unpacked] = tmp_path.iterdir()
    for path in unpacked.rglob("*"):
        path.chmod(path.stat().st_mode & 0o700)
        os.utime(path, (0, 0))
    again = tmp_path / "again"
    run([sys.executable, "-m", "hatchling", "build", "-d", str(again)], cwd=unpacked)
    for pattern in ("*.tar.gz", "*.whl"):
        first, second = only(dist, pattern), only(again, pattern)
        assert first.name == second.name
        assert hashlib.sha256(first.read_bytes()).digest() == hashlib.sha256(second.read_bytes()).digest(), first.name


@pytest.mark.exhaustive
def test_the_installed_wheel_runs_the_quickstart(python: Path, tmp_path: Path) -> None:
    where = "import importlib.util; print(importlib.util.find_spec('lightning_swarm').origin)"
    assert Path(run_installed([str(python), "-c", where], tmp_path).strip()).is_relative_to(python.parents[1])
    (tmp_path / "train.py").write_text(shown("docs/quickstart.md")["train.py"])
    output = run_installed([str(python), "train.py"], tmp_path)
    expected = next(block.text for block in blocks("docs/quickstart.md") if block.kind == "text").splitlines()[-1]
    words, loss = expected.rsplit(maxsplit=1)
    found = re.search(rf"^{re.escape(words)} ([\d.]+)$", output, flags=re.MULTILINE)
    assert found is not None, output
    assert float(found[1]) == pytest.approx(float(loss), rel=1e-2)
    assert "Peers of this machine only" in output
    assert (tmp_path / "sine.ckpt").is_file()


def test_the_installed_command_examines_the_machine(python: Path, tmp_path: Path) -> None:
    command = shutil.which("lightning-swarm", path=str(python.parent))
    assert command is not None
    assert "This machine can be a peer." in run_installed([command, "doctor"], tmp_path)
