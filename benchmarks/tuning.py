"""Samples/s of users who tune LoRA over a served model's two stages, against plain peft, and the bytes of a step.

Each server is a process with one thread, and so is each user. Plain peft and the plain Trainer have as many threads as
there are servers. The ways take turns: one user, several at once, plain.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import override

from benchmarks.generation import VOCABULARY, chain, save
from benchmarks.report import median, picture, table, write
from benchmarks.runs import start

RANK = 8
NUM_STAGES = 2
ROWS, TOKENS = 32, 64  # 2,048 tokens, as in the estimate of bytes
NUM_WARM = 2  # steps that do not count
READY_S = 120.0


class Tuning(L.LightningModule):
    """A model of peft's."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    @override
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        return self.model(input_ids=batch[0], labels=batch[0], use_cache=False).loss

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([one for one in self.parameters() if one.requires_grad], lr=1e-3)


class Clock(L.Callback):
    """Counts the steps of a time that begins when all users are ready.

    Args:
        seconds: How long it is.
        traffic: What this process has exchanged, if it has peers.
    """

    def __init__(self, seconds: float, traffic: Any) -> None:
        self._seconds, self._traffic = seconds, traffic
        self._begin_s = 0.0
        self._num_steps = 0
        self._before: Counter[str] = Counter()

    def _bytes(self) -> Counter[str]:
        found: Counter[str] = Counter()
        for way, counts in (("sent", self._traffic.sent_bytes), ("received", self._traffic.received_bytes)):
            for (_, method), number in counts.items():
                found[f"{way} {method}"] += number
        return found

    @override
    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == NUM_WARM:
            print("ready", flush=True)
            input()
            self._begin_s = time.monotonic()
            self._before = self._bytes() if self._traffic is not None else Counter()
        elif trainer.global_step > NUM_WARM:
            self._num_steps += 1
            took_s = time.monotonic() - self._begin_s
            if took_s >= self._seconds:
                trainer.should_stop = True
                sent = self._bytes() - self._before if self._traffic is not None else Counter()
                said = {name: number / self._num_steps for name, number in sent.items()}
                print(json.dumps({"rate": ROWS * self._num_steps / took_s, "bytes": said}), flush=True)


def tune(arguments: argparse.Namespace) -> None:
    """Tune, in this process."""
    import peft
    import transformers

    torch.set_num_threads(arguments.num_threads)
    torch.manual_seed(0)
    strategy: Any = "auto"
    traffic = None
    if arguments.user:
        from lightning_swarm import AttachStrategy

        strategy = AttachStrategy(arguments.user, weights=arguments.folder, microbatch_size=arguments.microbatch_size)
        base = strategy.base_model()
        traffic = base.swarm.routes.transport.traffic
    else:
        base = transformers.AutoModelForCausalLM.from_pretrained(arguments.folder)
    model = peft.get_peft_model(base, peft.LoraConfig(r=RANK, target_modules="all-linear", task_type="CAUSAL_LM"))
    rows = torch.randint(1, VOCABULARY, (64 * ROWS, TOKENS))
    trainer = L.Trainer(
        accelerator="auto" if arguments.user else "cpu",
        devices=1,
        strategy=strategy,
        max_epochs=-1,
        callbacks=[Clock(arguments.seconds, traffic)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Tuning(model), DataLoader(TensorDataset(rows), ROWS))


def rates(*users: tuple[object, ...], seconds: float) -> list[dict[str, Any]]:
    """What users find who tune at the same time."""
    command = ("-m", "benchmarks.tuning", "--seconds", seconds)
    with ExitStack() as stack:
        runs = []
        for user in users:
            run = start(*command, *user, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
            stack.callback(run.wait)
            stack.callback(run.kill)
            runs.append(run)
        for run in runs:
            assert run.stdout is not None
            if not any(line.startswith("ready") for line in run.stdout):
                raise RuntimeError(f"a user ended before its first steps: {run.args!r}")
        for run in runs:
            assert run.stdin is not None
            run.stdin.write("\n")
            run.stdin.flush()
        found = []
        for run in runs:
            assert run.stdout is not None
            found.append(next(json.loads(line) for line in run.stdout if line.startswith('{"rate"')))
        return found


def expected_bytes(width: int, num_blocks: int) -> dict[str, float]:
    """What the design has the user exchange in a step: the adapter once, and its gradients with each microbatch."""
    linear = [(width, width)] * 4 + [(width, 4 * width)] * 3
    adapter = 4 * num_blocks * sum(RANK * (inputs + outputs) for inputs, outputs in linear)
    hidden = 4 * ROWS * TOKENS * width
    num_microbatches = 4 * NUM_STAGES
    return {
        "adapter, up": adapter,
        "gradients of the adapter, down": adapter * num_microbatches,
        "hidden states, up and down": 2 * hidden,
        "gradients of hidden states, up": hidden,
    }


def main(words: Sequence[str] | None = None) -> None:
    """Measure, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--num-blocks", type=int, default=8)
    parser.add_argument("--users", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=15.0, help="that each way is measured for (default: 15)")
    parser.add_argument("--microbatch-size", type=int, metavar="ROWS", help="(default: that of `AttachStrategy`)")
    parser.add_argument("--user", metavar="ADDRESS", default="", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parser.add_argument("--num-threads", type=int, default=1, help=argparse.SUPPRESS)
    arguments = parser.parse_args(words)
    if arguments.folder:
        tune(arguments)
        return
    found: dict[str, list[float]] = {"swarm, one user": [], f"swarm, {arguments.users} users": [], "plain": []}
    one, many, plain = found.values()
    fairness, sent = [], Counter[str]()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        model = save(Path(folder), arguments.num_blocks, arguments.width)
        address = chain(stack, folder, model, NUM_STAGES, "--stay")
        user: tuple[object, ...] = ("--folder", folder, "--user", address)
        if arguments.microbatch_size is not None:
            user = (*user, "--microbatch-size", arguments.microbatch_size)
        for _ in range(arguments.repeats):
            (alone,) = rates(user, seconds=arguments.seconds)
            sent = Counter(alone["bytes"])
            one.append(alone["rate"])
            together = [
                each["rate"] for each in rates(*[user] * arguments.users, seconds=arguments.users * arguments.seconds)
            ]
            many.append(sum(together))
            fairness.append(min(together) / max(together))
            (alone,) = rates(("--folder", folder, "--num-threads", NUM_STAGES), seconds=arguments.seconds)
            plain.append(alone["rate"])
    rows: list[list[object]] = [["what", "samples/s", "share of plain", "share of one user"]]
    for name, values in found.items():
        shares = [f"{median(values) / median(other):.2f}" for other in (plain, one)]
        rows.append([name, f"{median(values):.1f}", *shares])
    title = f"LoRA over {NUM_STAGES} stages, {ROWS} rows of {TOKENS} tokens a step"
    text = [table(title, rows), f"slowest user / fastest: {statistics.median(fairness):.2f}"]
    sizes: list[list[object]] = [["bytes of a step", "kB"]]
    computed = expected_bytes(arguments.width, arguments.num_blocks)
    measured = {name: number for name, number in sorted(sent.items()) if "tune" in name}
    sizes += [[name, f"{number / 1e3:.0f}"] for name, number in {**computed, **measured}.items()]
    write("tuning", "\n".join([*text, table("Bytes: computed, and measured by method", sizes)]))
    picture("tuning", title, "samples/s", found)


if __name__ == "__main__":
    main()
