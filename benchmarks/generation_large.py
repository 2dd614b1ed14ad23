"""A text by a model that none of the processes may hold: four servers, or one process that reads its blocks from disk.

Each server may take a number of megabytes of its own, and Linux refuses it more. Hugging Face's way to run such a
model alone is `accelerate`'s offload to disk (`pip install accelerate`). It maps all files at once, which that limit
would refuse, so it is only told how much memory weights may take. What the kernel has cached of its files is dropped
before each token, as a larger model's would be; the servers have read theirs once.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from benchmarks.generation import Arrivals, save, server
from benchmarks.report import median, table, write
from benchmarks.runs import start

WIDTH = 2048
NUM_BLOCKS = 16
NUM_PEERS = 4
NUM_TOKENS = {"offload": 4, "swarm": 24}
PROMPT = torch.arange(1, 17)[None]
TEXTS = 64 << 20
LIBRARIES_MB = 700  # what a process takes without weights


def drop_cached(folder: Path) -> None:
    """Have the kernel forget what it has cached of a folder's files."""
    for file in folder.rglob("*"):
        if file.is_file():
            handle = os.open(file, os.O_RDONLY)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(handle)


class Dropping(Arrivals):
    """Notes tokens, and has the next one find nothing in the kernel's cache."""

    def __init__(self, folders: list[Path]) -> None:
        super().__init__()
        self._folders = folders

    def put(self, tokens: Any) -> None:
        """Note tokens."""
        super().put(tokens)
        for folder in self._folders:
            drop_cached(folder)


def written(model: Any, number: int, arrivals: Arrivals) -> list[int]:
    """Write a text greedily; returns its tokens."""
    mask = torch.ones_like(PROMPT)
    text = model.generate(
        PROMPT, attention_mask=mask, max_new_tokens=number, do_sample=False, streamer=arrivals, pad_token_id=0
    )
    return [int(one) for one in text[0, PROMPT.shape[1] :]]


def offload(folder: Path, megabytes: int) -> None:
    """In a process of its own: write a text with the blocks on disk, and print what it took."""
    import transformers

    torch.set_num_threads(2)
    with tempfile.TemporaryDirectory(dir=folder.parent) as offloaded:
        room = f"{megabytes - LIBRARIES_MB}MB"
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, device_map="auto", max_memory={"cpu": room}, offload_folder=offloaded, dtype=torch.float32
        )
        arrivals = Dropping([folder, Path(offloaded)])
        tokens = written(model, NUM_TOKENS["offload"], arrivals)
        waits = arrivals.waits()
    print(json.dumps({"tokens": tokens, "seconds": waits}), flush=True)


def write_folder(folder: Path) -> None:
    """In a process of its own, which may be large: make the model."""
    save(folder, NUM_BLOCKS, WIDTH)
    os.sync()  # the kernel can only forget what is on the disk


def swarm(folder: Path, megabytes: int) -> tuple[list[int], list[float]]:
    """Write a text by four servers, and a client that holds no blocks."""
    from lightning_swarm import remote_model

    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    own = ("--memory", size // NUM_PEERS * 21 // 20 + TEXTS, "--texts", TEXTS)
    before = ("prlimit", f"--data={megabytes << 20}")
    with ExitStack() as stack:
        address = ""
        for _ in range(NUM_PEERS):
            join = ("--join", address) if address else ("--stages", NUM_PEERS)
            found = stack.enter_context(server("--weights", folder, *join, *own, before=before))
            address = address or found
        remote = remote_model(address, weights=folder)
        stack.callback(remote.swarm.close)
        arrivals = Arrivals()
        tokens = written(remote, NUM_TOKENS["swarm"], arrivals)
        return tokens, arrivals.waits()


def main() -> None:
    """One row for each way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--memory-mb", type=int, default=2300, help="of each process (default: %(default)s)")
    parser.add_argument("--part", choices=["offload", "write"], help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.part == "offload":
        return offload(arguments.folder, arguments.memory_mb)
    if arguments.part == "write":
        return write_folder(arguments.folder)
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made, "model")
        own = ("-m", "benchmarks.generation_large", "--folder", folder, "--memory-mb", arguments.memory_mb)
        if start(*own, "--part", "write").wait():
            raise RuntimeError("the model could not be made")
        gigabytes = sum(file.stat().st_size for file in folder.glob("*.safetensors")) / 1e9
        tokens, seconds = swarm(folder, arguments.memory_mb)
        with start(*own, "--part", "offload", stdout=subprocess.PIPE, stderr=sys.stderr) as run:
            said, _ = run.communicate(timeout=900.0)
        if run.returncode:
            raise RuntimeError(f"accelerate's process ended with {run.returncode}")
        alone = json.loads(said.splitlines()[-1])
        if alone["tokens"] != tokens[: len(alone["tokens"])]:
            raise RuntimeError(f"the tokens differ: {alone['tokens']} and {tokens}")
    rows: list[list[object]] = [["by", "seconds a token", "tokens/s"]]
    for name, times in {"accelerate, blocks on disk": alone["seconds"], "a swarm of 4": seconds}.items():
        rows.append([name, f"{median(times):.2f}", f"{1 / median(times):.2f}"])
    title = f"{gigabytes:.1f} GB of weights, {arguments.memory_mb} MB for each process"
    write("generation_large", f"{table(title, rows)}\nratio {median(alone['seconds']) / median(seconds):.1f}")
    return None


if __name__ == "__main__":
    main()
