"""The same training twice, on a swarm of four local peers and in one process, and how far the two are apart.

After a third of the steps one of the four is killed, and a new one joins. Ends with text that the stages of the swarm
write while it still runs, and its checkpoint in a plain process; and with a picture of both loss curves.

In float32, rounding alone drives two such curves apart, as it does those of the plain Trainer on one thread and on two.
"""

import argparse
import csv
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from types import FrameType

# How long an interrupted run may take to say goodbye to its peers.
GRACE_S = 15.0
# The curves are float32; nothing smaller can be told from zero.
RESOLUTION = 1e-8


def train(title: str, out: Path, *options: str) -> None:
    """Run train.py in a process of its own, on this terminal.

    Raises:
        RuntimeError: It failed.
    """
    print(f"\n== {title}", flush=True)
    command = [sys.executable, "-m", "examples.bytes.train", "--out", str(out), *options]
    begin_s = time.monotonic()
    child = subprocess.Popen(command)
    try:
        status = child.wait()
    except BaseException as reason:
        # The terminal sends Ctrl-C to the child as well; any other reason to stop it has not heard of.
        if not isinstance(reason, KeyboardInterrupt):
            child.terminate()
        try:
            child.wait(GRACE_S)
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            child.kill()
            child.wait()
        raise
    if status != 0:
        raise RuntimeError(f"The run ended with status {status}: {' '.join(command)}")
    print(f"   took {time.monotonic() - begin_s:.0f} s, including the start", flush=True)


def read_curve(out: Path) -> dict[int, float]:
    """Training loss by step, as the CSVLogger wrote it."""
    with (out / "metrics.csv").open(newline="") as file:
        return {int(row["step"]): float(row["train_loss"]) for row in csv.DictReader(file) if row["train_loss"]}


@dataclass(frozen=True)
class Peers:
    """How many there were after each step, and after which ones something happened."""

    steps: list[int]
    counts: list[int]
    events: dict[str, int]


def read_peers(out: Path) -> Peers:
    """As replacement.py wrote it.

    Raises:
        RuntimeError: No peer was killed and replaced.
    """
    with (out / "peers.csv").open(newline="") as file:
        rows = [(int(row["step"]), int(row["peers"]), row["event"]) for row in csv.DictReader(file)]
    events = {event: step for step, _, event in reversed(rows) if event}
    if not {"killed", "gone", "joined"} <= events.keys():
        raise RuntimeError(f"One peer was to be killed, and another to join; what happened: {events or 'nothing'}.")
    return Peers([step for step, _, _ in rows], [count for _, count, _ in rows], events)


def relative_differences(swarm: dict[int, float], plain: dict[int, float]) -> list[float]:
    """Of each step, in order.

    Raises:
        RuntimeError: The curves do not have the same steps.
    """
    if not plain or swarm.keys() != plain.keys():
        raise RuntimeError(
            f"Both curves must have the same steps; the swarm's has {len(swarm)}, the plain one {len(plain)}, "
            f"and they differ in {sorted(swarm.keys() ^ plain.keys())[:10]}."
        )
    return [abs(swarm[step] - plain[step]) / abs(plain[step]) for step in sorted(plain)]


def draw(path: Path, swarm: dict[int, float], plain: dict[int, float], differences: list[float], peers: Peers) -> None:
    """Both curves on top of each other, below them how far they are apart, and how many peers there were."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    steps = sorted(plain)
    figure, (losses, gap, count) = plt.subplots(
        3, sharex=True, figsize=(8, 7), height_ratios=[5, 2, 1], layout="constrained", dpi=120
    )
    losses.plot(steps, [plain[s] for s in steps], color="tab:orange", linewidth=4, alpha=0.5, label="plain Trainer")
    losses.plot(steps, [swarm[s] for s in steps], color="tab:blue", linewidth=1, label="swarm: 4 peers, 2 stages")
    losses.set_ylabel("training loss (nats per byte)")
    gap.semilogy(steps, [max(d, RESOLUTION) for d in differences], color="tab:gray", linewidth=1)
    gap.set_ylabel(f"relative difference\n(at least {RESOLUTION:.0e})")
    count.step(peers.steps, peers.counts, where="post", color="tab:blue")
    count.set_ylim(0, max(peers.counts) + 1)
    count.set_yticks(range(max(peers.counts) + 1))
    count.set_ylabel("peers")
    count.set_xlabel("step")
    for axes in (losses, gap, count):
        axes.grid(alpha=0.3)
        # Counted from 0 are the losses, from 1 the steps that are done.
        axes.axvline(peers.events["killed"], color="tab:red", linestyle="--", label="a peer is killed")
        axes.axvline(peers.events["joined"], color="tab:green", linestyle="--", label="a new one is let in")
    losses.legend()
    figure.savefig(path)
    plt.close(figure)


def read_sample(out: Path) -> tuple[str, str]:
    """The prompt, and what the swarm wrote after it while it ran."""
    with (out / "samples.csv").open(newline="", encoding="utf-8") as file:
        row = list(csv.DictReader(file))[-1]
    return row["prompt"], row["text"]


def write_sample(checkpoint: Path, prompt: str, seed: int) -> str:
    """What the swarm learned, loaded as any Lightning checkpoint is, and computed in this process alone."""
    # Imported this late so that the first line appears at once.
    from examples.bytes.model import ByteGPT
    from examples.bytes.train import write

    return write(seed, ByteGPT.load_from_checkpoint(checkpoint, map_location="cpu"), prompt)


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--max-steps", type=int, default=200, help="steps of each training (default: 200)")
    parser.add_argument("--seed", type=int, default=0, help="of both trainings and of the sample (default: 0)")
    parser.add_argument("--out", type=Path, help="a new folder (default: runs/demo/ and the time of day)")
    return parser.parse_args()


def run(arguments: argparse.Namespace) -> None:
    """Both trainings, and what came out of them."""
    out = arguments.out or Path("runs/demo") / datetime.now().astimezone().strftime("%Y%m%d-%H%M%S")
    try:
        out.mkdir(parents=True)
    except FileExistsError:
        raise RuntimeError(f"`--out` must be a new folder, so that no results are overwritten, got {out}.") from None
    options = ("--max-steps", str(arguments.max_steps), "--seed", str(arguments.seed))
    print("A GPT on bytes learns Python's own standard library.")
    kill_at = max(arguments.max_steps // 3, 1)
    title = f"on a swarm: 2 stages on 4 local peers, of which one is killed after step {kill_at} and replaced"
    train(title, out / "swarm", "--kill-at", str(kill_at), *options)
    train("the same with the plain Trainer, in one process", out / "plain", "--plain", *options)

    swarm, plain, peers = read_curve(out / "swarm"), read_curve(out / "plain"), read_peers(out / "swarm")
    differences = relative_differences(swarm, plain)
    checkpoint = out / "swarm" / "checkpoints" / "last.ckpt"
    prompt, text = read_sample(out / "swarm")
    print(f"\n== what the running swarm wrote after {prompt!r}, through its stages: after so few steps no Python yet\n")
    print(prompt + text)
    again = write_sample(checkpoint, prompt, arguments.seed)
    same = next((place for place, (one, other) in enumerate(zip(text, again, strict=False)) if one != other), None)
    picture = out / "curves.png"
    draw(picture, swarm, plain, differences, peers)
    worst = max(range(len(differences)), key=differences.__getitem__)
    happened = sorted(peers.events.items(), key=lambda event: event[1])
    print("\n== results")
    print(f"loss of the last step          swarm {swarm[max(swarm)]:.4f}, plain {plain[max(plain)]:.4f}")
    print(f"largest relative difference    {differences[worst]:.1e}, in step {sorted(plain)[worst]}")
    print("peers                          " + ", ".join(f"one {what} at step {s}" for what, s in happened))
    alike = "the same text" if same is None else f"the same text up to letter {same}: float32 rounds"
    print(f"checkpoint on one machine      writes {alike}")
    print(f"checkpoint                     {checkpoint}")
    print(f"loss curves                    {picture}")


def _terminated(_signal: int, _frame: FrameType | None) -> None:
    # As an exception, so that the run under way is ended too.
    raise SystemExit(128 + signal.SIGTERM)


def main() -> int:
    """Run the demo; the exit status."""
    signal.signal(signal.SIGTERM, _terminated)
    try:
        run(parse_arguments())
    except KeyboardInterrupt:
        print("\nInterrupted.", file=sys.stderr)
        return 130
    except RuntimeError as error:
        print(f"\n{error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
