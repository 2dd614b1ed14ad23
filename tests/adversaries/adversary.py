"""Adversaries: peers of a swarm under test whose servers report false values, by some attack and in some steps.

An `Adversary` only decides and counts. `attacks.py` computes the lies (the false values), and `lying_server.py` puts
them in place of the true values.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from lightning_swarm.core.errors import ConfigError
from lightning_swarm.model.random import key_seed
from lightning_swarm.network import PeerId
from lightning_swarm.testing.faults import DidNotHappen
from tests.adversaries.attacks import ATTACKS, Attack

_MAX_SEED: Final = 1 << 62


class Adversary:
    """A peer whose server lies.

    ``Adversary("peer-3", "sign_flip", strength=1000.0, since=100)``

    The adversaries of one swarm collude: they see the sums of all of its servers. A test must look at `struck`, or call
    `check_struck`: a test whose adversaries did not lie has shown nothing.

    Args:
        peer: The name of the peer, as in a `FaultPlan`.
        attack: An attack of `tests.adversaries.attacks`, or the name of one in `ATTACKS`.
        since: The first step in which it lies.
        until: The first step in which it no longer lies; None: it lies to the end.
        every: It lies in every n-th step from `since` on.
        seed: Seed of the random numbers in its lies. Adversaries with the same seed draw the same numbers.
        options: Arguments of the attack, if `attack` is a name.
    """

    def __init__(
        self,
        peer: str,
        attack: str | Attack,
        *,
        since: int = 0,
        until: int | None = None,
        every: int = 1,
        seed: int = 0,
        **options: Any,
    ) -> None:
        if since < 0 or every < 1 or (until is not None and until <= since):
            raise ConfigError(
                "an adversary lies from step `since` >= 0 on, in each `every`-th step, before a later step `until`; got"
                f" since={since}, every={every}, until={until}"
            )
        if isinstance(attack, str) and attack not in ATTACKS:
            raise ConfigError(f"`attack` must be one of {', '.join(ATTACKS)}, got {attack!r}")
        if isinstance(attack, Attack) and options:
            raise ConfigError(f"options belong to an attack that is named, got {attack} and {sorted(options)}")
        self.peer = PeerId(peer)
        self.attack = ATTACKS[attack](**options) if isinstance(attack, str) else attack
        self.since, self.until, self.every, self.seed = since, until, every, seed
        self.lies: Counter[int] = Counter()  # step -> number of lies
        self.on_lie: Callable[[Adversary], None] = lambda _: None  # called before each lie

    @property
    def struck(self) -> int:
        """The number of lies so far."""
        return self.lies.total()

    def lies_in(self, step: int) -> bool:
        """Return whether it lies in a step."""
        return step >= self.since and (self.until is None or step < self.until) and not (step - self.since) % self.every

    def tell(self, step: int, true: Sequence[Tensor], said: Sequence[Tensor]) -> bool:
        """Count a lie if the reported tensors `said` differ from the true tensors; return whether they do."""
        if all(map(_is_same, true, said)):
            return False
        self.count(step)
        return True

    def count(self, step: int) -> None:
        """Count a lie before it is reported."""
        self.on_lie(self)
        self.lies[step] += 1

    def generator(self, *numbers: int) -> torch.Generator:
        """Make a random generator, seeded by the adversary's seed and these numbers."""
        return torch.Generator("cpu").manual_seed(key_seed(self.seed, *numbers) % _MAX_SEED)

    def __str__(self) -> str:
        until = "" if self.until is None else f" until {self.until}"
        return f"{self.peer}: {self.attack}, every {self.every} from step {self.since}{until}"


def check_struck(adversaries: Sequence[Adversary]) -> None:
    """Raise `DidNotHappen` if any adversaries told no lie, and name them."""
    if honest := [adversary for adversary in adversaries if not adversary.struck]:
        raise DidNotHappen(f"These adversaries told no lie: {'; '.join(map(str, honest))}.")


def _is_same(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors are equal, where NaN equals NaN."""
    return one is other or bool(((one == other) | (one.isnan() & other.isnan())).all())
