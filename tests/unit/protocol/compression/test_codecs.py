"""Codecs: bounds on their error, their size, and refusal of malformed data."""

from __future__ import annotations

import math
import re
import sys
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lightning_swarm.core.errors import ProtocolError
from lightning_swarm.protocol.compression import CODECS, Codec, NotFinite, codec
from lightning_swarm.protocol.compression.quantization import BLOCK as BLOCK_OF_8
from lightning_swarm.protocol.compression.quantization import ROTATED_BLOCK, Blockwise8Bit
from lightning_swarm.protocol.compression.quantization import SLICE as ROTATED_SLICE

EPS = 1e-6  # margin for float32's own rounding


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=dtype)


def outliers(scale: float) -> Tensor:
    tensor = normal(3000)
    tensor[::97] *= scale
    return tensor


TENSORS: dict[str, Callable[[], Tensor]] = {
    "normal": lambda: normal(4000),
    "of odd length": lambda: normal(1, 3, 331),
    "one": lambda: normal(1),
    "no dimensions": lambda: normal(1)[0],
    "outliers": lambda: outliers(1e4),
    "huge outliers": lambda: outliers(1e30),
    "zeros": lambda: torch.zeros(1000),
    "a constant": lambda: torch.full((1000,), -3.7),
    "one of many": lambda: torch.cat((torch.zeros(999), torch.tensor([5.0]))),
    "denormals": lambda: normal(1000) * 1e-41,
    "tiny": lambda: normal(1000) * 1e-30,
    "all powers of two": lambda: (2.0 ** torch.arange(-149, 120)).repeat_interleave(BLOCK_OF_8),
    "all powers of two, in columns": lambda: (2.0 ** torch.arange(-149, 120)).repeat(ROTATED_BLOCK, 1),
    "several slices": lambda: normal(2 * ROTATED_SLICE + 77),
    "several slices of a matrix": lambda: normal(7, ROTATED_SLICE // 3),
    "huge": lambda: normal(1000) * 1e30,
    "the largest": lambda: torch.tensor([3.4e38, -3.4e38, 1.0]),
    "all magnitudes": lambda: normal(1000) * 10.0 ** torch.linspace(-38, 36, 1000),
    "not contiguous": lambda: normal(40, 50).t(),
    "float64": lambda: normal(1000, dtype=torch.float64),
    "bfloat16": lambda: normal(1000).bfloat16(),
    "float16": lambda: normal(1000).half(),
}


def blocks(tensor: Tensor, size: int) -> Tensor:
    flat = tensor.reshape(-1).double()
    return torch.cat((flat, flat.new_zeros(-len(flat) % size))).view(-1, size)


def bound_of_float16(tensor: Tensor) -> Tensor:
    x = tensor.reshape(-1).double().abs()
    return torch.maximum(x * 2.0**-11, x.max() * 2.0**-38) + 2.0**-135


def bound_of_bfloat16(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).double().abs() * 2.0**-8 + 2.0**-133


def bound_of_8bit(tensor: Tensor) -> Tensor:
    largest = blocks(tensor, BLOCK_OF_8).abs().amax(dim=1, keepdim=True)
    return (largest * 2.0**-7 + 2.0**-126).expand(-1, BLOCK_OF_8).reshape(-1)[: tensor.numel()]


def bound_of_rotated(tensor: Tensor, share: float) -> Tensor:
    """Return an error bound for a block: a share of its largest rotated element, because a rotation keeps distances."""
    bounds = []
    for part in tensor.reshape(-1).double().split(ROTATED_SLICE):
        padded = torch.cat((part, part.new_zeros(-len(part) % ROTATED_BLOCK)))
        columns = padded.view(-1, ROTATED_BLOCK).t() if tensor.dim() == 1 else padded.view(ROTATED_BLOCK, -1)
        norms = (columns.norm(dim=0) * math.sqrt(ROTATED_BLOCK) * share + 2.0**-93).expand(ROTATED_BLOCK, -1)
        bounds.append((norms.t() if tensor.dim() == 1 else norms).reshape(-1)[: len(part)])
    return torch.cat(bounds)


BOUNDS = {
    "float16": bound_of_float16,
    "bfloat16": bound_of_bfloat16,
    "8bit": bound_of_8bit,
    "6bit": partial(bound_of_rotated, share=1 / 50),
    "4bit": partial(bound_of_rotated, share=1 / 8),
}


def named(name: str) -> Codec:
    found = codec(name)  # type: ignore[arg-type]
    assert found is not None
    return found


def travelled(by: Codec, tensor: Tensor) -> Tensor:
    return by.decode(by.encode(tensor), tensor.dtype, tensor.shape)


@pytest.mark.parametrize("tensor", TENSORS.values(), ids=TENSORS.keys())
@pytest.mark.parametrize("name", CODECS)
def test_no_more_is_lost_than_it_says(name: str, tensor: Callable[[], Tensor]) -> None:
    by, x = named(name), tensor()
    if name in ("4bit", "6bit") and float(x.abs().max()) > 2.0**120:
        with pytest.raises(NotFinite, match=f"{name} encodes only numbers up to"):
            by.encode(x)
        return
    before = x.clone()
    y = travelled(by, x)
    assert torch.equal(x, before)
    assert (y.shape, y.dtype) == (x.shape, x.dtype)
    assert y.isfinite().all()
    own = torch.finfo(x.dtype).eps * x.reshape(-1).double().abs() if x.dtype != torch.float64 else 0.0
    error = (x.reshape(-1).double() - y.reshape(-1).double()).abs()
    assert (error <= BOUNDS[name](x) * (1 + EPS) + own).all(), float((error / BOUNDS[name](x)).max())


@pytest.mark.parametrize(
    ("name", "share"), [("float16", 3e-4), ("bfloat16", 2.5e-3), ("8bit", 0.014), ("6bit", 0.028), ("4bit", 0.098)]
)
@pytest.mark.parametrize("kind", ["normal", "laplace", "with outliers"])
def test_what_is_lost_as_a_rule(name: str, share: float, kind: str) -> None:
    x = normal(1 << 16)
    if kind == "laplace":
        x = x.sign() * x.square()
    elif kind == "with outliers":
        x[::300] *= 100.0
    assert float((x - travelled(named(name), x)).norm() / x.norm()) < share


@pytest.mark.parametrize("name", CODECS)
def test_as_many_bits_are_sent_as_it_says(name: str) -> None:
    by, x = named(name), normal(1 << 16)
    parts = by.encode(x)
    num_bytes = sum(part.numel() * part.element_size() for part in parts)
    assert num_bytes == pytest.approx(by.bits / 8 * x.numel(), rel=1e-3)
    assert num_bytes <= 1.05 * {"8bit": 8, "6bit": 6, "4bit": 4}.get(name, 16) / 8 * x.numel()
    assert all(part.dim() == 1 for part in parts)
    assert tuple((part.dtype, len(part)) for part in parts) == by.layout(x.numel())


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("shape", [(0,), (3, 0, 2)])
def test_nothing_is_nothing(name: str, shape: tuple[int, ...]) -> None:
    by = named(name)
    y = travelled(by, torch.empty(shape, dtype=torch.float64))
    assert (y.shape, y.dtype) == (shape, torch.float64)


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e39])
def test_what_is_no_number_is_not_taken(name: str, value: float, dtype: torch.dtype) -> None:
    x = normal(1000, dtype=torch.float64)
    x[777] = value
    x = x.to(dtype)
    with pytest.raises(NotFinite):
        named(name).encode(x)


@pytest.mark.parametrize("name", CODECS)
def test_the_same_tensor_gives_the_same_bytes(name: str) -> None:
    by, x = named(name), normal(5000)
    again = [part.clone() for part in by.encode(x)]
    assert all(torch.equal(one, other) for one, other in zip(by.encode(x.double()), again, strict=True))
    # This codec has a process of its own.
    assert all(torch.equal(one, other) for one, other in zip(type(by)().encode(x), again, strict=True))


@pytest.mark.parametrize("name", CODECS)
def test_the_default_dtype_does_not_matter(name: str) -> None:
    kind, x = CODECS[name], normal(1000)
    expected = travelled(kind(), x)
    torch.set_default_dtype(torch.float64)
    try:
        assert torch.equal(travelled(kind(), x), expected)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", CODECS)
def test_autocast_does_not_matter(name: str, dtype: torch.dtype) -> None:
    by, x = named(name), normal(3000)
    expected = travelled(by, x)
    with torch.autocast("cpu", dtype=dtype):
        found = travelled(by, x)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("name", CODECS)
def test_the_default_device_does_not_matter(name: str) -> None:
    x = normal(1000)
    expected = travelled(named(name), x)
    with torch.device("meta"):
        found = travelled(CODECS[name](), x)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("name", CODECS)
def test_other_parts_are_refused(name: str) -> None:
    by, x = named(name), normal(1000)
    parts = by.encode(x)
    wrong = [
        (),
        parts[:-1],
        (*parts, parts[0]),
        tuple(part[:-1] for part in parts),
        tuple(torch.cat((part, part)) for part in parts),
        tuple(part.double() for part in parts),
        tuple(part[None] for part in parts),
    ]
    for one in wrong:
        with pytest.raises(ProtocolError, match=name):
            by.decode(one, torch.float32, x.shape)
    for shape in [(1025,), (1 << 20, 1 << 20), (0,), ()]:
        with pytest.raises(ProtocolError, match=name):
            by.decode(parts, torch.float32, shape)
    for dtype in (torch.int64, torch.complex64, torch.bool):
        with pytest.raises(ProtocolError, match=name):
            by.decode(parts, dtype, x.shape)


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_that_no_codec_writes_are_refused(name: str, value: float) -> None:
    by, x = named(name), normal(1000)
    for place, part in enumerate(by.encode(x)):
        if part.is_floating_point():
            parts = [one.clone() for one in by.encode(x)]
            parts[place][-1] = value
            with pytest.raises(ProtocolError, match="others"):
                by.decode(parts, torch.float32, x.shape)


@pytest.mark.parametrize("name", ["float16", "6bit", "4bit"])
def test_negative_scales_are_refused(name: str) -> None:
    parts = [part.clone() for part in named(name).encode(normal(1000))]
    parts[0][-1] = -1.0
    with pytest.raises(ProtocolError, match="not negative"):
        named(name).decode(parts, torch.float32, (1000,))


@pytest.mark.parametrize("name", ["8bit", "6bit", "4bit"])
def test_any_codes_are_finite_numbers(name: str) -> None:
    """Even a malicious peer's codes are all in the table."""
    by, x = named(name), torch.ones(256 * 64)
    parts = list(by.encode(x))
    parts[-1] = torch.arange(parts[-1].numel()).to(torch.uint8)
    assert by.decode(parts, torch.float32, x.shape).isfinite().all()


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_the_largest_of_a_block_of_8bit_is_exact(sign: float) -> None:
    """The table's other end stops a hundredth earlier, so the sign matters."""
    x = sign * torch.cat((torch.tensor([3.0]), normal(500) / 10, torch.tensor([7.0])))
    y = travelled(named("8bit"), x)
    assert (y[0], y[-1]) == (x[0], x[-1])


def test_the_values_of_8_bits_are_those_of_bitsandbytes_on_every_processor() -> None:
    from bitsandbytes.functional import create_dynamic_map

    from lightning_swarm.protocol.compression.quantization import dynamic_map

    parts = (torch.ones(1), torch.arange(256, dtype=torch.uint8))
    values = named("8bit").decode(parts, torch.float32, (256,))
    torch.testing.assert_close(values, create_dynamic_map(), rtol=2e-7, atol=0)
    # Their libraries have other last bits on processors with other instructions.
    assert torch.equal(values, dynamic_map(torch.device("cpu")))
    assert zlib.crc32(values.numpy().tobytes()) == 3059976122


def test_nobody_is_told_to_install_what_no_codec_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Importing bitsandbytes for the first time does so on a processor with instructions for 4-bit matrices."""
    from bitsandbytes.backends.cpu import ops

    [said] = re.findall(r'"(Failed to load .*?)"', Path(ops.__file__).read_text())
    package = tmp_path / "bitsandbytes"
    package.mkdir()
    log = f"import logging\nlog = logging.getLogger({ops.__name__!r})\n"
    (package / "__init__.py").write_text(
        f"{log}log.warning({said!r}, 'there is none')\nlog.warning('of another kind')\n"
    )
    (package / "functional.py").touch()
    for name in [name for name in sys.modules if name.partition(".")[0] == "bitsandbytes"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    caplog.clear()
    Blockwise8Bit()
    assert caplog.messages == ["of another kind"]
    ops.logger.warning(said, "there is none")  # a later import by other code
    assert len(caplog.messages) == 2
