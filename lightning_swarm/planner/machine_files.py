"""Reads a user's file for the planner: the list of machines, and the compression of tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, get_args

import yaml

from lightning_swarm.core.errors import ConfigError
from lightning_swarm.model.boundary_layers import Bottleneck
from lightning_swarm.planner.records import Code, Machine, Processor, WireFormat
from lightning_swarm.protocol.compression import CODECS, MIN_ELEMENTS
from lightning_swarm.protocol.settings import Compression


@dataclass(frozen=True)
class WireSettings:
    """The compression of a swarm's tensors; None: not set."""

    compression: Compression | None = None
    boundary_ratio: int | None = None  # boundary layers send that many times fewer features from stage to stage

    @classmethod
    def parse(cls, compression: Any, boundary_ratio: Any) -> WireSettings:
        """Check a user's values, in the forms that `SwarmStrategy` and `Bottleneck` take."""
        if compression is not None and not isinstance(compression, Compression | Mapping):
            compression = str(compression)
        return cls(
            compression=None if compression is None else Compression.parse(compression),
            boundary_ratio=None if boundary_ratio is None else Bottleneck(boundary_ratio).ratio,
        )

    def filled_from(self, other: WireSettings) -> WireSettings:
        """Return these settings, with those that are not set taken from `other`."""
        return WireSettings(self.compression or other.compression, self.boundary_ratio or other.boundary_ratio)

    @property
    def wire(self) -> WireFormat:
        """The sizes of encoded tensors. A codec of unknown size counts as no codec, and is listed in `uncounted`."""
        compression = self.compression or Compression()
        codecs = compression.activations, compression.gradients, compression.averaging
        activations, gradients, averaging = (
            Code(bits=CODECS[name].bits, cpu_s=CODECS[name].cpu_s, smallest=MIN_ELEMENTS) if name in CODECS else None
            for name in codecs
        )
        return WireFormat(
            activations=activations,
            gradients=gradients,
            averaging=averaging,
            error_feedback=bool(compression.error_feedback),
            boundary_ratio=self.boundary_ratio or 1,
            uncounted=tuple(sorted({codec for codec in codecs if codec not in CODECS} - {"none"})),
        )

    def as_json(self) -> dict[str, Any]:
        """Return the settings in a form for JSON."""
        return {"compression": asdict(self.compression or Compression()), "boundary_ratio": self.boundary_ratio}


NOT_GIVEN: Final = WireSettings()


HERE: Final = "here"  # value of a rate in the file: measure it on this machine
_MBIT, _GB = 1e6 / 8, 1e9


@dataclass(frozen=True)
class _Key:
    """A key of a machine in the file, whose value is a number."""

    field: str  # field of `Machine`
    meaning: str  # what the number measures, in words for messages
    scale: float  # factor from the file's unit to the unit of `Machine`
    optional: bool = False  # the key may be left out, or be 0


_NUMBERS: Final = {
    "memory_gb": _Key("memory_bytes", "GB of memory of the device that computes", _GB),
    "up_mbit": _Key("up_bytes_per_s", "Mb/s that its link sends", _MBIT),
    "down_mbit": _Key("down_bytes_per_s", "Mb/s that its link receives", _MBIT),
    "latency_ms": _Key(
        "latency_s", "milliseconds from it to another machine, half of a round trip", 1e-3, optional=True
    ),
    "host_memory_gb": _Key("host_memory_bytes", "GB of host memory, beside the GPU's own", _GB, optional=True),
    "bus_gb_per_s": _Key("bus_bytes_per_s", "GB/s between GPU and host, each way", _GB, optional=True),
}
_RATES: Final = ("tflops", "samples_per_s")
_FILE_KEYS: Final = ("machines", "compression", "boundary_ratio")
_MACHINE_KEYS: Final = ("name", "count", *_RATES, "processor", *_NUMBERS)


def read_machines(path: Path, flop_per_sample: float, here_flop_per_s: Callable[[], float] | None) -> list[Machine]:
    """Read the machines of a YAML file, the starter first; the model's `flop_per_sample` converts rates in samples/s.

    `here_flop_per_s` measures this machine, for rates that are ``here``; None: do not measure.
    """
    content = _content(path)
    listed = content.get("machines") if isinstance(content, Mapping) else content
    if not isinstance(listed, list) or not listed:
        raise ConfigError(
            f"{path} must have a list of at least one machine under `machines`, got {listed!r}. Begin with\n"
            "machines:\n  - {tflops: 10, memory_gb: 24, up_mbit: 100, down_mbit: 100}"
        )
    machines = []
    for index, entry in enumerate(listed):
        label = f"machine {index + 1} of {path}"
        machine, count = _machine(entry, label, flop_per_sample, here_flop_per_s)
        machines += [machine] * count
    return machines


def read_compression(path: Path) -> WireSettings:
    """Read the compression of tensors from a file of machines."""
    content = _content(path)
    if not isinstance(content, Mapping):
        return NOT_GIVEN
    unknown = [key for key in content if key not in _FILE_KEYS]
    if unknown:
        raise ConfigError(f"{path} has the unknown key {unknown[0]!r}. Choose from {', '.join(_FILE_KEYS)}.")
    return WireSettings.parse(content.get("compression"), content.get("boundary_ratio"))


def _content(path: Path) -> Any:
    try:
        return yaml.safe_load(path.read_text())
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(
            f"the list of machines must be a YAML file, got {path}: {error}. Check the path and the content."
        ) from error


def _machine(
    entry: Any, label: str, flop_per_sample: float, here_flop_per_s: Callable[[], float] | None
) -> tuple[Machine, int]:
    """Read an entry of the list, and return the machine and the number of such machines."""
    if not isinstance(entry, Mapping):
        raise ConfigError(f"{label} must be a mapping, got {entry!r}. Write {{tflops: 10, memory_gb: 24, ...}}.")
    unknown = [key for key in entry if key not in _MACHINE_KEYS]
    if unknown:
        raise ConfigError(f"{label} has the unknown key {unknown[0]!r}. Choose from {', '.join(_MACHINE_KEYS)}.")
    rate, is_here = _rate(entry, label, flop_per_sample, here_flop_per_s)
    processor = entry.get("processor", "cpu" if is_here else "accelerator")
    if processor not in get_args(Processor):
        raise ConfigError(f"`processor` of {label} must be one of {', '.join(get_args(Processor))}, got {processor!r}.")
    count = entry.get("count", 1)
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= 10_000:
        raise ConfigError(f"`count` of {label} must be a whole number from 1 to 10000, got {count!r}.")
    name = str(entry.get("name", label.partition(" of ")[0]))  # by default such as `machine 3`
    numbers = {}
    for key, number in _NUMBERS.items():
        if key in entry:
            numbers[number.field] = (
                _checked(entry[key], key, number.meaning, label, allow_zero=number.optional) * number.scale
            )
        elif not number.optional:
            raise ConfigError(f"{label} must have `{key}`: {number.meaning}. Add it.")
    return Machine(name=name, flop_per_s=rate, processor=processor, **numbers), count


def _rate(
    entry: Mapping[str, Any], label: str, flop_per_sample: float, here_flop_per_s: Callable[[], float] | None
) -> tuple[float, bool]:
    """Return a machine's flop/s, and whether the rate was measured on this machine."""
    rates = [key for key in _RATES if key in entry]
    if len(rates) != 1:
        raise ConfigError(
            f"{label} must have one of `tflops` and `samples_per_s`, got "
            f"{' and '.join(rates) or 'none'}. Set the TFLOP/s that it reaches, about a third of its data sheet's, or "
            "samples/s of the whole model."
        )
    [key] = rates
    if entry[key] == HERE:
        if here_flop_per_s is None:
            raise ConfigError(
                f"`{key}: {HERE}` of {label} is measured on this machine. Add --measure, or set a number."
            )
        return here_flop_per_s(), True
    return _checked(entry[key], key, "its speed", label) * (1e12 if key == "tflops" else flop_per_sample), False


def _checked(value: Any, key: str, meaning: str, label: str, *, allow_zero: bool = False) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not is_number or value < 0 or (value == 0 and not allow_zero):
        least = "of at least 0" if allow_zero else "above 0"
        raise ConfigError(f"`{key}` of {label} must be a number {least} ({meaning}), got {value!r}. Correct it.")
    return float(value)
