"""Guards of a served model: methods that need all of its weights raise errors, because its blocks are on servers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final, NoReturn

import torch
from torch import Tensor, nn

from lightning_swarm.core.errors import ConfigError

# method -> (refused act, remedy)
_REFUSED: Final = {
    "save_pretrained": ("saved", "Copy the folder from its servers, or save an adapter by peft's `save_pretrained`"),
    "push_to_hub": ("uploaded", "Upload the folder from its servers, or an adapter by peft's `push_to_hub`"),
    "load_state_dict": ("given other weights", "Save the weights in a folder, and serve it"),
    "resize_token_embeddings": ("resized", "Resize the model on one machine, save it, and serve that folder"),
    "__deepcopy__": ("copied", "Connect again, by `remote_model(ADDRESS)`"),
    "__reduce_ex__": ("pickled, as `torch.save` does", "Connect in the other process, by `remote_model(ADDRESS)`"),
}


def refuse_changes(module: nn.Module, dtype: torch.dtype, device: torch.device, *, moves: bool) -> None:
    """Make a served model raise errors when it is copied, saved or changed; unless `moves`, also when it is moved."""
    for name, (act, remedy) in _REFUSED.items():  # `copy` and `pickle`, too, look their methods up on the instance
        vars(module)[name] = partial(_refuse, act, remedy)
    if not moves:
        vars(module)["_apply"] = partial(_apply, module, dtype, device)


def _refuse(act: str, remedy: str, *_: Any, **__: Any) -> NoReturn:
    raise ConfigError(f"a served model cannot be {act}, because its blocks are on servers. {remedy}.")


def _apply(
    module: nn.Module, dtype: torch.dtype, device: torch.device, fn: Callable[[Tensor], Tensor], recurse: bool = True
) -> nn.Module:
    """Replace `nn.Module._apply`: refuse a move to another dtype or device; any other move changes nothing."""
    moved = fn(torch.zeros((), dtype=dtype, device=device))
    if moved.dtype != dtype or moved.device.type != device.type:
        raise ConfigError(
            f"a served model must stay in {dtype} on {device}, got a move to {moved.dtype} on {moved.device}. "
            "Serve the model with another `--dtype`, or connect by `remote_model(..., device=...)`."
        )
    return module
