"""Texts of several users at once: by a served model's stages on this machine, and by plain Hugging Face.

The same prompts, of different lengths, go through plain Hugging Face one after the other, with as many threads as there
are cores, and as one padded batch, also with one thread. Each stage is a process of its own, with one thread. The users
are threads of one client that call `generate`, or rows of a few loops, each of which embeds its texts as one batch.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
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


def _row(tree: Any, index: int, number: int) -> Any:
    """One text's part of the blocks' arguments."""
    if isinstance(tree, torch.Tensor):
        return tree[index : index + 1] if tree.ndim and len(tree) == number else tree
    if isinstance(tree, dict):
        return {key: _row(one, index, number) for key, one in tree.items()}
    return type(tree)(_row(one, index, number) for one in tree) if type(tree) in (tuple, list) else tree


@torch.no_grad()
def loop(remote: Any, prompts: Sequence[torch.Tensor], begun: threading.Barrier) -> tuple[list[list[int]], list[float]]:
    """Write texts in one loop: each step is one forward, whose blocks get one call of `step_many`.

    Returns the new tokens of each text, and the seconds of each step. All loops begin together, after the prompts.
    """
    from transformers import DynamicCache

    blocks, number = remote.swarm.served, len(prompts)
    caches = [DynamicCache(config=remote.config) for _ in prompts]
    new = [
        remote(one, past_key_values=own).logits[:, -1].argmax(-1).tolist()
        for one, own in zip(prompts, caches, strict=True)
    ]

    def compute(hidden: Any, extras: dict[str, Any], _: Any) -> Any:
        rows = [(_row(hidden, i, number), _row(extras, i, number), cache) for i, cache in enumerate(caches)]
        found = blocks.step_many(rows)
        for one in found:
            if isinstance(one, Exception):
                raise one
        return torch.cat(found)

    begun.wait()
    seconds = []
    with calls_of_blocks(compute):
        for step in range(NUM_TOKENS - 1):
            begin_s = time.perf_counter()
            places = torch.tensor([[prompt.shape[1] + step] for prompt in prompts])
            tokens = torch.tensor([[text[-1]] for text in new])
            logits = remote(tokens, position_ids=places, past_key_values=caches[0]).logits[:, -1]
            for text, token in zip(new, logits.argmax(-1).tolist(), strict=True):
                text.append(token)
            seconds.append(time.perf_counter() - begin_s)
    return new, seconds


_local = threading.local()


@contextmanager
def calls_of_blocks(compute: Callable[[Any, dict[str, Any], Any], Any]) -> Iterator[None]:
    """Inside, and on this thread, compute the blocks of forwards with a cache by this function."""
    _local.compute = compute
    try:
        yield
    finally:
        del _local.compute


def divert_blocks() -> None:
    """Make `calls_of_blocks` effective, before a client is connected."""
    from lightning_swarm.serving.blocks import ServedBlocks

    own = ServedBlocks.generate

    def generate(blocks: Any, *call: Any) -> Any:
        compute = getattr(_local, "compute", None)
        return own(blocks, *call) if compute is None else compute(*call)

    setattr(ServedBlocks, "generate", generate)  # noqa: B010 - mypy refuses the assignment


def padded(prompts: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Prompts as one batch padded on the left, and its mask."""
    longest = max(prompt.shape[1] for prompt in prompts)
    rows = [torch.nn.functional.pad(prompt, (longest - prompt.shape[1], 0)) for prompt in prompts]
    masks = [torch.nn.functional.pad(torch.ones_like(one), (longest - one.shape[1], 0)) for one in prompts]
    return torch.cat(rows), torch.cat(masks)


def main(words: Sequence[str] | None = None) -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=int, default=8)
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--width", type=int, default=832)
    parser.add_argument("--num-blocks", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--loops", type=int, nargs="+", default=[1, 2], help="numbers of loops that share the texts")
    parser.add_argument("--chunk", type=int, default=128, help="tokens of a long prompt in each step")
    arguments = parser.parse_args(words)
    torch.set_num_threads(1)
    cores = os.cpu_count() or 1
    rows: list[list[object]] = []
    names = [*(f"swarm, {number} loops" for number in arguments.loops)]
    seconds: dict[str, list[float]] = {
        name: [] for name in ("swarm", *names, "one by one", "one batch", "one batch, one thread")
    }
    waits: list[float] = []
    steps: dict[str, list[float]] = {name: [] for name in names}
    rows.append(["what", "tokens/s", "swarm / it", *(f"{name} / it" for name in names)])
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        plain = save(Path(folder), arguments.num_blocks, arguments.width, dtype=getattr(torch, arguments.dtype))
        from lightning_swarm import remote_model

        divert_blocks()
        own = ("--weights", folder, *for_one_stage(plain, arguments.stages))
        address = stack.enter_context(server("--stages", arguments.stages, *own))
        for _ in range(arguments.stages - 1):
            stack.enter_context(server("--join", address, *own))
        remote = remote_model(address, weights=folder)
        stack.callback(remote.swarm.close)
        prompts = [torch.randint(1, VOCABULARY, (1, PROMPT - 2 * (i % 8))) for i in range(arguments.texts)]
        batch, mask = padded(prompts)
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
            plain.generate(batch, attention_mask=mask, max_new_tokens=NUM_TOKENS, do_sample=False)

        def loops(number: int) -> float:
            """Seconds of the loops, without their prompts, as if they had taken a step's share for them."""
            begun = threading.Barrier(number + 1)
            with ThreadPoolExecutor(number) as pool:
                calls = [pool.submit(loop, remote, prompts[i::number], begun) for i in range(number)]
                begun.wait()
                took_s = seconds_of(lambda: [call.result() for call in calls])
            texts: list[torch.Tensor] = [torch.empty(0)] * len(prompts)
            for i, call in enumerate(calls):
                new, own = call.result()
                steps[f"swarm, {number} loops"] += own
                for place, text in zip(range(i, len(prompts), number), new, strict=True):
                    texts[place] = torch.cat([prompts[place], torch.tensor([text])], 1)
            found[f"swarm, {number} loops"] = texts
            return took_s * NUM_TOKENS / (NUM_TOKENS - 1)

        for turn in range(arguments.repeats + 1):
            if turn < 2:  # what is computed together is found out in the first texts
                waits.clear()
                for times in steps.values():
                    times.clear()
            taken = {
                "swarm": seconds_of(swarm),
                **{f"swarm, {number} loops": loops(number) for number in arguments.loops},
                "one by one": with_threads(cores, one_by_one),
                "one batch": with_threads(cores, one_batch),
                "one batch, one thread": with_threads(1, one_batch),
            }
            for name, took_s in taken.items() if turn else ():
                seconds[name].append(took_s)
            for name in ("swarm", *names):
                if not all(map(torch.equal, found[name], found["one by one"])):
                    print(f"{name}: some texts differ from plain Hugging Face's: steps were computed together")
        chunk_s, longest_s = beside_a_long_prompt(remote, prompts, arguments.chunk)
    num_tokens = arguments.texts * NUM_TOKENS
    for name, times in seconds.items():
        ratios = (median(times) / median(seconds[one]) for one in ("swarm", *names))
        rows.append([name, f"{num_tokens / median(times):.1f}", *(f"{ratio:.2f}" for ratio in ratios)])

    def spread(own: Sequence[float]) -> str:
        most = statistics.quantiles(own, n=20)[-1]
        return f"median {1e3 * median(own):.0f} ms, 95 % within {most / median(own):.2f} of it"

    title = f"{arguments.texts} texts of {NUM_TOKENS} tokens at once, {arguments.stages} stages"
    notes = (
        f"a token's wait: {spread(waits)}; " + "; ".join(f"{name}: {spread(own)}" for name, own in steps.items()) + "\n"
        f"beside a prompt of {LONG_PROMPT} tokens: at most {1e3 * longest_s:.0f} ms; {arguments.chunk} tokens of it "
        f"take {1e3 * chunk_s:.0f} ms alone"
    )
    write("generation_many", f"{table(title, rows)}\n{notes}")
    picture(
        "generation_many", title, "tokens/s", {name: [num_tokens / one for one in own] for name, own in seconds.items()}
    )


if __name__ == "__main__":
    main()
