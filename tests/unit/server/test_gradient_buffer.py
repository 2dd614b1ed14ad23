"""The ledger: each receipt once, and after the closing only receipts that it names."""

from __future__ import annotations

import pytest

from lightning_swarm.core.errors import LeaseRevoked, ProtocolError
from lightning_swarm.network import PeerId
from lightning_swarm.protocol.messages.calls import Origin, Receipt
from lightning_swarm.protocol.messages.wire import from_bitmap, to_bitmap
from lightning_swarm.server.gradient_buffer import ReceiptLedger

ONE, TWO, THREE = (0, 0, 0), (0, 1, 0), (4, 0, 0)
OWN, OTHER = PeerId("own"), PeerId("other")


def of(weight: float, trainer: PeerId = OWN) -> Origin:
    return Origin(weight, trainer)


def filled(*receipts: Receipt) -> ReceiptLedger:
    ledger = ReceiptLedger(step=3)
    for receipt in receipts:
        assert ledger.add(receipt, of(1.0)) is True
    return ledger


def test_a_receipt_is_entered_once() -> None:
    ledger = filled(ONE, TWO)
    assert ledger.add(ONE, of(1.0)) is False
    assert ledger.holds(ONE)
    assert not ledger.holds(THREE)


def test_none_is_added_after_a_closing_that_does_not_name_it() -> None:
    ledger = filled(ONE)
    ledger.freeze({ONE, TWO}, {0: of(1.0)})
    assert not ledger.final
    with pytest.raises(LeaseRevoked, match=r"step 3 is closed, .* microbatch \(4, 0, 0\)"):
        ledger.add(THREE, of(1.0))
    assert not ledger.holds(THREE)
    assert ledger.add(TWO, of(1.0)) is True
    assert ledger.final
    assert ledger.add(ONE, of(1.0)) is False, "a repetition is harmless at any time"


def test_a_frozen_ledger_adds_nothing_but_knows_what_it_holds() -> None:
    ledger = filled(ONE)
    ledger.freeze()
    assert ledger.add(ONE, of(1.0)) is False
    with pytest.raises(LeaseRevoked):
        ledger.add(TWO, of(1.0))


def test_a_batch_has_one_weight() -> None:
    ledger = filled(ONE)
    for wrong in (1e6, 1e-6, 1.0 + 1e-15, float("nan")):
        with pytest.raises(ProtocolError, match=r"the batch at 0 of step 3 has the weight 1\.0, got a gradient with"):
            ledger.add(TWO, of(wrong))
    assert (ledger.held, ledger.origins) == ({ONE}, {0: of(1.0)})


def test_a_second_trainer_of_a_batch_adds_nothing_and_is_not_refused_for_what_the_first_did() -> None:
    ledger = filled(ONE)
    for receipt in (ONE, TWO):
        assert ledger.add(receipt, of(1e6, OTHER)) is False
    assert (ledger.held, ledger.origins) == ({ONE}, {0: of(1.0)})
    assert ledger.add(THREE, of(1e6, OTHER)) is True, "another batch"


def test_what_is_named_is_added_from_its_trainer_alone() -> None:
    ledger = ReceiptLedger(step=3)
    ledger.freeze({ONE}, {0: of(1.0)})
    with pytest.raises(ProtocolError, match=r"the batch at 0 of step 3 was granted to own, got .* from other"):
        ledger.add(ONE, of(1.0, OTHER))
    assert ledger.add(ONE, of(1.0)) is True
    assert not ledger.agrees({ONE}, {0: of(1.0, OTHER)})


def test_what_is_named_is_added_with_its_weight() -> None:
    ledger = ReceiptLedger(step=3)
    ledger.freeze({ONE}, {0: of(2.0)})
    with pytest.raises(ProtocolError, match=r"has the weight 2\.0"):
        ledger.add(ONE, of(1.0))
    assert not ledger.held
    assert not ledger.origins
    assert ledger.add(ONE, of(2.0)) is True
    assert ledger.agrees({ONE}, {0: of(2.0)})
    assert ledger.agrees({ONE, THREE}, {0: of(2.0), 4: of(1.0)})
    assert not ledger.agrees({ONE}, {0: of(1.0)})
    assert not ledger.agrees(set(), {})


def test_it_says_all_that_it_holds_and_of_which_batches() -> None:
    assert filled(THREE, ONE).held == {ONE, THREE}
    assert filled().held == frozenset()
    assert filled(THREE, ONE).holds_any({4, 8})
    assert not filled(THREE, ONE).holds_any({1, 8})
    assert not filled(THREE).holds_any(())


@pytest.mark.parametrize("length", [0, 1, 7, 8, 9, 64, 1001])
def test_bitmaps_come_back(length: int) -> None:
    flags = [i % 3 == 0 for i in range(length)]
    assert from_bitmap(to_bitmap(flags), length) == flags
    with pytest.raises(ProtocolError, match="must have"):
        from_bitmap(to_bitmap(flags) + b"\0", length)
