"""A trainer behind a router accepts no connections, and takes part through connections that it opens itself."""

from __future__ import annotations

import random
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from benchmarks.hosts import BEHIND, Hosts
from tests.p2p.several import NUM_EPOCHS, Long, Several
from tests.p2p.test_killed import assert_undisturbed
from tests.p2p.test_whole_churn import NUM_STEPS, Churn
from tests.p2p.warm import shared_zygote, wait_until

# Cold starts in this file: 1, the process that all trainers are forked from.


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    if missing := Hosts.missing(routed=True):
        pytest.skip(f"it needs Linux, root, iproute2 and iptables; not found: {missing}")
    try:
        with Hosts([0.0] * 4) as made:
            yield made
    except (OSError, RuntimeError, subprocess.CalledProcessError) as error:
        pytest.skip(f"network namespaces are not permitted here: {error}")


@pytest.mark.thorough
@pytest.mark.timeout(400)
def test_each_sample_counts_once(hosts: Hosts, tmp_path: Path) -> None:
    """Another trainer joins later, and trains beside it although it cannot reach the first one's address."""
    with (
        hosts.behind(3) as inner,
        shared_zygote() as zygote,
        closing(Churn(zygote, tmp_path, random.Random(0))) as churn,
    ):
        churn.begin(netns=hosts.namespace(0), listen=hosts.address(0))
        wait_until(lambda: bool(churn.address(0)), "nobody begins a run")
        first = [churn.address(0)]
        churn.begin(netns=hosts.namespace(1), listen=hosts.address(1), initial_peers=first)
        churn.begin(netns=inner, listen=BEHIND, initial_peers=first)
        churn.wait(5)
        churn.begin(netns=hosts.namespace(2), listen=hosts.address(2), initial_peers=first, log="info")
        churn.wait(25)
        churn.finish()
        hidden = churn.address(2).partition("/")[2]
        assert f"Cannot reach server {hidden[-6:]}" in churn.trainers[3].said
    seen = Several.read(tmp_path)
    assert len(seen.generations) == 1
    assert len(seen.steps) == NUM_STEPS
    assert len(seen.validated) == NUM_EPOCHS
    after = {seen.batches[place][0] for places in seen.steps[25:] for place in places}
    assert after == {0, 1, 2, 3}, "somebody idled"
    assert_undisturbed(seen, Long)
