"""Exports checkpoints: to a safetensors file, to a Hugging Face folder, or from a sharded folder to one file."""

from __future__ import annotations

import logging
import os
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch
from packaging.version import Version
from torch import Tensor

from lightning_swarm.core.errors import ConfigError
from lightning_swarm.model.optimizer_state import name_to_number
from lightning_swarm.model.sharded_format import OPTIMIZER, REST, WEIGHTS, ShardedCheckpoint, is_folder

_log = logging.getLogger(__name__)

_SAFE_TORCH: Final = Version("2.10.0")  # the first version whose `weights_only=True` has no known bypass


def export_safetensors(checkpoint: Path, target: Path) -> int:
    """Write the weights of a checkpoint to a `.safetensors` file, atomically, and return the number of tensors."""
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
    with _atomic_write(target, OSError, SafetensorError) as partial:
        save_file(weights, partial, metadata)
    return len(weights)


def join_shards(folder: Path, target: Path) -> int:
    """Join the sharded checkpoint in `folder` to one `.ckpt` file, atomically, and return the number of weights."""
    if not is_folder(folder):
        raise ConfigError(
            f"a .ckpt file is made from the folder of a sharded checkpoint, got {folder}, which is not. Name such a "
            "folder, or export to a .safetensors file."
        )
    content = _read(folder)
    with _atomic_write(target, OSError, RuntimeError) as partial:
        torch.save(content, partial)
    return len(content["state_dict"])


def export_pretrained(checkpoint: Path, folder: Path) -> int:
    """Write the Hugging Face model in a checkpoint to the `folder` with its config; return the number of tensors.

    The model may be an attribute of the LightningModule, at any depth; its prefix is found in the checkpoint's names.
    """
    from lightning_swarm.model.pretrained import PretrainedModel, read_config, read_generation_config

    model = PretrainedModel(read_config(folder), read_generation_config(folder), dtype="float32")
    if model.quantization is not None:
        raise ConfigError(
            f"a checkpoint is exported with plain weights, but {folder / 'config.json'} has `quantization_config`. "
            "Remove it from the config; `serve --quantize` quantises the weights."
        )
    own = model.module.state_dict()
    wanted = model.saved(own)
    weights = _weights(_read(checkpoint), checkpoint)
    prefixes = {name.removesuffix(wanted[0]) for name in weights if name.endswith(wanted[0])}
    complete = [prefix for prefix in prefixes if all(f"{prefix}{name}" in weights for name in wanted)]
    if len(complete) != 1:
        raise ConfigError(
            f"a checkpoint must hold the weights of the {type(model.module).__name__} of {folder / 'config.json'} "
            f"once, but {checkpoint} has them {len(complete)} times. It has names like {sorted(weights)[:3]}, and the "
            f"model has names like {wanted[:3]}. Write the config of the module that was trained."
        )
    for name in wanted:
        value, shape = weights[f"{complete[0]}{name}"], own[name].shape
        if value.shape != shape:
            raise ConfigError(
                f"a checkpoint must have the shapes of config.json: {name!r} has {tuple(value.shape)} instead of "
                f"{tuple(shape)}. Write the config of the module that was trained."
            )
    # Not written directly, because `save_pretrained` may rename tensors in files, and writes tied weights once.
    values = {name: weights[f"{complete[0]}{name}"] for name in wanted}
    model.module.save_pretrained(folder, state_dict=values)
    return len(wanted)


@contextmanager
def _atomic_write(target: Path, *errors: type[Exception]) -> Iterator[Path]:
    """Yield a temporary path, and move its file to `target` afterwards; convert `errors` of writing to ConfigError."""
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        yield partial
        partial.replace(target)
    except errors as error:
        raise ConfigError(
            f"{target} must be a file that can be written: {error}. Name a folder that exists and has room."
        ) from error
    finally:
        partial.unlink(missing_ok=True)


def _read(checkpoint: Path) -> dict[str, Any]:
    """Read a checkpoint without executing code in it. A sharded checkpoint is returned as if it were a single file."""
    if is_folder(checkpoint):
        content, parts = _read(checkpoint / REST), ShardedCheckpoint(checkpoint).read_all()
        content["state_dict"] = parts.get(WEIGHTS, {})
        if OPTIMIZER in parts:
            try:
                content["optimizer_states"] = [name_to_number({"state": {}, **parts[OPTIMIZER]})]
            except (AttributeError, KeyError, TypeError) as error:
                raise ConfigError(
                    f"the optimizer state must be as Lightning writes it, got {error!r} from {checkpoint}. Use another "
                    "checkpoint."
                ) from error
        return content
    rule = "the checkpoint must be a file that Lightning wrote"
    if Version(torch.__version__) < _SAFE_TORCH:
        _log.warning(
            "torch %s may execute code that a checkpoint's author hid in it (CVE-2026-24747). Install torch %s or "
            "newer, or export only checkpoints of authors whom you trust.",
            torch.__version__,
            _SAFE_TORCH,
        )
    try:
        content = torch.load(checkpoint, map_location="cpu", weights_only=True)
    except FileNotFoundError as error:
        raise ConfigError(f"{rule}, but {checkpoint} does not exist. Check the path.") from error
    except pickle.UnpicklingError as error:
        raise ConfigError(
            f"{rule}, with tensors, numbers and text only: {checkpoint} holds other objects, or is broken "
            f"({str(error).splitlines()[0]}). Save it again with `trainer.save_checkpoint(path, weights_only=True)`, "
            "and without objects in its hyperparameters."
        ) from error
    except Exception as error:  # torch raises many kinds of errors for malformed bytes
        raise ConfigError(f"{rule}, but {checkpoint} cannot be read: {error}. Check the path.") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{rule}, but {checkpoint} holds a {type(content).__name__}. Check the path.")
    return content


def _weights(content: dict[str, Any], checkpoint: Path) -> dict[str, Tensor]:
    state = content.get("state_dict")
    if not isinstance(state, dict) or not state:
        raise ConfigError(
            f"a checkpoint must hold weights under `state_dict`, but {checkpoint} has {sorted(map(str, content))[:5]}. "
            "Name a file that the Trainer saved."
        )
    refused = [name for name, value in state.items() if not isinstance(value, Tensor) or value.layout != torch.strided]
    if refused:
        raise ConfigError(
            f"the exported weights must be dense tensors, but {refused[:5]} in {checkpoint} are not. Leave them out of "
            "the module's `state_dict`."
        )
    # Cloned, because safetensors refuses tensors that share memory, such as tied weights.
    return {name: tensor.detach().clone(memory_format=torch.contiguous_format) for name, tensor in state.items()}
