"""Texts of several users at once: by a served model's stages on this machine, and by plain Hugging Face.

The same prompts, of different lengths, go through plain Hugging Face one after the other, with as many threads as there
are cores, and as one padded batch, also with one thread. Each stage is a process of its own, with one thread. The texts
are those of one HTTP endpoint, without its protocol.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from benchmarks.generation import VOCABULARY, chain, save
from benchmarks.report import median, picture, table, write
from lightning_swarm.serving.http_fields import TextFields
from lightning_swarm.serving.texts import ServedText

PROMPTS = (24, 40)  # least and greatest number of tokens
NUM_TOKENS = 64
LONG_PROMPT = 1024
_MOST_S = 600.0


def written(model: Any, prompt: torch.Tensor) -> torch.Tensor:
    """Write texts greedily; a prompt's zeros are padding. Return the new tokens."""
    options = {"max_new_tokens": NUM_TOKENS, "do_sample": False}
    text: torch.Tensor = model.generate(prompt, attention_mask=(prompt > 0).long(), **options)
    return text[:, prompt.shape[1] :]


class Text:
    """Receives a text's tokens, with the time of each."""

    is_cancelled = False
    num_cached = 0

    def __init__(self, begin: Callable[[], None] = lambda: None) -> None:
        self.begin = begin
        self.tokens: list[int] = []
        self.at_s: list[float] = []
        self.has_eight, self.is_over = threading.Event(), threading.Event()
        self.error: BaseException | None = None

    def add(self, token: int, _: Any) -> None:
        """Receive a token."""
        self.tokens.append(token)
        self.at_s.append(time.perf_counter())
        if len(self.tokens) == 8:
            self.has_eight.set()

    def end(self, *, is_complete: bool, error: BaseException | None) -> None:
        """Receive the end."""
        self.error = error
        self.is_over.set()

    def waits(self, since_s: float = 0.0, until_s: float = math.inf) -> list[float]:
        """Return the seconds from each token to the next, for tokens within a time."""
        pairs = itertools.pairwise(self.at_s)
        return [later - earlier for earlier, later in pairs if later >= since_s and earlier <= until_s]


def begun(served: ServedText, prompt: torch.Tensor, num_new: int = NUM_TOKENS) -> Text:
    """Have the endpoint's scheduler write a text greedily."""
    text, ids = Text(), prompt[prompt > 0].unsqueeze(0)
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    asked = TextFields(temperature=0.0)
    served.scheduler.submit(served.new_text(given, asked, ids[0].tolist(), None, text, num_new=num_new, choice=0))
    return text


def ended(text: Text) -> torch.Tensor:
    """Wait for a text, and return its tokens."""
    if not text.is_over.wait(_MOST_S) or text.error is not None:
        raise RuntimeError("a text did not end, or failed") from text.error
    return torch.tensor(text.tokens)


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


def beside_a_long_prompt(served: ServedText, prompts: Sequence[torch.Tensor]) -> tuple[list[float], float]:
    """Return the waits for tokens while a newcomer's long prompt is computed, and the seconds of that prompt."""
    texts = [begun(served, prompt, 4 * NUM_TOKENS) for prompt in prompts]
    for text in texts:
        text.has_eight.wait(_MOST_S)
    begin_s = time.perf_counter()
    newcomer = begun(served, torch.randint(1, VOCABULARY, (LONG_PROMPT,)), 1)
    ended(newcomer)
    end_s = newcomer.at_s[0]
    for text in texts:
        ended(text)
    return [wait for text in texts for wait in text.waits(begin_s, end_s)], end_s - begin_s


def main(words: Sequence[str] | None = None) -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=int, default=8)
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--width", type=int, default=832)
    parser.add_argument("--num-blocks", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dtype", default="float32")
    arguments = parser.parse_args(words)
    torch.set_num_threads(1)
    cores = os.cpu_count() or 1
    rows: list[list[object]] = [["what", "tokens/s", "swarm / it"]]
    seconds: dict[str, list[float]] = {
        name: [] for name in ("swarm", "one by one", "one batch", "one batch, one thread")
    }
    waits, num_same, num_texts = list[float](), 0, 0
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        plain = save(Path(folder), arguments.num_blocks, arguments.width, dtype=getattr(torch, arguments.dtype))
        from lightning_swarm import remote_model

        remote = remote_model(chain(stack, folder, plain, arguments.stages), weights=folder)
        stack.callback(remote.swarm.close)
        served = ServedText("m", remote, None)
        lengths = torch.linspace(*PROMPTS, arguments.texts).int().tolist()
        prompts = [torch.randint(1, VOCABULARY, (length,)) for length in lengths]
        batch = torch.stack([torch.nn.functional.pad(one, (max(lengths) - len(one), 0)) for one in prompts])
        found: dict[str, list[torch.Tensor]] = {}

        def swarm() -> None:
            texts = [begun(served, prompt) for prompt in prompts]
            found["swarm"] = [ended(text) for text in texts]
            waits.extend(wait for text in texts for wait in text.waits())

        def one_by_one() -> None:
            found["one by one"] = [written(plain, one.unsqueeze(0))[0] for one in prompts]

        def one_batch() -> None:
            found["one batch"] = list(written(plain, batch))

        for turn in range(arguments.repeats + 1):
            if turn < 2:  # what is computed together is found out in the first texts
                waits.clear()
            taken = {
                "swarm": seconds_of(swarm),
                "one by one": with_threads(cores, one_by_one),
                "one batch": with_threads(cores, one_batch),
                "one batch, one thread": seconds_of(one_batch),
            }
            for name, took_s in taken.items() if turn else ():
                seconds[name].append(took_s)
            num_same += sum(map(torch.equal, found["swarm"], found["one by one"]))
            num_texts += len(prompts)
        beside, prompt_s = beside_a_long_prompt(served, prompts)
    num_tokens = arguments.texts * NUM_TOKENS
    for name, times in seconds.items():
        ratio = median(times) / median(seconds["swarm"])
        rows.append([name, f"{num_tokens / median(times):.1f}", f"{ratio:.2f}"])
    title = f"{arguments.texts} texts of {NUM_TOKENS} tokens at once, {arguments.stages} stages, {arguments.dtype}"
    notes = (
        f"{num_same} of {num_texts} texts equal plain Hugging Face's to the last token\n"
        f"a token's wait: median {1e3 * median(waits):.0f} ms, 95 % within {_most(waits) / median(waits):.2f} of it\n"
        f"beside a prompt of {LONG_PROMPT} tokens, which took {prompt_s:.1f} s: 95 % of the waits within "
        f"{_most(beside) / median(waits):.2f} of that median"
    )
    write("generation_many", f"{table(title, rows)}\n{notes}")
    picture(
        "generation_many", title, "tokens/s", {name: [num_tokens / one for one in own] for name, own in seconds.items()}
    )


def _most(waits: Sequence[float]) -> float:
    """Return the wait that 95 % of waits do not exceed."""
    return statistics.quantiles(waits, n=20)[-1] if len(waits) > 1 else sum(waits)


if __name__ == "__main__":
    main()
