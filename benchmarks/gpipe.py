"""`benchmarks.train` by `torch.distributed.pipelining` over gloo: two stages, a process and a thread each.

The same blocks, data, optimizer and microbatches, and turns as `--by-turns` has them there.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from benchmarks.together import Together, run_together
from benchmarks.train import SEQUENCE, Blocks, Noise

SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}


def train(together: Together, folder: str, arguments: argparse.Namespace) -> None:
    """One stage's part."""
    torch.set_num_threads(arguments.num_threads)
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/gloo", rank=together.rank, world_size=together.size
    )
    torch.manual_seed(0)
    blocks = Blocks(arguments.width, arguments.num_blocks).blocks
    share = arguments.num_blocks // together.size
    module = nn.Sequential(*list(blocks)[together.rank * share : (together.rank + 1) * share])
    example = torch.zeros(arguments.microbatch_size, SEQUENCE, arguments.width)
    between = torch.zeros_like(example).requires_grad_()  # else no gradient comes back over a boundary
    inputs = example if together.rank == 0 else between
    stage = PipelineStage(
        module, together.rank, together.size, torch.device("cpu"), input_args=(inputs,), output_args=(between,)
    )
    num_microbatches = arguments.batch_size // arguments.microbatch_size
    schedule: Any = SCHEDULES[arguments.schedule](stage, n_microbatches=num_microbatches, loss_fn=_loss)
    _train(together, schedule, torch.optim.AdamW(module.parameters(), lr=1e-4), arguments)
    distributed.destroy_process_group()


def _train(together: Together, schedule: Any, optimizer: torch.optim.Optimizer, arguments: argparse.Namespace) -> None:
    data = Noise(arguments.width, 64 * arguments.batch_size)
    first, last = together.rank == 0, together.rank == together.size - 1
    for number in itertools.count():
        began_s = time.monotonic()
        begin = number * arguments.batch_size % len(data)
        batch = torch.stack([data[i] for i in range(begin, begin + arguments.batch_size)])
        optimizer.zero_grad()
        schedule.step(*([batch] if first else []), **({"target": batch, "losses": []} if last else {}))
        optimizer.step()
        distributed.barrier()  # the step is over when its slowest stage has stepped
        if first:
            print(json.dumps({"took_s": time.monotonic() - began_s} if number else {"first": 1}), flush=True)
        over = torch.tensor(float(first and not sys.stdin.readline()))
        distributed.broadcast(over, src=0)
        if over:
            return


def _loss(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def main(words: Sequence[str] | None = None) -> None:
    """Train."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--schedule", choices=sorted(SCHEDULES), default="gpipe")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--num-blocks", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--microbatch-size", type=int, default=1)
    parser.add_argument("--num-threads", type=int, default=1)
    arguments = parser.parse_args(words)
    with tempfile.TemporaryDirectory() as folder:
        run_together(train, arguments.devices, folder, arguments)


if __name__ == "__main__":
    main()
