"""Tensors from one process to another, one after the other: the swarm's streams against hivemind's.

hivemind's are what `hivemind.moe` sends large tensors with: serialized by its codec into protobuf messages, a stream of
chunks. The swarm's are its own framing on a raw stream. Both go through libp2p's daemon, on 127.0.0.1. Beside them, the
swarm's as they go between peers of one machine, past the daemons. They take turns of 64 MiB each, for a line that was
idle is slow at first, and in a training it is not.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import AsyncIterator  # noqa: UP035 - hivemind knows a stream by this one

import torch
import uvloop
from hivemind.compression import deserialize_tensor_stream, serialize_torch_tensor
from hivemind.p2p import P2PContext, ServicerBase
from hivemind.p2p.p2p_daemon import DEFAULT_MAX_MSG_SIZE
from hivemind.proto import runtime_pb2
from hivemind.utils.asyncio import amap_in_executor, iter_as_aiter
from hivemind.utils.streaming import split_for_streaming

from benchmarks.peers import hivemind_peer, swarm_peer
from benchmarks.report import median, picture, table, write
from benchmarks.together import Together, run_together
from lightning_swarm.network import Message, PeerId

METHOD = "benchmark.tensor"
SIZES = (1 << 20, 8 << 20, 64 << 20)
"""Bytes of a tensor."""
TURN_BYTES = 64 << 20
WAYS = ("swarm", "hivemind", "swarm, next door")


class _Servicer(ServicerBase):
    """Answers with the tensor of the size that the request names, as an expert's output goes to its client."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._tensors = tensors

    async def rpc_tensor(
        self, request: runtime_pb2.ExpertRequest, context: P2PContext
    ) -> AsyncIterator[runtime_pb2.ExpertResponse]:
        serialized = serialize_torch_tensor(self._tensors[request.uid])
        async for part in amap_in_executor(
            lambda part: runtime_pb2.ExpertResponse(tensors=[part]),
            iter_as_aiter(split_for_streaming(serialized, DEFAULT_MAX_MSG_SIZE)),
        ):
            yield part


def measure(together: Together, repeats: int) -> dict[str, list[list[float]]]:
    """Seconds for a tensor in each turn, by size; what the first process found, which asks the other one.

    NaN: some tensor of the turn did not come whole.
    """
    torch.set_num_threads(1)
    return uvloop.run(_measure(together, repeats))


async def _measure(together: Together, repeats: int) -> dict[str, list[list[float]]]:
    tensors = {str(size): torch.randn(size // 4) for size in SIZES}
    async with (
        swarm_peer(together) as (transport, ids),
        swarm_peer(together, neighbours=True) as (next_door, ids_next_door),
        hivemind_peer(together) as (p2p, their_ids),
    ):

        async def give(caller: PeerId, message: Message) -> Message:
            return Message(tensors=(tensors[message.body.decode()],))

        async def by_swarm(name: str) -> torch.Tensor:
            return (await transport.stream(ids[1], METHOD, Message(name.encode()), timeout=60.0)).tensors[0]

        async def by_neighbour(name: str) -> torch.Tensor:
            return (await next_door.stream(ids_next_door[1], METHOD, Message(name.encode()), timeout=60.0)).tensors[0]

        async def by_hivemind(name: str) -> torch.Tensor:
            parts = await stub.rpc_tensor(runtime_pb2.ExpertRequest(uid=name))
            try:
                return (await deserialize_tensor_stream(amap_in_executor(lambda part: part.tensors, parts)))[0]
            except (RuntimeError, IndexError):  # parts of it were lost, so its shape is wrong; or all of them
                return torch.empty(0)

        for one in (transport, next_door):
            one.handle_stream(METHOD, give)
        await _Servicer(tensors).add_p2p_handlers(p2p)
        stub = _Servicer.get_stub(p2p, their_ids[1])
        together.exchange()
        if together.rank != 0:
            return {}
        ways = [by_swarm, by_hivemind, by_neighbour]
        return {name: await _by_turns(name, len(tensors[name]), ways, repeats) for name in tensors}


async def _by_turns(
    name: str, length: int, ways: Sequence[Callable[[str], Awaitable[torch.Tensor]]], repeats: int
) -> list[list[float]]:
    seconds: list[list[float]] = [[] for _ in ways]
    num_tensors = TURN_BYTES // int(name)
    for repeat in range(repeats + 1):
        for way, found in zip(ways, seconds, strict=True):
            began_s = time.perf_counter()
            are_whole = [len(await way(name)) == length for _ in range(num_tensors)]
            if repeat:  # the first time opens streams
                found.append((time.perf_counter() - began_s) / num_tensors if all(are_whole) else math.nan)
    return seconds


def main(words: Sequence[str] | None = None) -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=15)
    arguments = parser.parse_args(words)
    rows: list[list[object]] = [
        ["tensor", *WAYS, "swarm / hivemind", "next door / hivemind", "turns with losses, each"]
    ]
    drawn: dict[str, list[float]] = {}
    for name, found in run_together(measure, 2, arguments.repeats)[0].items():
        size = f"{int(name) >> 20} MiB"
        rates = [[int(name) / 1e6 / each for each in seconds if not math.isnan(each)] for seconds in found]
        ours, theirs, next_door = medians = [median(each) for each in rates]
        lost = [str(sum(map(math.isnan, seconds))) for seconds in found]
        speeds = [f"{rate:.0f} MB/s" for rate in medians]
        rows.append([size, *speeds, f"{ours / theirs:.2f}", f"{next_door / theirs:.2f}", ", ".join(lost)])
        drawn |= {f"{way}, {size}": each for way, each in zip(WAYS, rates, strict=True)}
    title = "Tensors from one process to another"
    write("streaming", table(f"{title}, medians", rows))
    picture("streaming", title, "MB/s", drawn)


if __name__ == "__main__":
    main()
