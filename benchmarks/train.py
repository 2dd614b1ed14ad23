"""One training, on a swarm of local peers or in this process; says on its standard output when each step was over.

The other modules run it, with different options, and compare what it says.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import signal
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from typing_extensions import override

from lightning_swarm import Limits, SwarmStrategy
from lightning_swarm import nn as swarm_nn
from lightning_swarm.testing import SharedGPU

SEQUENCE = 64
VOCABULARY = 8192


class Block(nn.Module):
    """A transformer's block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, max(1, width // 64), batch_first=True)
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, hidden: Tensor) -> Tensor:
        """``[batch, sequence, width]`` to the same."""
        normed = self.norms[0](hidden)
        mixed: Tensor = self.attention(normed, normed, normed, need_weights=False)[0]
        hidden = hidden + mixed
        out: Tensor = hidden + self.mlp(self.norms[1](hidden))
        return out


class Nop(nn.Module):
    """Computes next to nothing."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))

    @override
    def forward(self, hidden: Tensor) -> Tensor:
        """``[batch, sequence, width]`` to the same."""
        return hidden * self.scale


class Blocks(L.LightningModule):
    """Learns to give back what it gets."""

    def __init__(
        self, width: int, num_blocks: int, block: type[nn.Module] = Block, *, eight_bits: bool = False
    ) -> None:
        super().__init__()
        self._eight_bits = eight_bits
        self.blocks = nn.Sequential(*(block(width) for _ in range(num_blocks)))

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (self.blocks(batch) - batch).square().mean()

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self._eight_bits:
            from bitsandbytes.optim.adamw import AdamW8bit  # takes seconds, and memory

            return AdamW8bit(self.parameters(), lr=1e-4)
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class _Embed(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, width)

    @override
    def forward(self, tokens: Tensor) -> Tensor:
        """``[batch, sequence]`` to ``[batch, sequence, width]``."""
        hidden: Tensor = self.token(tokens)
        return hidden


class _LossHead(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.out = nn.LayerNorm(width), nn.Linear(width, VOCABULARY)

    @override
    def forward(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """``[batch, sequence, width]`` to a loss for each sample."""
        logits = self.out(self.norm(hidden)).flatten(0, 1)
        losses = nn.functional.cross_entropy(logits, targets.flatten(), reduction="none")
        return losses.view_as(targets).mean(1)


class Language(Blocks):
    """A language model: tokens go in, losses come out, and what travels is the hidden state between stages."""

    def __init__(self, width: int, num_blocks: int) -> None:
        super().__init__(width, num_blocks)
        self.blocks = swarm_nn.Sequential(_Embed(width), *self.blocks, _LossHead(width))

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        losses: Tensor = self.blocks(batch, targets=batch.roll(-1, 1))
        return losses.mean()


class Text(Dataset[Tensor]):
    """Samples ``[sequence]`` of tokens, each by its number."""

    def __init__(self, num_samples: int, sequence: int) -> None:
        self._tokens = torch.randint(VOCABULARY, (num_samples, sequence), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, index: int) -> Tensor:
        return self._tokens[index]


class Noise(Dataset[Tensor]):
    """Samples ``[sequence, width]``, each by its number."""

    def __init__(self, width: int, num_samples: int, sequence: int = SEQUENCE) -> None:
        self._sequence = sequence
        self._width = width
        self._num_samples = num_samples

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> Tensor:
        return torch.randn(self._sequence, self._width, generator=torch.Generator().manual_seed(index))


class Clock(L.Callback):
    """Says when steps are over, kills a server when it is time to, and ends the run when the time is up.

    Args:
        seconds: How long it lasts.
        kill_after_s: When to kill a server.
        device: Of the network; says how many bytes went over it since the first step.
    """

    def __init__(self, seconds: float, kill_after_s: float | None, device: str | None = None) -> None:
        self.seconds = seconds
        self.kill_after_s = kill_after_s
        self.begin_s: float | None = None
        self._device = device
        self._begin_bytes = 0

    @override
    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Tensor, batch_idx: int
    ) -> None:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        now_s = time.monotonic()
        if self.begin_s is None:  # the first step warms up
            self.begin_s = now_s
            self._begin_bytes = self._bytes()
            print(json.dumps({"first": 1}), flush=True)
            return
        counted = {} if self._device is None else {"bytes": self._bytes() - self._begin_bytes}
        self._say(now_s, samples=len(batch), **counted)
        if self.kill_after_s is not None and now_s - self.begin_s >= self.kill_after_s:
            self.kill_after_s = None
            self._kill(trainer)
            self._say(time.monotonic(), killed=1)
        # All processes of a DDP run have to agree.
        trainer.should_stop = trainer.strategy.reduce_boolean_decision(now_s - self.begin_s >= self.seconds, all=False)
        if trainer.should_stop and isinstance(trainer.strategy, SwarmStrategy):
            peers = [os.getpid(), *trainer.strategy.local_processes]
            print(json.dumps({"peak_bytes": [peak_bytes(one) for one in peers]}), flush=True)

    def _say(self, now_s: float, **what: int) -> None:
        assert self.begin_s is not None
        print(json.dumps({"at_s": now_s - self.begin_s, **what}), flush=True)

    def _bytes(self) -> int:
        """Both ways, headers included."""
        if self._device is None:
            return 0
        folder = Path("/sys/class/net", self._device, "statistics")
        return sum(int((folder / name).read_text()) for name in ("rx_bytes", "tx_bytes"))

    def _kill(self, trainer: L.Trainer) -> None:
        """End the last of this machine's servers, as a power cut would."""
        assert isinstance(trainer.strategy, SwarmStrategy)
        os.kill(trainer.strategy.local_processes[-1], signal.SIGKILL)


def peak_bytes(pid: int) -> int:
    """The most memory that a process has held; 0 of one that was killed. Its parent's is no part of it."""
    status = Path("/proc", str(pid), "status")
    held = status.read_text().partition("VmHWM:")[2].split() if status.exists() else []
    return int(held[0]) << 10 if held else 0


class Turns(L.Callback):
    """Trains a step for each line on the standard input, and says how long it took; where that ends, the run does.

    So several ways to train take turns, step by step, all of them started and warm.
    """

    def __init__(self) -> None:
        self._began_s: float | None = None

    @override
    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Tensor, batch_idx: int
    ) -> None:
        said = {"first": 1} if self._began_s is None else {"took_s": time.monotonic() - self._began_s}
        print(json.dumps(said), flush=True)
        line = sys.stdin.readline()
        trainer.should_stop = not line
        self.obey(line.strip())
        self._began_s = time.monotonic()

    def obey(self, how: str) -> None:
        """What the line said."""


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    """What to train, and for how long."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--plain", action="store_true", help="no swarm")
    parser.add_argument("--ddp", action="store_true", help="no swarm, but Lightning's DDP on two hosts")
    parser.add_argument("--listen", default="127.0.0.1")
    parser.add_argument("--initial-peers", nargs="*", default=())
    parser.add_argument("--nop", action="store_true", help="blocks that compute next to nothing")
    parser.add_argument("--language", action="store_true", help="a language model in place of blocks alone")
    parser.add_argument("--gpu", action="store_true", help="all devices are one GPU")
    parser.add_argument("--precision", default="32-true")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--num-stages", type=int, default=2)
    parser.add_argument("--role", default="auto")
    parser.add_argument("--trust", default="open", help="its hosts are in a network of their own")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--sequence", type=int, default=SEQUENCE, help="length of a sample")
    parser.add_argument("--num-blocks", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--microbatch-size", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--kill-after-s", type=float)
    parser.add_argument("--by-turns", action="store_true", help="a step for each line on the standard input")
    parser.add_argument("--compression", default="none")
    parser.add_argument("--count", metavar="DEVICE", help="say what went over this network device, too")
    parser.add_argument("--num-threads", type=int, default=1)
    parser.add_argument("--cache-bytes", type=int, default=Limits().cache_bytes, help="for what waits for its backward")
    parser.add_argument("--eight-bits", action="store_true", help="AdamW8bit")
    parser.add_argument("--snapshot-interval", type=float, help="0: none are taken; left out: the default")
    return parser.parse_args(words)


def strategy_of(arguments: argparse.Namespace) -> SwarmStrategy | str:
    """By which way."""
    if arguments.plain or arguments.ddp:
        return "ddp" if arguments.ddp else "auto"
    limits = Limits(cache_bytes=arguments.cache_bytes)
    if arguments.snapshot_interval is not None:
        limits = replace(limits, snapshot_interval=arguments.snapshot_interval or None)
    return SwarmStrategy(
        num_stages=arguments.num_stages,
        role=arguments.role,
        microbatch_size=arguments.microbatch_size,
        listen=arguments.listen,
        trust=arguments.trust,
        initial_peers=arguments.initial_peers,
        compression=arguments.compression,
        limits=limits,
    )


def main(words: Sequence[str] | None = None) -> None:
    """Train; peers of the swarm run this, too."""
    arguments = parse(words)
    warnings.simplefilter("ignore")
    torch.set_num_threads(arguments.num_threads)
    torch.manual_seed(0)
    trainer = L.Trainer(
        accelerator=SharedGPU() if arguments.gpu else "cpu",
        precision=arguments.precision,
        devices=1 if arguments.plain or arguments.ddp else arguments.devices,
        num_nodes=2 if arguments.ddp else 1,
        strategy=strategy_of(arguments),
        max_epochs=-1,
        callbacks=[
            Turns() if arguments.by_turns else Clock(arguments.seconds, arguments.kill_after_s, arguments.count)
        ],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data: Dataset[Tensor]
    if arguments.language:
        data = Text(64 * arguments.batch_size, arguments.sequence)
        model: Blocks = Language(arguments.width, arguments.num_blocks)
    else:
        data = Noise(arguments.width, 64 * arguments.batch_size, arguments.sequence)
        block = Nop if arguments.nop else Block
        model = Blocks(arguments.width, arguments.num_blocks, block, eight_bits=arguments.eight_bits)
    trainer.fit(model, DataLoader(data, batch_size=arguments.batch_size))
    # In KiB, and of the children that have ended the largest one's.
    own, largest = (resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    print(json.dumps({"trainer_bytes": own << 10, "server_bytes": largest << 10}), flush=True)


if __name__ == "__main__":
    main()
