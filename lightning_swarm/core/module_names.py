"""The origin of code (the user's, a library's, this one's), by the name of its Python module."""

from __future__ import annotations

from collections.abc import Collection


def is_of(packages: Collection[str], module_name: object) -> bool:
    """Tell whether a Python module belongs to one of these top-level packages; what has no name belongs to none."""
    return isinstance(module_name, str) and module_name.partition(".")[0] in packages
