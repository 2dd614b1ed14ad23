"""Quantised weights of served models, in the layers and formats of bitsandbytes: NF4, FP4 and int8."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from packaging.version import Version
from torch import Tensor, nn

from lightning_swarm.core.errors import ConfigError

KINDS: Final = ("nf4", "int8")  # the kinds of quantisation in which a plain model can be served

BLOCK: Final = 64  # number of 4-bit weights that share a scale

NESTED_BLOCK: Final = 256  # number of scales that share a nested scale

_MAX_THRESHOLD: Final = 1e30  # beyond all activations
_PIECE: Final = 1 << 18  # weights that are quantised at once; bitsandbytes needs 20 bytes for each
_DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16)
_PACKAGE: Final = "bitsandbytes"
_VERSION: Final = "0.50"  # the first version with all kernels on CPUs


def _require_bitsandbytes() -> Any:
    try:
        import bitsandbytes
    except ImportError as error:
        raise ConfigError(
            f"quantised weights need bitsandbytes, which cannot be imported here: {error}. Run: pip install "
            f"'bitsandbytes>={_VERSION}'"
        ) from error
    if Version(bitsandbytes.__version__) < Version(_VERSION):
        raise ConfigError(
            f"quantised weights need bitsandbytes {_VERSION} or newer, got {bitsandbytes.__version__}. Run: "
            f"pip install 'bitsandbytes>={_VERSION}'"
        )
    logger = logging.getLogger("bitsandbytes.autograd._functions")
    if _is_not_about_casts not in logger.filters:
        logger.addFilter(_is_not_about_casts)
    return bitsandbytes


def _is_not_about_casts(record: logging.LogRecord) -> bool:
    # int8 layers log this message for each product in another dtype than float16.
    return not str(record.msg).startswith("MatMul8bitLt: inputs will be cast")


def is_quantized(layer: nn.Module) -> bool:
    """Return whether a layer computes with quantised weights."""
    return type(layer).__module__.partition(".")[0] == _PACKAGE


def is_conv1d(layer: nn.Module) -> bool:
    """Return whether a layer is GPT-2's `Conv1D`, a linear layer whose weight is transposed."""
    return type(layer).__name__ == "Conv1D" and hasattr(layer, "nf")


def linear_shape(layer: Any) -> tuple[int, int]:
    """Return the numbers of a linear layer's inputs and outputs."""
    if is_conv1d(layer):
        inputs, outputs = layer.weight.shape
        return inputs, outputs
    return layer.in_features, layer.out_features


@dataclass(frozen=True, kw_only=True)
class Quantization:
    """The form of a model's quantised weights, as `quantization_config` in its config.json describes it."""

    kind: str  # nf4, fp4 or int8
    dtype: torch.dtype  # dtype of plain weights, and of the others before they were quantised
    compute_dtype: torch.dtype = torch.float32  # 4 bits: dtype of products
    storage: torch.dtype = torch.uint8  # 4 bits: dtype of the tensor that holds the weights
    is_nested: bool = False  # 4 bits: the scales are quantised, too
    threshold: float = 6.0  # int8: columns with larger inputs are computed in the inputs' dtype
    skipped: tuple[str, ...] | None = None  # modules that stay plain; None: as transformers chooses them

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Quantization | None:
        """Return the form that a config describes; None if its weights are plain."""
        if not isinstance(settings, Mapping):
            raise ConfigError(f"config.json must hold an object, got {str(settings)[:200]}. Correct config.json.")
        config = settings.get("quantization_config") or settings.get("compression_config")
        if not config:
            return None
        kind = _kind_of(config)
        skipped = config.get("llm_int8_skip_modules")
        # transformers uses the names as patterns. They may come from another peer, so only plain names are accepted.
        if skipped is not None and not (
            isinstance(skipped, list) and all(isinstance(s, str) and re.fullmatch(r"[\w.-]+", s) for s in skipped)
        ):
            raise ConfigError(
                f"`llm_int8_skip_modules` must be names of modules, got {str(skipped)[:200]}. Correct config.json."
            )
        dtype = settings.get("dtype") or settings.get("torch_dtype") or "float32"
        return cls(
            kind=kind,
            dtype=_dtype("dtype", dtype),
            compute_dtype=_dtype("bnb_4bit_compute_dtype", config.get("bnb_4bit_compute_dtype") or "float32"),
            storage=_dtype("bnb_4bit_quant_storage", config.get("bnb_4bit_quant_storage") or "uint8", torch.uint8),
            is_nested=kind != "int8" and bool(config.get("bnb_4bit_use_double_quant")),
            threshold=_threshold(config.get("llm_int8_threshold", 6.0)),
            skipped=None if skipped is None else tuple(skipped),
        )

    @property
    def rows_depend(self) -> bool:
        """Whether a row's result depends on the other rows of a forward, by more than rounding."""
        # A column counts as large if it is large in any row.
        return self.kind == "int8" and self.threshold > 0.0

    @property
    def adapted_dtype(self) -> torch.dtype:
        """The dtype of a plain layer to which peft adds the same adapter as to a quantised layer."""
        # peft rounds an adapter to its layer's dtype, unless that is an integer dtype.
        return torch.int8 if self.kind == "int8" else self.compute_dtype

    def layer_names(self, model: Any) -> list[str]:
        """Return the names of the linear layers that transformers quantises in a model."""
        from transformers.quantizers.base import HfQuantizer
        from transformers.quantizers.quantizers_utils import should_convert_module

        skipped = None if self.skipped is None else list(self.skipped)
        plain = HfQuantizer.get_modules_to_not_convert(model, skipped, model._keep_in_fp32_modules)
        return [
            name
            for name, layer in model.named_modules()
            if (type(layer) is nn.Linear or is_conv1d(layer)) and should_convert_module(name, plain)
        ]

    def layer_like(self, layer: Any) -> nn.Module:
        """Return a quantised layer on meta in place of a plain layer.

        Its scales are buffers, so that they are loaded, compared and sent with the other tensors.
        """
        bnb = _require_bitsandbytes()
        inputs, outputs = linear_shape(layer)
        sizes = inputs, outputs, layer.bias is not None
        with torch.device("meta"):
            if self.kind == "int8":
                made = bnb.nn.Linear8bitLt(*sizes, has_fp16_weights=False, threshold=self.threshold)
                weight = torch.empty(outputs, inputs, dtype=torch.int8)
            else:
                made = bnb.nn.Linear4bit(*sizes, self.compute_dtype, self.is_nested, self.kind, self.storage)
                # On some CPUs, the first forward without gradients would rewrite the weights for a kernel in bfloat16
                # that has no backward. Results must not depend on earlier forwards.
                made.support_avx512bf16_for_cpu = False
                num_bytes = (inputs * outputs + 1) // 2
                weight = torch.empty(num_bytes // self.storage.itemsize, 1, dtype=self.storage)
            if layer.bias is not None:
                # The dtype to which the layer would convert the bias in its first forward.
                dtype = layer.bias.dtype if self.kind == "int8" else self.compute_dtype
                made.bias = nn.Parameter(torch.empty(outputs, dtype=dtype), requires_grad=False)
            made.weight = nn.Parameter(weight, requires_grad=False)
            for name, scales in self._scales(inputs * outputs, outputs).items():
                made.register_buffer(name, scales)
        made.was_transposed = is_conv1d(layer)
        return made  # type: ignore[no-any-return]  # bitsandbytes is imported where it is needed

    def _scales(self, num_weights: int, num_rows: int) -> dict[str, Tensor]:
        if self.kind == "int8":
            return {"SCB": torch.empty(num_rows, dtype=torch.float32)}
        num_scales = -(-num_weights // BLOCK)
        shapes: dict[str, tuple[int, ...]] = {"absmax": (num_scales,), "quant_map": (16,)}
        if self.is_nested:
            shapes |= {"nested_absmax": (-(-num_scales // NESTED_BLOCK),), "nested_quant_map": (256,)}
            shapes["nested_offset"] = ()
        tensors = {name: torch.empty(shape, dtype=torch.float32) for name, shape in shapes.items()}
        return {**tensors, "absmax": tensors["absmax"].to(torch.uint8)} if self.is_nested else tensors

    def check_device(self, layers: Mapping[str, Any], device: torch.device) -> None:
        """Refuse layers that bitsandbytes computes wrongly on a device."""
        # On a CPU with AVX-512, version 0.50.2 applies wrong scales if two rows share one.
        odd = [name for name, layer in layers.items() if layer.in_features % BLOCK] if self.kind != "int8" else []
        if odd and device.type == "cpu":
            raise ConfigError(
                f"on a CPU, the number of inputs of 4-bit layers must be a multiple of {BLOCK}, because bitsandbytes "
                f"gives wrong results otherwise: {odd[0]!r} has {layers[odd[0]].in_features}. Serve the model with "
                "`--quantize int8`, or on GPUs."
            )

    def bind(self, layer: Any) -> None:
        """Make a quantised layer compute with its tensors, after these were loaded."""
        weight = layer.weight
        if self.kind == "int8":
            weight.CB = None
            layer.state.CB, layer.state.SCB = weight.data, layer.SCB
            return
        make = _require_bitsandbytes().functional.QuantState
        shape = torch.Size((layer.out_features, layer.in_features))
        settings: dict[str, Any] = {"quant_type": self.kind, "dtype": self.dtype, "blocksize": BLOCK, "shape": shape}
        if self.is_nested:
            nested = make(layer.nested_absmax, None, layer.nested_quant_map, NESTED_BLOCK, dtype=torch.float32)
            settings |= {"offset": layer.nested_offset, "state2": nested}
        weight.quant_state = layer.quant_state = make(layer.absmax, code=layer.quant_map, **settings)

    def quantize(self, weight: Tensor) -> dict[str, Tensor]:
        """Quantise a weight ``[outputs, inputs]`` on the CPU; return the tensors of the layer by their names in it.

        The result is that of bitsandbytes for the whole weight, but is computed in pieces.
        """
        functional = _require_bitsandbytes().functional
        if self.kind == "int8":
            rows = weight.split(max(1, _PIECE // weight.shape[1]))
            parts = [functional.int8_vectorwise_quant(piece.contiguous().to(torch.float16))[:2] for piece in rows]
            codes, scales = zip(*parts, strict=True)
            return {"weight": torch.cat(codes), "SCB": torch.cat(scales)}
        pieces = weight.contiguous().view(-1).split(_PIECE)
        quantized = [functional.quantize_4bit(piece, blocksize=BLOCK, quant_type=self.kind) for piece in pieces]
        packed = torch.cat([piece for piece, _ in quantized])
        absmax, quant_map = torch.cat([state.absmax for _, state in quantized]), quantized[0][1].code
        weights = packed.view(-1).view(self.storage).unsqueeze(1)
        tensors = {"weight": weights, "absmax": absmax, "quant_map": quant_map}
        if not self.is_nested:
            return tensors
        offset = absmax.mean()
        nested, state = functional.quantize_blockwise(absmax - offset, blocksize=NESTED_BLOCK)
        tensors |= {"absmax": nested, "nested_absmax": state.absmax, "nested_quant_map": state.code}
        return {**tensors, "nested_offset": offset}


def _threshold(value: float) -> float:
    """Return the threshold of int8's large columns; refuse a number out of range."""
    if isinstance(value, bool) or not 0 <= value <= _MAX_THRESHOLD:
        raise ConfigError(
            f"`llm_int8_threshold` must be a number of 0..{_MAX_THRESHOLD:g}, got {str(value)[:200]}. Correct "
            "config.json."
        )
    return float(value)


def _kind_of(config: Any) -> str:
    """Return the kind that a `quantization_config` names; refuse kinds that cannot be read here."""
    method = config.get("quant_method") if isinstance(config, dict) else None
    if method == _PACKAGE and not config.get("llm_int8_has_fp16_weight"):
        is_4bit, is_8bit = config.get("load_in_4bit") is True, config.get("load_in_8bit") is True
        kind = config.get("bnb_4bit_quant_type", "fp4") if is_4bit else "int8"
        is_number = isinstance(config.get("llm_int8_threshold", 6.0), float | int)
        if is_4bit != is_8bit and kind in (("nf4", "fp4") if is_4bit else ("int8",)) and is_number:
            return str(kind)
    got = f"bitsandbytes with {config}" if method == _PACKAGE else repr(method)
    raise ConfigError(
        "a served model's weights must be plain, or quantised by bitsandbytes to NF4, FP4 or int8, got "
        f"{got[:300]} in config.json. Name the folder of the plain model, and use `--quantize`."
    )


def _dtype(name: str, value: object, *others: torch.dtype) -> torch.dtype:
    dtype: torch.dtype | None = getattr(torch, str(value).removeprefix("torch."), None)
    if dtype not in (*_DTYPES, *others):
        raise ConfigError(
            f"a quantised model computes in float32, bfloat16 or float16, got {value!r} as `{name}`. Set `--dtype`, "
            "for example to bfloat16."
        )
    assert dtype is not None
    return dtype


def with_quantization(config: str, kind: str | None, dtype: str) -> str:
    """Return a config.json with a `kind` of quantisation, computed in `dtype`; unchanged if `kind` is None."""
    settings = json.loads(config)
    own = Quantization.of(settings)
    if kind is None or (own is not None and own.kind == kind):
        return config
    if own is not None:
        raise ConfigError(
            f"only plain weights can be quantised, but the folder's weights are {own.kind} already, got "
            f"`--quantize {kind}`. Leave it out, or name the folder of the plain model."
        )
    form: dict[str, Any] = {"quant_method": _PACKAGE}
    if kind == "int8":
        form |= {"load_in_8bit": True}
    elif kind == "nf4":
        form |= {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": dtype}
    else:
        raise ConfigError(f"`--quantize` must be one of {', '.join(KINDS)}, got {kind!r}. Correct it.")
    settings.pop("torch_dtype", None)  # the former name of `dtype`
    result = {**settings, "dtype": dtype, "quantization_config": form}
    Quantization.of(result)  # checks the dtype
    return json.dumps(result, sort_keys=True)


def check_same(served: str, folder: str | None, kind: str | None) -> None:
    """Refuse to serve a model in another form than a local folder has, or than the user chose (`kind`, if not None).

    `served` and `folder` are the contents of the config.json files of the served model and of the local folder.
    """
    served_form = Quantization.of(json.loads(served))
    local_form = None if folder is None else Quantization.of(json.loads(folder))
    name = "plain" if served_form is None else served_form.kind
    if kind not in (None, name):
        raise ConfigError(
            f"all servers of a model must hold the same weights: the weights at `--join` are {name}, got "
            f"`--quantize {kind}`. Leave it out to serve them, or start a first server of another form."
        )
    if local_form is not None and (
        served_form is None or (local_form.kind, local_form.is_nested) != (served_form.kind, served_form.is_nested)
    ):
        raise ConfigError(
            f"all servers of a model must hold the same weights: the weights at `--join` are {name}, but the weights "
            f"in `--weights` are {local_form.kind}. Name the folder of the plain model, or leave `--weights` out."
        )
