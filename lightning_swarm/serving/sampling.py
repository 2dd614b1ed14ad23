"""Draws the next tokens of several texts: penalties, temperature and truncation (min-p, top-k, top-p), in vLLM's order.

Texts with a temperature are truncated and drawn in one batch. Each text has a random generator of its own, so its
tokens depend on its seed and not on the other texts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from lightning_swarm.serving.http_fields import RequestError, TextFields

if TYPE_CHECKING:
    from lightning_swarm.serving.grammar_masks import GrammarMask

_LEAST_TEMPERATURE: Final = 1e-5  # lower temperatures count as 0, as in vLLM, because the logits would overflow


@dataclasses.dataclass(frozen=True)
class Sampling:
    """A request's sampling parameters, completed by the model's defaults."""

    temperature: float
    top_p: float
    top_k: int  # 0: all tokens
    min_p: float
    repetition_penalty: float

    @classmethod
    def of(cls, fields: TextFields, config: Any) -> Sampling:
        """Complete a request's parameters by the model's generation config."""
        defaults = config.to_diff_dict()

        def value(name: str, neutral: float) -> Any:
            requested = getattr(fields, name)
            return requested if requested is not None else neutral if defaults.get(name) is None else defaults[name]

        temperature = value("temperature", 1.0)
        return cls(
            temperature=0.0 if temperature < _LEAST_TEMPERATURE else temperature,
            top_p=value("top_p", 1.0),
            top_k=max(0, value("top_k", 0)),
            min_p=value("min_p", 0.0),
            repetition_penalty=value("repetition_penalty", 1.0),
        )


def check_tokens(fields: TextFields, num_tokens: int) -> None:
    """Refuse token numbers that the model does not have."""
    for name, ids in [
        ("logit_bias", map(int, fields.logit_bias)),
        ("allowed_token_ids", fields.allowed_token_ids),
        ("stop_token_ids", fields.stop_token_ids),
    ]:
        if (largest := max(ids, default=0)) >= num_tokens:
            raise RequestError(400, f"the model has {num_tokens} tokens, got number {largest}", param=name)


class TextSampler:
    """The rules by which one text's tokens are drawn, with its random generator and its tokens so far.

    Args:
        fields: The request's fields.
        sampling: The request's sampling parameters.
        prompt: The prompt's tokens.
        ends: The tokens that end the text.
        seed: Seed of the draws; None: a random seed.
        mask: Excludes the tokens that break the text's grammar.

    Attributes:
        rules: Further rules, which change the logits ``[tokens]`` of the next token in place, before all other rules.
        logits: The newest token's logits after `rules`; None if no scores are requested.
    """

    def __init__(
        self,
        fields: TextFields,
        sampling: Sampling,
        *,
        prompt: Sequence[int],
        ends: Sequence[int],
        seed: int | None,
        mask: GrammarMask | None = None,
    ) -> None:
        self.sampling, self.mask = sampling, mask
        self._asked, self._prompt, self._ends = fields, prompt, list(ends)
        self.rules: Sequence[Callable[[Tensor], None]] = ()
        self.logits: Tensor | None = None
        self._new: list[int] = []
        self._biases = {int(token): bias for token, bias in fields.logit_bias.items()}
        self._penalizes = bool(fields.presence_penalty or fields.frequency_penalty)
        self._seen: Tensor | None = None  # whether each token is in prompt or text
        self._counts: Tensor | None = None  # number of times that each token is in the text
        self._generator = torch.Generator()
        if seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(seed & ((1 << 63) - 1))

    def restrict(self, row: Tensor) -> None:
        """Apply the rules that come before the temperature to the logits ``[tokens]`` of the next token, in place."""
        fields = self._asked
        for rule in self.rules:
            rule(row)
        self.logits = None if fields.num_logprobs is None else row.clone()
        if self.mask is not None:
            self.mask.restrict(row)
        if fields.allowed_token_ids:
            allowed = row[fields.allowed_token_ids].clone()
            row.fill_(float("-inf"))[fields.allowed_token_ids] = allowed
        if self._biases:
            row[list(self._biases)] += torch.tensor(list(self._biases.values()), dtype=row.dtype, device=row.device)
        if self._ends and len(self._new) < fields.min_tokens:
            row[self._ends] = float("-inf")
        if (penalty := self.sampling.repetition_penalty) != 1.0:
            if self._seen is None:
                self._seen = torch.zeros(len(row), dtype=torch.bool, device=row.device)
                self._seen[[*self._prompt, *self._new]] = True
            row.copy_(torch.where(self._seen, torch.where(row < 0, row * penalty, row / penalty), row))
        if self._penalizes:
            if self._counts is None:
                self._counts = torch.bincount(torch.tensor(self._new, dtype=torch.long), minlength=len(row))
                self._counts = self._counts.to(row.device)
            row -= fields.presence_penalty * (self._counts > 0)
            row -= fields.frequency_penalty * self._counts

    def noise(self, num_tokens: int) -> Tensor:
        """Return exponential noise ``[tokens]`` in float64 for one draw."""
        return torch.empty(num_tokens, dtype=torch.float64).exponential_(generator=self._generator)

    def add(self, token: int) -> None:
        """Append a token to the text."""
        self._new.append(token)
        if self._seen is not None:
            self._seen[token] = True
        if self._counts is not None:
            self._counts[token] += 1
        if self.mask is not None:
            self.mask.add(token)


def draw(scores: Tensor, samplers: Sequence[TextSampler]) -> list[int | Exception]:
    """Return each text's next token, or the error of its rules.

    `scores` are the logits ``[texts, tokens]`` in float32, which are overwritten.
    """
    errors: dict[int, Exception] = {}
    for index, sampler in enumerate(samplers):
        try:
            sampler.restrict(scores[index])
        except Exception as error:  # noqa: BLE001 - it concerns this text alone
            errors[index] = error
    drawn = [index for index, text in enumerate(samplers) if text.sampling.temperature and index not in errors]
    if drawn:
        drawing = [samplers[index] for index in drawn]
        rows = scores if len(drawn) == len(scores) else scores[drawn]
        rows = _truncated(rows, [sampler.sampling for sampler in drawing])
        # With Gumbel noise on the logits, the position of the largest is a draw from their softmax.
        noise = torch.stack([sampler.noise(scores.shape[1]) for sampler in drawing]).log_().neg_()
        scores[drawn] = rows + noise.to(rows.device, rows.dtype)
    tokens = scores.argmax(dim=-1).tolist()
    return [errors.get(index, token) for index, token in enumerate(tokens)]


def _truncated(scores: Tensor, samplings: Sequence[Sampling]) -> Tensor:
    """Divide rows of logits by their temperatures, and exclude tokens by their min-p, top-k and top-p, as transformers.

    Source: ``transformers.generation.logits_process``, where all rows have the same values.
    """

    def apply(has: Callable[[Sampling], bool], cut: Callable[[Tensor, Sequence[Sampling]], Tensor]) -> None:
        """Exclude the tokens that `cut` marks, in the rows for which `has` holds."""
        nonlocal scores
        rows = [index for index, sampling in enumerate(samplings) if has(sampling)]
        if len(rows) == len(samplings):
            scores = scores.masked_fill(cut(scores, samplings), float("-inf"))
        elif rows:
            part = scores[rows]
            excluded = cut(part, [samplings[index] for index in rows])
            scores = scores.index_copy(
                0, torch.tensor(rows, device=scores.device), part.masked_fill(excluded, float("-inf"))
            )

    if any(sampling.temperature != 1.0 for sampling in samplings):
        scores = scores / _column([sampling.temperature for sampling in samplings], scores)
    apply(lambda sampling: sampling.min_p > 0.0, _below_min_p)
    apply(lambda sampling: sampling.top_k > 0, _below_top_k)
    apply(lambda sampling: sampling.top_p < 1.0, _beyond_top_p)
    return scores


def _column(values: Sequence[float], scores: Tensor) -> Tensor:
    return torch.tensor(values, dtype=scores.dtype, device=scores.device).unsqueeze(1)


def _below_min_p(scores: Tensor, samplings: Sequence[Sampling]) -> Tensor:
    probabilities = scores.softmax(dim=-1)
    least = _column([sampling.min_p for sampling in samplings], scores) * probabilities.amax(dim=-1, keepdim=True)
    return probabilities < least


def _below_top_k(scores: Tensor, samplings: Sequence[Sampling]) -> Tensor:
    numbers = [min(sampling.top_k, scores.shape[1]) for sampling in samplings]
    best = scores.topk(max(numbers), dim=-1).values
    return scores < best.gather(1, torch.tensor(numbers, device=scores.device).unsqueeze(1) - 1)


def _beyond_top_p(scores: Tensor, samplings: Sequence[Sampling]) -> Tensor:
    ascending, places = scores.sort(dim=-1)
    tails = _column([1 - sampling.top_p for sampling in samplings], scores)
    excluded = ascending.softmax(dim=-1).cumsum(dim=-1) <= tails
    excluded[:, -1] = False
    return torch.zeros_like(excluded).scatter(1, places, excluded)
