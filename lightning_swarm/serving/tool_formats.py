"""Formats in which families of models call tools, and the grammars of texts with such calls."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from lightning_swarm.serving.grammar import Grammar, json_rule, quoted
from lightning_swarm.serving.http_fields import Chat, RequestError
from lightning_swarm.serving.http_formats import Tool

_MAX_CALLS: Final = 32  # in one text


@dataclass(frozen=True)
class CallFormat:
    """The format of a text's calls: marker, opening, calls with separators between them, closing.

    Each call consists of head, the function's name, middle, the arguments as JSON, and tail.
    """

    signs: tuple[str, ...]  # strings that chat templates of the family contain
    foreign_signs: tuple[str, ...]  # strings that only templates of other families contain
    head: str
    middle: str
    tail: str
    marker: str = ""  # empty: a text with calls begins with a brace
    opening: str = ""
    separator: str = ""  # empty: a text has at most one call
    closing: str = ""
    prefix: str = ""  # special token that may precede the calls

    def special_tokens(self, tokenizer: Any) -> dict[str, int]:
        """Return the tokenizer's special tokens that occur in calls, which decoding must not leave out."""
        parts = (self.marker, self.opening, self.head, self.middle, self.tail, self.separator, self.closing)
        return {
            text: number
            for text, number in all_special_tokens(tokenizer).items()
            if any(text in part for part in parts) or text == self.prefix
        }


FORMATS: Final[Mapping[str, CallFormat]] = {
    "hermes": CallFormat(
        signs=("<tool_call>", '"arguments"'),
        foreign_signs=("<function=", "<arg_key>"),
        marker="<tool_call>",
        head='\n{"name": "',
        middle='", "arguments": ',
        tail="}\n</tool_call>",
        separator="\n<tool_call>",
    ),
    "llama3_json": CallFormat(
        signs=("<|start_header_id|>", '{"name": ', '"parameters": '),
        foreign_signs=("<tool_call>", "[TOOL_CALLS]"),
        prefix="<|python_tag|>",
        head='{"name": "',
        middle='", "parameters": ',
        tail="}",
    ),
    "mistral": CallFormat(
        signs=("[TOOL_CALLS]",),
        foreign_signs=("[ARGS]",),
        marker="[TOOL_CALLS]",
        opening="[",
        head='{"name": "',
        middle='", "arguments": ',
        tail="}",
        separator=", ",
        closing="]",
    ),
    "mistral_args": CallFormat(
        signs=("[TOOL_CALLS]", "[ARGS]"),
        foreign_signs=("[CALL_ID]",),
        marker="[TOOL_CALLS]",
        head="",
        middle="[ARGS]",
        tail="",
        separator="[TOOL_CALLS]",
    ),
}
"""The formats by name: for Hermes and Qwen, Llama 3.1 to 3.3, Mistral up to v7, Mistral from v13 on."""


def all_special_tokens(tokenizer: Any) -> dict[str, int]:
    """Return the tokens that decoding may leave out of texts, with their numbers."""
    return {token.content: number for number, token in tokenizer.added_tokens_decoder.items() if token.special}


def format_of(template: str) -> CallFormat | None:
    """Return the format of the calls that a chat template describes, or None if it is unknown."""
    template = template.replace('\\"', '"')
    for form in FORMATS.values():
        if all(sign in template for sign in form.signs) and not any(sign in template for sign in form.foreign_signs):
            return form
    return None


def grammar_with_calls(form: CallFormat, fields: Chat, special: Mapping[str, int], answer: Grammar | None) -> Grammar:
    """Return the grammar of a text that may or must call tools.

    Args:
        form: The calls' format.
        fields: The request.
        special: The tokenizer's special tokens that occur in calls.
        answer: The grammar of a text without calls. None: any text.
    """
    names = [tool.function.name for tool in fields.callable_tools]
    arguments = [_arguments(tool) for tool in fields.callable_tools]
    answer_rule = None if answer is None or fields.must_call else _rule_beside_calls(form, answer)

    def grammar_text(token: Callable[[str], str]) -> str:
        """Return the whole grammar; `token` returns the rule of a special token."""

        def literal(text: str) -> str:
            parts = re.split("|".join(f"({re.escape(name)})" for name in special) or r"(?!)", text)
            return " ".join(token(part) if part in special else quoted(part) for part in parts if part) or '""'

        may_repeat = form.separator and fields.may_call_many
        further_calls = f"({literal(form.separator)} call){{0,{_MAX_CALLS - 1}}}" if may_repeat else ""
        prefix = f"{token(form.prefix)}?" if form.prefix in special else ""
        blank = '" "?' if form.opening else ""  # some tokenizers of the family insert a blank here
        calls = [
            f"call_{index}: {literal(form.head + name + form.middle)} {rule} {literal(form.tail)}"
            for index, (name, rule) in enumerate(zip(names, arguments, strict=True))
        ]
        lines = [
            "%llguidance {}",
            *_start(form, fields, literal(form.marker), answer_rule, is_token=form.marker in special),
            f"calls: {prefix} {blank} {literal(form.opening)} call {further_calls} {literal(form.closing)}",
            f"call: {' | '.join(f'call_{index}' for index in range(len(names)))}",
            *calls,
        ]
        return "\n".join(lines)

    # The tokenizer of `grammar_check` has no special tokens, so `checked` has a string in their place.
    text, checked = grammar_text(lambda name: f"<[{special[name]}]>"), grammar_text(lambda _: '"<>"')
    return Grammar("tools", text=text, checked=checked)


def _start(form: CallFormat, fields: Chat, marker: str, answer: str | None, *, is_token: bool) -> list[str]:
    """Return the rules of a text's beginning up to its calls.

    Args:
        form: The calls' format.
        fields: The request.
        marker: The marker's rule.
        answer: The rule of a text without calls. None: any text.
        is_token: Whether the marker is a special token.
    """
    if fields.must_call:
        return [f"start: {marker} calls"]
    if answer is not None:
        return [f"start: {marker} calls | answer", f"answer: {answer}"]
    if not form.marker:
        return ["start: calls | ANSWER", r"ANSWER: /[ \n]*([^{ \n](.|\n)*)?/"]
    if is_token:
        # Refuse a marker spelled in ordinary tokens, which would be read as the special token.
        spelled = rf"/(.|\n)*{re.escape(form.marker)}(.|\n)*/"
        return [f"start: TEXT ({marker} calls)?", rf"TEXT: /(.|\n)*/ & ~{spelled}"]
    # A lazy rule matches as little as possible, so it ends with the first marker.
    return ["start: begin calls | answer", f"begin[lazy]: TEXT {marker}", "answer: TEXT", r"TEXT: /(.|\n)*/"]


def _arguments(tool: Tool) -> str:
    """Return the rule of a function's arguments."""
    schema = tool.function.parameters
    if schema is None:
        schema = {"type": "object", "properties": {}, "additionalProperties": False}
    if schema.setdefault("type", "object") != "object":
        name = tool.function.name
        raise RequestError(400, f"the parameters of {name!r} must be the schema of an object", param="tools")
    return json_rule(schema, "tools", is_lenient=not tool.function.strict)


def _rule_beside_calls(form: CallFormat, answer: Grammar) -> str:
    """Return the rule of an answer without calls; refuse an answer whose beginning does not differ from calls."""
    if answer.rule.startswith("%json") and form.marker:
        return answer.rule
    raise RequestError(
        400,
        f"with `tools`, `{answer.param}` must ask for JSON from a model whose calls begin with a marker. Set "
        '`tool_choice` to "none" or "required"',
        param=answer.param,
    )
