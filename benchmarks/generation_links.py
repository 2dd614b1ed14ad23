"""Tokens a second of a served model over links with latency: through the chain, with drafts, and by a star's trips.

Each stage is on a host of its own, and so is the client; between any two hosts a round trip takes as long as asked for
(100 ms). The ideal is one-way trips alone: as many as stages, and one more. A star, in which the client asks one server
after the other, takes a round trip a stage: the client makes those, and nothing else, in turns with the texts.

The text repeats itself, so that prompt lookup foresees it. One assistant is the model itself, and foresees every token;
another has other weights, and foresees hardly any.
"""

from __future__ import annotations

import argparse
import json
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from benchmarks.generation import for_one_stage, save, server
from benchmarks.hosts import Hosts
from benchmarks.report import median, picture, table, write
from benchmarks.runs import FAR_APART, start

NUM_TOKENS = 64
TURNS = 5
PORT = 31337
NUM_PROMPT = 48


def repeating(folder: Path, num_stages: int, width: int) -> Any:
    """Save and return a model whose next token depends on the last one alone, so that its text soon repeats itself."""
    model = save(folder, num_stages, width)
    for layer in model.model.layers:
        torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
    model.save_pretrained(folder, max_shard_size="200MB")
    return model


def client(address: str, num_stages: int, folder: str) -> dict[str, list[float]]:
    """Measure, at the client's host: seconds a token by the chain, by drafts, and of a star's trips."""
    import transformers

    from lightning_swarm import remote_model

    torch.set_num_threads(1)
    model = remote_model(address, weights=folder)
    plain: Any = transformers.AutoModelForCausalLM.from_pretrained(folder)
    torch.manual_seed(1)
    unlike: Any = transformers.AutoModelForCausalLM.from_config(plain.config).eval()
    first = torch.tensor([[5]])
    prompt = plain.generate(
        first, attention_mask=torch.ones_like(first), max_new_tokens=NUM_PROMPT - 1, do_sample=False
    )
    prompts = {"input_ids": prompt, "attention_mask": torch.ones_like(prompt)}
    ways: dict[str, dict[str, Any]] = {
        "chain": {},
        "prompt lookup": {"prompt_lookup_num_tokens": 10},
        "assistant": {"assistant_model": plain},
        "unlike assistant": {"assistant_model": unlike},
    }
    found: dict[str, list[float]] = {name: [] for name in (*ways, "star", "plain")}
    host, _, port = address.partition("/")[0].rpartition(":")
    try:
        texts = set()
        for turn in range(TURNS + 1):
            for name, options in [*ways.items(), ("plain", {})]:
                moments: list[float] = []

                class Noting:
                    """Notes when tokens come."""

                    def put(self, value: Any, moments: list[float] = moments) -> None:
                        moments.extend([time.perf_counter()] * value.numel())

                    def end(self) -> None:
                        """Nothing is held back."""

                asked = plain if name == "plain" else model
                written = asked.generate(
                    **prompts, max_new_tokens=NUM_TOKENS, do_sample=False, streamer=Noting(), **options
                )
                texts.add(tuple(written[0].tolist()))
                first_s = moments[NUM_PROMPT]  # the prompt's own tokens come first
                if turn:
                    found[name].append((moments[-1] - first_s) / (NUM_TOKENS - 1))
            begin_s = time.perf_counter()
            for _ in range(num_stages):
                socket.create_connection((host, int(port))).close()  # a handshake is a round trip
            if turn:
                found["star"].append(time.perf_counter() - begin_s)
        if len(texts) > 1:
            raise RuntimeError(f"the ways wrote {len(texts)} different texts")
    finally:
        model.swarm.close()
    return found


def measure(num_stages: int, round_trip_s: float, width: int) -> dict[str, list[float]]:
    """Measure a model of so many stages, each on a host of its own."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        own = ("--weights", folder, *for_one_stage(repeating(Path(folder), num_stages, width), num_stages))
        hosts = stack.enter_context(
            Hosts([0.0] * (num_stages + 1), [round_trip_s / 4] * (num_stages + 1))  # to the switch and back, twice
        )

        def served(number: int, *options: object) -> str:
            listen = ("--listen", f"{hosts.address(number)}:{PORT}", "--trust", "open")
            begun = server(*listen, *options, *own, before=hosts.on(number), environment=FAR_APART)
            return stack.enter_context(begun)

        address = served(0, "--stages", num_stages)
        for number in range(1, num_stages):
            served(number, "--join", address)
        command = ("-m", "benchmarks.generation_links", "--client", address, "--stages", num_stages, "--folder", folder)
        process = start(*command, before=hosts.on(num_stages), environment=FAR_APART, stdout=subprocess.PIPE)
        said, _ = process.communicate(timeout=900.0)
        if process.returncode:
            raise RuntimeError(f"the client ended with {process.returncode}")
        result: dict[str, list[float]] = json.loads(said.splitlines()[-1])
        return result


def main(words: Sequence[str] | None = None) -> None:
    """All numbers of stages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--round-trip", type=float, default=100.0, help="milliseconds between two hosts (default: 100)")
    parser.add_argument("--width", type=int, default=256, help="of the hidden state (default: 256)")
    parser.add_argument("--client", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    arguments = parser.parse_args(words)
    if arguments.client:
        print(json.dumps(client(arguments.client, arguments.stages[0], arguments.folder)))
        return
    if missing := Hosts.missing(delayed=True):
        sys.exit(f"This needs {missing}.")
    round_trip_s = arguments.round_trip / 1e3
    drafts = ("prompt lookup", "assistant", "unlike assistant")
    rows: list[Sequence[object]] = [
        ("stages", "tokens/s", "of the ideal", "against a star", *(f"{one}, times" for one in drafts), "plain here")
    ]
    found: dict[str, list[float]] = {}
    for num_stages in arguments.stages:
        seconds = {name: median(one) for name, one in measure(num_stages, round_trip_s, arguments.width).items()}
        ideal_s = (num_stages + 1) * round_trip_s / 2 + seconds["plain"]
        rows.append(
            (
                num_stages,
                f"{1 / seconds['chain']:.2f}",
                f"{ideal_s / seconds['chain']:.2f}",
                f"{(seconds['star'] + seconds['plain']) / seconds['chain']:.2f}",
                *(f"{seconds['chain'] / seconds[one]:.2f}" for one in drafts),
                f"{1 / seconds['plain']:.1f}",
            )
        )
        found[f"{num_stages} stages"] = [1 / seconds[one] for one in ("chain", *drafts)]
    title = f"A served model, {arguments.round_trip:g} ms between hosts"
    write("generation_links", table(title, rows))
    picture("generation_links", title, "tokens/s", found)


if __name__ == "__main__":
    main()
