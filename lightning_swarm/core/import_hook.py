"""Imports a module of this package as soon as a script imports another package."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

from typing_extensions import override


def import_along(package: str, module: str) -> None:
    """Import `module` right after `package`: now, or when that is imported."""
    if package in sys.modules:
        import_module(module)
    else:
        sys.meta_path.insert(0, _Finder(package, module))


class _Finder(MetaPathFinder):
    """Finds a package as others do, and has a module imported after it."""

    def __init__(self, package: str, module: str) -> None:
        self._package = package
        self._module = module

    @override
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._package:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        if spec is not None and spec.loader is not None:
            own = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                own(module)
                import_module(self._module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
