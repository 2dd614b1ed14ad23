"""Decides which stages are held by machines of different kinds, and which machines may hold a stage. Pure.

Machines of one kind have the same `arithmetic_of`: they compute the same bits from the same input.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from lightning_swarm.core.errors import ConfigError
from lightning_swarm.network import PeerId
from lightning_swarm.protocol.messages.run import Manifest, Member


def mixed_stages(kinds: Sequence[Collection[str]], tied: Collection[Sequence[int]] = ()) -> list[int]:
    """Return the stages whose servers are of several `kinds`, and the stages that share parameters with them."""
    # Each stage of a `tied` group steps the optimizer on the shared parameters.
    groups = [*tied, *([index] for index in range(len(kinds)))]
    mixed = [group for group in groups if len(set[str]().union(*(kinds[index] for index in group))) > 1]
    return sorted({index for group in mixed for index in group})


def needs_one_kind(manifest: Manifest) -> str:
    """Return why all servers of a stage must be machines of one kind; empty if they need not be."""
    if manifest.settings.deterministic:
        return "`deterministic=True` requires the same bits whichever servers compute"
    return manifest.unportable or ""


def check_one_kind(manifest: Manifest, stage_index: int, kinds: Mapping[PeerId, str]) -> None:
    """Raise ConfigError if a stage's servers must be machines of one kind, and are not."""
    reason = needs_one_kind(manifest)
    if reason and len(set(kinds.values())) > 1:
        machines = "; ".join(f"{peer} is {kind or 'unknown'}" for peer, kind in sorted(kinds.items()))
        raise ConfigError(
            f"all servers of stage {stage_index} must be machines of one kind, because {reason}; got {machines}. Use "
            "machines of one kind, with one build of torch and one number of threads, or avoid what requires it."
        )


def assign_by_kind(
    num_stages: int, servers: Sequence[Member], kinds: Mapping[PeerId, str]
) -> list[list[Member]] | None:
    """Assign servers to stages of one kind each, in proportion to the kinds' servers; None if that is impossible."""
    by_kind: dict[str, list[Member]] = {}
    for member in servers:
        by_kind.setdefault(kinds.get(member.peer_id, ""), []).append(member)
    if not len(by_kind) <= num_stages <= len(servers):
        return None
    shares = dict.fromkeys(by_kind, 1)  # stages of each kind
    for _ in range(num_stages - len(by_kind)):
        fullest = max(by_kind, key=lambda kind: len(by_kind[kind]) / shares[kind])
        shares[fullest] += 1
    rosters = [members[first :: shares[kind]] for kind, members in by_kind.items() for first in range(shares[kind])]
    return rosters[::-1]  # the first server has the last stage
