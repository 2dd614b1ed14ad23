"""The ledger: which microbatches' gradients were added to the open step's sum. Pure bookkeeping.

It is what makes a repeated call harmless: a receipt is entered before the gradient is added and never twice.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from lightning_swarm.errors import LeaseRevoked
from lightning_swarm.types.calls import Receipt


class Ledger:
    """Receipts of one stage for one attempt of one step."""

    def __init__(self, step: int, attempt: int = 0) -> None:
        self.step = step
        self.attempt = attempt
        self._receipts: set[Receipt] = set()
        self._named: frozenset[Receipt] | None = None

    @property
    def frozen(self) -> bool:
        """Whether the step is closing."""
        return self._named is not None

    @property
    def final(self) -> bool:
        """Whether nothing more may be added."""
        return self._named is not None and not self._named - self._receipts

    @property
    def begun(self) -> bool:
        """Whether it holds a receipt, or the step is closing."""
        return self.frozen or bool(self._receipts)

    def holds(self, receipt: Receipt) -> bool:
        """Whether the microbatch's gradient is in the sum."""
        return receipt in self._receipts

    def add(self, receipt: Receipt) -> bool:
        """Enter a receipt; False when it is there already (then nothing may be added to the sum).

        Raises:
            LeaseRevoked: The step is closing and its closing does not name the receipt. Either it does not count the
                batch, which was struck, or was granted by a peer that does not coordinate any more; or another
                server's sum has the microbatch, or shall have it.
        """
        if receipt in self._receipts:
            return False
        if self._named is not None and receipt not in self._named:
            raise LeaseRevoked(f"step {self.step} is closed, and its closing does not name microbatch {receipt} here")
        self._receipts.add(receipt)
        return True

    def freeze(self, named: Iterable[Receipt]) -> None:
        """From now on add only what `named` holds: nothing while ledgers are read, then what is this server's."""
        self._named = frozenset(named)

    def thaw(self) -> None:
        """The step takes batches again: add whatever comes."""
        self._named = None

    def goes_beyond(self, named: Iterable[Receipt]) -> bool:
        """Whether the sum holds a gradient that `named` does not."""
        return not self._receipts.issubset(named)

    def lacks(self, named: Iterable[Receipt]) -> list[Receipt]:
        """What `named` holds and the sum does not, in order."""
        return sorted(set(named) - self._receipts)

    @property
    def held(self) -> frozenset[Receipt]:
        """All that is in the sum."""
        return frozenset(self._receipts)

    def holds_any(self, batches: Collection[int]) -> bool:
        """Whether a microbatch of these batches, by their places, is in the sum."""
        return any(first in batches for first, _, _ in self._receipts)
