"""Counts convictions where honest servers compute with kernels of different kinds. There must be none.

``python -m benchmarks.honest_kinds``: eight processes, whose libraries are told to use other instructions each, audit
each other's whole work. It prints how far results were apart, as parts of what is allowed between machines of different
kinds. What applies an optimizer step rounds alike in all of them: else the servers of a stage come to differ, which
every run refuses.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Final

# Before torch is imported, of which each peer of this machine has its own.
os.environ |= {
    1: {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_CBWR": "AVX2"},
    2: {"ONEDNN_MAX_CPU_ISA": "SSE41", "MKL_CBWR": "COMPATIBLE"},
    3: {"OMP_NUM_THREADS": "2"},
}.get(int(os.environ.get("LOCAL_RANK", "0")) % 4, {})

import argparse
import json
from collections import Counter
from typing import Any

import lightning as L
from typing_extensions import override

from benchmarks.liar_swarms import dropped, hush, text
from benchmarks.report import table, write
from benchmarks.runs import lines_of
from lightning_swarm import Compression, Limits, SwarmStrategy, Trust
from lightning_swarm.coordinator.audit import step_audits
from lightning_swarm.coordinator.audit.disputes import AuditResult, compare
from lightning_swarm.coordinator.audit.policy import WorkComparison, relative_deviation
from lightning_swarm.protocol.compression import Codecs

NUM_PEERS, NUM_STAGES, NUM_STEPS = 8, 2, 40
CONDITIONS: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "float32": ("32-true", {}),
    "float64": ("64-true", {}),
    "bfloat16 autocast": ("bf16-mixed", {}),
    "float32, dropout": ("32-true", {}),
    "float32, 8-bit activations and gradients": (
        "32-true",
        {"compression": Compression(activations="8bit", gradients="8bit")},
    ),
}


class Convictions(L.Callback):
    """Counts convictions, which the strategy forgets when the run is over."""

    def __init__(self, found: Counter[str]) -> None:
        self._found = found

    @override
    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        assert isinstance(trainer.strategy, SwarmStrategy)
        assert trainer.strategy.peer is not None
        self._found["convictions"] = trainer.strategy.peer.events.counts["convicted"]


def one_run(name: str, num_peers: int, num_steps: int) -> dict[str, float]:
    """Train in processes of all kinds, and count what audits find."""
    hush()
    precision, settings = CONDITIONS[name]
    task = (dropped if "dropout" in name else text)()
    found: Counter[str] = Counter()
    farthest = 0.0

    def noted(claims: Any, its: AuditResult, *arguments: Any, **options: Any) -> WorkComparison:
        nonlocal farthest
        found["audits"] += 1
        if its.distance is not None:
            found["between kinds"] += 1
            farthest = max(farthest, its.distance / relative_deviation(its.precision, codec_bits))
        return compare(claims, its, *arguments, **options)

    # A coordinator keeps no distances, so its comparison of each audit is replaced by one that notes them.
    step_audits.compare = noted  # type: ignore[assignment,attr-defined]
    strategy = SwarmStrategy(
        num_stages=NUM_STAGES,
        microbatch_size=4,
        trust=Trust("audited", audit_share=1.0),
        limits=Limits(call_timeout=60.0, start_timeout=400.0),
        **settings,
    )
    codecs = Codecs.of(strategy.config.settings.compression)
    codec_bits = min((one.bits for one in (codecs.activations, codecs.gradients) if one is not None), default=None)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=num_peers,
        strategy=strategy,
        precision=precision,  # type: ignore[arg-type]
        max_steps=num_steps,
        callbacks=[Convictions(found)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(task.model(0), task.loader(0, num_steps))
    return {**found, "farthest": farthest, "steps": trainer.global_step}


def main(words: Sequence[str] | None = None) -> None:
    """Measure all conditions, each in processes of its own."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--condition", choices=[*CONDITIONS], help="measure it alone")
    parser.add_argument("--peers", type=int, default=NUM_PEERS)
    parser.add_argument("--steps", type=int, default=NUM_STEPS)
    arguments = parser.parse_args(words)
    if arguments.condition is not None:
        print(json.dumps(one_run(arguments.condition, arguments.peers, arguments.steps)), flush=True)
        return
    rows: list[list[object]] = [["conditions", "audits", "between kinds", "convictions", "farthest apart, of allowed"]]
    for name in CONDITIONS:
        options = ("--condition", name, "--peers", arguments.peers, "--steps", arguments.steps)
        its = json.loads(lines_of("-m", "benchmarks.honest_kinds", *options, timeout=1800.0)[-1])
        assert its["steps"] == arguments.steps, its
        counts = [its.get(what, 0) for what in ("audits", "between kinds", "convictions")]
        print(name, counts, its["farthest"], flush=True)
        rows.append([name, *counts, f"{its['farthest']:.2g}"])
    write("honest-kinds", table(f"Four kinds of kernels, {arguments.peers} honest peers, {NUM_STAGES} stages", rows))


if __name__ == "__main__":
    main()
