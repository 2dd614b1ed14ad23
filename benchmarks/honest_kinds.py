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
import subprocess
import sys
from collections import Counter
from typing import Any

import lightning as L

from benchmarks.liar_swarms import dropped, hush, text
from benchmarks.report import table, write
from lightning_swarm import Compression, Limits, SwarmStrategy
from lightning_swarm.coordinator.audit.audit_run import Assignment, AuditResults
from lightning_swarm.coordinator.audit.policy import WorkComparison, tolerance_between_machines
from lightning_swarm.coordinator.audit.step_audits import StepAudits, _Examined

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


def one_run(name: str) -> dict[str, float]:
    """Train in processes of all kinds, and count what audits find."""
    hush()
    precision, settings = CONDITIONS[name]
    task = (dropped if "dropout" in name else text)()
    found: Counter[str] = Counter()
    farthest, compare, convict = 0.0, StepAudits._compare, StepAudits._convict

    def noted(self: StepAudits, step: _Examined, one: Assignment, results: AuditResults) -> WorkComparison:
        nonlocal farthest
        its = results.found.get((one.unit, one.auditor))
        found["audits"] += 1
        if its is not None and its.distance is not None:
            found["between kinds"] += 1
            farthest = max(farthest, its.distance / tolerance_between_machines(its.precision, self._codec_bits))
        return compare(self, step, one, results)

    def convicted(self: StepAudits, *arguments: Any) -> None:
        found["convictions"] += 1
        convict(self, *arguments)

    StepAudits._compare, StepAudits._convict = noted, convicted  # type: ignore[method-assign]
    strategy = SwarmStrategy(
        num_stages=NUM_STAGES,
        microbatch_size=4,
        trust="audited",
        audit_share=1.0,
        limits=Limits(call_timeout=60.0, start_timeout=400.0),
        **settings,
    )
    trainer = L.Trainer(
        accelerator="cpu",
        devices=NUM_PEERS,
        strategy=strategy,
        precision=precision,  # type: ignore[arg-type]
        max_steps=NUM_STEPS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(task.model(0), task.loader(0, NUM_STEPS))
    return {**found, "farthest": farthest, "steps": trainer.global_step}


def main(words: Sequence[str] | None = None) -> None:
    """Measure all conditions, each in processes of its own."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--condition", choices=[*CONDITIONS], help="measure it alone")
    chosen = parser.parse_args(words).condition
    if chosen is not None:
        print(json.dumps(one_run(chosen)), flush=True)
        return
    rows: list[list[object]] = [["conditions", "audits", "between kinds", "convictions", "farthest apart, of allowed"]]
    for name in CONDITIONS:
        command = [sys.executable, "-m", "benchmarks.honest_kinds", "--condition", name]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=1800)
        its = json.loads(done.stdout.splitlines()[-1])
        assert its["steps"] == NUM_STEPS, its
        counts = [its.get(what, 0) for what in ("audits", "between kinds", "convictions")]
        print(name, counts, its["farthest"], flush=True)
        rows.append([name, *counts, f"{its['farthest']:.2g}"])
    write("honest-kinds", table(f"Four kinds of kernels, {NUM_PEERS} honest peers, {NUM_STAGES} stages", rows))


if __name__ == "__main__":
    main()
