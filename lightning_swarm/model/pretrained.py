"""Hugging Face models for serving: reads a model's folder, and fills parts of a model on meta with its weights."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from lightning_swarm.core.errors import ConfigError
from lightning_swarm.model.deferred_init import in_place_of, put_tensors
from lightning_swarm.model.fidelity.unsaved_buffers import unsaved_buffers
from lightning_swarm.model.fingerprint import digest
from lightning_swarm.model.folder_reader import FolderReader
from lightning_swarm.model.init_record import InitRecord
from lightning_swarm.model.partition import Blocks, StageModule, build_stages, find_blocks
from lightning_swarm.model.quantization import Quantization, with_quantization
from lightning_swarm.model.quantized_reader import QuantizedReader, check_finite
from lightning_swarm.protocol.messages.serving import MAX_FILE_BYTES, CardFile, ModelCard, ServedStage, WeightsDigest

_CONFIG: Final = "config.json"
_GENERATION: Final = "generation_config.json"
_WEIGHTS: Final = "model.safetensors"
_INDEX: Final = "model.safetensors.index.json"
FILES: Final = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "vocab.txt", "tokenizer.model", "spiece.model", "chat_template.jinja"),
)
"""The small files that go with a model's weights."""

Read = Callable[[str], Tensor]  # reads a tensor of a model by its name in the module's state dict


def require_transformers() -> None:
    """Raise `ConfigError` if the packages that read Hugging Face models are missing."""
    try:
        import safetensors  # noqa: F401 - only checks that it is installed
        import transformers  # noqa: F401
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"serving a model of Hugging Face needs {error.name}, which is not installed. "
            "Run: pip install transformers safetensors"
        ) from error


def transformers_version() -> str:
    """Return the major and minor version of transformers on this machine."""
    import transformers

    return ".".join(transformers.__version__.split(".")[:2])


def check_version(card: ModelCard) -> None:
    """Refuse a model that is served with another version of transformers, whose blocks may give other results."""
    if card.transformers != transformers_version():
        raise ConfigError(
            "all peers of a served model must have the same version of transformers: the servers have "
            f"{card.transformers}, this machine has {transformers_version()}. Run: pip install "
            f"'transformers=={card.transformers}.*'"
        )


class PretrainedModel:
    """A Hugging Face model on meta, in eval mode, and the blocks between which it is cut."""

    def __init__(
        self,
        config: str,  # the content of config.json
        generation_config: str,  # the content of generation_config.json; empty if there is none
        *,
        dtype: str,  # name of the weights' dtype, such as ``bfloat16``
        blocks: str | None = None,  # name of the model's list of blocks; None: search for it
        computes_blocks: bool = True,  # False: blocks get no weights here, so their layers need not be quantised
    ) -> None:
        require_transformers()
        import transformers

        settings = json.loads(config)
        plain = _plain(settings)
        self.quantization = Quantization.of(settings)
        self._unquantized = json.dumps(_without_quantization(settings)), generation_config, dtype, blocks
        self._record = InitRecord(draws=False)  # weights come from files
        try:
            self.config = transformers.AutoConfig.for_model(**plain)
            if dtype == "float64":  # torch has no grouped matrix products, which experts use, in float64
                self.config._experts_implementation = "eager"
            with self._record.recording(torch.device("cpu")), torch.device("meta"):
                self.module: Any = transformers.AutoModelForCausalLM.from_config(
                    self.config, dtype=dtype_of(dtype), trust_remote_code=False
                )
        except ConfigError:
            raise
        except Exception as error:  # transformers may raise any error
            raise ConfigError(
                f"a served model must be one that transformers {transformers.__version__} builds from its config.json "
                f"for generating text, but that failed: {error}. Use another version, or another model."
            ) from error
        self._keep_in_float32(dtype_of(dtype))
        root = blocks or _find_list(self.module, self.config)
        # The names of all quantised layers, and the quantised layers that have weights here, by name.
        self.quantized, self.quantized_here = self._replace_layers(None if computes_blocks else root)
        self.module.eval().requires_grad_(False)
        if generation_config:
            self.module.generation_config = transformers.GenerationConfig.from_dict(json.loads(generation_config))
        self.blocks: Blocks = find_blocks(self.module, root)
        # Keep all tensors alive, because they are identified by `id`, even after they have been replaced.
        self._on_meta = [*self.module.parameters(), *self.module.buffers()]
        self._views = {id(tensor): self._record.view(tensor) for tensor in self._on_meta if tensor.is_meta}

    def _replace_layers(self, plain_module: str | None) -> tuple[frozenset[str], dict[str, nn.Module]]:
        """Replace layers by quantised layers, except in `plain_module`.

        Return the names of all layers that are quantised in files, and the new layers by name.
        """
        if self.quantization is None:
            return frozenset(), {}
        if self.module.dtype != self.quantization.dtype:
            raise ConfigError(
                "a folder with quantised weights must be served in the dtype in which it was saved, "
                f"{self.quantization.dtype}, got {self.module.dtype}. Leave out `--dtype`, or name the folder of the "
                "plain model, and use `--quantize`."
            )
        names, made = self.quantization.layer_names(self.module), {}
        for name in names:
            if plain_module is None or not name.startswith(f"{plain_module}."):
                made[name] = self.quantization.layer_like(self.module.get_submodule(name))
                self.module.set_submodule(name, made[name])
        return frozenset(names), made

    @cached_property
    def unquantized(self) -> PretrainedModel:
        """This model as it was before its weights were quantised."""
        config, generation_config, dtype, blocks = self._unquantized
        return PretrainedModel(config, generation_config, dtype=dtype, blocks=blocks)

    def _keep_in_float32(self, dtype: torch.dtype) -> None:
        """Convert to float32 the tensors that `from_pretrained` keeps in float32, which `from_config` does not."""
        patterns = [re.escape(name).replace(r"\*", ".*") for name in self.module._get_dtype_plan(dtype)]
        named = [*self.module.named_parameters(), *self.module.named_buffers()] if patterns else []
        kept = [tensor for name, tensor in named if any(re.search(pattern, name) for pattern in patterns)]
        with self._record.recording(torch.device("cpu")), torch.no_grad():
            made = {id(tensor): in_place_of(tensor, tensor.float()) for tensor in kept}
        put_tensors(self.module, made)

    def stages(self, ranges: Sequence[range]) -> tuple[StageModule, ...]:
        """Cut the blocks into stages, without the last stage of `build_stages`, of the parameters outside of blocks."""
        return build_stages(self.module, self.blocks, ranges)[: len(ranges)]

    def stage_bytes(self, ranges: Sequence[range]) -> list[int]:
        """Return the number of bytes of each stage's weights, without loading the weights."""
        named = [stage.named_stage_tensors() for stage in self.stages(ranges)]
        return [sum(tensors[name].nbytes for name in self.saved(tensors)) for tensors in named]

    def bytes_if_quantized(self, kind: str, ranges: Sequence[range], device: torch.device) -> int | None:
        """Return the bytes of all stages' weights if quantised; None if they are already, or cannot be on `device`."""
        if self.quantization is not None:
            return None
        config, generation_config, dtype, blocks = self._unquantized
        try:
            config = with_quantization(config, kind, dtype)
            made = PretrainedModel(config, generation_config, dtype=dtype, blocks=blocks)
            made.check_device(device)
        except ConfigError:
            return None
        return sum(made.stage_bytes(ranges))

    @cached_property
    def around(self) -> dict[str, Tensor]:
        """The tensors outside of all blocks, by name, each once."""
        inside = {id(tensor) for block in self.blocks.modules for tensor in (*block.parameters(), *block.buffers())}
        named = [*self.module.named_parameters(), *self.module.named_buffers()]
        return {name: tensor for name, tensor in named if id(tensor) not in inside}

    def saved(self, tensors: Iterable[str]) -> list[str]:
        """Return, sorted, the names of those tensors that files hold; the values of the rest follow from the config."""
        return sorted(set(tensors) - unsaved_buffers(self.module).keys())

    def fill(self, tensors: Mapping[str, Tensor], read: Read, device: torch.device) -> dict[str, Tensor]:
        """Replace tensors of the model by their values on a device; return the values that were read, by name.

        The values of tensors that no file has are computed, because they follow from the config.
        """
        self.check_device(device)
        values = {name: self._checked(name, tensors[name], read(name)) for name in self.saved(tensors)}
        on_device: dict[int, Tensor] = {}
        for name, tensor in tensors.items():
            if name in values:
                on_device[id(tensor)] = values[name].to(device)
            elif tensor.is_meta:
                (value,) = self._record.values([self._views[id(tensor)]], device)
                on_device[id(tensor)] = value.to(tensor.dtype)
        old = {id(tensor): tensor for tensor in tensors.values()}
        put_tensors(self.module, {key: in_place_of(old[key], value) for key, value in on_device.items()})
        for name, layer in self.quantized_here.items():
            if f"{name}.weight" in tensors and self.quantization is not None:
                self.quantization.bind(layer)
        return values

    def check_device(self, device: torch.device) -> None:
        """Refuse a device on which quantised layers would be computed wrongly."""
        if self.quantization is not None:
            self.quantization.check_device(self.quantized_here, device)

    def make_placeholders(self, device: torch.device) -> list[Tensor]:
        """Replace the blocks' tensors by zeros of equal shapes that take no memory, and return these placeholders."""
        # Not on meta, because peft makes an adapter on the device of its layer, and an adapter needs values.
        adapted = None if self.quantization is None else self.quantization.adapted_dtype
        quantized = {id(self.module.get_submodule(name).weight) for name in self.quantized}
        made: dict[int, Tensor] = {}
        for block in self.blocks.modules:
            for tensor in (*block.parameters(), *block.buffers()):
                dtype = adapted if adapted is not None and id(tensor) in quantized else tensor.dtype
                made[id(tensor)] = in_place_of(tensor, torch.zeros((), dtype=dtype, device=device).expand(tensor.shape))
        put_tensors(self.module, made)
        return list(made.values())

    def _checked(self, name: str, like: Tensor, value: Tensor) -> Tensor:
        if value.shape != like.shape:
            raise ConfigError(
                f"weights must have the shapes of their config: {name!r} has {tuple(value.shape)} instead of "
                f"{tuple(like.shape)}. Name the folder that belongs to this config."
            )
        return in_dtype_of(like, name, value)


def in_dtype_of(like: Tensor, name: str, value: Tensor) -> Tensor:
    """Convert a tensor of a file to the dtype of the model's tensor; refuse encodings such as int8."""
    is_encoded = not value.is_floating_point() or value.element_size() < 2
    if is_encoded if like.is_floating_point() else value.dtype != like.dtype:
        raise ConfigError(
            f"a served model's weights must be as its config.json describes them, {like.dtype} for {name!r}, but the "
            f"file has {value.dtype}. Save the model without quantization, and serve it with `--quantize`."
        )
    return value.to(like.dtype)


def _plain(settings: Any) -> dict[str, Any]:
    """Return the settings of a config without names of code, because the config may come from another peer.

    transformers would download the code, such as another implementation of attention.
    """
    if not isinstance(settings, dict):
        raise ConfigError(f"a model's config must be a JSON object, got a {type(settings).__name__}. Correct the file.")
    return {
        name: _floats(value)
        for name, value in _without_quantization(settings).items()
        if not (name.startswith("_") or name.endswith("_implementation") or name == "auto_map")
    }


def _without_quantization(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value for name, value in settings.items() if name not in ("quantization_config", "compression_config")
    }


def _floats(value: Any) -> Any:
    """Decode infinity and NaN, which transformers encodes in JSON as in `{"__float__": "Infinity"}`."""
    if isinstance(value, list):
        return [_floats(item) for item in value]
    if isinstance(value, dict):
        if value.keys() == {"__float__"} and value["__float__"] in ("Infinity", "-Infinity", "NaN"):
            return float(value["__float__"])
        return {name: _floats(item) for name, item in value.items()}
    return value


def dtype_of(name: str) -> torch.dtype:
    """Return the dtype of a name such as ``bfloat16``."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ConfigError(f"a model's dtype must be a floating-point dtype, got {name!r}. Use 'bfloat16', for example.")
    return dtype


def device_of(name: str | torch.device) -> torch.device:
    """Return the device of this name; refuse a device that torch cannot use here."""
    try:
        device = torch.device(name)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ConfigError(
            f"a model's device must be one that torch {torch.__version__} can use here, where it sees "
            f"{torch.cuda.device_count()} GPUs, got {str(name)!r}: {str(error).splitlines()[0]}. Use another device, "
            "such as 'cpu'."
        ) from error
    return device


def _find_list(module: nn.Module, config: Any) -> str:
    """Return the name of the least nested list with as many modules as the config has layers."""
    number = getattr(config.get_text_config(), "num_hidden_layers", None)
    lists: list[str] = [
        name for name, inner in module.named_modules() if isinstance(inner, nn.ModuleList) and len(inner) == number
    ]
    if not lists:
        raise ConfigError(
            f"a model is cut between the blocks of a list, but {type(module).__name__} has no list of {number} blocks, "
            "the number in its config. Name the list with `--blocks`."
        )
    return min(lists, key=lambda name: name.count("."))


def weights_digest(values: Mapping[str, Tensor]) -> WeightsDigest:
    """Return the digest of weights, which does not depend on their order in the mapping."""
    return _digest_of(values, values.__getitem__)


def _digest_of(names: Iterable[str], read: Read) -> WeightsDigest:
    """Return the digest of weights that are read one by one, because they may not fit into memory together."""
    names, num_bytes = sorted(names), 0

    def tensors() -> Iterator[Tensor]:
        nonlocal num_bytes
        for name in names:
            tensor = read(name)
            num_bytes += tensor.nbytes
            yield tensor

    hashed = digest(tensors(), "\n".join(names).encode())  # reads all tensors, and so counts their bytes
    return WeightsDigest(num_bytes=num_bytes, sha256=hashed)


def read_config(folder: Path) -> str:
    """Return the config.json of a folder."""
    return _json(folder, _CONFIG)


def read_generation_config(folder: Path) -> str:
    """Return the generation_config.json of a folder; empty if there is none."""
    return _json(folder, _GENERATION)


def _json(folder: Path, name: str) -> str:
    """Return the content of a JSON file, with sorted keys; empty if there is no such file."""
    file = folder / name
    if name == _CONFIG and not file.is_file():
        raise ConfigError(
            f"the folder of a Hugging Face model must have a config.json, but {str(folder)!r} has none. Write it by "
            "`model.config.save_pretrained(FOLDER)`, or name another folder."
        )
    if not file.is_file():
        return ""
    try:
        return json.dumps(json.loads(file.read_text()), sort_keys=True)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} must hold JSON: {error}. Write it again by `save_pretrained`.") from error


def _too_large(path: Path, error: RuntimeError) -> str:
    return (
        f"each file of a served model must fit into the memory that this process may use, but {path} does not: "
        f"{error}. Save the model in smaller files, by `save_pretrained(..., max_shard_size='200MB')`."
    )


class PretrainedFolder:
    """Reads a model's folder as `save_pretrained` writes it, and executes nothing in it."""

    def __init__(self, path: Path) -> None:
        require_transformers()
        self.path = path
        self.config, self.generation_config = read_config(path), read_generation_config(path)
        self.quantization = Quantization.of(json.loads(self.config))  # None: the folder's weights are plain
        self._files = self._index()

    def _index(self) -> dict[str, str]:
        from safetensors import SafetensorError, safe_open

        try:
            if (self.path / _INDEX).is_file():
                files: dict[str, str] = json.loads((self.path / _INDEX).read_text())["weight_map"]
                return files
            with safe_open(self.path / _WEIGHTS, "pt") as file:
                return dict.fromkeys(file.keys(), _WEIGHTS)
        except RuntimeError as error:  # torch cannot map the file into memory
            raise ConfigError(_too_large(self.path / _WEIGHTS, error)) from error
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            if gguf_files := sorted(self.path.glob("*.gguf")):
                raise ConfigError(
                    f"a served model's weights must be in safetensors, but {str(self.path)!r} has GGUF, as in "
                    f"{gguf_files[0].name}. Name the folder of the model from which it was made, and use `--quantize`."
                ) from error
            raise ConfigError(
                f"a served model's folder must have a readable {_WEIGHTS}, or several such files and {_INDEX}, but "
                f"reading {str(self.path)!r} failed: {error}. Write it by `save_pretrained`."
            ) from error

    @property
    def dtype(self) -> str:
        """The dtype that the model was saved in."""
        settings = json.loads(self.config)
        return str(settings.get("dtype") or settings.get("torch_dtype") or "float32").removeprefix("torch.")

    @property
    def files(self) -> dict[str, bytes]:
        """The contents of the small files that go with the weights, such as a tokenizer's."""
        contents = {name: (self.path / name).read_bytes() for name in FILES if (self.path / name).is_file()}
        for name, content in contents.items():
            if len(content) > MAX_FILE_BYTES:
                raise ConfigError(
                    f"{self.path / name} must have at most {MAX_FILE_BYTES} bytes, got {len(content)}. Remove it, or "
                    "save the tokenizer again."
                )
        return contents

    def reader(self, model: PretrainedModel) -> FolderReader | QuantizedReader:
        """Return a reader of tensors by the model's names, which quantises plain weights if the model needs that."""
        if model.quantization is None:
            return FolderReader(self, model)
        is_stored = self.quantization is not None
        plain = FolderReader(self, model.unquantized, model.quantized if is_stored else ())
        return QuantizedReader(model.quantization, model.quantized_here, plain, is_stored=is_stored)

    def has(self, name: str) -> bool:
        """Return whether a file has a tensor of this name."""
        return name in self._files

    @property
    def names(self) -> list[str]:
        """The names of the tensors."""
        return list(self._files)

    def tensor(self, name: str) -> Tensor:
        """Read a tensor by its name in the files."""
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(self.path / self._files[name], "pt") as file:
                tensor: Tensor = file.get_tensor(name)
        except RuntimeError as error:  # torch cannot map the file into memory
            raise ConfigError(_too_large(self.path / self._files[name], error)) from error
        except (OSError, SafetensorError) as error:
            raise ConfigError(
                f"{self.path / self._files[name]} must be a readable safetensors file: {error}. Write it again by "
                "`save_pretrained`."
            ) from error
        return tensor.clone()  # the read tensor keeps its whole file mapped, and changes with the file

    def card(self, model: PretrainedModel, ranges: Sequence[range]) -> ModelCard:
        """Describe a model of this folder, cut into stages. Read all weights once, one at a time, for their digests."""
        read = self.reader(model)

        def digest_tensors(tensors: Mapping[str, Tensor]) -> WeightsDigest:
            def read_checked(name: str) -> Tensor:
                like, layer = tensors[name], name.rpartition(".")[0]
                # In a quantised layer, the scales must be finite. Its weight is packed bits, whatever the dtype.
                is_packed_layer = layer in model.quantized_here and not name.endswith(".bias")
                value = in_dtype_of(like, name, read(name))
                if isinstance(like, nn.Parameter) != is_packed_layer:
                    check_finite(name, value, "serve it in another `--dtype`")
                return value

            return _digest_of(model.saved(tensors), read_checked)

        stages = [
            ServedStage(num_blocks=len(blocks), weights=digest_tensors(stage.named_stage_tensors()))
            for stage, blocks in zip(model.stages(ranges), ranges, strict=True)
        ]
        around = digest_tensors(model.around)
        read.warn_of_unread()
        return ModelCard(
            config=self.config,
            generation_config=self.generation_config,
            transformers=transformers_version(),
            blocks=model.blocks.root_name,
            dtype=str(model.module.dtype).removeprefix("torch."),
            stages=stages,
            around=around,
            files=[
                CardFile(name=name, num_bytes=len(content), sha256=hashlib.sha256(content).digest())
                for name, content in self.files.items()
            ],
        )
