"""Skips these tests if there is no GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

_HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests of this folder, unless torch sees a GPU."""
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA GPU, and torch sees none")
    for item in items:
        if _HERE in item.path.parents:
            item.add_marker(skip)
