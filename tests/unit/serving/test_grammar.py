"""A text with a grammar has only tokens that the grammar admits, and a grammar that cannot be followed is refused."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_swarm.serving import grammar_check
from lightning_swarm.serving.grammar import Grammar, grammar_of
from lightning_swarm.serving.grammar_masks import GrammarCompiler
from lightning_swarm.serving.http_fields import Completion, RequestError, read
from tests.served import bytes_tokenizer

TOKENIZER = bytes_tokenizer()
NUM_TOKENS = 264  # more than the tokenizer has, as in many models
END = 2
COMPILER = GrammarCompiler(TOKENIZER, num_tokens=NUM_TOKENS, ends=[END])


def asked_grammar(**fields: Any) -> Grammar:
    found = grammar_of(read(json.dumps({"model": "m", "prompt": "a", **fields}).encode(), Completion))
    assert found is not None
    return found


def next_tokens(grammar: Grammar, text: str) -> set[str]:
    """Return the tokens that may follow a text; the end is an empty text."""
    mask, row = COMPILER.compile(grammar)(), torch.zeros(NUM_TOKENS, dtype=torch.float64)
    for token in TOKENIZER(text).input_ids:
        mask.add(token)
    mask.restrict(row)
    allowed = (row == 0).nonzero().flatten().tolist()
    return {"" if token == END else TOKENIZER.convert_ids_to_tokens(token) for token in allowed}


def admits(grammar: Grammar, text: str) -> bool:
    """Return whether a text follows a grammar to its end."""
    try:
        return "" in next_tokens(grammar, text)
    except RequestError:
        return False


def json_schema(schema: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}}


def outputs(**fields: Any) -> dict[str, Any]:
    return {"structured_outputs": fields}


DAYS = {
    "type": "object",
    "properties": {"days": {"type": "integer", "minimum": 1}, "to": {"enum": ["Rome", "Oslo"]}},
    "required": ["days", "to"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("fields", "good", "bad"),
    [
        (json_schema(DAYS), '{"days": 12,\n  "to": "Oslo"}', '{"days": 0, "to": "Oslo"}'),
        (json_schema(DAYS), '{"days":1,"to":"Rome"}', '{"days":   1, "to": "Rome"}'),
        ({"response_format": {"type": "json_object"}}, '{"a": [1, "é"]}', "[1]"),
        (outputs(json=DAYS), '{"days": 3, "to": "Oslo"}', '{"to": "Oslo", "days": 3}'),
        (outputs(json='{"type": "boolean"}'), "true", "yes"),
        (outputs(json=True), "[1]", "x"),
        (outputs(json_object=True), "{}", "1"),
        (outputs(regex="[a-c]+/x"), "abc/x", "abd/x"),
        (outputs(choice=["links", 'q"\né']), 'q"\né', "link"),
        (outputs(grammar='root ::= "a" ("b" | "c"){2}'), "abc", "ab"),
        (outputs(grammar='start: "a" B+\nB: /[0-9]/'), "a12", "a"),
        (outputs(choice=["<[5]>"]), "<[5]>", "<>"),
        (json_schema({"enum": ["<[5]>"]}), '"<[5]>"', '"<>"'),
        (outputs(regex="<[12]>"), "<2>", "<>"),
    ],
)
def test_texts_of_a_grammar(fields: dict[str, Any], good: str, bad: str) -> None:
    grammar = asked_grammar(**fields)
    assert admits(grammar, good)
    assert not admits(grammar, bad)


def test_a_mask_has_the_next_tokens() -> None:
    grammar = asked_grammar(**json_schema({"enum": ["ab", "ac"]}))
    assert next_tokens(grammar, '"a') == {"b", "c"}
    assert next_tokens(grammar, '"ab"') == {""}


def test_texts_of_one_grammar_are_apart() -> None:
    compiled = COMPILER.compile(asked_grammar(**outputs(choice=["ab", "cd"])))
    one, other = compiled(), compiled()
    assert not one.is_done
    for token, is_done in zip(TOKENIZER("ab").input_ids, (False, True), strict=True):
        one.add(token)
        assert one.is_done == is_done
    other.add(*TOKENIZER("c").input_ids)
    assert not other.is_done


def chain(length: int) -> dict[str, Any]:
    """Return a schema of references, which compilers follow recursively."""
    links = {f"a{index}": {"type": "array", "items": {"$ref": f"#/$defs/a{index + 1}"}} for index in range(length)}
    return {"$ref": "#/$defs/a0", "$defs": {**links, f"a{length}": {"type": "null"}}}


def nested(depth: int) -> Any:
    return {"type": "array", "items": nested(depth - 1)} if depth else {}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (
            json_schema({"not": {}}),
            r"cannot be followed: failed to compile JSON schema: Unimplemented keys: \[\"not\"\]",
        ),
        (json_schema({"type": "strin"}), "Invalid type: strin"),
        (json_schema(False), "a schema that admits some value"),
        (json_schema({"x-guidance": {"lenient": True}}), "has no `x-guidance`"),
        (json_schema({"$ref": "https://example.org/schema"}), "retrieving it failed"),
        (json_schema({"$ref": "#"}), "NoExtension"),
        (json_schema(chain(50)), None),
        (json_schema(chain(3000)), "too complex to compile"),
        (json_schema(nested(300)), "recursion limit"),
        (json_schema({"type": "integer", "multipleOf": 99999989}), "too complex|fuel"),
        (json_schema({"enum": ["x" * 300_000]}), "at most 262144 characters"),
        (outputs(regex="(?=a)a"), "look-around"),
        (outputs(regex="abc\\"), "ends amid an escape"),
        (outputs(regex="abc\\\\"), None),
        (outputs(grammar="start: <|im_end|>"), "it names special tokens"),
        (outputs(grammar="start: <[9000]>"), "it names special tokens"),
        (outputs(grammar="start: foo"), 'unknown name: "foo", in start: foo'),
        (outputs(grammar="root ::= (((" + "(" * 5000), "it cannot be read"),
        (outputs(grammar="root ::= " + "\n" * 65_000), "too complex to compile"),
        (outputs(grammar="root ::= " + "a" * 65_536), "at most 65536 characters"),
        (outputs(json="{"), "`json` is no JSON"),
    ],
)
def test_a_grammar_that_cannot_be_followed_is_refused(fields: dict[str, Any], words: str | None) -> None:
    if words is None:
        COMPILER.compile(asked_grammar(**fields))
        return
    with pytest.raises(RequestError, match=words) as found:
        COMPILER.compile(asked_grammar(**fields))
    assert (found.value.status, found.value.param) == (400, next(iter(fields)))


def test_a_grammar_of_a_request_is_not_converted_in_the_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    """Converting GBNF holds the interpreter's lock for seconds, so even a thread would delay all other requests."""
    monkeypatch.setattr("llguidance.gbnf_to_lark.any_to_lark", None)
    assert admits(asked_grammar(**outputs(grammar='root ::= "a" [b-d]')), "ac")


@pytest.mark.parametrize("script", ["raise SystemExit('no llguidance')", ""])
def test_a_check_that_fails_is_no_verdict(script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    grammar = asked_grammar(**outputs(choice=["for a check that fails", script]))
    (tmp_path / "check.py").write_text(script)
    with monkeypatch.context() as patch:
        patch.setattr(grammar_check, "__file__", str(tmp_path / "check.py"))
        with pytest.raises(RequestError, match="cannot be compiled here") as found:
            COMPILER.compile(grammar)
    assert found.value.status == 500
    COMPILER.compile(grammar)


def test_an_error_in_the_checks_thread_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = Path(grammar_check.__file__).read_text().replace("matcher.compute_bitmask()", "raise OSError('broken')")
    (tmp_path / "check.py").write_text(script)
    monkeypatch.setattr(grammar_check, "__file__", str(tmp_path / "check.py"))
    with pytest.raises(RequestError, match=r"cannot be compiled here: .*broken"):
        COMPILER.compile(asked_grammar(**outputs(choice=["for a thread that fails"])))


def test_a_step_without_a_token_is_an_error() -> None:
    grammar = Grammar("structured_outputs", rule='"a"')
    mask = COMPILER.compile(grammar)()
    with pytest.raises(RequestError, match="no token of the model can continue the text"):
        mask.restrict(torch.zeros(3))


def test_a_model_must_have_an_end_token_and_a_tokenizer_of_bytes() -> None:
    with pytest.raises(RequestError, match="needs an end token"):
        GrammarCompiler(TOKENIZER, num_tokens=NUM_TOKENS, ends=[])
    with pytest.raises(RequestError, match="Only fast tokenizers are supported"):
        GrammarCompiler(object(), num_tokens=NUM_TOKENS, ends=[END])


def test_without_llguidance_the_endpoint_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning_swarm.core.errors import ConfigError
    from lightning_swarm.serving import http_server

    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ConfigError, match=r'Run: pip install "lightning-swarm\[http\]"'):
        http_server.run([], host="127.0.0.1", port=0)
