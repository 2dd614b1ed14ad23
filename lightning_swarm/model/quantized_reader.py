"""Reads the tensors of quantised layers: unchanged from a quantised folder, or quantised from a plain folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn

from lightning_swarm.core.errors import ConfigError
from lightning_swarm.model.quantization import BLOCK, NESTED_BLOCK, Quantization

if TYPE_CHECKING:
    from lightning_swarm.model.folder_reader import FolderReader

# Tensors of a quantised layer -> their names in files, after the layer's name.
_IN_FILES: Final = {
    "weight": "weight",
    "SCB": "SCB",
    "absmax": "weight.absmax",
    "quant_map": "weight.quant_map",
    "nested_absmax": "weight.nested_absmax",
    "nested_quant_map": "weight.nested_quant_map",
}


def check_finite(name: str, values: Tensor, remedy: str) -> None:
    """Refuse weights that are infinite or NaN."""
    if num_refused := int((~torch.isfinite(values)).sum()):
        raise ConfigError(
            f"a model's weights must be finite numbers, but {num_refused} of {values.numel()} in {name!r} are not, in "
            f"{values.dtype}. Save the model again from a sound checkpoint, or {remedy}."
        )


class QuantizedReader:
    """Reads the tensors of quantised layers from a folder, and quantises a plain folder's weights one by one."""

    def __init__(
        self,
        quantization: Quantization,
        layers: Mapping[str, nn.Module],
        folder: FolderReader,
        *,
        is_stored: bool,  # the weights in the folder are quantised
    ) -> None:
        self._quantization, self._layers = quantization, layers
        self._folder, self._is_stored = folder, is_stored
        self._last: tuple[str, Mapping[str, Tensor]] = ("", {})  # the layer that was read last, and its tensors

    def __call__(self, name: str) -> Tensor:
        """Read a tensor by its name in the module."""
        layer_name, _, part = name.rpartition(".")
        layer = self._layers.get(layer_name)
        if layer is None:
            return self._folder(name)
        if part == "bias":
            return self._folder(name).to(self._quantization.dtype)
        if self._last[0] != layer_name:
            self._last = ("", {})  # frees the former layer's tensors first
            read = self._read_quantized if self._is_stored else self._quantize
            self._last = layer_name, read(layer_name, layer)
        return self._last[1][part]

    def warn_of_unread(self) -> None:
        """Warn of tensors in the files that were not read, after the whole model was read."""
        self._folder.warn_of_unread()

    def _quantize(self, layer_name: str, layer: Any) -> Mapping[str, Tensor]:
        """Return a layer's tensors from a folder whose weights are plain."""
        weight = self._folder(f"{layer_name}.weight").to(self._quantization.dtype)
        # bitsandbytes computes the scales of int8 in float16.
        checked = weight.to(torch.float16) if self._quantization.kind == "int8" else weight
        check_finite(f"{layer_name}.weight", checked, "serve it without `--quantize`")
        return self._quantization.quantize(weight.T if layer.was_transposed else weight)

    def _read_quantized(self, layer_name: str, layer: nn.Module) -> Mapping[str, Tensor]:
        """Return a layer's tensors from a folder whose weights are quantised."""
        stored = {part: self._folder.find(f"{layer_name}.{name}") for part, name in _IN_FILES.items()}
        if self._quantization.kind == "int8":
            # Marks it as read. Its value is not needed, because bitsandbytes has written one format since 0.45.
            self._folder.find(f"{layer_name}.weight_format")
        else:
            packed = self._folder.find(f"{layer_name}.weight.quant_state.bitsandbytes__{self._quantization.kind}")
            settings = {} if packed is None else json.loads(bytes(packed.tolist()))
            self._check(layer_name, layer, settings)
            if self._quantization.is_nested:
                stored["nested_offset"] = torch.tensor(float(settings["nested_offset"]))
        wanted = ["weight", *(name for name, _ in layer.named_buffers())]
        if missing := [part for part in wanted if stored.get(part) is None]:
            raise ConfigError(
                f"the files of a quantised model must have all tensors of its layers, but {layer_name!r} has no "
                f"{missing[0]!r} under the name that transformers writes today. Save the model again by "
                "`save_pretrained`, or serve the plain model with `--quantize`."
            )
        return {part: tensor for part in wanted if (tensor := stored[part]) is not None}

    def _check(self, layer_name: str, layer: Any, settings: Mapping[str, Any]) -> None:
        """Refuse a layer that was quantised in another form than its config describes."""
        wanted = {
            "quant_type": self._quantization.kind,
            "blocksize": BLOCK,
            "dtype": str(self._quantization.dtype).removeprefix("torch."),
            "shape": [layer.out_features, layer.in_features],
        }
        if self._quantization.is_nested:
            wanted |= {"nested_blocksize": NESTED_BLOCK, "nested_dtype": "float32"}
        for name, value in wanted.items():
            if settings.get(name) != value:
                raise ConfigError(
                    f"the layers of a quantised model must have the form in its config.json: {layer_name!r} has "
                    f"`{name}` {settings.get(name)} instead of {value}. Serve the plain model with `--quantize`."
                )
