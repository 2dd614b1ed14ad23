"""Reads a model's tensors from the files of a Hugging Face folder, which may have other names and layouts."""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Callable, Iterable
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from lightning_swarm.core.errors import ConfigError
from lightning_swarm.model.deferred_init import in_place_of

if TYPE_CHECKING:
    from lightning_swarm.model.pretrained import PretrainedFolder, PretrainedModel

_log = logging.getLogger(__name__)

NO_BLOCK: Final = -1  # stands for the tensors outside of blocks, such as embeddings, where a block's index is expected


class FolderReader:
    """Reads a model's tensors by the module's names, which may differ from the names in its files."""

    def __init__(
        self,
        folder: PretrainedFolder,
        model: PretrainedModel,
        quantized: Iterable[str] = (),  # layers whose weights in the files are quantised
    ) -> None:
        self._folder, self._model = folder, model
        self._quantized_prefixes = tuple(f"{layer}." for layer in quantized)
        self._prefix = f"{model.module.base_model_prefix}."
        # `id` of a parameter -> its names in the module. Tied parameters have several; the files may have only some.
        self._names_by_parameter_id: dict[int, list[str]] = {}
        for name, tensor in model.module.named_parameters(remove_duplicate=False):
            self._names_by_parameter_id.setdefault(id(tensor), []).append(name)
        # name in the module -> all names of the same parameter
        self._tied_names = {name: names for names in self._names_by_parameter_id.values() for name in names}
        self._read: set[str] = set()  # names in the files, of tensors that were read
        # The part that was converted last: the index of its block, or `NO_BLOCK`, and its tensors by name.
        self._loaded: tuple[int | None, dict[str, Tensor]] = (None, {})

    def __call__(self, name: str) -> Tensor:
        """Read a tensor by its name in the module."""
        # If the files hold a base model, without a head for generating text, their names lack the prefix.
        tied = self._tied_names.get(name, [name])
        aliases = dict.fromkeys(alias for own in tied for alias in (own, own.removeprefix(self._prefix)))
        names = [alias for alias in aliases if self._folder.has(alias)]
        if not names:
            return self._read_converted(name)
        self._read.update(names)
        tensors = [self._folder.tensor(alias) for alias in names]
        if not all(torch.equal(tensors[0], other) for other in tensors[1:]):
            raise ConfigError(
                f"tied weights must be equal, but {', '.join(names)} differ in {str(self._folder.path)!r}. If they are "
                "not tied, set `tie_word_embeddings` to false in config.json."
            )
        return tensors[0]

    def find(self, name: str) -> Tensor | None:
        """Read a tensor by its name in the files, with or without the base model's prefix; None if there is none."""
        for alias in (name, name.removeprefix(self._prefix)):
            if self._folder.has(alias):
                self._read.add(alias)
                return self._folder.tensor(alias)
        return None

    def _read_converted(self, name: str) -> Tensor:
        """Read a tensor that has another name or layout in the files, converted by Hugging Face's own loader."""
        blocks = self._model.blocks
        root = f"{blocks.root_name}."
        index = blocks.names.index(name.removeprefix(root).split(".")[0]) if name.startswith(root) else NO_BLOCK
        if self._loaded[0] != index:
            self._loaded = index, self._load(index)
        # In the small model that `_load` fills, the block has the number 0.
        key = name if index == NO_BLOCK else f"{root}0.{name.removeprefix(f'{root}{blocks.names[index]}.')}"
        like, loaded = self._model.module.state_dict()[name], self._loaded[1].get(key)
        if loaded is None or loaded.shape != like.shape:
            raise ConfigError(
                f"the files of a served model must have all of its weights, but {str(self._folder.path)!r} has no "
                f"{name!r}, under this or any other name that transformers knows. Save the model again with "
                "`save_pretrained`, or serve another model."
            )
        return loaded

    @cached_property
    def _to_module_name(self) -> Callable[[str], str]:
        """The function that maps a name in the files to a name in the module."""
        return _make_to_module_name(self._model.module)  # lazy, because most files have the module's names

    def warn_of_unread(self) -> None:
        """Warn of tensors in the files that were not read, after the whole model was, as Hugging Face's loader does."""
        ignored = self._model.module._keys_to_ignore_on_load_unexpected or ()
        unread = [
            name
            for name in self._folder.names
            if name not in self._read and not any(re.search(pattern, name) for pattern in ignored)
        ]
        if unread:
            _log.warning(
                "%d tensors of %s are not part of a %s, as its config.json describes it, and are not served: %s.",
                len(unread),
                self._folder.path,
                type(self._model.module).__name__,
                ", ".join(sorted(unread)[:5]),
            )

    def _renames_for_block(self, index: int) -> dict[str, str]:
        """Map the files' names of a block's tensors to their names in a model that has only this block.

        For `NO_BLOCK`, map the names of the tensors outside of blocks to themselves.
        """
        root = f"{self._model.blocks.root_name}."
        if index == NO_BLOCK:
            excluded = root, *self._quantized_prefixes
            return {name: name for name in self._folder.names if not self._to_module_name(name).startswith(excluded)}
        block_name = self._model.blocks.names[index]
        prefix = f"{root}{block_name}."
        renames = {}
        for name in self._folder.names:
            module_name = self._to_module_name(name)
            if not module_name.startswith(prefix) or module_name.startswith(self._quantized_prefixes):
                continue
            # Another part of the name may equal the block's number, as in `h.1.experts.1.w` of block 1. Choose the
            # replacement that gives a name in block 0: `h.0.experts.1.w`.
            parts = name.split(".")
            positions = [position for position, part in enumerate(parts) if part == block_name]
            renamed = (".".join([*parts[:position], "0", *parts[position + 1 :]]) for position in positions)
            renames[name] = next(new for new in renamed if self._to_module_name(new).startswith(f"{root}0."))
        return renames

    def _load(self, index: int) -> dict[str, Tensor]:
        """Load one block, as the only block of a small model, or the tensors outside of blocks (`NO_BLOCK`)."""
        import transformers

        model, names = self._model, self._renames_for_block(index)
        state = {new: self._folder.tensor(name) for name, new in names.items()}
        verbosity = transformers.logging.get_verbosity()
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        try:
            small, report = _small_class(model, index).from_pretrained(  # type: ignore[attr-defined]
                None,
                config=_small_config(model.config, index),
                state_dict=state,
                dtype=model.module.dtype,
                output_loading_info=True,
            )
        finally:
            transformers.logging.set_verbosity(verbosity)
            transformers.logging.enable_progress_bar()
        missing, unexpected = set(report["missing_keys"]), set(report["unexpected_keys"])
        self._read |= {
            name for name, new in names.items() if new not in unexpected and self._to_module_name(new) not in unexpected
        }
        # Missing tensors have random values.
        return {name: tensor for name, tensor in small.state_dict().items() if name not in missing}


def _make_to_module_name(module: Any) -> Callable[[str], str]:
    """Return a function that maps a tensor's name in files to its name in the model, as transformers does."""
    from transformers import conversion_mapping, core_model_loading

    rules = conversion_mapping.get_model_conversion_mapping(module)
    renamings = [rule for rule in rules if isinstance(rule, core_model_loading.WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, core_model_loading.WeightConverter)]
    prefix, known = module.base_model_prefix, module.state_dict()
    return cache(lambda name: core_model_loading.rename_source_key(name, renamings, converters, prefix, known)[0])


def _small_class(model: PretrainedModel, index: int) -> type:
    """Return a class like the model's with one block, a copy of block `index`; `NO_BLOCK`: a block of its own."""
    kind, root = type(model.module), model.blocks.root_name

    def build(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        kind.__init__(self, config, *args, **kwargs)
        if index != NO_BLOCK:
            block = model.blocks.modules[index]
            tensors = [*block.parameters(), *block.buffers()]
            on_meta = {id(t): in_place_of(t, torch.empty_like(t, device="meta")) for t in tensors}
            self.get_submodule(root)[0] = copy.deepcopy(block, on_meta)

    # Keep the class's name and module, by which transformers looks up its conversions.
    return type(kind.__name__, (kind,), {"__init__": build, "__module__": kind.__module__})


def _small_config(config: Any, index: int) -> Any:
    """Return the config of a model that has only block `index`; `NO_BLOCK`: only the first block."""
    small = copy.deepcopy(config)
    text = small.get_text_config()
    number, first = text.num_hidden_layers, max(index, 0)
    text.num_hidden_layers = 1
    for name, value in list(vars(text).items()):
        if isinstance(value, list) and len(value) == number:  # an entry for each block, such as its kind of attention
            setattr(text, name, value[first : first + 1])
    if index != NO_BLOCK:  # embeddings are not loaded, so make them small
        text.vocab_size, text.pad_token_id = 8, None
    return small
