"""A server of a project of some kind, as its user's script on another machine would start it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from typing_extensions import override

from lightning_swarm import SwarmStrategy
from lightning_swarm.core.limits import Limits
from tests.parity.harness import run_on
from tests.parity.models import digits, loader
from tests.parity.test_kinds import KINDS, Digits, train


def strategy_of(
    name: str, *, made: type[SwarmStrategy] = SwarmStrategy, limits: Mapping[str, Any], **options: Any
) -> SwarmStrategy:
    """Return the strategy of such a project, in two stages."""
    kind = KINDS[name]
    shared = getattr(kind.make(), "shared", ())
    options = {"num_stages": 2, "microbatch_size": 3, "shared": shared, **kind.swarm, **options}
    return made(limits=Limits(**limits), **options)


class AbsentDigits(Digits):
    """The data's file is on another machine."""

    @override
    def setup(self, stage: str) -> None:
        raise FileNotFoundError("digits.csv")


def serve_kind(*, name: str, initial_peers: list[str], limits: Mapping[str, Any], lacks: str = "") -> None:
    """Serve until the run is over.

    Args:
        name: The kind of project.
        initial_peers: Peers of the run; empty: this is its first server.
        limits: As in `Limits`.
        lacks: Missing on this server: the "file" of the data module, or the data "module".
    """
    kind = KINDS[name]
    if lacks:
        kind = replace(kind, data={"file": AbsentDigits, "module": lambda: loader(digits())}[lacks])
    strategy = strategy_of(name, role="server", initial_peers=initial_peers, limits=limits)
    train(partial(run_on, strategy), kind, devices=1)
