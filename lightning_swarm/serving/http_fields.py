"""Requests of OpenAI's HTTP protocol, with fields that vLLM adds. Each field is honoured, or refused by its name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, TypeVar

import msgspec
from msgspec import Meta
from typing_extensions import override

from lightning_swarm.serving.http_formats import NamedFunction, ResponseFormat, StructuredOutputs, Tool

MAX_TOKENS: Final = 1 << 20
MAX_CHOICES: Final = 16
MAX_TEXTS: Final = 32  # per request, and per client at once
MAX_LOGPROBS: Final = 20
MAX_TOOLS: Final = 128
_MAX_STOPS, _MAX_STOP = 16, 256  # number of stop strings, and characters of each

_OF_CLIENT: Final = ("user", "metadata", "safety_identifier", "request_id")
_OF_SCHEDULING: Final = ("service_tier", "priority", "prediction")
_OF_CACHES: Final = ("prompt_cache_key", "prompt_cache_retention", "prompt_cache_options")
WITHOUT_EFFECT: Final = frozenset((*_OF_CLIENT, *_OF_SCHEDULING, *_OF_CACHES))
"""Ignored fields. They name the client or concern scheduling and caches, and do not change the text."""

UNSUPPORTED: Final[Mapping[str, tuple[Any, ...]]] = {
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "store": (False,),
    "reasoning_effort": ("none",),
    "verbosity": (),
    "web_search_options": (),
    "moderation": (),
    "suffix": ("",),
    "use_beam_search": (False,),
    "length_penalty": (1.0,),
    "early_stopping": (False,),
    "ignore_eos": (False,),
    "truncate_prompt_tokens": (),
    "prompt_logprobs": (),
    "bad_words": ([],),
    "spaces_between_special_tokens": (True,),
    "chat_template": (),
    "documents": ([],),
    "mm_processor_kwargs": (),
    "media_io_kwargs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_decoding_backend": (),
    "guided_whitespace_pattern": (),
    "structural_tag": (),
    "logits_processors": ([],),
    "return_tokens_as_token_ids": (False,),
    "return_token_ids": (False,),
    "prompt_embeds": (),
    "kv_transfer_params": (),
    "vllm_xargs": (),
    "thinking_token_budget": (),
}
"""Unsupported fields, each with the values that request nothing. Any other value is refused."""

_REMEDIES: Final = {
    **dict.fromkeys(("guided_json", "guided_regex", "guided_choice", "guided_grammar"), "use `structured_outputs`"),
    **dict.fromkeys(("functions", "function_call"), "use `tools` and `tool_choice`"),
}


class RequestError(Exception):
    """A request that cannot be answered, with its HTTP status."""

    def __init__(self, status: int, message: str, *, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.param = status, code, param


class _StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool = False
    include_obfuscation: bool = False  # ignored, because chunks are never padded to hide their length


_Count = Annotated[int, Meta(ge=0, le=MAX_TOKENS)]
_Penalty = Annotated[float, Meta(ge=-2.0, le=2.0)]
_TokenIds = Annotated[list[Annotated[int, Meta(ge=0)]], Meta(max_length=4096)]


class TextFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Honoured fields of completions and chats. None means the value in the model's generation_config.json."""

    model: str = ""
    max_tokens: _Count | None = None
    max_completion_tokens: _Count | None = None
    min_tokens: _Count = 0
    temperature: Annotated[float, Meta(ge=0.0, le=100.0)] | None = None
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    min_p: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0.0, le=100.0)] | None = None
    presence_penalty: _Penalty = 0.0
    frequency_penalty: _Penalty = 0.0
    logit_bias: dict[str, Annotated[float, Meta(ge=-100.0, le=100.0)]] = {}
    allowed_token_ids: _TokenIds = []
    seed: int | None = None
    exact: bool = False  # each step is computed alone, so that no rounding depends on other texts
    stop: str | list[str] = []
    stop_token_ids: _TokenIds = []
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    add_special_tokens: bool | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] = 1
    best_of: int | None = None
    stream: bool = False
    stream_options: _StreamOptions | None = None
    echo: bool = False
    cache_salt: Annotated[str, Meta(max_length=256)] = ""
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None

    def check(self) -> None:
        """Refuse values that contradict each other."""
        self._check_grammar()
        if len(self.stops) > _MAX_STOPS or any(len(stop) > _MAX_STOP for stop in self.stops):
            text = f"`stop` must have at most {_MAX_STOPS} texts of at most {_MAX_STOP} characters"
            raise RequestError(400, text, param="stop")
        if self.best_of not in (None, self.n):
            raise RequestError(400, f"`best_of` must equal `n`, which is {self.n}, got {self.best_of}", param="best_of")
        if self.stream_options is not None and not self.stream:
            raise RequestError(400, "`stream_options` need `stream`: true", param="stream_options")
        if not all(token.isdecimal() and len(token) < 10 for token in self.logit_bias):
            raise RequestError(400, "the keys of `logit_bias` must be token numbers", param="logit_bias")
        if self.num_tokens == 0 and not self.echo:
            raise RequestError(400, "`max_tokens` must be at least 1 unless `echo` is set", param="max_tokens")

    def _check_grammar(self) -> None:
        """Refuse two grammars, and fields that could forbid every token that a grammar allows."""
        if self.has_format and self.structured_outputs is not None:
            raise RequestError(400, "`response_format` excludes `structured_outputs`", param="structured_outputs")
        if not (self.has_grammar and (self.min_tokens or self.allowed_token_ids)):
            return
        name = "min_tokens" if self.min_tokens else "allowed_token_ids"
        raise RequestError(
            400, f"`{name}` cannot be combined with a grammar or tools. Leave one of them out", param=name
        )

    @property
    def has_format(self) -> bool:
        """Whether `response_format` asks for JSON."""
        return self.response_format is not None and self.response_format.type != "text"

    @property
    def has_grammar(self) -> bool:
        """Whether a grammar restricts the text."""
        return self.has_format or self.structured_outputs is not None

    @property
    def num_tokens(self) -> int | None:
        """The maximum number of new tokens. None: as many as the model's context has left."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def stops(self) -> list[str]:
        """The strings that end the text."""
        return [stop for stop in ([self.stop] if isinstance(self.stop, str) else self.stop) if stop]

    @property
    def num_logprobs(self) -> int | None:
        """The number of most probable tokens to report with each written token. None: report no scores."""
        return None


class Completion(TextFields, kw_only=True):
    """A request to complete prompts, each of which is a text or a list of tokens."""

    prompt: Any
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None

    @override
    def check(self) -> None:
        super().check()
        if not self.prompts or len(self.prompts) * self.n > MAX_TEXTS or not all(self.prompts):
            raise RequestError(
                400,
                f"a request must have non-empty prompts, and ask for 1 to {MAX_TEXTS} texts in all, got "
                f"{len(self.prompts)} prompts with {self.n} texts each",
                param="prompt",
            )

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, each a text or a list of token numbers."""
        prompt = self.prompt
        if isinstance(prompt, str) or _is_list_of(prompt, int):
            return [prompt]
        if isinstance(prompt, list) and all(isinstance(part, str) or _is_list_of(part, int) for part in prompt):
            return prompt
        message = "`prompt` must be a text, a list of tokens, or a list of texts or of lists of tokens"
        raise RequestError(400, message, param="prompt")

    @property
    @override
    def num_logprobs(self) -> int | None:
        return self.logprobs


class Chat(TextFields, kw_only=True):
    """A request for the next message of a chat."""

    messages: Annotated[list[dict[str, Any]], Meta(min_length=1)]
    logprobs: bool = False
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] = 0
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = {}
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] = []
    tool_choice: Literal["none", "auto", "required"] | NamedFunction = "auto"
    parallel_tool_calls: bool = True

    @override
    def check(self) -> None:
        self._check_tools()
        super().check()
        if self.top_logprobs and not self.logprobs:
            raise RequestError(400, "`top_logprobs` need `logprobs`: true", param="top_logprobs")
        if self.echo:
            raise RequestError(400, "`echo` is a field of completions, got it in a chat", param="echo")
        if self.continue_final_message and self.add_generation_prompt:
            raise RequestError(
                400,
                "`continue_final_message` needs `add_generation_prompt`: false",
                param="continue_final_message",
            )
        reserved = {"tokenize", "return_tensors", "return_dict", "chat_template", "conversation", "tools", "documents"}
        if used := reserved & self.chat_template_kwargs.keys():
            text = f"`chat_template_kwargs` must name variables of the template, got `{min(used)}`"
            raise RequestError(400, text, param="chat_template_kwargs")

    @property
    @override
    def num_logprobs(self) -> int | None:
        return self.top_logprobs if self.logprobs else None

    @property
    def callable_tools(self) -> list[Tool]:
        """The tools that the model may call."""
        if self.tool_choice == "none":
            return []
        if isinstance(self.tool_choice, NamedFunction):
            return [tool for tool in self.tools if tool.function.name == self.tool_choice.function.name]
        return self.tools

    @property
    def must_call(self) -> bool:
        """Whether the answer must be a call."""
        return self.tool_choice not in ("none", "auto")

    @property
    def may_call_many(self) -> bool:
        """Whether the answer may have several calls."""
        return self.parallel_tool_calls and not isinstance(self.tool_choice, NamedFunction)

    @property
    @override
    def has_grammar(self) -> bool:
        return super().has_grammar or bool(self.callable_tools)

    def _check_tools(self) -> None:
        names = [tool.function.name for tool in self.tools]
        if repeated := {name for name in names if names.count(name) > 1}:
            raise RequestError(400, f"each tool must have a different name, got {min(repeated)!r} twice", param="tools")
        if self.must_call and not self.callable_tools:
            wanted = "a function" if isinstance(self.tool_choice, str) else repr(self.tool_choice.function.name)
            text = f"`tool_choice` asks for {wanted[:100]}, but `tools` has only {names[:10]}"
            raise RequestError(400, text, param="tool_choice")


_Request = TypeVar("_Request", bound=TextFields)


def read(body: bytes, request_type: type[_Request]) -> _Request:
    """Read a request; raises RequestError with the name of a field that is not honoured."""
    return converted(fields_of(body, UNSUPPORTED), request_type)


def fields_of(body: bytes, unsupported: Mapping[str, tuple[Any, ...]]) -> dict[str, Any]:
    """Return the fields of a request that may have an effect; refuse unsupported fields."""
    try:
        sent = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise RequestError(400, f"the request cannot be read: {error}") from error
    if not isinstance(sent, dict):
        raise RequestError(400, f"a request must be a JSON object, got a {type(sent).__name__}")
    fields = {name: value for name, value in sent.items() if value is not None and name not in WITHOUT_EFFECT}
    for name in unsupported.keys() & fields.keys():
        value = fields.pop(name)
        if not any(value == neutral and type(value) is type(neutral) for neutral in unsupported[name]):
            remedy = _REMEDIES.get(name, "leave it out")
            raise RequestError(400, f"`{name}` is not supported here, got {short(value)}: {remedy}", param=name)
    return fields


def converted(fields: Mapping[str, Any], request_type: type[_Request]) -> _Request:
    """Return the typed request with these fields; raises RequestError if a field is wrong."""
    if unknown := sorted(fields.keys() - set(request_type.__struct_fields__)):
        raise RequestError(400, f"there is no field `{short(unknown[0])}` in this request", param=unknown[0][:100])
    try:
        request = msgspec.convert(fields, request_type)
    except msgspec.ValidationError as error:
        field = re.search(r"at `\$\.(\w+)", str(error))
        param = None if field is None else field[1]
        raise RequestError(400, f"the request cannot be read: {error}", param=param) from error
    request.check()
    return request


def _is_list_of(values: object, element_type: type) -> bool:
    return isinstance(values, list) and bool(values) and all(type(value) is element_type for value in values)


def short(value: object) -> str:
    """Return a value in at most about 100 characters, for an error."""
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= 100 else f"{text[:100]}..."
