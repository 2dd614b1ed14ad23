"""Prompts of requests, as tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lightning_swarm.serving.http_fields import Chat, Completion, RequestError
from lightning_swarm.serving.http_messages import conversation
from lightning_swarm.serving.texts import ServedText
from lightning_swarm.serving.tool_calls import tools_of


@dataclass(frozen=True)
class Prompt:
    """A tokenized prompt."""

    encoded: dict[str, Any]  # `input_ids` and `attention_mask`, ``[1, tokens]``
    text: str  # empty if the client sent tokens, and no `echo`, which would repeat their text


def tokens_of_prompt(served: ServedText, fields: Completion, prompt: str | list[int]) -> Prompt:
    """Turn a prompt into tokens."""
    import torch

    if isinstance(prompt, list):
        num_tokens = served.model.config.get_text_config().vocab_size
        if not all(0 <= token < num_tokens for token in prompt):
            raise RequestError(400, f"a prompt's tokens must be 0..{num_tokens - 1}, as in the model", param="prompt")
        ids = torch.tensor([prompt])
        text = served.tokenizer.decode(prompt) if fields.echo else ""
        return Prompt({"input_ids": ids, "attention_mask": torch.ones_like(ids)}, text)
    served.check_text(len(prompt.encode()))
    special = True if fields.add_special_tokens is None else fields.add_special_tokens
    return Prompt(_model_inputs(served.tokenizer(prompt, return_tensors="pt", add_special_tokens=special)), prompt)


def tokens_of_chat(served: ServedText, fields: Chat) -> Prompt:
    """Turn a chat into tokens by the model's template."""
    if getattr(served.tokenizer, "chat_template", None) is None:
        raise RequestError(
            400,
            f"model {served.name!r} cannot chat, because it has no chat template. Send a prompt to /v1/completions",
        )
    messages, tools = conversation(fields.messages), tools_of(fields)
    served.check_text(sum(len(message["content"].encode()) for message in messages))
    if tools is not None and "tools" not in served.tokenizer.get_chat_template(tools=tools):
        raise RequestError(
            400,
            f"the chat template of model {served.name!r} supports no tools. Describe them in a message, and ask for "
            "JSON by `response_format`",
            param="tools",
        )
    try:
        text = served.tokenizer.apply_chat_template(
            messages,
            tools=tools,
            tokenize=False,
            add_generation_prompt=fields.add_generation_prompt,
            continue_final_message=fields.continue_final_message,
            **fields.chat_template_kwargs,
        )
    except Exception as error:
        raise RequestError(400, f"the model's chat template refuses this chat: {error}", param="messages") from error
    served.check_text(len(text.encode()))
    special = bool(fields.add_special_tokens)  # the template adds special tokens itself
    return Prompt(_model_inputs(served.tokenizer(text, return_tensors="pt", add_special_tokens=special)), text)


def _model_inputs(encoding: Any) -> dict[str, Any]:
    return {name: encoding[name] for name in ("input_ids", "attention_mask")}
