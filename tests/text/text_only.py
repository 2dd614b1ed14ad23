"""Check that a change touches text alone: ``python -m tests.text.text_only COMMIT [PATH ...]``.

The syntax trees at the commit and in the working tree must be equal but for docstrings and sentences. A sentence is a
string with a space between two words. In an f-string the inserted values may change their places.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

_SENTENCE = re.compile(r"[A-Za-z`'\")\].,;:]\s+[A-Za-z`'\"({\[]")
_DEFAULT_PATHS = ("lightning_swarm", "tests", "examples", "benchmarks")


class _WithoutText(ast.NodeTransformer):
    """Removes docstrings, and replaces sentences by placeholders."""

    def visit_Expr(self, node: ast.Expr) -> ast.AST | None:
        """Remove a docstring, which stands alone."""
        if isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            return None
        return self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        """Replace a sentence."""
        return ast.Constant("sentence") if _is_sentence(node.value) else node

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.AST:
        """Replace an f-string with a sentence by its inserted values, in the order of their code."""
        texts = [part.value for part in node.values if isinstance(part, ast.Constant)]
        values = [ast.dump(self.generic_visit(part)) for part in node.values if not isinstance(part, ast.Constant)]
        if any(map(_is_sentence, texts)) or len(values) > 1 or " " in "".join(map(str, texts)):
            return ast.Constant(f"sentence of {sorted(values)}")
        return node


def _is_sentence(value: object) -> bool:
    return isinstance(value, str) and bool(_SENTENCE.search(value))


def tree_of(source: str) -> str:
    """Return the syntax tree of a module without its text."""
    return ast.dump(_WithoutText().visit(ast.parse(source)), indent=1)


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], check=True, capture_output=True, text=True).stdout


def main(commit: str, *paths: str) -> int:
    """Print the files whose code differs; returns their number."""
    changed = _git("diff", "--name-only", commit, "--", *(paths or _DEFAULT_PATHS)).split()
    found = 0
    for name in changed:
        if not name.endswith(".py"):
            continue
        if not (Path(name).exists() and _git("ls-tree", commit, name)):
            print(f"{name}: added or removed")
            found += 1
            continue
        before, after = tree_of(_git("show", f"{commit}:{name}")), tree_of(Path(name).read_text())
        if before != after:
            found += 1
            pairs = zip(before.splitlines(), after.splitlines(), strict=False)
            line = next(
                (f"{one.strip()} -> {other.strip()}" for one, other in pairs if one != other), "more at its end"
            )
            print(f"{name}: {line[:300]}")
    print(f"{found} of {len(changed)} changed files have other code.")
    return found


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]) > 0)
