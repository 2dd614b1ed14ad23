"""The files that name the version agree."""

from __future__ import annotations

import re
import tomllib

import yaml

import lightning_swarm
from tests.docs.pages import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CITATION = yaml.safe_load((ROOT / "CITATION.cff").read_text())


def test_changelog_and_citation_have_the_version_of_the_package() -> None:
    newest = re.search(r"^## \[(\d.*)\] - (\d{4}-\d\d-\d\d)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest is not None
    assert newest[1] == lightning_swarm.__version__
    assert (CITATION["version"], str(CITATION["date-released"])) == newest.groups()


def test_the_citation_is_of_this_project() -> None:
    assert CITATION["title"] == PROJECT["name"]
    assert CITATION["abstract"] == PROJECT["description"]
    assert CITATION["license"] == PROJECT["license"]
    assert CITATION["authors"] == PROJECT["authors"]
    assert CITATION["keywords"] == PROJECT["keywords"]
