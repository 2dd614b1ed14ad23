"""The origin of code (the user, a library, this package), by the name of its Python module."""

from __future__ import annotations

from collections.abc import Collection


def is_in_packages(packages: Collection[str], module_name: object) -> bool:
    """Return whether a module belongs to one of these top-level packages; a name that is no string belongs to none."""
    return isinstance(module_name, str) and module_name.partition(".")[0] in packages
