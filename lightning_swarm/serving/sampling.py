"""Draws the next tokens of several texts: penalties, temperature and truncation (min-p, top-k, top-p), in vLLM's order.

Texts with a temperature are truncated and drawn in one batch. Each text draws by a generator of its own, so its tokens
depend on its seed and not on the other texts.
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

_LEAST_TEMPERATURE: Final = 1e-5  # lower ones count as 0, as in vLLM, because the logits would overflow


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

        temperature = value("temperature", 1.0)
        return cls(
            temperature=0.0 if temperature < _LEAST_TEMPERATURE else temperature,
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


class TextSampler:
    """The rules by which one text's tokens are drawn, with its random generator and its tokens so far.

    Args:
        asked: The request.
        sampling: The request's sampling parameters.
        prompt: The prompt's tokens.
        ends: The tokens that end the text.
        seed: Seed of the draws; None: a new seed each time.
        mask: Excludes the tokens that break the text's grammar.

    Attributes:
        rules: Further rules, which change the logits ``[tokens]`` of the next token in place, before all others.
        logits: The newest token's logits after `rules`; None if no scores are requested.
    """

    def __init__(
        self,
        asked: TextFields,
        sampling: Sampling,
        *,
        prompt: Sequence[int],
        ends: Sequence[int],
        seed: int | None,
        mask: GrammarMask | None = None,
    ) -> None:
        self.sampling, self.mask = sampling, mask
        self._asked, self._prompt, self._ends = asked, prompt, list(ends)
        self.rules: Sequence[Callable[[Tensor], None]] = ()
        self.logits: Tensor | None = None
        self._new: list[int] = []
        self._biases = {int(token): bias for token, bias in asked.logit_bias.items()}
        self._penalizes = bool(asked.presence_penalty or asked.frequency_penalty)
        self._seen: Tensor | None = None  # whether each token is in prompt or text
        self._counts: Tensor | None = None  # number of times that each token is in the text
        self._generator = torch.Generator()
        if seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(seed & ((1 << 63) - 1))

    def restrict(self, row: Tensor) -> None:
        """Apply the rules that come before the temperature to the logits ``[tokens]`` of the next token, in place."""
        asked = self._asked
        for rule in self.rules:
            rule(row)
        self.logits = None if asked.num_logprobs is None else row.clone()
        if self.mask is not None:
            self.mask.restrict(row)
        if asked.allowed_token_ids:
            allowed = row[asked.allowed_token_ids].clone()
            row.fill_(float("-inf"))[asked.allowed_token_ids] = allowed
        if self._biases:
            row[list(self._biases)] += torch.tensor(list(self._biases.values()), dtype=row.dtype, device=row.device)
        if self._ends and len(self._new) < asked.min_tokens:
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
            row -= asked.presence_penalty * (self._counts > 0)
            row -= asked.frequency_penalty * self._counts

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
    drawn = [index for index, one in enumerate(samplers) if one.sampling.temperature and index not in errors]
    if drawn:
        own = [samplers[index] for index in drawn]
        rows = _truncated(scores if len(drawn) == len(scores) else scores[drawn], [one.sampling for one in own])
        # The largest of the logits with Gumbel noise is a token drawn by their softmax.
        noise = torch.stack([one.noise(scores.shape[1]) for one in own]).log_().neg_()
        scores[drawn] = rows + noise.to(rows.device, rows.dtype)
    tokens = scores.argmax(dim=-1).tolist()
    return [errors.get(index, token) for index, token in enumerate(tokens)]


def _truncated(scores: Tensor, samplings: Sequence[Sampling]) -> Tensor:
    """Divide rows of logits by their temperatures, and exclude tokens by their min-p, top-k and top-p, as transformers.

    Source: ``transformers.generation.logits_process``, for one value for all rows.
    """

    def apply(has: Callable[[Sampling], bool], cut: Callable[[Tensor, Sequence[Sampling]], Tensor]) -> None:
        """Exclude the tokens that `cut` finds, in the rows that have such a rule."""
        nonlocal scores
        rows = [index for index, one in enumerate(samplings) if has(one)]
        if len(rows) == len(samplings):
            scores = scores.masked_fill(cut(scores, samplings), float("-inf"))
        elif rows:
            part = scores[rows]
            excluded = cut(part, [samplings[index] for index in rows])
            scores = scores.index_copy(
                0, torch.tensor(rows, device=scores.device), part.masked_fill(excluded, float("-inf"))
            )

    if any(one.temperature != 1.0 for one in samplings):
        scores = scores / _column([one.temperature for one in samplings], scores)
    apply(lambda one: one.min_p > 0.0, _below_min_p)
    apply(lambda one: one.top_k > 0, _below_top_k)
    apply(lambda one: one.top_p < 1.0, _beyond_top_p)
    return scores


def _column(values: Sequence[float], scores: Tensor) -> Tensor:
    return torch.tensor(values, dtype=scores.dtype, device=scores.device).unsqueeze(1)


def _below_min_p(scores: Tensor, samplings: Sequence[Sampling]) -> Tensor:
    probabilities = scores.softmax(dim=-1)
    least = _column([one.min_p for one in samplings], scores) * probabilities.amax(dim=-1, keepdim=True)
    return probabilities < least


def _below_top_k(scores: Tensor, samplings: Sequence[Sampling]) -> Tensor:
    numbers = [min(one.top_k, scores.shape[1]) for one in samplings]
    best = scores.topk(max(numbers), dim=-1).values
    return scores < best.gather(1, torch.tensor(numbers, device=scores.device).unsqueeze(1) - 1)


def _beyond_top_p(scores: Tensor, samplings: Sequence[Sampling]) -> Tensor:
    ascending, places = scores.sort(dim=-1)
    excluded = ascending.softmax(dim=-1).cumsum(dim=-1) <= _column([1 - one.top_p for one in samplings], scores)
    excluded[:, -1] = False
    return torch.zeros_like(excluded).scatter(1, places, excluded)
