"""Of which of Lightning's import trees the classes are that a command line names."""

from __future__ import annotations

import pkgutil
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, Final

import yaml

from lightning_swarm.framework import LIGHTNING, Framework, framework_of_class, mixed_import

_MODEL, _DATA, _STRATEGY = "model", "data", "trainer.strategy"
_CLASSES: Final = (_MODEL, _DATA, _STRATEGY)
"""What decides, the first before the others."""


def choose_framework(arguments: Sequence[str], commands: Sequence[str]) -> Framework:
    """The tree whose Trainer can do what a command line says.

    What cannot be read or imported decides nothing: whoever parses it in earnest says what is wrong with it.

    Args:
        arguments: Of the process, the command included.
        commands: Those that there are.

    Raises:
        ConfigError: The data module is from another tree than the model.
    """
    named: dict[str, Any] = {}
    for option, value in _options(arguments):
        if option in ("-c", "--config"):
            named.update(_named_in_file(value, [*arguments, *commands], commands))
        for name in _CLASSES:
            if option in (f"--{name}", f"--{name}.class_path", f"--{name}.help"):
                named[name] = value
    found = {name: _imported(named.get(name)) for name in _CLASSES}
    trees = {name: framework_of_class(kind) for name, kind in found.items()}
    model, data = trees[_MODEL], trees[_DATA]
    if model is not None and data is not None and data is not model:
        raise mixed_import("LightningDataModule", found[_DATA], model)
    return next((tree for tree in trees.values() if tree is not None), LIGHTNING)


def _options(arguments: Sequence[str]) -> Iterator[tuple[str, str | None]]:
    for argument, following in zip_longest(arguments, arguments[1:]):
        option, equals, value = argument.partition("=")
        yield option, value if equals else following


def _named_in_file(path: str | None, candidates: Sequence[str], commands: Sequence[str]) -> Iterator[tuple[str, Any]]:
    try:
        content = yaml.safe_load(Path(path or "").read_text())
    except (OSError, ValueError, yaml.YAMLError):
        return
    # A file that is named before the command has a section for it.
    sections = (_at(content, name) for name in candidates if name in commands)
    section = next((section for section in sections if section is not None), content)
    for name in _CLASSES:
        value = _at(section, *name.split("."))
        if value is not None:
            yield name, _at(value, "class_path") or value


def _at(content: Any, *keys: str) -> Any:
    for key in keys:
        content = content.get(key) if isinstance(content, Mapping) else None
    return content


def _imported(path: Any) -> Any:
    if not isinstance(path, str) or "." not in path:
        return None
    try:
        return pkgutil.resolve_name(path)
    except Exception:  # noqa: BLE001 - the parser imports it again, and says which option it was
        return None
