"""The documentation's pages, and the code in them."""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    str(path.relative_to(ROOT))
    for path in (
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        ROOT / "SECURITY.md",
        *sorted((ROOT / "benchmarks").glob("*.md")),
        *sorted((ROOT / "docs").rglob("*.md")),
        *sorted((ROOT / "examples").rglob("*.md")),
    )
]

_MARKDOWN = MarkdownIt("commonmark").enable("table")
_SHOWN = re.compile(r"# ([\w/]+\.(?:py|yaml))\n")


@dataclass(frozen=True)
class Block:
    """A block of code.

    Args:
        page: Its file, from the repository's root.
        line: Its line in the page, from 1.
        kind: The word after its fence; "indented" for a block without a fence.
        text: Its content.
    """

    page: str
    line: int
    kind: str
    text: str

    @property
    def shown(self) -> str | None:
        """The name of the file that this block shows, by its first line."""
        found = _SHOWN.match(self.text)
        return found[1] if found else None

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


@cache
def _tokens(page: str) -> list[Token]:
    return _MARKDOWN.parse((ROOT / page).read_text())


def blocks(page: str) -> list[Block]:
    """Return a page's blocks, in order."""
    return [
        Block(page, token.map[0] + 1, token.info.split()[0] if token.info else "", token.content)
        if token.type == "fence"
        else Block(page, token.map[0] + 1, "indented", token.content)
        for token in _tokens(page)
        if token.type in ("fence", "code_block") and token.map is not None
    ]


def spans(page: str) -> list[str]:
    """Return the text between backticks in a page's sentences and tables."""
    return [child.content for child in _inside(page) if child.type == "code_inline"]


def links(page: str) -> list[str]:
    """Return the targets of a page's links and pictures."""
    found = [child.attrGet("href") or child.attrGet("src") for child in _inside(page)]
    return [str(target) for target in found if target]


def headings(page: str) -> list[str]:
    """Return the anchors of a page's headings, as GitHub and MyST form them."""
    tokens = _tokens(page)
    texts = [after.content for token, after in itertools.pairwise(tokens) if token.type == "heading_open"]
    return [re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for text in texts]


def cells(page: str) -> list[str]:
    """Return the text of each table cell as a reader sees it: a link without its target."""
    found = [after for token, after in itertools.pairwise(_tokens(page)) if token.type in ("th_open", "td_open")]
    return ["".join(child.content for child in cell.children or []) for cell in found]


def _inside(page: str) -> list[Token]:
    return [child for token in _tokens(page) for child in token.children or []]


def shown(page: str) -> dict[str, str]:
    """Return the files that a page shows, by name; if there are none, the quickstart's."""
    own = {block.shown: block.text for block in blocks(page) if block.shown is not None}
    if page == "docs/quickstart.md":
        return own
    return {**shown("docs/quickstart.md"), **own}
