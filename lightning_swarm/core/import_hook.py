"""Deferred imports: at the first use of a name, or after the import of another package; and aliases of modules."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from types import ModuleType
from typing import Any

from typing_extensions import override


def import_path(path: str) -> Any:
    """Import and return ``module`` or ``module:attribute``."""
    module, _, attribute = path.partition(":")
    imported = import_module(module)
    return getattr(imported, attribute) if attribute else imported


def lazy_attributes(package: str, paths: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a package's ``__getattr__``, which imports each name at its first use, from a path of `import_path`."""

    def get(name: str) -> Any:
        if name not in paths:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = import_path(paths[name])
        setattr(sys.modules[package], name, value)
        return value

    return get


def import_after(package: str, *paths: str) -> None:
    """Import each ``module`` or ``module:attribute`` right after `package`, at once if that is imported already."""
    if package in sys.modules:
        _import_all(paths)
    else:
        sys.meta_path.insert(0, _Follower(package, paths))


def alias_modules(package: str, paths: Mapping[str, str]) -> None:
    """Make ``import package.name`` import the module that `paths` gives for the name.

    Public names such as ``lightning_swarm.errors`` can then be imported like submodules. Attributes are skipped.
    """
    modules = {f"{package}.{name}": path for name, path in paths.items() if ":" not in path}
    sys.meta_path.insert(0, _Aliases(modules))


def _import_all(paths: Sequence[str]) -> None:
    for path in paths:
        import_path(path)


class _Follower(MetaPathFinder):
    """Imports modules right after a package. The finders behind this finder locate and load the package itself."""

    def __init__(self, package: str, paths: Sequence[str]) -> None:
        self._package = package
        self._paths = paths

    @override
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._package:
            return None
        later_finders = sys.meta_path[sys.meta_path.index(self) + 1 :]
        spec = next((spec for finder in later_finders if (spec := finder.find_spec(fullname, path, target))), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            # Only execution removes this finder, because `importlib.util.find_spec` asks for a spec without importing.
            def exec_module(module: ModuleType) -> None:
                execute(module)
                # A shared loader, such as pytest's assertion rewriter, also executes other modules by this function.
                if module.__name__ == self._package and self in sys.meta_path:
                    sys.meta_path.remove(self)
                    _import_all(self._paths)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


class _Aliases(MetaPathFinder, Loader):
    """Imports modules under their alias names."""

    def __init__(self, modules: Mapping[str, str]) -> None:
        self._modules = modules

    @override
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return spec_from_loader(fullname, self) if fullname in self._modules else None

    @override
    def exec_module(self, module: ModuleType) -> None:
        # The import system returns this entry of `sys.modules`, the real module, in place of the empty `module`.
        sys.modules[module.__name__] = import_module(self._modules[module.__name__])
