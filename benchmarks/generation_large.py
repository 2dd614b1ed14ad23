"""A text by a model that none of the processes may hold: four servers, or one process that reads its blocks from disk.

Each server may take a number of megabytes of its own, and Linux refuses it more. Hugging Face's way to run such a
model alone is `accelerate`'s offload to disk (`pip install accelerate`). It maps all files at once, which that limit
would refuse, so it is only told how much memory weights may take. What the kernel has cached of its files is dropped
before each token, as a larger model's would be; the servers have read theirs once.

Then a user with the same limit tunes LoRA over the servers, by `AttachStrategy`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import override

from benchmarks.generation import VOCABULARY, Arrivals, save, server
from benchmarks.report import median, table, write
from benchmarks.runs import lines_of, start

WIDTH = 2048
NUM_BLOCKS = 16
NUM_PEERS = 4
NUM_TOKENS = {"offload": 4, "swarm": 24}
PROMPT = torch.arange(1, 17)[None]
TEXTS = 64 << 20
NUM_STEPS = 4  # of the user who tunes
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


def write_folder(folder: Path, num_blocks: int, width: int) -> None:
    """In a process of its own, which may be large: make the model."""
    save(folder, num_blocks, width)
    os.sync()  # the kernel can only forget what is on the disk


def tune(folder: Path, address: str) -> None:
    """In a process of its own: tune over the servers, and print what each step took, and the most memory."""
    import lightning as L
    import peft

    from benchmarks.tuning import RANK, Tuning
    from lightning_swarm import AttachStrategy

    class Steps(L.Callback):
        def __init__(self) -> None:
            self.at_s = [time.perf_counter()]

        @override
        def on_train_batch_end(self, *_: Any) -> None:
            self.at_s.append(time.perf_counter())

    strategy, steps = AttachStrategy(address, weights=folder), Steps()
    config = peft.LoraConfig(r=RANK, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model = Tuning(peft.get_peft_model(strategy.base_model(), config))
    rows = torch.randint(1, VOCABULARY, (NUM_STEPS * 2, 32))
    options: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = L.Trainer(strategy=strategy, devices=1, max_epochs=1, callbacks=[steps], **options)
    trainer.fit(model, DataLoader(TensorDataset(rows), 2))
    seconds = [end_s - begin_s for begin_s, end_s in itertools.pairwise(steps.at_s[1:])]
    print(
        json.dumps({"seconds": seconds, "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}),
        flush=True,
    )


def swarm(folder: Path, megabytes: int) -> tuple[list[int], list[float], dict[str, Any]]:
    """Write a text by four servers, and a client that holds no blocks; then tune."""
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
        user = ("-m", "benchmarks.generation_large", "--part", "tune", "--folder", folder, "--address", address)
        said = lines_of(*user, timeout=300.0, before=before)
        return tokens, arrivals.waits(), json.loads(said[-1])


def main(words: Sequence[str] | None = None) -> None:
    """One row for each way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--memory-mb", type=int, default=2300, help="of each process (default: %(default)s)")
    parser.add_argument("--width", type=int, default=WIDTH)
    parser.add_argument("--num-blocks", type=int, default=NUM_BLOCKS)
    parser.add_argument("--part", choices=["offload", "write", "tune"], help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--address", help=argparse.SUPPRESS)
    arguments = parser.parse_args(words)
    if arguments.part == "offload":
        return offload(arguments.folder, arguments.memory_mb)
    if arguments.part == "write":
        return write_folder(arguments.folder, arguments.num_blocks, arguments.width)
    if arguments.part == "tune":
        return tune(arguments.folder, arguments.address)
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made, "model")
        own = ("-m", "benchmarks.generation_large", "--folder", folder, "--memory-mb", arguments.memory_mb)
        size = ("--width", arguments.width, "--num-blocks", arguments.num_blocks)
        if start(*own, *size, "--part", "write").wait():
            raise RuntimeError("the model could not be made")
        gigabytes = sum(file.stat().st_size for file in folder.glob("*.safetensors")) / 1e9
        tokens, seconds, tuned = swarm(folder, arguments.memory_mb)
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
    ratio = f"ratio {median(alone['seconds']) / median(seconds):.1f}"
    user = f"a user who tunes: {median(tuned['seconds']):.1f} s a step, {tuned['peak_mb']:.0f} MB at most"
    write("generation_large", "\n".join([table(title, rows), ratio, user]))
    return None


if __name__ == "__main__":
    main()
