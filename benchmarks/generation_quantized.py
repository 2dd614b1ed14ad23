"""What quantised weights of a served model save and cost: bytes, memory of the server, and tokens a second of one text.

One server for each form holds all blocks; texts are written in turns, with one thread a process.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import torch

from benchmarks.generation import VOCABULARY, Arrivals, save, server
from benchmarks.report import median, table, write

FORMS: Mapping[str, Sequence[str]] = {
    "bfloat16": (),
    "int8": ("--quantize", "int8"),
    "nf4": ("--quantize", "nf4"),
}
NUM_TOKENS = 32


def peak_mb(process: psutil.Process) -> float:
    """Return the most memory that a process has had."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024


def measure(folder: Path, repeats: int, num_prompt: int) -> dict[str, dict[str, Any]]:
    """Return each form's bytes of a block, peak memory of its server, and seconds of prompts and of tokens."""
    from lightning_swarm import remote_model

    found: dict[str, dict[str, Any]] = {}
    remotes = {}
    with ExitStack() as stack:
        for form, options in FORMS.items():
            before = {one.pid for one in psutil.Process().children()}
            address = stack.enter_context(server("--weights", folder, *options))
            [process] = [one for one in psutil.Process().children() if one.pid not in before]
            remote = remotes[form] = remote_model(address, weights=folder)
            stack.callback(remote.swarm.close)
            stages = remote.swarm.card.stages
            size = sum(stage.weights.num_bytes for stage in stages) / sum(stage.num_blocks for stage in stages)
            found[form] = {"bytes": size, "loaded_mb": peak_mb(process), "prompt": [], "token": []}
        prompt = torch.randint(1, VOCABULARY, (1, num_prompt))
        given = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": NUM_TOKENS, "do_sample": False}
        for turn in range(repeats + 1):
            for form, remote in remotes.items():
                arrivals = Arrivals()
                arrivals.put(None)  # the time of the call
                remote.generate(prompt, streamer=arrivals, **given)
                if turn:  # the first time loads and allocates
                    # Hugging Face puts the prompt itself first, and then each token.
                    begin_s, _, first_s, *_, last_s = arrivals.at_s
                    found[form]["prompt"].append(first_s - begin_s)
                    found[form]["token"].append((last_s - first_s) / (NUM_TOKENS - 1))
    return found


def main(words: Sequence[str] | None = None) -> None:
    """One row for each form."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=1024, help="of the hidden state (default: %(default)s)")
    parser.add_argument("--num-blocks", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=128, help="tokens of it (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=5, help="texts in each form (default: %(default)s)")
    arguments = parser.parse_args(words)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as made:
        save(Path(made), arguments.num_blocks, arguments.width, dtype=torch.bfloat16)
        found = measure(Path(made), arguments.repeats, arguments.prompt)
    rows: list[list[object]] = [
        ["form", "MB a block", "of bfloat16", "server's peak MB", "token's ms", "time", "prompt's time"]
    ]
    plain = found["bfloat16"]
    for form, one in found.items():
        token, prompt = (median(one[name]) / median(plain[name]) for name in ("token", "prompt"))
        size = [f"{one['bytes'] / 1e6:.1f}", f"{one['bytes'] / plain['bytes']:.2f}", f"{one['loaded_mb']:.0f}"]
        rows.append([form, *size, f"{1e3 * median(one['token']):.1f}", f"{token:.2f}", f"{prompt:.2f}"])
    title = f"{arguments.num_blocks} blocks of width {arguments.width}, a prompt of {arguments.prompt} tokens"
    write("generation_quantized", table(title, rows))


if __name__ == "__main__":
    main()
