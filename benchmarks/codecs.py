"""Codecs of the swarm against bitsandbytes itself and hivemind's: how fast, and how much is lost.

All run in one process of one thread, and take turns on the same float32 numbers: there and back for each size. Rates
are of the float32 bytes. The picture has the plane of tensor size and bandwidth: where each codec takes less time to
encode, send and decode a tensor than it takes to send it whole, and which takes the least, as measured here.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import matplotlib as mpl
import torch
from bitsandbytes import functional
from hivemind.compression import BlockwiseQuantization, Float16Compression, Uniform8BitQuantization
from hivemind.compression.base import CompressionInfo
from matplotlib import pyplot as plt
from torch import Tensor

from benchmarks.report import OUT, table, write
from lightning_swarm.protocol.compression import CODECS, Codec, codec

SIZES = (1 << 12, 1 << 16, 1 << 20, 1 << 24)
"""Bytes of a tensor in float32."""
BASELINES = {
    "float16": "hivemind float16",
    "bfloat16": "hivemind float16",
    "8bit": "bitsandbytes 8bit, 256",
    "4bit": "bitsandbytes nf4",
}


class Way(NamedTuple):
    """There and back."""

    encode: Callable[[Tensor], Any]
    decode: Callable[[Any, Tensor], Tensor]
    num_bytes: Callable[[Any], int]


def _swarm(by: Codec) -> Way:
    return Way(
        by.encode,
        lambda parts, x: by.decode(parts, x.dtype, x.shape),
        lambda parts: sum(part.numel() * part.element_size() for part in parts),
    )


def _hivemind(by: Any) -> Way:
    def encode(x: Tensor) -> Any:
        return by.compress(x, CompressionInfo.from_tensor(x))

    return Way(encode, lambda message, _: by.extract(message), lambda message: len(message.buffer))


def _blockwise(block: int) -> Way:
    return Way(
        lambda x: functional.quantize_blockwise(x, blocksize=block),
        lambda parts, _: functional.dequantize_blockwise(*parts),
        lambda parts: parts[0].numel() + 4 * parts[1].absmax.numel(),
    )


def _four_bits(kind: str) -> Way:
    def num_bytes(parts: Any) -> int:
        codes, state = parts
        return codes.numel() + state.absmax.numel() + 4 * state.state2.absmax.numel() + 4

    return Way(
        lambda x: functional.quantize_4bit(x, blocksize=64, quant_type=kind, compress_statistics=True),
        lambda parts, _: functional.dequantize_4bit(*parts),
        num_bytes,
    )


def ways() -> dict[str, Way]:
    """All that are compared, by name."""
    by_name = ((name, codec(name)) for name in CODECS)
    return {name: _swarm(by) for name, by in by_name if by is not None} | {
        "bitsandbytes 8bit, 256": _blockwise(256),
        "bitsandbytes 8bit, 4096": _blockwise(4096),
        "bitsandbytes nf4": _four_bits("nf4"),
        "bitsandbytes fp4": _four_bits("fp4"),
        "hivemind float16": _hivemind(Float16Compression()),
        "hivemind uniform 8bit": _hivemind(Uniform8BitQuantization()),
        "hivemind blockwise 8bit": _hivemind(BlockwiseQuantization()),
    }


class Found(NamedTuple):
    """Of one way and size."""

    encode_s: list[float]
    decode_s: list[float]
    num_bytes: int
    lost: float
    """Of normal numbers, the share of their norm."""
    lost_of_outliers: float
    """Where one in a hundred is 30 times as large."""


def measure(all_: dict[str, Way], size: int, turns: int, turn_s: float) -> dict[str, Found]:
    """By turns, each of as many repeats as last `turn_s`."""
    x = torch.randn(size // 4, generator=torch.Generator().manual_seed(0))
    heavy = x.clone()
    heavy[::100] *= 30
    found = {name: Found([], [], *_once(way, x, heavy)) for name, way in all_.items()}
    for _ in range(turns):
        for name, way in all_.items():
            encoded = way.encode(x)
            found[name].encode_s.append(_seconds(partial(way.encode, x), turn_s))
            found[name].decode_s.append(_seconds(partial(way.decode, encoded, x), turn_s))
    return found


def _once(way: Way, x: Tensor, heavy: Tensor) -> tuple[int, float, float]:
    lost = [float((way.decode(way.encode(one), one) - one).norm() / one.norm()) for one in (x, heavy)]
    return way.num_bytes(way.encode(x)), lost[0], lost[1]


def _seconds(do: Callable[[], Any], turn_s: float) -> float:
    began_s, number = time.perf_counter(), 0
    while number == 0 or time.perf_counter() - began_s < turn_s:
        do()
        number += 1
    return (time.perf_counter() - began_s) / number


def _rows(size: int, found: dict[str, Found]) -> list[list[object]]:
    rows: list[list[object]] = []
    for name, one in found.items():
        rates = [f"{size / 1e9 / statistics.median(seconds):.2f}" for seconds in (one.encode_s, one.decode_s)]
        ratios = ["", ""]
        if name in BASELINES:
            other = found[BASELINES[name]]
            ratios = [_ratio(other.encode_s, one.encode_s), _ratio(other.decode_s, one.decode_s)]
        bits = f"{one.num_bytes * 32 / size:.3f}"
        label = f"{size >> 10} KiB"
        rows.append([name, label, bits, *rates, *ratios, f"{one.lost:.4f}", f"{one.lost_of_outliers:.4f}"])
    return rows


def _ratio(theirs: Sequence[float], ours: Sequence[float]) -> str:
    return f"{statistics.median(their / our for their, our in zip(theirs, ours, strict=True)):.2f}"


def picture(found: dict[int, dict[str, Found]]) -> None:
    """Keep the picture of where which codec is the quickest, and up to which bandwidth each is quicker than none."""
    names = [name for name in CODECS if name in found[SIZES[0]]]
    sizes = [SIZES[0] * (SIZES[-1] / SIZES[0]) ** (place / 120) for place in range(121)]  # as measured
    megabits = [10 ** (place / 40) for place in range(200)]  # 1 Mb/s to 94 Gb/s
    best = [[_quickest([None, *names], size, each * 1e6 / 8, found) for each in megabits] for size in sizes]
    mpl.use("Agg")
    figure, axes = plt.subplots(figsize=(8, 4.5))
    colours = plt.get_cmap("Pastel1", len(names) + 1)
    kib = [size / 1024 for size in sizes]
    axes.pcolormesh(megabits, kib, best, cmap=colours, vmin=-0.5, vmax=len(names) + 0.5)
    for name in names:
        upto = [(size - _sent_bytes(name, size, found)) / _computed_s(name, size, found) * 8 / 1e6 for size in sizes]
        axes.plot(upto, kib, label=f"{name} is quicker than none to the left")
    axes.set(xscale="log", yscale="log", xlabel="Mb/s", ylabel="KiB of float32")
    axes.set_title("Encode, send and decode a tensor: where each codec pays, and the quickest (shaded)")
    shown = sorted({place for row in best for place in row})
    patches = [mpl.patches.Patch(color=colours(place), label=["none", *names][place]) for place in shown]
    axes.legend(handles=[*patches, *axes.get_lines()], loc="center left", bbox_to_anchor=(1, 0.5))
    OUT.mkdir(parents=True, exist_ok=True)
    figure.savefig(OUT / "codecs.png", dpi=120, bbox_inches="tight")
    plt.close(figure)


def _quickest(names: Sequence[str | None], size: float, bytes_per_s: float, found: dict[int, dict[str, Found]]) -> int:
    seconds = [
        size / bytes_per_s
        if name is None
        else _computed_s(name, size, found) + _sent_bytes(name, size, found) / bytes_per_s
        for name in names
    ]
    return seconds.index(min(seconds))


def _sent_bytes(name: str, size: float, found: dict[int, dict[str, Found]]) -> float:
    return size * found[SIZES[-1]][name].num_bytes / SIZES[-1]


def _computed_s(name: str, size: float, found: dict[int, dict[str, Found]]) -> float:
    """To encode and decode it."""
    both = [statistics.median(one[name].encode_s) + statistics.median(one[name].decode_s) for one in found.values()]
    return _between(size, list(found), both)


def _between(size: float, sizes: Sequence[int], seconds: Sequence[float]) -> float:
    """On straight lines through what was measured, both axes logarithmic."""
    place = min(sum(size > one for one in sizes[1:]), len(sizes) - 2)
    steps = [math.log(many[place + 1] / many[place]) for many in (seconds, sizes)]
    return seconds[place] * (size / sizes[place]) ** (steps[0] / steps[1])


def main(words: Sequence[str] | None = None) -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--turn-seconds", type=float, default=0.05)
    arguments = parser.parse_args(words)
    torch.set_num_threads(1)
    all_ = ways()
    found = {size: measure(all_, size, arguments.turns, arguments.turn_seconds) for size in SIZES}
    head = [
        "codec",
        "tensor",
        "bits",
        "encode GB/s",
        "decode GB/s",
        "encode / other",
        "decode / other",
        "lost",
        "outliers",
    ]
    rows: list[Sequence[object]] = [head, *(row for size in SIZES for row in _rows(size, found[size]))]
    others = ", ".join(f"{name} to {other}" for name, other in BASELINES.items())
    write("codecs", table("Codecs, one thread, medians", rows) + f"\nRatios of speeds, by turns: {others}")
    picture(found)


if __name__ == "__main__":
    main()
