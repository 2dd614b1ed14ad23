"""What is no checkpoint, or no place for one."""

from __future__ import annotations

from pathlib import Path

from lightning_swarm.errors import ConfigError
from lightning_swarm.shards import Folder, is_folder

_NAMED_CHECKPOINTS = ("best", "last", "hpc", "registry")


def check_ckpt_path(path: object) -> None:
    """Refuse a checkpoint that is not there. What Lightning looks up itself passes: a name, the registry, a URL.

    Raises:
        ConfigError: There is no such file.
    """
    if path is None or "://" in str(path) or str(path).partition(":")[0] in _NAMED_CHECKPOINTS:
        return
    if not Path(str(path)).exists():
        raise ConfigError(
            f"`ckpt_path` must be a checkpoint's path, 'best' or 'last', got {str(path)!r}, which is not there. "
            f"Correct it, seen from {Path.cwd()}, or leave it out."
        )


def check_folder(path: object, storage_options: object) -> None:
    """Refuse to write a sharded checkpoint where, or how, it cannot be.

    Raises:
        ConfigError: It is no folder of this machine, or options of a `CheckpointIO` are given.
    """
    if "://" in str(path):
        raise ConfigError(
            f"with `state_dict_type='sharded'` servers write into a folder, got {str(path)!r}. Name one that this "
            "machine sees as a path, or use `state_dict_type='full'`."
        )
    if storage_options is not None:
        raise ConfigError(
            "`storage_options` are for a `CheckpointIO`, which writes no sharded checkpoints; got "
            f"{storage_options!r}. Leave them out, or use `state_dict_type='full'`."
        )


def find_folder(path: object) -> Folder | None:
    """The sharded checkpoint that is there; None: it is an ordinary one.

    Raises:
        ConfigError: It is a folder and no checkpoint, or not all of one.
    """
    if "://" in str(path) or not Path(str(path)).is_dir():
        return None
    folder = Path(str(path))
    if not is_folder(folder):
        raise ConfigError(
            f"a checkpoint must be a file, or a folder that was written with `state_dict_type='sharded'`; {folder} is "
            "a folder without an index `.metadata`. Name the checkpoint in it."
        )
    return Folder(folder)
