"""Guards of a served model: methods that need all of its weights raise errors, because its blocks are on servers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final, NoReturn

import torch
from torch import Tensor, nn

from lightning_swarm.core.errors import ConfigError

_ON_SERVERS: Final = "the blocks of a served model are on servers"
_REMEDIES: Final = {
    "save_pretrained": "Copy the folder from its servers, or save an adapter by peft's own `save_pretrained`",
    "push_to_hub": "Upload the folder from its servers, or an adapter by peft's own `push_to_hub`",
    "load_state_dict": "Save the weights in a folder, and serve it",
    "resize_token_embeddings": "Resize the model on one machine, save it, and serve that folder",
    "__deepcopy__": "Connect again, by `remote_model(ADDRESS)`",
    "__reduce_ex__": "Connect in the other process, by `remote_model(ADDRESS)`",
}
_TITLES: Final = {"__deepcopy__": "copying it", "__reduce_ex__": "pickling it, as `torch.save` does,"}


def refuse_changes(module: nn.Module, dtype: torch.dtype, device: torch.device, *, moves: bool) -> None:
    """Make a served model refuse copies, files and other weights; without `moves`, also another dtype or device."""
    for name in _REMEDIES:
        vars(module)[name] = partial(_refuse, name)
    if not moves:
        vars(module)["_apply"] = partial(_apply, module, dtype, device)


def _refuse(name: str, *_: Any, **__: Any) -> NoReturn:
    raise ConfigError(f"{_ON_SERVERS}, got {_TITLES.get(name, f'`{name}`')} of the model itself. {_REMEDIES[name]}.")


def _apply(
    module: nn.Module, dtype: torch.dtype, device: torch.device, fn: Callable[[Tensor], Tensor], recurse: bool = True
) -> nn.Module:
    """Check a change of all tensors by `to`, `float` or a similar method, and refuse another dtype or device."""
    moved = fn(torch.zeros((), dtype=dtype, device=device))
    if moved.dtype != dtype or moved.device.type != device.type:
        raise ConfigError(
            f"{_ON_SERVERS} in {dtype}, and the rest is on {device}, got a move to {moved.dtype} on {moved.device}. "
            "Serve the model with another `--dtype`, or connect by `remote_model(..., device=...)`."
        )
    return module
