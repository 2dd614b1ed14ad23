"""Draws a text's tokens after penalties, temperature and truncation (min-p, top-k, top-p), in vLLM's order."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
import transformers
from torch import Tensor

from lightning_swarm.serving.http_fields import RequestError, TextFields


@dataclasses.dataclass(frozen=True)
class Sampling:
    """A request's sampling parameters, with the model's defaults where it has none."""

    temperature: float
    top_p: float
    top_k: int  # 0: all tokens
    min_p: float
    repetition_penalty: float

    @classmethod
    def of(cls, asked: TextFields, config: Any) -> Sampling:
        """Complete a request's parameters by the model's generation config."""
        own = config.to_diff_dict()

        def value(name: str, neutral: float) -> Any:
            given = getattr(asked, name)
            return given if given is not None else neutral if own.get(name) is None else own[name]

        return cls(
            temperature=value("temperature", 1.0),
            top_p=value("top_p", 1.0),
            top_k=max(0, value("top_k", 0)),
            min_p=value("min_p", 0.0),
            repetition_penalty=value("repetition_penalty", 1.0),
        )


def check_tokens(asked: TextFields, num_tokens: int) -> None:
    """Refuse token numbers that the model does not have."""
    for name, ids in [
        ("logit_bias", map(int, asked.logit_bias)),
        ("allowed_token_ids", asked.allowed_token_ids),
        ("stop_token_ids", asked.stop_token_ids),
    ]:
        if (largest := max(ids, default=0)) >= num_tokens:
            raise RequestError(400, f"the model has {num_tokens} tokens, got number {largest}", param=name)


def processors(
    asked: TextFields,
    sampling: Sampling,
    *,
    prompt: int,
    ends: Sequence[int],
    seed: int | None,
    see: Callable[[Tensor], None],
    mask: transformers.LogitsProcessor | None = None,
    device: torch.device,
) -> list[Any]:
    """Return the logits processors after which the largest logit of a row is the drawn token.

    Args:
        asked: The request.
        sampling: The request's sampling parameters.
        prompt: Number of the prompt's tokens.
        ends: The tokens that end the text.
        seed: Seed of the draws; None: a new seed each time.
        see: Called with the logits of each token as the model computed them.
        mask: Excludes the tokens that break the text's grammar.
        device: Device of the logits.
    """
    found: list[Any] = [_Seen(see), *([] if mask is None else [mask])]
    if asked.allowed_token_ids:
        allowed = asked.allowed_token_ids
        found.append(transformers.PrefixConstrainedLogitsProcessor(lambda *_: allowed, num_beams=1))
    if asked.logit_bias:
        biases: list[Any] = [[[int(token)], bias] for token, bias in asked.logit_bias.items()]
        found.append(transformers.SequenceBiasLogitsProcessor(biases))
    if asked.min_tokens and ends:
        least = transformers.MinNewTokensLengthLogitsProcessor(prompt, asked.min_tokens, list(ends), device=str(device))
        found.append(least)
    if sampling.repetition_penalty != 1.0:
        found.append(transformers.RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    if asked.presence_penalty or asked.frequency_penalty:
        found.append(_Penalized(prompt, asked.presence_penalty, asked.frequency_penalty))
    if sampling.temperature == 0.0:
        return found
    if sampling.temperature != 1.0:
        found.append(transformers.TemperatureLogitsWarper(float(sampling.temperature)))
    if sampling.min_p:
        found.append(transformers.MinPLogitsWarper(sampling.min_p))
    if sampling.top_k:
        found.append(transformers.TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1.0:
        found.append(transformers.TopPLogitsWarper(sampling.top_p))
    return [*found, _Noise(seed)]


class _Seen(transformers.LogitsProcessor):
    """Passes each token's logits to a function, before other processors change them."""

    def __init__(self, see: Callable[[Tensor], None]) -> None:
        self._see = see

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        self._see(scores[0])
        return scores


class _Penalized(transformers.LogitsProcessor):
    """Penalizes tokens of the text so far, as OpenAI does: once for their presence, and again for each occurrence."""

    def __init__(self, prompt: int, presence: float, frequency: float) -> None:
        self._prompt, self._presence, self._frequency = prompt, presence, frequency

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        counts = torch.bincount(input_ids[0, self._prompt :], minlength=scores.shape[1]).to(scores.device)
        return scores - self._presence * (counts > 0) - self._frequency * counts


class _Noise(transformers.LogitsProcessor):
    """Draws tokens by the text's own generator, because several threads write texts at the same time."""

    def __init__(self, seed: int | None) -> None:
        self._generator = torch.Generator()
        if seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(seed & ((1 << 63) - 1))

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        # The largest of the logits with Gumbel noise is a token drawn by their softmax.
        noise = torch.empty(scores.shape, dtype=torch.float64).exponential_(generator=self._generator).log().neg()
        return scores + noise.to(scores.device, scores.dtype)
