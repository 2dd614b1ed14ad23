"""Delayed imports: lazy attributes, modules under further names, and modules imported along with a package."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from pathlib import Path
from types import ModuleType

import pytest

from lightning_swarm.core.import_hook import alias_modules, import_after, lazy_attributes

NAMES = ("waited_for", "along", "lazy", "lazy.part")


@pytest.fixture(autouse=True)
def _packages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A package, a module that is imported along with it, and a package with a submodule."""
    (tmp_path / "waited_for.py").write_text("")
    (tmp_path / "along.py").write_text(
        "import waited_for\nwaited_for.number = waited_for.__dict__.get('number', 0) + 1\n"
    )
    (tmp_path / "lazy").mkdir()
    (tmp_path / "lazy" / "__init__.py").write_text("")
    (tmp_path / "lazy" / "part.py").write_text("value = [1]\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    for name in NAMES:
        monkeypatch.delitem(sys.modules, name, raising=False)


def test_a_module_is_imported_along_with_a_package() -> None:
    finders = [*sys.meta_path]
    import_after("waited_for", "along")
    assert "along" not in sys.modules
    # Code may look for a package without importing it.
    assert importlib.util.find_spec("waited_for") is not None
    assert "along" not in sys.modules
    assert importlib.import_module("waited_for").number == 1
    assert sys.meta_path == finders


def test_a_module_is_imported_at_once_if_the_package_is_there() -> None:
    package = importlib.import_module("waited_for")
    import_after("waited_for", "along")
    assert package.number == 1


def test_two_wait_for_one_package() -> None:
    import_after("waited_for", "along")
    import_after("waited_for", "lazy.part:value")
    importlib.import_module("waited_for")
    assert {"along", "lazy.part"} <= sys.modules.keys()


def test_a_package_that_is_missing_stays_missing() -> None:
    import_after("not_there", "along")
    with pytest.raises(ModuleNotFoundError, match="No module named 'not_there'"):
        importlib.import_module("not_there")
    assert "along" not in sys.modules


def test_an_attribute_is_imported_once_at_its_first_use() -> None:
    package = importlib.import_module("lazy")
    package.__getattr__ = lazy_attributes("lazy", {"value": "lazy.part:value", "missing": "lazy.part:missing"})  # type: ignore[method-assign]
    assert "lazy.part" not in sys.modules
    assert package.value is sys.modules["lazy.part"].value
    assert "value" in vars(package)
    for name in ("missing", "other"):
        assert not hasattr(package, name)


def test_a_module_has_a_further_name_and_stays_one_module() -> None:
    alias_modules("lazy", {"short": "lazy.part", "value": "lazy.part:value"})
    alias = importlib.import_module("lazy.short")
    assert alias is importlib.import_module("lazy.part")
    assert alias.__name__ == alias.__spec__.name == "lazy.part"  # type: ignore[union-attr]
    assert sys.modules["lazy"].short is alias
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("lazy.value")


def test_a_loader_of_several_modules_stays_as_it_was() -> None:
    """For example, pytest's loader rewrites assertions in modules of its choice."""

    class Shared(MetaPathFinder, Loader):
        def find_spec(self, fullname: str, *_: object) -> ModuleSpec | None:
            return spec_from_loader(fullname, self) if fullname in ("waited_for", "lazy") else None

        def exec_module(self, module: ModuleType) -> None:
            executed.append(module.__name__)

    executed: list[str] = []
    sys.meta_path.insert(0, Shared())
    import_after("waited_for", "along")
    for name in ("waited_for", "lazy"):
        importlib.import_module(name)
    assert executed == ["waited_for", "lazy"]
    assert sys.modules["waited_for"].number == 1
