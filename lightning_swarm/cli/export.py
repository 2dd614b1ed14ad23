"""The command `lightning-swarm export`."""

from __future__ import annotations

import argparse

from lightning_swarm.model.export import export_pretrained, export_safetensors, join_shards


def run(arguments: argparse.Namespace) -> int:
    """Write a checkpoint in another form; returns the exit status."""
    to_folder = arguments.out.is_dir() or not arguments.out.suffix
    export = export_pretrained if to_folder else join_shards if arguments.out.suffix == ".ckpt" else export_safetensors
    num_tensors = export(arguments.checkpoint, arguments.out)
    print(f"{arguments.out}: {num_tensors} tensors")  # noqa: T201 - a command
    return 0
