"""The fields of a request that set the format of a text, or name tools."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta


class _NamedSchema(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    schema: dict[str, Any] | bool
    description: str | None = None
    strict: bool | None = None  # without effect: the schema is always followed exactly


class ResponseFormat(msgspec.Struct, forbid_unknown_fields=True):
    """The format of a text: `response_format` of OpenAI's API."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: _NamedSchema | None = None

    def __post_init__(self) -> None:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("`json_schema` must be set for the type 'json_schema', and for no other type")


class StructuredOutputs(msgspec.Struct, forbid_unknown_fields=True):
    """The grammar of a text: `structured_outputs` of vLLM's API."""

    json: str | dict[str, Any] | bool | None = None  # schema
    regex: str | None = None
    choice: Annotated[list[str], Meta(min_length=1)] | None = None
    grammar: str | None = None  # Lark, or GBNF of llama.cpp
    json_object: bool | None = None

    def __post_init__(self) -> None:
        values = (self.json, self.regex, self.choice, self.grammar, self.json_object or None)
        if sum(value is not None for value in values) != 1:
            raise ValueError("exactly one of `json`, `regex`, `choice`, `grammar` and `json_object` must be set")


class _Function(msgspec.Struct, forbid_unknown_fields=True):
    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.-]{1,64}\Z")]
    description: str | None = None
    parameters: dict[str, Any] | None = None  # schema; None: no arguments
    strict: bool | None = None  # unless True, unsupported keywords of the schema are ignored


class Tool(msgspec.Struct, forbid_unknown_fields=True):
    """A function that the model may call."""

    type: Literal["function"]
    function: _Function


class _FunctionName(msgspec.Struct, forbid_unknown_fields=True):
    name: str


class NamedFunction(msgspec.Struct, forbid_unknown_fields=True):
    """The choice of one function that the model must call."""

    type: Literal["function"]
    function: _FunctionName
