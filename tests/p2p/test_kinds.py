"""Unusual kinds of projects with servers in real processes have the plain Trainer's result, as in `tests/parity`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial

import pytest
from typing_extensions import override

from lightning_swarm import SwarmStrategy
from tests.p2p.kinds import strategy_of
from tests.p2p.warm import LIMITS, Zygote, shared_zygote, wait_until
from tests.parity.harness import LOSS_TOLERANCE, assert_exact, run_on
from tests.parity.test_kinds import KINDS, plain, train

# Cold starts in this file: 1, the process that all servers are forked from.

pytestmark = [pytest.mark.thorough, pytest.mark.filterwarnings("ignore:Found .* in eval mode")]


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    with shared_zygote() as made:
        yield made


@pytest.mark.parametrize("num_servers", [1, 3])
@pytest.mark.parametrize("name", KINDS)
def test_a_kind(zygote: Zygote, name: str, num_servers: int) -> None:
    class Strategy(SwarmStrategy):
        @property
        @override
        def num_awaited_servers(self) -> int:
            return num_servers

    first = zygote.begin_kind(name=name, initial_peers=[], limits=LIMITS)
    servers = [first]
    for _ in range(num_servers - 1):
        servers.append(zygote.begin_kind(name=name, initial_peers=[first.address], limits=LIMITS))
    strategy = strategy_of(name, made=Strategy, role="trainer", initial_peers=[first.address], limits=LIMITS)
    run = train(partial(run_on, strategy), KINDS[name], devices=1)
    assert_exact(run, plain(name))
    seen = [getattr(one.module, "seen", []) for one in (run, plain(name))]
    assert seen[0] == pytest.approx(seen[1], rel=LOSS_TOLERANCE)
    wait_until(lambda: not any(one.alive for one in servers), "a server outlived its run")
    assert all("Traceback" not in one.said for one in servers)


@pytest.mark.parametrize(
    ("lacks", "said"), [("file", "FileNotFoundError: digits.csv"), ("module", "AttributeError: .*'width'")]
)
def test_a_server_says_what_it_lacks(zygote: Zygote, lacks: str, said: str) -> None:
    server = zygote.begin_kind(name="a shape from the data module", initial_peers=[], limits=LIMITS, lacks=lacks)
    wait_until(lambda: not server.alive, "a server that cannot build the model still runs")
    rule = "a peer that serves must be able to build the model in `setup` and `configure_model` as the trainer does"
    assert re.search(rf"lightning_swarm: ConfigError: {rule}.*it failed with {said}. Copy the files", server.said)
    assert "Traceback" not in server.said
