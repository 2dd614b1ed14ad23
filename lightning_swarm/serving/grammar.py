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
        checked: A variant of `text` without the model's special tokens, which `grammar_check` does not know. Empty:
            `text` has none.
        source: A whole grammar in Lark or in llama.cpp's GBNF, which becomes `text` when it is compiled.
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


def grammar_of(fields: TextFields) -> Grammar | None:
    """Return the grammar that a request asks for by `response_format` or `structured_outputs`."""
    response_format, structured = fields.response_format, fields.structured_outputs
    name = "response_format"
    if response_format is not None and response_format.type == "json_object":
        return Grammar(name, rule=json_rule({"type": "object"}, name))
    if response_format is not None and response_format.json_schema is not None:
        return Grammar(name, rule=json_rule(response_format.json_schema.schema, name))
    if structured is None:
        return None
    name = "structured_outputs"
    if structured.json is not None:
        return Grammar(name, rule=json_rule(_decoded(structured.json), name))
    if structured.json_object:
        return Grammar(name, rule=json_rule({"type": "object"}, name))
    if structured.choice is not None:
        return Grammar(name, rule=" | ".join(quoted(choice) for choice in structured.choice))
    from llguidance import regex_to_lark

    if (regex := structured.regex) is not None:
        if (len(regex) - len(regex.rstrip("\\"))) % 2:  # the conversion would drop the backslash
            refuse(name, f"the regex {regex[-100:]!r} ends amid an escape")
        return Grammar(name, rule=f"/{regex_to_lark(regex, use_ascii='')}/")
    source = str(structured.grammar)
    if len(source) > _MAX_SOURCE:
        refuse(name, f"it must have at most {_MAX_SOURCE} characters, got {len(source)}")
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
        raise RequestError(400, f"`{param}` needs a schema that admits some value and has no `x-guidance`", param=param)
    options = {"whitespace_pattern": _BLANKS, "lenient": is_lenient}
    try:
        return "%json " + json.dumps({**({} if schema is True else schema), "x-guidance": options})
    except (RecursionError, ValueError) as error:
        raise RequestError(400, f"the schema of `{param}` cannot be read: {error}", param=param) from error


def quoted(text: str) -> str:
    """Return a string literal of Lark."""
    return json.dumps(text, ensure_ascii=False)


def _decoded(schema: Any) -> Any:
    """Parse a schema that was sent as a text."""
    if not isinstance(schema, str):
        return schema
    try:
        decoded = json.loads(schema)
    except (RecursionError, ValueError) as error:
        raise RequestError(400, f"`json` is no JSON: {error}", param="structured_outputs") from error
    if isinstance(decoded, dict | bool):
        return decoded
    raise RequestError(400, f"`json` must be a schema, got {schema[:100]!r}", param="structured_outputs")


def refuse(param: str, problem: str) -> NoReturn:
    """Raise RequestError for a grammar that texts cannot follow."""
    # llguidance puts `<non-verbose/>` into some of its messages.
    problem = re.sub(r"\s+", " ", problem.replace("<non-verbose/>", "")).strip()
    raise RequestError(
        400, f"the grammar of `{param}` cannot be followed: {problem[:400]}. Simplify or correct it", param=param
    )
