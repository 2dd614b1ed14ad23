"""What a microbatch costs at each stage when the stage computes nothing: the swarm against `hivemind.moe`.

A hop is the forward and the backward of one microbatch at one stage in another process. The swarm's is the time of a
step over its microbatches and stages, everything included. That of `hivemind.moe` is a chain of as many experts that do
nothing, called as its users call them: `RemoteExpert`, from as many threads as the swarm has microbatches in flight.
Both go through libp2p's daemons, but for "next door": as peers of one machine do it, past them.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import hivemind
import torch
from hivemind.moe import Server
from hivemind.moe.client.expert import RemoteExpert, create_remote_experts
from hivemind.moe.expert_uid import ExpertInfo

from benchmarks.report import picture, table, write
from benchmarks.runs import FAR_APART, train
from benchmarks.together import Together, run_together
from benchmarks.train import SEQUENCE

WIDTH = 64
NUM_STAGES = 2
NUM_MICROBATCHES = 64
WAYS = ("swarm", "hivemind.moe", "swarm, next door")


def swarm_ms(seconds: float, environment: Mapping[str, str]) -> float:
    """Milliseconds of each hop: the median of the steps."""
    steps = train(
        "--nop", "--role", "trainer", "--devices", NUM_STAGES + 1, "--num-stages", NUM_STAGES,
        "--width", WIDTH, "--num-blocks", NUM_STAGES, "--batch-size", NUM_MICROBATCHES,
        seconds=seconds, environment=environment,
    )  # fmt: skip
    return statistics.median(
        1e3 * (steps.at_s[i] - steps.at_s[i - 1]) / NUM_MICROBATCHES / NUM_STAGES for i in range(1, len(steps.at_s))
    )


def moe(together: Together, seconds: float, num_threads: int) -> list[float]:
    """Likewise by `hivemind.moe`: one process calls, each of the others serves an expert."""
    torch.set_num_threads(1)
    dht, server = None, None
    if together.rank:
        uid = f"nop.{together.rank}"
        server = Server.create(
            expert_uids=[uid], expert_cls="nop", hidden_dim=WIDTH, num_handlers=4, device="cpu", start=True,
            optim_cls=None,
        )  # fmt: skip
        place = (uid, [str(address) for address in server.dht.get_visible_maddrs()], server.dht.peer_id)
    else:
        place = ("", [], None)
    places = together.exchange(place)[1:]
    took: list[float] = []
    if not together.rank:
        dht = hivemind.DHT(initial_peers=[address for _, addresses, _ in places for address in addresses], start=True)
        experts = create_remote_experts([ExpertInfo(uid, peer) for uid, _, peer in places], dht)
        took = _call(experts, seconds, num_threads)
        dht.shutdown()
    together.exchange()
    if server is not None:
        server.shutdown()
        server.dht.shutdown()
    return took


def _call(experts: list[RemoteExpert], seconds: float, num_threads: int) -> list[float]:
    def through(_: int) -> None:
        hidden = torch.randn(1, WIDTH * SEQUENCE)[:, :WIDTH].requires_grad_()
        out = hidden
        for expert in experts:
            out = expert(out)
        out.sum().backward()

    took: list[float] = []
    with ThreadPoolExecutor(num_threads) as pool:
        list(pool.map(through, range(NUM_MICROBATCHES)))  # warms up
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s:
            began_s = time.monotonic()
            list(pool.map(through, range(NUM_MICROBATCHES)))
            took.append(1e3 * (time.monotonic() - began_s) / NUM_MICROBATCHES / len(experts))
    return took


def main(words: Sequence[str] | None = None) -> None:
    """Measure by turns, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=8.0)
    arguments = parser.parse_args(words)
    rows: list[list[object]] = [["round", *WAYS, "swarm / moe", "next door / moe"]]
    found: dict[str, list[float]] = {way: [] for way in WAYS}
    for number in range(1, arguments.rounds + 1):
        ours = swarm_ms(arguments.seconds, FAR_APART)
        theirs = statistics.median(run_together(moe, NUM_STAGES + 1, arguments.seconds, 8)[0])
        next_door = swarm_ms(arguments.seconds, {})
        took = dict(zip(WAYS, (ours, theirs, next_door), strict=True))
        rows.append(
            [number, *(f"{ms:.2f} ms" for ms in took.values()), *(f"{ms / theirs:.2f}" for ms in (ours, next_door))]
        )
        for way, ms in took.items():
            found[way].append(ms)
    title = "One microbatch at one stage that does nothing, forward and backward"
    write("hops", table(title, rows))
    picture("hops", title, "ms", found)


if __name__ == "__main__":
    main()
