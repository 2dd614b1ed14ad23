"""What `plan` can be told of how tensors travel, by the names that `SwarmStrategy` has for it."""

from __future__ import annotations

import argparse
from dataclasses import fields
from typing import get_args

from lightning_swarm.config import CodecName, Compression
from lightning_swarm.planner.travel import Travel

_NAMES = [field.name for field in fields(Compression)]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options."""
    group = parser.add_argument_group("how tensors travel, if not as MACHINES.yaml, FILE or the live swarm says")
    group.add_argument("--compression", metavar="CODEC", help=f"all by one: {', '.join(get_args(CodecName))}")
    for name in _NAMES:
        group.add_argument(f"--compression.{name}", metavar="VALUE", help=f"`{name}` alone, as in `Compression`")
    group.add_argument("--boundary-ratio", type=int, metavar="K", help="through `Bottleneck(ratio=K)` between stages")


def of_command(arguments: argparse.Namespace) -> Travel:
    """What the options say.

    Raises:
        ConfigError: It cannot be.
    """
    every = arguments.compression
    options = {name: getattr(arguments, f"compression.{name}") for name in _NAMES}
    said = {name: _value(text) for name, text in options.items() if text is not None}
    if said and every is not None:
        said = {**dict.fromkeys(("activations", "gradients", "averaging"), every), **said}
    return Travel.parse(said or every, arguments.boundary_ratio)


def _value(text: str) -> object:
    if text.isdigit():
        return int(text)
    return {"true": True, "false": False}.get(text.lower(), text)
