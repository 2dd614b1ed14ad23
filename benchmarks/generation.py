"""Tokens a second of one text: by a served model's stages on this machine, and by plain Hugging Face, in turns.

Each stage is a process of its own; the client has none. All processes compute with one thread. `--width 64` has blocks
that take next to nothing: there the time is the swarm's own.
"""

from __future__ import annotations

import argparse
import itertools
import re
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from benchmarks.report import median, picture, table, write
from benchmarks.runs import start

VOCABULARY = 256
NUM_TOKENS = 128
TEXTS = 256 << 20  # bytes for texts, at each server


def save(folder: Path, num_blocks: int, width: int, *, dtype: torch.dtype = torch.float32) -> Any:
    """Save a model with random weights, which never comes to an end by itself, and return it."""
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=num_blocks,
        num_attention_heads=8,
        num_key_value_heads=8,
        eos_token_id=None,
        pad_token_id=0,
    )
    model = transformers.LlamaForCausalLM(config).eval().to(dtype)
    model.save_pretrained(folder, max_shard_size="200MB")
    return model


def for_one_stage(model: Any, num_stages: int) -> Sequence[object]:
    """Return the options of a server that has room for one stage, of as many blocks as the others."""
    blocks = model.model.layers
    size = sum(tensor.nbytes for tensor in blocks[0].state_dict().values()) * len(blocks) // num_stages
    return ("--memory", TEXTS + size * 3 // 2, "--texts", TEXTS)


@contextmanager
def server(
    *options: object, before: Sequence[str] = (), environment: Mapping[str, str] = MappingProxyType({})
) -> Iterator[str]:
    """Start a server, with `before` and `environment` as `start` takes them. Yields its address."""
    process = start(
        *("-m", "lightning_swarm", "serve", *options),
        before=before,
        environment=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert process.stdout is not None
    try:
        said = []
        for line in process.stdout:
            said.append(line)
            if "Others can join" in line and (found := re.search(r"\S+:\d+/\w+", line)):
                break
        else:
            raise RuntimeError(f"the server ended before it served:\n{''.join(said)}")
        threading.Thread(target=process.stdout.read, daemon=True).start()  # else it would wait for a reader
        yield found[0]
    finally:
        process.kill()
        process.wait()


def chain(stack: ExitStack, folder: str, model: Any, num_stages: int, *options: object) -> str:
    """Start a server for each stage of a model, until the stack closes; return the first one's address."""
    own = ("--weights", folder, *for_one_stage(model, num_stages), *options)
    address = stack.enter_context(server("--stages", num_stages, *own))
    for _ in range(num_stages - 1):
        stack.enter_context(server("--join", address, *own))
    return address


class Arrivals:
    """When each token of a text came, by Hugging Face's streamer: the prompt first."""

    def __init__(self) -> None:
        self.at_s: list[float] = []

    def put(self, _tokens: Any) -> None:
        """Note tokens."""
        self.at_s.append(time.perf_counter())

    def end(self) -> None:
        """Hear that the text is whole."""

    def waits(self, since_s: float = 0.0) -> list[float]:
        """Seconds between two tokens."""
        return [later - earlier for earlier, later in itertools.pairwise(self.at_s[1:]) if earlier >= since_s]


def measure(num_stages: int, width: int, num_blocks: int, repeats: int, num_prompt: int) -> dict[str, list[float]]:
    """Return the seconds of each text, both ways, from its second token on."""
    from lightning_swarm import remote_model

    seconds: dict[str, list[float]] = {"swarm": [], "plain": []}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        plain = save(Path(folder), num_blocks, width)
        address = chain(stack, folder, plain, num_stages)
        remote = remote_model(address, weights=folder)
        stack.callback(remote.swarm.close)
        prompt = torch.randint(1, VOCABULARY, (1, num_prompt))
        options = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": NUM_TOKENS, "do_sample": False}
        texts = []
        for turn in range(repeats + 1):
            for way, model in {"swarm": remote, "plain": plain}.items():
                arrivals = Arrivals()
                texts.append(model.generate(prompt, streamer=arrivals, **options))
                if turn:  # the first time loads and allocates
                    seconds[way].append(arrivals.at_s[-1] - arrivals.at_s[1])
        if not all(torch.equal(text, texts[0]) for text in texts):
            raise RuntimeError("The swarm must write what plain Hugging Face writes, and did not.")
    return seconds


def main(words: Sequence[str] | None = None) -> None:
    """All numbers of stages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--width", type=int, default=832, help="of the hidden state (default: 832)")
    parser.add_argument("--num-blocks", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=32, help="tokens of it (default: 32)")
    parser.add_argument("--repeats", type=int, default=5, help="texts of each way (default: 5)")
    arguments = parser.parse_args(words)
    torch.set_num_threads(1)
    rows: list[list[object]] = [["stages", "swarm, tokens/s", "plain, tokens/s", "ratio", "ms a token more"]]
    found: dict[str, list[float]] = {}
    for num_stages in arguments.stages:
        seconds = measure(num_stages, arguments.width, arguments.num_blocks, arguments.repeats, arguments.prompt)
        swarm, plain = median(seconds["swarm"]), median(seconds["plain"])
        rows.append(
            [
                num_stages,
                f"{(NUM_TOKENS - 1) / swarm:.1f}",
                f"{(NUM_TOKENS - 1) / plain:.1f}",
                f"{plain / swarm:.2f}",
                f"{1e3 * (swarm - plain) / (NUM_TOKENS - 1):.2f}",
            ]
        )
        found[f"swarm, {num_stages} stages"] = [(NUM_TOKENS - 1) / one for one in seconds["swarm"]]
        found[f"plain beside {num_stages}"] = [(NUM_TOKENS - 1) / one for one in seconds["plain"]]
    blocks = f"{arguments.num_blocks} blocks of width {arguments.width}"
    title = f"{NUM_TOKENS} tokens after a prompt of {arguments.prompt}, {blocks}"
    write("generation", table(title, rows))
    picture("generation", title, "tokens/s", found)


if __name__ == "__main__":
    main()
