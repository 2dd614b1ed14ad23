"""Texts of several users at once: by a served model's stages on this machine, and by plain Hugging Face.

The same prompts go through plain Hugging Face one after the other, with as many threads as there are cores, and as one
batch. Each stage is a process of its own, with one thread; the users are threads of one client.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from benchmarks.generation import VOCABULARY, Arrivals, for_one_stage, save, server
from benchmarks.report import median, picture, table, write

PROMPT = 32
NUM_TOKENS = 64
LONG_PROMPT = 1024


def written(model: Any, prompt: torch.Tensor, **options: Any) -> torch.Tensor:
    """Write a text greedily."""
    options = {"max_new_tokens": NUM_TOKENS, "do_sample": False, **options}
    text: torch.Tensor = model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)
    return text


def seconds_of(work: Callable[[], object]) -> float:
    """How long a piece of work takes."""
    begin_s = time.perf_counter()
    work()
    return time.perf_counter() - begin_s


def with_threads(number: int, work: Callable[[], object]) -> float:
    """How long a piece of work takes with so many threads."""
    torch.set_num_threads(number)
    try:
        return seconds_of(work)
    finally:
        torch.set_num_threads(1)


def beside_a_long_prompt(remote: Any, prompts: Sequence[torch.Tensor], chunk: int) -> tuple[float, float]:
    """Seconds of a long prompt's chunk alone, and the longest wait of the others for a token beside the whole one."""
    torch.manual_seed(1)
    long = torch.randint(1, VOCABULARY, (1, LONG_PROMPT))
    options = {"max_new_tokens": 1, "prefill_chunk_size": chunk}
    alone_s = seconds_of(lambda: written(remote, long, **options)) * chunk / LONG_PROMPT
    arrivals = [Arrivals() for _ in prompts]
    begin_s = 0.0

    def write_long() -> None:
        nonlocal begin_s
        while min(len(one.at_s) for one in arrivals) < 8:
            time.sleep(0.01)
        begin_s = time.perf_counter()
        written(remote, long, **options)

    with ThreadPoolExecutor(len(prompts) + 1) as pool:
        texts = [
            pool.submit(written, remote, prompt, streamer=one, max_new_tokens=2 * NUM_TOKENS)
            for prompt, one in zip(prompts, arrivals, strict=True)
        ]
        pool.submit(write_long).result()
        for text in texts:
            text.result()
    return alone_s, max(wait for one in arrivals for wait in one.waits(begin_s))


def main(words: Sequence[str] | None = None) -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=int, default=8)
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--width", type=int, default=832)
    parser.add_argument("--num-blocks", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--chunk", type=int, default=128, help="tokens of a long prompt in each step")
    arguments = parser.parse_args(words)
    torch.set_num_threads(1)
    cores = os.cpu_count() or 1
    rows: list[list[object]] = [["what", "tokens/s", "swarm / it"]]
    seconds: dict[str, list[float]] = {"swarm": [], "one by one": [], "one batch": []}
    waits: list[float] = []
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        plain = save(Path(folder), arguments.num_blocks, arguments.width)
        from lightning_swarm import remote_model

        own = ("--weights", folder, *for_one_stage(plain, arguments.stages))
        address = stack.enter_context(server("--stages", arguments.stages, *own))
        for _ in range(arguments.stages - 1):
            stack.enter_context(server("--join", address, *own))
        remote = remote_model(address, weights=folder)
        stack.callback(remote.swarm.close)
        prompts = [torch.randint(1, VOCABULARY, (1, PROMPT)) for _ in range(arguments.texts)]
        batch = torch.cat(prompts)
        found: dict[str, list[torch.Tensor]] = {}

        def swarm() -> None:
            arrivals = [Arrivals() for _ in prompts]
            with ThreadPoolExecutor(len(prompts)) as pool:
                calls = [
                    pool.submit(written, remote, one, streamer=own) for one, own in zip(prompts, arrivals, strict=True)
                ]
                found["swarm"] = [call.result() for call in calls]
            waits.extend(wait for one in arrivals for wait in one.waits())

        def one_by_one() -> None:
            found["one by one"] = [written(plain, one) for one in prompts]

        def one_batch() -> None:
            found["one batch"] = list(written(plain, batch).split(1))

        for turn in range(arguments.repeats + 1):
            if turn < 2:  # what is computed together is found out in the first texts
                waits.clear()
            taken = {
                "swarm": seconds_of(swarm),
                "one by one": with_threads(cores, one_by_one),
                "one batch": with_threads(cores, one_batch),
            }
            for name, took_s in taken.items() if turn else ():
                seconds[name].append(took_s)
            if not all(map(torch.equal, found["swarm"], found["one by one"])):
                print("some texts differ from plain Hugging Face's: steps were computed together, in float32")
        chunk_s, longest_s = beside_a_long_prompt(remote, prompts, arguments.chunk)
    num_tokens = arguments.texts * NUM_TOKENS
    for name, times in seconds.items():
        ratio = median(times) / median(seconds["swarm"])
        rows.append([name, f"{num_tokens / median(times):.1f}", f"{ratio:.2f}"])
    most = statistics.quantiles(waits, n=20)[-1]
    title = f"{arguments.texts} texts of {NUM_TOKENS} tokens at once, {arguments.stages} stages"
    notes = (
        f"a token's wait: median {1e3 * median(waits):.0f} ms, 95 % within {most / median(waits):.2f} of it\n"
        f"beside a prompt of {LONG_PROMPT} tokens: at most {1e3 * longest_s:.0f} ms; {arguments.chunk} tokens of it "
        f"take {1e3 * chunk_s:.0f} ms alone"
    )
    write("generation_many", f"{table(title, rows)}\n{notes}")
    picture(
        "generation_many", title, "tokens/s", {name: [num_tokens / one for one in own] for name, own in seconds.items()}
    )


if __name__ == "__main__":
    main()
