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
    """A prompt's tokens, and its text. Tokens that a client sends have an empty text, unless the answer repeats it."""

    tokens: dict[str, Any]
    text: str


def tokens_of_prompt(served: ServedText, asked: Completion, prompt: str | list[int]) -> Prompt:
    """Turn a prompt into tokens."""
    import torch

    if isinstance(prompt, list):
        number = served.model.config.get_text_config().vocab_size
        if not all(0 <= token < number for token in prompt):
            raise RequestError(400, f"a prompt's tokens are below {number}, the model's number of them", param="prompt")
        ids = torch.tensor([prompt])
        text = served.tokenizer.decode(prompt) if asked.echo else ""
        return Prompt({"input_ids": ids, "attention_mask": torch.ones_like(ids)}, text)
    served.check_text(len(prompt.encode()))
    special = True if asked.add_special_tokens is None else asked.add_special_tokens
    return Prompt(_both(served.tokenizer(prompt, return_tensors="pt", add_special_tokens=special)), prompt)


def tokens_of_chat(served: ServedText, asked: Chat) -> Prompt:
    """Turn a chat into tokens by the model's template."""
    if getattr(served.tokenizer, "chat_template", None) is None:
        raise RequestError(
            400,
            f"model {served.name!r} has no chat template, so it takes no chats. Use /v1/completions, with a prompt.",
        )
    said, tools = conversation(asked.messages), tools_of(asked)
    served.check_text(sum(len(one["content"].encode()) for one in said))
    if tools is not None and "tools" not in served.tokenizer.get_chat_template(tools=tools):
        raise RequestError(
            400,
            f"the chat template of model {served.name!r} shows it no tools. Describe them in a message, and ask for "
            "JSON by `response_format`",
            param="tools",
        )
    try:
        text = served.tokenizer.apply_chat_template(
            said,
            tools=tools,
            tokenize=False,
            add_generation_prompt=asked.add_generation_prompt,
            continue_final_message=asked.continue_final_message,
            **asked.chat_template_kwargs,
        )
    except Exception as error:
        raise RequestError(400, f"the model's chat template refuses this chat: {error}", param="messages") from error
    served.check_text(len(text.encode()))
    special = bool(asked.add_special_tokens)  # the template adds special tokens itself
    return Prompt(_both(served.tokenizer(text, return_tensors="pt", add_special_tokens=special)), text)


def _both(found: Any) -> dict[str, Any]:
    return {name: found[name] for name in ("input_ids", "attention_mask")}
