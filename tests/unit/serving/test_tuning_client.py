"""Cuts of a tuning batch into microbatches."""

from __future__ import annotations

import pytest
import torch

from lightning_swarm.serving.tuning_client import microbatch_rows


@pytest.mark.parametrize(
    ("rows", "positions", "num_stages", "expected"),
    [
        (32, 64, 2, 4),  # four for each stage
        (8, 64, 2, 2),  # 128 positions each
        (8, 1024, 2, 1),
        (8, 4, 2, 2),  # each stage gets at least two
        (8, 0, 2, 2),
        (3, 64, 4, 1),
        (1, 64, 2, 1),
        (1, 1, 1, 1),
    ],
)
def test_rows_of_a_microbatch(rows: int, positions: int, num_stages: int, expected: int) -> None:
    assert microbatch_rows([torch.zeros(rows, positions, 5)], rows, num_stages) == expected


def test_what_has_no_positions_is_cut_by_rows() -> None:
    assert microbatch_rows([torch.zeros(16)], 16, 2) == 4
