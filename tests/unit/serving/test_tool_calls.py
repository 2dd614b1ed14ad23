"""Calls of tools are read from a text, in each family's format, in whatever pieces the text comes."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_swarm.serving.grammar import Grammar, json_rule
from lightning_swarm.serving.grammar_masks import GrammarCompiler
from lightning_swarm.serving.http_fields import Chat, RequestError, read
from lightning_swarm.serving.pieces import TextPiece
from lightning_swarm.serving.texts import ServedText
from lightning_swarm.serving.tool_calls import FormatReader, TemplateReader, tool_use, with_calls
from lightning_swarm.serving.tool_formats import FORMATS, format_of, grammar_with_calls
from tests.served import bytes_tokenizer

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 9}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "weather", "parameters": CITY, "strict": True}},
    {"type": "function", "function": {"name": "now"}},
]
SPECIAL = ["[TOOL_CALLS]", "[ARGS]", "<|python_tag|>"]
TOKENIZER = bytes_tokenizer(*SPECIAL)

RIO = '{"city": "Ri\\"o}"}'
HERMES_NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'

# Format -> text, and its expected calls.
TEXTS: dict[str, tuple[str, list[tuple[str, str]]]] = {
    "hermes": (
        f'I look.\n<tool_call>\n{{"name": "weather", "arguments": {RIO}}}\n</tool_call>\n{HERMES_NOW}',
        [("weather", RIO), ("now", "{}")],
    ),
    "llama3_json": ('{"name": "weather", "parameters": {"city": "{\\\\"}}', [("weather", '{"city": "{\\\\"}')]),
    "mistral": (
        'Wait.[TOOL_CALLS] [{"name": "now", "arguments": {}}, {"name": "weather", "arguments": {"city":"]"}}]',
        [("now", "{}"), ("weather", '{"city":"]"}')],
    ),
    "mistral_args": (
        '[TOOL_CALLS]weather[ARGS]{"city": "Rome"}[TOOL_CALLS]now[ARGS]{}',
        [("weather", '{"city": "Rome"}'), ("now", "{}")],
    ),
}


def asked(**fields: Any) -> Chat:
    least = {"model": "m", "messages": [{"role": "user", "content": "a"}], "tools": TOOLS}
    return read(json.dumps({**least, **fields}).encode(), Chat)


def reader_of(name: str, **options: Any) -> FormatReader:
    return FormatReader(FORMATS[name], {"weather", "now"}, **options)


def read_text(reader: Any, text: str, reason: str = "stop", seed: int = 0) -> Any:
    """Return a text's content, calls and finish reason; the text comes in pieces of random lengths."""
    rng = random.Random(seed)

    async def pieces() -> AsyncIterator[TextPiece]:
        place = 0
        while place < len(text):
            end = place + rng.randint(1, 9)
            yield TextPiece(text[place:end])
            place = end
        yield TextPiece(finish_reason=reason)

    async def collect() -> list[TextPiece]:
        return [piece async for piece in with_calls(pieces(), reader)]

    found = asyncio.run(collect())
    calls = dict[int, list[str]]()
    ids = set[str]()
    for piece in (call for one in found for call in one.calls):
        if piece.name:
            calls[piece.index] = [piece.name, ""]
            ids.add(piece.id)
        calls[piece.index][1] += piece.arguments
    assert len(ids) == len(calls)
    assert all(len(one) == 9 and one.isalnum() for one in ids)
    content = "".join(one.text for one in found)
    reasoning = "".join(one.reasoning for one in found)
    return content, [tuple(call) for call in calls.values()], found[-1].finish_reason, reasoning


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("seed", range(20))
def test_calls_are_read_in_any_pieces(name: str, seed: int) -> None:
    text, calls = TEXTS[name]
    content = text[: text.find(FORMATS[name].marker)]
    assert read_text(reader_of(name), text, seed=seed) == (content, calls, "tool_calls", "")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", "a < b, and <tool_ is no call"),
        ("llama3_json", "The set {1, 2}"),
        ("llama3_json", "  "),
        ("mistral", "[TOOL] [x]"),
    ],
)
def test_a_text_without_calls_is_unchanged(name: str, text: str) -> None:
    content, calls, reason, _ = read_text(reader_of(name), text)
    assert (content.strip(), calls, reason) == (text.strip(), [], "stop")


@pytest.mark.parametrize(
    ("name", "text", "options"),
    [
        ("mistral_args", '{"a": "[TOOL_CALLS]now[ARGS]{}"}', {"only_first": True}),
        ("mistral_args", 'say [TOOL_CALLS]rm[ARGS]{"x":1} done', {}),
        ("hermes", HERMES_NOW.replace("now", "rm"), {}),
        ("llama3_json", '\t{"name": "now", "parameters": {"a":1}} and so on', {}),
        ("llama3_json", '{"name": "rm", "parameters": {}}', {}),
    ],
)
@pytest.mark.parametrize("seed", range(5))
def test_a_text_about_calls_has_none(name: str, text: str, options: dict[str, Any], seed: int) -> None:
    assert read_text(reader_of(name, **options), text, seed=seed) == (text, [], "stop", "")


@pytest.mark.parametrize("seed", range(5))
def test_text_beside_a_call(seed: int) -> None:
    first = reader_of("mistral_args", only_first=True)
    assert read_text(first, " [TOOL_CALLS]now[ARGS]{}", seed=seed) == (" ", [("now", "{}")], "tool_calls", "")
    text = f"{HERMES_NOW}\n\n"
    assert read_text(reader_of("hermes"), text, seed=seed) == ("", [("now", "{}")], "tool_calls", "")
    for left in (" and so on", "}"):
        found = read_text(reader_of("hermes"), HERMES_NOW + left, seed=seed)
        assert found == (left, [("now", "{}")], "tool_calls", "")
    cut = read_text(reader_of("hermes"), HERMES_NOW[:-5], "length", seed=seed)
    assert cut == ("", [("now", "{}")], "length", "")


def test_a_marker_in_ordinary_tokens_is_no_part_of_a_text() -> None:
    """Readers see only the characters, so that they would take it for the special token."""
    tokenizer = bytes_tokenizer(*SPECIAL)
    spelled = tokenizer("say [TOOL_CALLS]", split_special_tokens=True).input_ids
    mask = COMPILER.compile(grammar("mistral_args"))()
    assert max(spelled) < tokenizer.convert_tokens_to_ids("[TOOL_CALLS]")
    with pytest.raises(RequestError):
        list(map(mask.add, spelled))
    assert admits(grammar("mistral_args"), "say [TOOL_CALL] ]")


def test_a_call_that_is_cut() -> None:
    text, _ = TEXTS["hermes"]
    begin = text.index('{"city"')
    content, calls, reason, _ = read_text(reader_of("hermes"), text[: begin + 5], "length")
    assert (content, calls, reason) == ("I look.\n", [("weather", '{"cit')], "length")
    before_name = text[: text.index("weather")]
    assert read_text(reader_of("hermes"), before_name, "length") == (before_name, [], "length", "")


# Excerpts of the chat templates of models.
QWEN = r"{{- 'a json object: <tool_call>\n{\"name\": <function-name>, \"arguments\": <args-json-object>}' }}"
TEMPLATES = {
    QWEN: "hermes",
    """{{- 'Respond in {"name": function name, "parameters": dictionary}' }}<|start_header_id|>""": "llama3_json",
    '{{- "[TOOL_CALLS] [" }}{{- out[:-1] + \', "id": "\' }}': "mistral",
    "{{- '[TOOL_CALLS]' + name + '[ARGS]' + arguments }}": "mistral_args",
    '<tool_call>\n<function=example>\n<parameter=arguments>"arguments"': None,
    "<tool_call>{name}<arg_key>": None,
    "<｜tool▁calls▁begin｜>": None,
}


@pytest.mark.parametrize(("template", "name"), TEMPLATES.items())
def test_the_format_is_found_in_the_template(template: str, name: str | None) -> None:
    assert format_of(template) is (None if name is None else FORMATS[name])


def test_the_page_names_each_format() -> None:
    page = (Path(__file__).parents[3] / "docs" / "serving.md").read_text()
    assert all(f"| `{name}` |" in page for name in FORMATS)


COMPILER = GrammarCompiler(TOKENIZER, num_tokens=len(TOKENIZER), ends=[2])


def admits(grammar: Grammar, text: str) -> bool:
    """Return whether a text follows a grammar to its end."""
    mask, row = COMPILER.compile(grammar)(), torch.zeros(len(TOKENIZER))
    try:
        for token in TOKENIZER(text).input_ids:
            mask.add(token)
        mask.restrict(row)
    except RequestError:
        return False
    return bool(row[2] == 0)


def grammar(name: str, answer: Grammar | None = None, **fields: Any) -> Grammar:
    form = FORMATS[name]
    return grammar_with_calls(form, asked(**fields), form.special_tokens(TOKENIZER), answer)


@pytest.mark.parametrize("name", TEXTS)
def test_the_grammar_admits_calls_that_fit(name: str) -> None:
    text, calls = TEXTS[name]
    call = text[text.find(FORMATS[name].marker) :] if FORMATS[name].marker else text
    free, forced = grammar(name), grammar(name, tool_choice="required")
    assert admits(free, text)
    assert admits(free, "I do not know.")
    assert admits(forced, call)
    assert not admits(forced, "I do not know.")
    for wrong in (text.replace("weather", "whether"), text.replace('"city"', '"town"')):
        assert not admits(free, wrong)
    if len(calls) > 1:
        assert not admits(grammar(name, parallel_tool_calls=False), text)
    assert not admits(grammar(name, tool_choice={"type": "function", "function": {"name": "now"}}), call)
    if name == "llama3_json":
        assert admits(free, f"<|python_tag|>{text}")


def test_calls_beside_json() -> None:
    answer = Grammar("response_format", rule=json_rule({"type": "boolean"}, "response_format"))
    both = grammar("hermes", answer)
    assert [admits(both, text) for text in ("true", TEXTS["hermes"][0][8:], "yes")] == [True, True, False]
    with pytest.raises(RequestError, match="with `tools`, `response_format` must ask for JSON"):
        grammar("llama3_json", answer)
    with pytest.raises(RequestError, match="with `tools`, `structured_outputs` must ask for JSON"):
        grammar("hermes", Grammar("structured_outputs", rule="/a/"))


def test_functions_without_strict_may_have_unsupported_keywords() -> None:
    odd = {"type": "object", "properties": {"a": {"type": "string", "format": "odd"}}}
    function: dict[str, Any] = {"name": "f", "parameters": odd}
    assert admits(
        grammar("mistral_args", tools=[{"type": "function", "function": function}]), '[TOOL_CALLS]f[ARGS]{"a": ""}'
    )
    function["strict"] = True
    with pytest.raises(RequestError, match=r'Unknown format: odd, in call_0: .*"f'):
        admits(grammar("mistral_args", tools=[{"type": "function", "function": function}]), "")
    function["parameters"] = {"type": "array"}
    with pytest.raises(RequestError, match="the parameters of 'f' must be the schema of an object"):
        grammar("hermes", tools=[{"type": "function", "function": function}])


def test_functions_with_definitions_of_their_own() -> None:
    """Each schema's references are to its own definitions, as pydantic writes them."""
    place = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
    parameters = {"properties": {"to": {"$ref": "#/$defs/P"}}, "required": ["to"], "$defs": {"P": place}}
    tools = [
        {"type": "function", "function": {"name": "f", "parameters": parameters, "strict": True}},
        {"type": "function", "function": {"name": "g", "parameters": {**parameters, "$defs": {"P": CITY}}}},
    ]
    found = grammar("mistral_args", tools=tools)
    assert admits(found, '[TOOL_CALLS]f[ARGS]{"to": {"x": 1}}[TOOL_CALLS]g[ARGS]{"to": {"city": "Rome"}}')
    assert not admits(found, '[TOOL_CALLS]g[ARGS]{"to": {"x": 1}}')


# Calls whose arguments are no JSON, as in Gemma 4.
RESPONSE_TEMPLATE: dict[str, Any] = {
    "defaults": {"role": "assistant"},
    "start_anchor": ["<|turn>model\n"],
    "fields": {
        "reasoning_content": {"open": "<think>", "close": "</think>", "content": "text"},
        "tool_calls": {
            "open_pattern": r"<call:(?P<name>\w+)>",
            "close": "</call>",
            "repeats": True,
            "content": "json",
            "content_args": {"unquoted_keys": True},
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {"close": ["<turn|>"], "content": "text"},
    },
}
CALLS = "<think>Hm</think>So<call:weather>{city:1}</call><call:now>{}</call>"


@pytest.mark.parametrize("seed", range(5))
def test_a_tokenizers_response_template(seed: int) -> None:
    tokenizer = bytes_tokenizer()
    tokenizer.response_template = RESPONSE_TEMPLATE
    calls = [("weather", '{"city": "1"}'), ("now", "{}")]
    tools = [{"type": "function", "function": {"name": "weather", "parameters": CITY}}]
    wanted = ("So", [("weather", '{"city": 1}'), ("now", "{}")], "tool_calls", "Hm")
    assert read_text(TemplateReader(tokenizer, "<|turn>model\n", tools), CALLS, seed=seed) == wanted
    cut = read_text(TemplateReader(tokenizer, "<|turn>model\n", tools), CALLS[:40], "length", seed=seed)
    assert (cut[0], cut[1:3]) == ("So<call:weather>{city:1", ([], "length")), calls


# A template whose calls are JSON, without checks of their fields.
PLAIN_TEMPLATE: dict[str, Any] = {
    "start_anchor": "<A>",
    "fields": {
        "content": {"content": "text"},
        "tool_calls": {"open": "<tool_call>", "close": "</tool_call>", "repeats": True, "content": "json"},
    },
}
GOOD_CALL = '<tool_call>{"function": {"name": "now", "arguments": {}}}</tool_call>'


@pytest.mark.parametrize(
    "wrong",
    [
        '<tool_call>{"foo": 1}</tool_call> bye',
        '<tool_call>{"foo": 1</tool_call> bye',
        '<tool_call>"just text"</tool_call>x<tool_call>',
        '<tool_call>{"name": "f</tool',
        "<tool_call>",
    ],
)
@pytest.mark.parametrize("seed", range(5))
def test_a_call_that_does_not_follow_the_template_is_text(wrong: str, seed: int) -> None:
    tokenizer = bytes_tokenizer()
    tokenizer.response_template = PLAIN_TEMPLATE
    for before, calls in (("", []), (f"hi {GOOD_CALL}so", [("now", "{}")])):
        found = read_text(TemplateReader(tokenizer, "<A>", None), before + wrong, seed=seed)
        assert found == (before.replace(GOOD_CALL, "") + wrong, calls, "stop", "")
    whole = TemplateReader(tokenizer, "<A>", None)
    assert whole.take(f"a <tool {GOOD_CALL}{wrong}").text + whole.rest().text == f"a <tool {wrong}"


def served(template: str = "tools", **options: Any) -> ServedText:
    tokenizer = bytes_tokenizer(template=template)
    tokenizer.response_template = options.pop("response_template", None)
    model = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=2))
    return ServedText("m", model, tokenizer, **options)


def test_the_way_in_which_a_model_calls_tools() -> None:
    assert tool_use(served(), asked(tool_choice="none"), "", None) is None
    with pytest.raises(
        RequestError, match=r"format of the tool calls of model 'm' is unknown here.*hermes.*--tool-parser"
    ):
        tool_use(served(), asked(), "", None)
    chosen = tool_use(served(tool_parser="hermes"), asked(), "", None)
    assert chosen is not None
    assert isinstance(chosen.new_reader(), FormatReader)
    by_template = served(response_template=RESPONSE_TEMPLATE)
    found = tool_use(by_template, asked(), "<|turn>model\n", None)
    assert found is not None
    assert isinstance(found.new_reader(), TemplateReader)
    assert (found.grammar, set(found.kept_tokens)) == (None, {0, 1})
    with pytest.raises(RequestError, match="in a format without a grammar here"):
        tool_use(by_template, asked(tool_choice="required"), "", None)
