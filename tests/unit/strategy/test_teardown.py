"""The end of a strategy's part in a run after an error."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from lightning_swarm.strategy.teardown import handle_exception


@pytest.mark.parametrize("notes", [(), ("The checkpoint last.ckpt was not written.",)])
def test_an_error_of_a_pending_write_is_noted_with_its_own_notes(notes: tuple[str, ...]) -> None:
    failed = OSError("no space left")
    for note in notes:
        failed.add_note(note)

    def close_files() -> None:
        raise failed

    checkpoints = SimpleNamespace(close_files=close_files)
    strategy: Any = SimpleNamespace(run=None, peer=None, is_global_zero=False, checkpoints=checkpoints)
    interrupt = KeyboardInterrupt()
    handle_exception(strategy, interrupt)
    assert interrupt.__notes__ == [": ".join(["OSError('no space left')", *notes])]
