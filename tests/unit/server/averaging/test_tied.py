"""Stages that share a parameter combine their means."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from lightning_swarm.core.clock import VirtualLoop
from lightning_swarm.network import PeerId
from lightning_swarm.network.memory import MemoryNetwork
from lightning_swarm.protocol.messages.run import StageManifest
from lightning_swarm.protocol.tickets import TicketStore
from lightning_swarm.protocol.tied_tensors import TiedTensors
from lightning_swarm.server.averaging.all_reduce import AveragingResult, AveragingState, Group
from lightning_swarm.server.averaging.tied import TiedMeans

ME = PeerId("a")


def stage(*names: str) -> StageManifest:
    return StageManifest(first_block=0, end_block=1, parameters=[(name, [1], "float64") for name in names], roster=[])


async def compute(run: Callable[[], Any]) -> Any:
    return run()


@pytest.mark.parametrize("exact", [False, True])
def test_a_norm_of_parts_that_no_float_holds_is_infinite(*, exact: bool) -> None:
    """The step is then skipped. In the second stage the shared elements lie between its own elements."""
    large = math.sqrt(1.5e308)
    found = {
        0: AveragingResult(torch.tensor([2.0], dtype=torch.float64), 0.0, AveragingState()),
        1: AveragingResult(torch.tensor([large, 1.0, large], dtype=torch.float64), 0.0, AveragingState()),
    }
    loop = VirtualLoop()
    tickets = TicketStore(MemoryNetwork().transport(ME), max_bytes=1 << 20)
    ties = TiedTensors([stage("shared"), stage("first", "shared", "last")])
    means = TiedMeans(
        ties,
        {"first", "shared", "last"},
        lambda index: Group([ME], f"round/{index}", tickets, 1.0),
        compute,
        exact=exact,
    )
    ended = loop.run_until_complete(means.averaged(found, {0: 0, 1: 0}))
    loop.close()
    assert [ended[index].mean.tolist() for index in ended] == [[3.0], [large, 3.0, large]]
    assert [ended[index].squared_norm for index in ended] == [9.0, math.inf]
