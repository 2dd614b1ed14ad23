"""Measure how text reads, by words that plain technical prose rarely has: ``python -m tests.text.meter [PATH ...]``.

The text of a Python file is its docstrings and comments, that of a page all but its code. Exits with 1 if a folder is
beyond the `GOALS`. A word is not wrong as such: where many of them stand together, sentences lack their nouns.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

WORDS = {
    "nobody": re.compile(r"\b(?:nobody|whoever|somebody|anybody|everybody|whom)\b", re.IGNORECASE),
    "what": re.compile(r"\bwhat(?:ever)?\b", re.IGNORECASE),
    "those": re.compile(r"\b(?:those|others|ones)\b", re.IGNORECASE),
}
GOALS = {"nobody": 0.1, "what": 1.5, "those": 1.0}  # per 1,000 words
MOST_FRAGMENTS = 0.06  # share of the comments behind code

_PREPOSITIONS = "of by in for that what who which to from with at as so if into whose whom until since likewise"
_FRAGMENT = re.compile(rf"(?:{'|'.join(_PREPOSITIONS.split())})\b", re.IGNORECASE)
_DIRECTIVE = re.compile(r"type:|noqa|pragma|fmt:|-{3}")
_CODE = re.compile(r"```.*?```|``.*?``|`[^`\n]*`", re.DOTALL)


@dataclass
class Reading:
    """Counts of some text."""

    words: int = 0
    found: dict[str, int] = field(default_factory=lambda: dict.fromkeys(WORDS, 0))
    comments: int = 0  # behind code
    fragments: int = 0

    def add(self, text: str) -> None:
        """Count the words of a text."""
        plain = _CODE.sub(" ", text)
        self.words += len(re.findall(r"[A-Za-z']+", plain))
        for name, pattern in WORDS.items():
            self.found[name] += len(pattern.findall(plain))

    def rate(self, name: str) -> float:
        """Return how often a kind of word stands in 1,000 words."""
        return 1000 * self.found[name] / max(1, self.words)

    @property
    def fragment_share(self) -> float:
        """The share of comments behind code that begin with a preposition."""
        return self.fragments / max(1, self.comments)

    def beyond(self) -> list[str]:
        """Describe the goals that are not met."""
        missed = [f"{name} {self.rate(name):.2f} of {goal}" for name, goal in GOALS.items() if self.rate(name) > goal]
        if self.fragment_share > MOST_FRAGMENTS:
            missed.append(f"fragments {self.fragment_share:.0%} of {MOST_FRAGMENTS:.0%}")
        return missed


def read(paths: Iterable[Path]) -> Reading:
    """Count the text of Python files and Markdown pages."""
    reading = Reading()
    for path in paths:
        source = path.read_text()
        if path.suffix == ".md":
            reading.add(source)
            continue
        reading.add("\n".join(_docstrings(ast.parse(source))))
        for text, is_behind in _comments(source):
            reading.add(text)
            if is_behind:
                reading.comments += 1
                reading.fragments += bool(_FRAGMENT.match(text))
    return reading


def _docstrings(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.value.value


def _comments(source: str) -> Iterator[tuple[str, bool]]:
    """Yield each comment, and whether it stands behind code."""
    lines = source.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        text = token.string.lstrip("#").strip()
        if token.type == tokenize.COMMENT and not _DIRECTIVE.match(text):
            line, column = token.start
            yield text, bool(lines[line - 1][:column].strip())


def _files(folder: Path) -> list[Path]:
    if folder.is_file():
        return [folder]
    return sorted(path for path in folder.rglob("*") if path.suffix in (".py", ".md"))


def main(*names: str) -> int:
    """Print each folder's reading; returns how many miss a goal."""
    failed = 0
    for name in names or DEFAULT:
        reading = read(_files(Path(name)))
        missed = reading.beyond()
        failed += bool(missed)
        rates = ", ".join(f"{kind} {reading.rate(kind):.2f}" for kind in WORDS)
        print(f"{name}: {reading.words} words, {rates}, fragments {reading.fragment_share:.0%}")
        if missed:
            print(f"  too often: {'; '.join(missed)}")
    return failed


DEFAULT = ("lightning_swarm", "docs", "tests")

if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]) > 0)
