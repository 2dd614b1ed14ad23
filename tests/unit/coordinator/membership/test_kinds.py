"""Stages with machines of several kinds, and the placement of servers of each kind."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from lightning_swarm.coordinator.membership.kinds import assign_by_kind, check_one_kind, mixed_stages
from lightning_swarm.core.errors import ConfigError
from lightning_swarm.network import PeerId
from lightning_swarm.protocol.messages.run import Member
from tests.unit.conftest import MakeSwarm


def members(count: int) -> list[Member]:
    return [Member(peer_id=PeerId(f"peer-{number}"), boot_id=number) for number in range(count)]


@pytest.mark.parametrize(
    ("kinds", "tied", "mixed"),
    [
        ([["a"], ["b"]], [], []),
        ([["a", "b"], ["b"]], [], [0]),
        ([["a", "a"], ["b"]], [[0, 1]], [0, 1]),
        ([["a"], ["b", "c"], ["a"]], [[0, 2]], [1]),
        ([["a"], ["b", "c"], ["b"], []], [[1, 2]], [1, 2]),
    ],
)
def test_stages_that_share_parameters_are_mixed_together(
    kinds: Sequence[Sequence[str]], tied: Sequence[Sequence[int]], mixed: Sequence[int]
) -> None:
    assert mixed_stages(kinds, tied) == mixed


@pytest.mark.parametrize("seed", range(50))
def test_each_stage_has_one_kind(seed: int) -> None:
    draw = random.Random(seed)
    servers = members(draw.randint(1, 12))
    kinds = {one.peer_id: draw.choice("abc") for one in servers}
    num_stages = draw.randint(1, 6)
    rosters = assign_by_kind(num_stages, servers, kinds)
    if not len(set(kinds.values())) <= num_stages <= len(servers):
        assert rosters is None
        return
    assert rosters is not None
    assert len(rosters) == num_stages
    assert sorted(one.peer_id for roster in rosters for one in roster) == sorted(one.peer_id for one in servers)
    assert all(len({kinds[one.peer_id] for one in roster}) == 1 for roster in rosters)
    assert servers[0] in rosters[-1], "the starter's outputs travel to its trainer"


@pytest.mark.parametrize("reason", ["deterministic", "unportable"])
def test_the_reason_and_the_kinds_are_named(make_swarm: MakeSwarm, reason: str) -> None:
    manifest = make_swarm("a").manifest
    unlike = {PeerId("a"): "cpu AVX2", PeerId("b"): "cuda T4"}
    check_one_kind(manifest, 0, unlike)  # it need not be of one kind
    if reason == "deterministic":
        manifest = replace(manifest, settings=replace(manifest.settings, deterministic=True, microbatch_size=1))
    else:
        manifest = replace(manifest, unportable="SOAP computes by aten::linalg_qr")
    check_one_kind(manifest, 0, dict.fromkeys(unlike, "cpu AVX2"))
    with pytest.raises(ConfigError, match=r"machines of one kind.*a is cpu AVX2; b is cuda T4"):
        check_one_kind(manifest, 0, unlike)
