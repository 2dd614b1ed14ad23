"""Each field of OpenAI's requests and of vLLM's additions is supported, or refused by its name."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params

from lightning_swarm.serving.http_fields import UNSUPPORTED, WITHOUT_EFFECT, Chat, Completion, RequestError, read

OF_VLLM = [
    *("top_k", "min_p", "repetition_penalty", "length_penalty", "stop_token_ids", "include_stop_str_in_output"),
    *("ignore_eos", "min_tokens", "skip_special_tokens", "spaces_between_special_tokens"),
    *("truncate_prompt_tokens", "allowed_token_ids", "prompt_logprobs", "bad_words", "use_beam_search"),
    *("early_stopping", "add_special_tokens", "guided_json", "guided_regex", "guided_choice", "guided_grammar"),
    *("structured_outputs", "priority", "request_id", "logits_processors", "return_tokens_as_token_ids"),
    *("return_token_ids", "cache_salt", "kv_transfer_params", "vllm_xargs", "structural_tag"),
    *("response_format", "prompt_embeds"),
]
OF_VLLM_CHATS = [
    *("echo", "add_generation_prompt", "continue_final_message", "documents", "chat_template"),
    *("chat_template_kwargs", "mm_processor_kwargs", "media_io_kwargs"),
]
OF_OPENAI = {
    Completion: completion_create_params.CompletionCreateParamsNonStreaming.__annotations__,
    Chat: chat_create_params.CompletionCreateParamsNonStreaming.__annotations__,
}
FIELDS: list[tuple[Any, str]] = [
    *((Completion, name) for name in sorted({*OF_OPENAI[Completion], "stream", *OF_VLLM})),
    *((Chat, name) for name in sorted({*OF_OPENAI[Chat], "stream", *OF_VLLM, *OF_VLLM_CHATS})),
]
LEAST: dict[Any, dict[str, Any]] = {
    Completion: {"model": "m", "prompt": "a"},
    Chat: {"model": "m", "messages": [{"role": "user", "content": "a"}]},
}
JSON: dict[str, Any] = {"response_format": {"type": "json_object"}}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "f"}}
PAGE = Path(__file__).parents[3] / "docs" / "serving.md"


def asked(kind: Any, **fields: Any) -> Any:
    return read(json.dumps({**LEAST[kind], **fields}).encode(), kind)


@pytest.mark.parametrize(("kind", "name"), FIELDS)
def test_each_field_is_honoured_or_refused(kind: Any, name: str) -> None:
    honoured = name in kind.__struct_fields__
    assert honoured + (name in UNSUPPORTED) + (name in WITHOUT_EFFECT) == 1
    if name in UNSUPPORTED:
        with pytest.raises(RequestError, match=rf"`{name}` is not supported here") as found:
            asked(kind, **{name: "something"})
        assert found.value.param == name
        for value in UNSUPPORTED[name]:
            asked(kind, **{name: value})
    elif name in WITHOUT_EFFECT:
        asked(kind, **{name: "something"})
    elif name not in LEAST[kind]:
        assert asked(kind, **{name: None}) == asked(kind), "null is as good as nothing"


def test_the_page_names_each_field() -> None:
    told = set(re.findall(r"`(\w+)`", PAGE.read_text()))
    assert {name for _, name in FIELDS} - told == set()


@pytest.mark.parametrize(
    ("kind", "fields", "words"),
    [
        (Completion, {"top_kk": 1}, "no field `top_kk`"),
        (Completion, {"temperature": "warm"}, r"Expected `float.*temperature"),
        (Completion, {"temperature": -1}, r"temperature"),
        (Completion, {"top_p": 0}, r"top_p"),
        (Completion, {"exact": 1}, "Expected `bool`"),
        (Completion, {"n": 17}, r"`n`|\.n"),
        (Completion, {"n": 2, "best_of": 3}, "`best_of` must equal `n`"),
        (Completion, {"prompt": []}, "non-empty prompts"),
        (Completion, {"prompt": ["a", ""]}, "non-empty prompts"),
        (Completion, {"prompt": ["a"] * 3, "n": 11}, "for 1 to 32 texts in all, got 3 prompts with 11 texts each"),
        (Completion, {"prompt": [1, "a"]}, "`prompt` must be a text, a list of tokens"),
        (Completion, {"prompt": [True]}, "`prompt` must be a text, a list of tokens"),
        (Completion, {"logit_bias": {"the": 1}}, "must be token numbers"),
        (Completion, {"max_tokens": 0}, "must be at least 1"),
        (Completion, {"stream_options": {"include_usage": True}}, "need `stream`"),
        (Completion, {"stream": True, "stream_options": {"other": 1}}, "unknown field `other`"),
        (Completion, {"stop": ["a"] * 17}, "at most 16 texts"),
        (Completion, {"guided_json": {}}, "`guided_json` is not supported here, got {}: use `structured_outputs`"),
        (Completion, {"tools": []}, "no field `tools`"),
        (Completion, {"response_format": {"type": "json"}}, "Invalid enum value 'json'"),
        (Completion, {"response_format": {"type": "json_schema"}}, "`json_schema` must be set"),
        (Completion, {"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}}, "field `schema`"),
        (Completion, {"structured_outputs": {"regex": "a", "choice": ["a"]}}, "exactly one of `json`"),
        (Completion, {"structured_outputs": {"whitespace_pattern": "a"}}, "unknown field `whitespace_pattern`"),
        (Completion, {**JSON, "structured_outputs": {"regex": "a"}}, "excludes `structured_outputs`"),
        (Completion, {**JSON, "min_tokens": 1}, "`min_tokens` cannot be combined with a grammar"),
        (Completion, {**JSON, "allowed_token_ids": [1]}, "`allowed_token_ids` cannot be combined"),
        (Chat, {"tools": [TOOL], "min_tokens": 1}, "`min_tokens` cannot be combined with a grammar or tools"),
        (Chat, {"tools": [TOOL, TOOL]}, "got 'f' twice"),
        (Chat, {"tools": [{"type": "custom"}]}, "Invalid enum value 'custom'"),
        (Chat, {"tools": [{"type": "function", "function": {"name": "a b"}}]}, "matching regex"),
        (Chat, {"tools": [{"type": "function", "function": {"name": "f\n"}}]}, "matching regex"),
        (Chat, {"tool_choice": "required"}, r"`tool_choice` asks for a function, but `tools` has only \[\]"),
        (Chat, {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "asks for 'g'"),
        (Chat, {"tools": [TOOL], "tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        (Chat, {"functions": [1]}, "use `tools` and `tool_choice`"),
        (Chat, {"top_logprobs": 2}, "need `logprobs`"),
        (Chat, {"echo": True}, "is a field of completions"),
        (Chat, {"continue_final_message": True}, "needs `add_generation_prompt`"),
        (Chat, {"chat_template_kwargs": {"tokenize": False}}, "must name variables of the template"),
        (Chat, {"messages": []}, "messages"),
    ],
)
def test_values_that_cannot_be_honoured_are_refused(kind: Any, fields: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError, match=words) as found:
        asked(kind, **fields)
    assert found.value.status == 400


@pytest.mark.parametrize("body", [b"", b"[]", b"\xff", b"{" * 5000, b'{"model": "m"}'])
def test_what_is_no_request_is_refused(body: bytes) -> None:
    with pytest.raises(RequestError):
        read(body, Completion)
