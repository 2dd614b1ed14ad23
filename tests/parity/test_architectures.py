"""Small models of all text architectures are served with the same tokens, or refused, as the documentation says."""

from __future__ import annotations

import re
from contextlib import closing
from pathlib import Path

import pytest
import torch

from lightning_swarm.core.errors import ConfigError
from tests.architectures import REASONS, make, plain, served, writes_one_token
from tests.served import ServedSwarm

PAGE = Path(__file__).parents[2] / "docs" / "architectures.md"
ROWS: list[tuple[str, str]] = re.findall(r"^\| `([\w-]+)` \| ([\w ]+) \|$", PAGE.read_text(), re.MULTILINE)


def test_the_table_is_complete() -> None:
    assert len(ROWS) > 140
    assert sum(result == "exact" for _, result in ROWS) > 130
    assert {result for _, result in ROWS} == {"exact", *REASONS}
    assert all(f"| {reason} |" in PAGE.read_text() for reason in REASONS)


FIRST = ["afmoe", "gemma3", "jamba", "mamba2", "zaya", "nemotron_h", "big_bird"]
"""These have blocks of several kinds, have other names in files, or are refused."""


@pytest.mark.first_cells(len(FIRST))
@pytest.mark.parametrize(("kind", "result"), sorted(ROWS, key=lambda row: row[0] not in FIRST))
def test_served_architectures(kind: str, result: str, tmp_path: Path) -> None:
    make(kind).save_pretrained(tmp_path)
    wanted = plain(tmp_path)
    if result == "exact":
        assert torch.equal(served(tmp_path), wanted)
        assert not writes_one_token(wanted), "it cannot fail"
    else:
        swarm = ServedSwarm(tmp_path, num_stages=2)
        with closing(swarm), pytest.raises(ConfigError, match=REASONS[result]):
            swarm.serve("a")


@pytest.mark.parametrize("kind", ["llama", "minimax", "prophetnet"])
def test_a_model_whose_cache_servers_cannot_hold_is_served_without_one(kind: str, tmp_path: Path) -> None:
    make(kind).save_pretrained(tmp_path)
    swarm = ServedSwarm(tmp_path, num_stages=2)
    said: list[str] = []
    with closing(swarm):
        swarm.serve("a", say=said.append)
        model = swarm.connect()
        assert model.config.use_cache == model.generation_config.use_cache == (kind == "llama")
        assert any("Clients generate text without a cache" in line for line in said) == (kind != "llama")


def test_without_a_cache_a_text_ends_where_its_config_says(tmp_path: Path) -> None:
    """The folder has no generation_config.json, so transformers derives it from config.json."""
    model = make("minimax")
    model.config.eos_token_id = 5
    model.save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").unlink()
    swarm = ServedSwarm(tmp_path, num_stages=2)
    with closing(swarm):
        swarm.serve("a")
        found = swarm.connect().generation_config
        assert (found.eos_token_id, found.use_cache) == (5, False)
