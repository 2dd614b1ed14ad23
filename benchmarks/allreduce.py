"""One vector averaged among peers: the swarm's butterfly against hivemind's `AllReduceRunner`, and gloo.

Each peer is a process of its own, with one thread. The ways take turns; a round's time is that of the slowest peer. CPU
time is that of all processes, the daemons of libp2p among them; unlike time, it hardly depends on what else is running.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence

import psutil
import torch
import uvloop
from hivemind.averaging.allreduce import AllReduceRunner
from hivemind.p2p import P2P, PeerID
from torch import Tensor, distributed

from benchmarks.peers import hivemind_peer, swarm_peer
from benchmarks.report import median, picture, table, write
from benchmarks.together import Together, run_together
from lightning_swarm.network import PeerId
from lightning_swarm.protocol.tickets import TicketStore
from lightning_swarm.server.averaging.all_reduce import Group, average

_TIMEOUT_S = 120.0

Round = Callable[[], Awaitable[Tensor]]
"""Averages once. All peers have got theirs before anyone begins."""

Spent = tuple[float, float]
"""Of one round: seconds, and seconds of CPU."""


def measure(together: Together, folder: str, num_parameters: int, repeats: int) -> dict[str, list[Spent]]:
    """What each round took, by way, on this peer."""
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/gloo", rank=together.rank, world_size=together.size
    )
    try:
        return uvloop.run(_measure(together, num_parameters, repeats))
    finally:
        distributed.destroy_process_group()


async def _measure(together: Together, num_parameters: int, repeats: int) -> dict[str, list[Spent]]:
    vector = torch.full((num_parameters,), float(together.rank))
    mean = (together.size - 1) / 2
    async with swarm_peer(together) as (transport, ids), hivemind_peer(together) as (p2p, their_ids):
        tickets = TicketStore(transport, max_bytes=1 << 30)
        ways: dict[str, Callable[[int, Tensor], Awaitable[Round]]] = {
            "swarm": lambda number, own: _by_swarm(tickets, ids, together.rank, number, own),
            "hivemind": lambda number, own: _by_hivemind(together, p2p, their_ids, number, own),
            "gloo": lambda _, own: _by_gloo(together.size, own),
        }
        # The swarm's daemon has a public number, and hivemind's has none.
        processes = [psutil.Process(), psutil.Process(transport.daemon_pid), psutil.Process(p2p._child.pid)]
        spent: dict[str, list[Spent]] = {name: [] for name in ways}
        for number in range(repeats + 1):
            taken: dict[str, Spent] = {}
            for name, way in ways.items():
                once = await way(number, vector.clone())
                await asyncio.to_thread(together.exchange)
                began_s, began_cpu_s = time.perf_counter(), _cpu_s(processes)
                found = await once()
                took_s = time.perf_counter() - began_s
                await asyncio.to_thread(together.exchange)  # until then others' rounds take of this peer's CPU
                took_cpu_s = _cpu_s(processes) - began_cpu_s
                tickets.drop(f"round{number}")
                averaged = torch.equal(found, torch.full_like(found, mean))
                if all(await asyncio.to_thread(together.exchange, averaged)):
                    taken[name] = took_s, took_cpu_s
                elif name != "hivemind":  # which loses parts now and then, and goes on without
                    raise RuntimeError(f"{name} did not average")
            if number and len(taken) == len(ways):  # the first round opens connections
                for name, one in taken.items():
                    spent[name].append(one)
        return spent


def _cpu_s(processes: Sequence[psutil.Process]) -> float:
    times = [process.cpu_times() for process in processes]
    return sum(one.user + one.system for one in times)


async def _by_swarm(tickets: TicketStore, ids: Sequence[PeerId], rank: int, number: int, own: Tensor) -> Round:
    async def once() -> Tensor:
        group = Group(roster=ids, prefix=f"round{number}", tickets=tickets, timeout=_TIMEOUT_S)
        found = await average(own, len(ids), group, rank)
        return found.mean

    return once


async def _by_hivemind(together: Together, p2p: P2P, ids: Sequence[PeerID], number: int, own: Tensor) -> Round:
    runner = AllReduceRunner(
        p2p=p2p,
        servicer_type=AllReduceRunner,
        prefix=f"round{number}",
        group_id=str(number).encode(),
        tensors=[own],
        ordered_peer_ids=ids,
        peer_fractions=(1 / together.size,) * together.size,
    )
    await runner.add_p2p_handlers(p2p, namespace=f"round{number}")

    async def once() -> Tensor:
        async for delta in runner:  # it gives differences
            own.add_(delta)
        return own

    return once


async def _by_gloo(size: int, own: Tensor) -> Round:
    async def once() -> Tensor:
        distributed.all_reduce(own)
        return own.div_(size)

    return once


def main(words: Sequence[str] | None = None) -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peers", type=int, default=4)
    parser.add_argument("--parameters", type=int, default=10_000_000)
    parser.add_argument("--repeats", type=int, default=11)
    arguments = parser.parse_args(words)
    with tempfile.TemporaryDirectory() as folder:
        found = run_together(measure, arguments.peers, folder, arguments.parameters, arguments.repeats)
    rounds = {name: list(zip(*(one[name] for one in found), strict=True)) for name in found[0]}  # each, of all peers
    seconds = {name: [max(took_s for took_s, _ in each) for each in all_] for name, all_ in rounds.items()}
    cpu = {name: [sum(cpu_s for _, cpu_s in each) for each in all_] for name, all_ in rounds.items()}
    rows = [["way", "seconds, median", "CPU seconds, median"]]
    rows += [[n, f"{median(seconds[n]):.3f}", f"{median(cpu[n]):.2f}"] for n in rounds]
    title = f"{arguments.parameters / 1e6:g}M float32 averaged among {arguments.peers} peers"
    ratios = [f"swarm / hivemind, {what}, by rounds: {_ratio(of)}" for what, of in (("time", seconds), ("CPU", cpu))]
    left_out = f"rounds left out, for hivemind lost parts: {arguments.repeats - len(seconds['swarm'])}"
    write("allreduce", "\n".join([table(title, rows), *ratios, left_out]))
    picture("allreduce", title, "seconds", seconds)


def _ratio(of: dict[str, list[float]]) -> str:
    # A short round may take less than a tick of the clock of CPU seconds.
    ratios = [ours / theirs for ours, theirs in zip(of["swarm"], of["hivemind"], strict=True) if theirs]
    if not ratios:
        return "too short to measure"
    if len(ratios) < 2:
        return f"{median(ratios):.2f}"
    low, middle, high = statistics.quantiles(ratios, n=4)
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


if __name__ == "__main__":
    main()
