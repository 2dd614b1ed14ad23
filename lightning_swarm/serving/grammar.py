"""Grammars that requests ask for: JSON schemas, regexes, choices, and grammars in Lark or GBNF."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, NoReturn

from lightning_swarm.serving.http_fields import RequestError, TextFields

_MAX_SOURCE: Final = 64 << 10  # characters
# Without a bound, a model that prefers blanks could write them until its text is full.
_BLANKS: Final = r"( |\n[ \t]{0,20})"


@dataclass(frozen=True)
class Grammar:
    """A grammar in llguidance's variant of Lark.

    Args:
        param: The request's field that asks for it.
        rule: The right-hand side of the rule for the text. Empty: `text` is the whole grammar.
        text: The whole grammar. Empty: one rule.
        checked: `text` as the check of its complexity gets it, whose tokenizer lacks the model's special tokens.
            Empty: the same.
        source: A whole grammar in Lark or in GBNF of llama.cpp, which becomes `text` when it is compiled.
    """

    param: str
    rule: str = ""
    text: str = ""
    checked: str = ""
    source: str = ""

    @property
    def whole(self) -> str:
        """The complete grammar."""
        return self.text or f"start: {self.rule}"


def grammar_of(asked: TextFields) -> Grammar | None:
    """Return the grammar that a request asks for by `response_format` or `structured_outputs`."""
    form, other = asked.response_format, asked.structured_outputs
    if form is not None and form.type == "json_object":
        return Grammar("response_format", rule=json_rule({"type": "object"}, "response_format"))
    if form is not None and form.json_schema is not None:
        return Grammar("response_format", rule=json_rule(form.json_schema.schema, "response_format"))
    if other is None:
        return None
    name = "structured_outputs"
    if other.json is not None:
        return Grammar(name, rule=json_rule(_decoded(other.json), name))
    if other.json_object:
        return Grammar(name, rule=json_rule({"type": "object"}, name))
    if other.choice is not None:
        return Grammar(name, rule=" | ".join(quoted(choice) for choice in other.choice))
    from llguidance import regex_to_lark

    if other.regex is not None:
        if (len(other.regex) - len(other.regex.rstrip("\\"))) % 2:  # the conversion would leave it out
            refuse(name, f"the regex {other.regex[-100:]!r} ends amid an escape")
        return Grammar(name, rule=f"/{regex_to_lark(other.regex, use_ascii='')}/")
    source = str(other.grammar)
    if len(source) > _MAX_SOURCE:
        refuse(name, f"it has {len(source)} characters, more than {_MAX_SOURCE}")
    return Grammar(name, source=source)


def json_rule(schema: Mapping[str, Any] | bool, param: str, *, is_lenient: bool = False) -> str:
    """Return the rule of the JSON values that fit a schema.

    Args:
        schema: The JSON schema.
        param: The request's field, for errors.
        is_lenient: Ignore keywords that llguidance does not support, instead of refusing the schema.
    """
    # False admits no value. `x-guidance` holds llguidance's options, which a client must not set.
    if schema is False or (schema is not True and "x-guidance" in schema):
        raise RequestError(400, f"`{param}` needs a schema that admits a value, without `x-guidance`", param=param)
    options = {"whitespace_pattern": _BLANKS, "lenient": is_lenient}
    try:
        return "%json " + json.dumps({**({} if schema is True else schema), "x-guidance": options})
    except (RecursionError, ValueError) as error:
        raise RequestError(400, f"the schema of `{param}` cannot be read: {error}", param=param) from error


def quoted(text: str) -> str:
    """Return a string literal of Lark."""
    return json.dumps(text, ensure_ascii=False)


def _decoded(schema: Any) -> Any:
    """Read a schema that is sent as a text."""
    if not isinstance(schema, str):
        return schema
    try:
        found = json.loads(schema)
    except (RecursionError, ValueError) as error:
        raise RequestError(400, f"`json` is no JSON: {error}", param="structured_outputs") from error
    if isinstance(found, dict | bool):
        return found
    raise RequestError(400, f"`json` must be a schema, got {schema[:100]!r}", param="structured_outputs")


def refuse(param: str, problem: str) -> NoReturn:
    """Raise the error of a grammar that cannot be followed."""
    # llguidance marks some of its messages by `<non-verbose/>`.
    problem = re.sub(r"\s+", " ", problem.replace("<non-verbose/>", "")).strip()
    raise RequestError(
        400, f"the grammar of `{param}` cannot be followed: {problem[:400]}. Simplify or correct it", param=param
    )
