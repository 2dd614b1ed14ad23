"""A checkpoint in another form: its weights as a safetensors file, or a folder as one file."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_swarm.core.errors import ConfigError
from lightning_swarm.model.optimizer_state import by_numbers
from lightning_swarm.model.sharded_format import OPTIMIZER, REST, WEIGHTS, ShardedCheckpoint, is_folder


def export_safetensors(checkpoint: Path, target: Path) -> int:
    """Write the weights of a checkpoint to a file of their own, at once or not at all.

    Tensors that share memory, such as tied weights, are written under each of their names.

    Args:
        checkpoint: A file that Lightning wrote, or a sharded checkpoint. Nothing in it is executed.
        target: Its suffix is `.safetensors`. Overwritten if it exists.

    Returns:
        How many tensors it holds.

    Raises:
        ConfigError: The checkpoint holds no weights, or more than can be read safely; safetensors is not installed;
            or one of the files cannot be read or written.
    """
    if target.suffix != ".safetensors":
        raise ConfigError(f"the exported file must end in .safetensors, got {target}. Name it {target}.safetensors.")
    try:
        from safetensors import SafetensorError
        from safetensors.torch import save_file
    except ModuleNotFoundError as error:
        raise ConfigError(
            "exporting needs the package safetensors, which is not installed. "
            'Run: pip install "lightning-swarm[export]", or pip install safetensors'
        ) from error
    content = _read(checkpoint)
    weights = _weights(content, checkpoint)
    metadata = {"format": "pt", "global_step": str(content.get("global_step", 0))}
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        save_file(weights, partial, metadata)
        partial.replace(target)
    except (OSError, SafetensorError) as error:
        raise _unwritable(target, error) from error
    finally:
        partial.unlink(missing_ok=True)
    return len(weights)


def export_file(folder: Path, target: Path) -> int:
    """Write a sharded checkpoint as one ordinary file, at once or not at all. All of it is in memory meanwhile.

    Args:
        folder: Written with ``state_dict_type="sharded"``. Nothing in it is executed.
        target: Its suffix is `.ckpt`. Overwritten if it exists.

    Returns:
        How many weights it holds.

    Raises:
        ConfigError: The checkpoint is not all there, or holds more than can be read safely; or the file cannot be
            written.
    """
    if not is_folder(folder):
        raise ConfigError(
            f"a .ckpt file is made of a sharded checkpoint, a folder; {folder} is none. Name such a folder, or export "
            "to a .safetensors file."
        )
    content = _read(folder)
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        torch.save(content, partial)
        partial.replace(target)
    except (OSError, RuntimeError) as error:
        raise _unwritable(target, error) from error
    finally:
        partial.unlink(missing_ok=True)
    return len(content["state_dict"])


def _unwritable(target: Path, error: Exception) -> ConfigError:
    return ConfigError(f"{target} must be a file that can be written: {error}. Name a folder that exists and has room.")


def _read_folder(path: Path) -> dict[str, Any]:
    """As the file that the same run would have written."""
    content = _read(path / REST)
    found = ShardedCheckpoint(path).read_all()
    content["state_dict"] = found.get(WEIGHTS, {})
    if OPTIMIZER in found:
        content["optimizer_states"] = [by_numbers({"state": {}, **found[OPTIMIZER]})]
    return content


def _read(checkpoint: Path) -> dict[str, Any]:
    if is_folder(checkpoint):
        return _read_folder(checkpoint)
    rule = "the checkpoint must be a file that Lightning wrote"
    try:
        content = torch.load(checkpoint, map_location="cpu", weights_only=True)
    except FileNotFoundError as error:
        raise ConfigError(f"{rule}, and {checkpoint} does not exist. Check the path.") from error
    except pickle.UnpicklingError as error:
        raise ConfigError(
            f"{rule}, and export reads only tensors, numbers and text from it: {checkpoint} holds more, or is broken "
            f"({str(error).splitlines()[0]}). Save it again with `trainer.save_checkpoint(path, weights_only=True)`, "
            "and without objects in its hyperparameters."
        ) from error
    except (OSError, RuntimeError, EOFError) as error:
        raise ConfigError(f"{rule}, and {checkpoint} cannot be read: {error}. Check the path.") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{rule}, and {checkpoint} holds a {type(content).__name__}. Check the path.")
    return content


def _weights(content: dict[str, Any], checkpoint: Path) -> dict[str, Tensor]:
    state = content.get("state_dict")
    if not isinstance(state, dict) or not state:
        raise ConfigError(
            f"a checkpoint must hold weights under `state_dict`, and {checkpoint} has {sorted(map(str, content))[:5]}. "
            "Name a file that the Trainer saved."
        )
    others = [name for name, value in state.items() if not isinstance(value, Tensor) or value.layout != torch.strided]
    if others:
        raise ConfigError(
            f"safetensors holds dense tensors only; in {checkpoint} these are something else: {others[:5]}. "
            "Leave them out of the module's `state_dict`."
        )
    # Copies: safetensors refuses tensors that share memory.
    return {name: tensor.detach().clone(memory_format=torch.contiguous_format) for name, tensor in state.items()}
