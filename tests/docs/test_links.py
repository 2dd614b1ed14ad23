"""Targets in the documentation exist: links, files, arguments, limits. Sphinx also checks links inside of docs/."""

from __future__ import annotations

import ast
import inspect
import re

import pytest

import lightning_swarm
from lightning_swarm import Limits, testing
from tests.docs.pages import PAGES, ROOT, headings, links, spans

CALLED = {
    "SwarmStrategy": lightning_swarm.SwarmStrategy,
    "Limits": Limits,
    "FaultySwarmStrategy": lightning_swarm.SwarmStrategy,  # has two more arguments of its own
    "local_swarm": lightning_swarm.SwarmStrategy,  # has further arguments of its own
}
OWN = {
    "FaultySwarmStrategy": {"faults", "fired", "name", "modify_peer"},
    "local_swarm": {"num_peers", "faults", "unlike", "modify_peer", "seed", "latency_s"},
}
TESTS = [path.read_text() for path in (ROOT / "tests").rglob("test_*.py")]
PACKAGE = ROOT / "lightning_swarm"
MODULES = {path.name for path in PACKAGE.iterdir() if path.is_dir()}
PATH = re.compile(r"(?:docs|examples|tests|benchmarks|lightning_swarm|\.ci)/[\w/.-]+")


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    for target in links(page):
        if re.match(r"https?://", target):
            continue
        path, _, anchor = target.partition("#")
        file = (ROOT / page).parent / path if path else ROOT / page
        assert file.exists(), f"{page} points at {target}"
        if anchor:
            assert anchor in headings(str(file.resolve().relative_to(ROOT))), f"{page} points at {target}"


@pytest.mark.parametrize("page", PAGES)
def test_named_files_and_settings_are_there(page: str) -> None:
    for text in spans(page):
        if PATH.fullmatch(text):
            assert (ROOT / text).exists(), f"{page} names {text}"
        if re.fullmatch(r"\w+(?:/[\w.-]*)+", text) and text.partition("/")[0] in MODULES:
            assert (PACKAGE / text).exists() or (ROOT / text).exists(), f"{page} names {text}"
        for name in re.findall(r"\bLimits\.(\w+)", text):
            assert name in Limits.__dataclass_fields__, f"{page} names Limits.{name}"
        if page.startswith("docs/") and re.fullmatch(r"test_\w+", text):
            assert any(f"def {text}(" in source for source in TESTS), f"{page} names {text}"
        unknown = unknown_arguments(text)
        assert not unknown, f"{page} says `{text}`"


@pytest.mark.parametrize("page", [page for page in PAGES if page.startswith("docs/")])
def test_links_have_the_names_of_pages(page: str) -> None:
    # The site shows no file names.
    assert not re.findall(r"\[[\w/]+\.md\]\(", (ROOT / page).read_text())


def unknown_arguments(text: str) -> set[str]:
    """Return the arguments in calls of this package's classes that these do not take."""
    try:
        tree = ast.parse(text.replace("...", "None").replace("=None, None", "=None"), mode="eval")
    except SyntaxError:
        return set()
    unknown = set()
    for call in ast.walk(tree):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in CALLED:
            known = {*inspect.signature(CALLED[call.func.id]).parameters, *OWN.get(call.func.id, ())}
            unknown |= {word.arg for word in call.keywords if word.arg is not None} - known
    return unknown


def test_unknown_arguments_are_found() -> None:
    assert unknown_arguments("SwarmStrategy(num_stages=2, tea=...)") == {"tea"}
    assert not unknown_arguments("FaultySwarmStrategy(faults=plan, fired=path)")
    assert set(testing.__all__) >= CALLED.keys() - {"SwarmStrategy", "Limits"}


@pytest.mark.parametrize(("page", "least"), [("docs/errors.md", 50), ("docs/agents.md", 10)])
def test_quoted_messages_are_those_of_the_code(page: str, least: int) -> None:
    sources = "\n".join(path.read_text() for path in PACKAGE.rglob("*.py"))
    sources = re.sub(r'"\s*\n\s*f?"', "", sources)  # texts over several lines
    quoted = re.findall(r"`([^`]+)`", "\n".join(re.findall(r"^\| ([^|]+) \|", (ROOT / page).read_text(), re.MULTILINE)))
    assert len(quoted) > least
    for text in quoted:
        for part in re.split(r"\s*(?:\d+|\.\.\.)\s*", text):  # numbers and ids are filled in
            assert part.removesuffix(" was banned") in sources, f"{page} quotes {text}"


def test_the_page_on_hivemind_counts_its_modules() -> None:
    files = list((PACKAGE / "network" / "hivemind").rglob("*.py"))
    num_lines = sum(len(file.read_text().splitlines()) for file in files)
    words = {9: "nine", 10: "ten", 11: "eleven", 12: "twelve"}
    text = f"{words[len(files)]} modules with {round(num_lines, -2):,} lines"
    assert text in (ROOT / "docs" / "hivemind.md").read_text()


def test_each_invariant_has_a_test() -> None:
    rows = re.findall(r"^\| (\d+) \| ", (ROOT / "docs" / "protocol.md").read_text(), re.MULTILINE)
    tests = (ROOT / "tests" / "faults" / "test_invariants.py").read_text()
    assert re.findall(r"^def test_(\d+)_", tests, re.MULTILINE) == rows


def test_the_reference_has_what_users_call() -> None:
    text = (ROOT / "docs" / "reference.md").read_text()
    classes = set(re.findall(r"^\.\. auto(?:class|method|function):: ([\w.]+)$", text, re.MULTILINE))
    modules = set(re.findall(r"^\.\. automodule:: ([\w.]+)$", text, re.MULTILINE))
    for name in set(lightning_swarm.__all__) - {"__version__"}:
        assert f"lightning_swarm.{name}" in classes
    for name in ("cli.SwarmCLI", "nn.Sequential", "status.SwarmStatus", "SwarmStrategy.status"):
        assert f"lightning_swarm.{name}" in classes
    assert modules >= {f"lightning_swarm.{name}" for name in ("errors", "preemption", "testing", "testing.plugin")}
