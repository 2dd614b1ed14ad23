"""Seconds to the first token of a chat's two turns, through a served model's stages on this machine.

The first turn sends a long prompt. The second one repeats it with the answer and a few new tokens, which alone are
computed where the servers keep the first turn's prefix; a client that never wrote the text sends it whole.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from benchmarks.generation import VOCABULARY, Arrivals, chain, save
from benchmarks.report import median, table, write

NUM_NEW = 32  # tokens of an answer
NUM_ASKED = 32  # tokens that the user adds


def first_token_s(model: Any, prompt: torch.Tensor) -> tuple[float, torch.Tensor]:
    """Write an answer; return the seconds to its first token, and the whole text."""
    arrivals, begin_s = Arrivals(), time.perf_counter()
    options = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": NUM_NEW, "do_sample": False}
    text = model.generate(prompt, streamer=arrivals, prefill_chunk_size=256, **options)
    return arrivals.at_s[1] - begin_s, text


def measure(num_stages: int, width: int, num_blocks: int, num_prompt: int, repeats: int) -> dict[str, list[float]]:
    """Return the seconds of each turn of each chat."""
    from lightning_swarm import remote_model

    seconds: dict[str, list[float]] = {"first turn": [], "second turn": [], "second turn, other client": []}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        plain = save(Path(folder), num_blocks, width)
        address = chain(stack, folder, plain, num_stages)
        remote, other = (remote_model(address, weights=folder) for _ in range(2))
        for one in (remote, other):
            stack.callback(one.swarm.close)
        for chat in range(repeats + 1):
            first_s, text = first_token_s(remote, torch.randint(1, VOCABULARY, (1, num_prompt)))
            prompt = torch.cat([text, torch.randint(1, VOCABULARY, (1, NUM_ASKED))], dim=1)
            second_s, answer = first_token_s(remote, prompt)
            other_s, same = first_token_s(other, prompt)
            if not torch.equal(answer, same):
                raise RuntimeError("A kept prefix must change no token, and did.")
            if chat:  # the first time loads and allocates
                for name, one_s in zip(seconds, (first_s, second_s, other_s), strict=True):
                    seconds[name].append(one_s)
    return seconds


def main(words: Sequence[str] | None = None) -> None:
    """All numbers of stages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--width", type=int, default=512, help="of the hidden state (default: 512)")
    parser.add_argument("--num-blocks", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=4000, help="tokens of the first turn (default: 4000)")
    parser.add_argument("--repeats", type=int, default=5, help="chats (default: 5)")
    arguments = parser.parse_args(words)
    torch.set_num_threads(1)
    rows: list[list[object]] = [["stages", "turn", "seconds to the first token", "of the first turn"]]
    for num_stages in arguments.stages:
        found = measure(num_stages, arguments.width, arguments.num_blocks, arguments.prompt, arguments.repeats)
        for name, seconds in found.items():
            ratio = median([one / first for one, first in zip(seconds, found["first turn"], strict=True)])
            rows.append([num_stages, name, f"{median(seconds):.3f}", f"{ratio:.3f}"])
    title = f"a chat of {arguments.prompt} tokens, {arguments.num_blocks} blocks of width {arguments.width}"
    write("generation_turns", table(title, rows))


if __name__ == "__main__":
    main()
