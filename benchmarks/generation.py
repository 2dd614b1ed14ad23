"""Tokens a second of one text: through the stages of a swarm, and by plain Hugging Face in the same process, in turns.

Each way writes the same text with the same weights, a few times. The trainer holds no stage, each server one. All
processes compute with one thread. `--width 64` has blocks that take next to nothing: there the time is the swarm's own.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from typing import Any

import lightning as L
import torch
import transformers
from torch import Tensor
from torch.utils.data import DataLoader
from typing_extensions import override

from benchmarks.report import median, picture, table, write
from lightning_swarm import SwarmStrategy

VOCABULARY = 256
PROMPT = 32
NUM_TOKENS = 128


class Writer(L.LightningModule):
    """Generates once it has taken a step."""

    def __init__(self, width: int, num_blocks: int, repeats: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        torch.set_num_threads(1)
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
        self.model = transformers.LlamaForCausalLM(config)
        self.repeats = repeats
        self.seconds: dict[str, list[float]] = {"swarm": [], "plain": []}

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.model(input_ids=batch, labels=batch, use_cache=False).loss
        return loss

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)

    @override
    def on_train_batch_end(self, *_: Any) -> None:
        plain = transformers.LlamaForCausalLM(self.model.config)
        plain.load_state_dict(self.model.state_dict())
        ways = {"swarm": self.model.eval(), "plain": plain.eval()}
        prompt = torch.arange(1, PROMPT + 1)[None]
        texts = []
        for turn in range(self.repeats + 1):
            for way, model in ways.items():
                begin_s = time.perf_counter()
                texts.append(model.generate(prompt, max_new_tokens=NUM_TOKENS, do_sample=False))
                if turn:  # the first time loads and allocates
                    self.seconds[way].append(time.perf_counter() - begin_s)
        if not all(torch.equal(text, texts[0]) for text in texts):
            raise RuntimeError("The swarm must write what plain Hugging Face writes, and did not.")
        self.model.train()


def batches() -> Iterator[Tensor]:
    """One batch."""
    yield torch.ones(2, 8, dtype=torch.long)


def measure(num_stages: int, width: int, num_blocks: int, repeats: int) -> dict[str, list[float]]:
    """Seconds of each text, both ways."""
    module = Writer(width, num_blocks, repeats)
    strategy = SwarmStrategy(num_stages=num_stages, pipeline="model.model.layers", role="trainer")
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1 + num_stages,
        strategy=strategy,
        max_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(list(batches()), batch_size=None))
    return module.seconds


def main() -> None:
    """All numbers of stages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--width", type=int, default=512, help="of the hidden state (default: 512)")
    parser.add_argument("--num-blocks", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5, help="texts of each way (default: 5)")
    arguments = parser.parse_args()
    rows: list[list[object]] = [["stages", "swarm, tokens/s", "plain, tokens/s", "ratio", "ms a token more"]]
    found: dict[str, list[float]] = {}
    for num_stages in arguments.stages:
        seconds = measure(num_stages, arguments.width, arguments.num_blocks, arguments.repeats)
        swarm, plain = median(seconds["swarm"]), median(seconds["plain"])
        more_ms = 1e3 * (swarm - plain) / NUM_TOKENS
        rows.append(
            [
                num_stages,
                f"{NUM_TOKENS / swarm:.1f}",
                f"{NUM_TOKENS / plain:.1f}",
                f"{plain / swarm:.2f}",
                f"{more_ms:.2f}",
            ]
        )
        found[f"swarm, {num_stages} stages"] = [NUM_TOKENS / one for one in seconds["swarm"]]
        found[f"plain beside {num_stages}"] = [NUM_TOKENS / one for one in seconds["plain"]]
    title = f"One text of {NUM_TOKENS} tokens, {arguments.num_blocks} blocks of width {arguments.width}"
    write("generation", table(title, rows))
    picture("generation", title, "tokens/s", found)


if __name__ == "__main__":
    main()
