"""The server's side of a project of some kind: as its user's script, on another machine."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from lightning_swarm import SwarmStrategy
from lightning_swarm.core.limits import Limits
from tests.parity.harness import run_on
from tests.parity.test_kinds import KINDS, train


def strategy_of(
    name: str, *, made: type[SwarmStrategy] = SwarmStrategy, limits: Mapping[str, Any], **options: Any
) -> SwarmStrategy:
    """Of a project of that kind, in two stages."""
    kind = KINDS[name]
    shared = getattr(kind.make(), "shared", ())
    options = {"num_stages": 2, "microbatch_size": 3, "shared": shared, **kind.swarm, **options}
    return made(limits=Limits(**limits), **options)


def serve_kind(*, name: str, initial_peers: list[str], limits: Mapping[str, Any]) -> None:
    """Serve until the run is over.

    Args:
        name: Of the kind.
        initial_peers: Of the run; none: this is its first server.
        limits: As in `Limits`.
    """
    strategy = strategy_of(name, role="server", initial_peers=initial_peers, limits=limits)
    train(partial(run_on, strategy), KINDS[name], devices=1)
