"""Tokens of several texts drawn together: each row is that of transformers' own processors, in vLLM's order."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from lightning_swarm.serving.http_fields import TextFields
from lightning_swarm.serving.sampling import Sampling, TextSampler, _truncated, draw

NUM_TOKENS = 50
PROMPT = [3, 4, 4, 9]
ENDS = [1, 2]


def random_fields(rng: random.Random) -> dict[str, Any]:
    """Choose values of about half of the sampling fields."""
    fields: dict[str, Any] = {
        "temperature": rng.choice([0.0, 0.7, 1.0, 3.0]),
        "top_p": rng.choice([0.3, 0.9]),
        "top_k": rng.choice([1, 5, 500]),
        "min_p": rng.choice([0.02, 0.5, 1.0]),
        "repetition_penalty": rng.choice([0.5, 1.7]),
        "presence_penalty": rng.choice([-1.0, 1.5]),
        "frequency_penalty": rng.choice([-0.5, 2.0]),
        "logit_bias": {"7": 4.0, "30": -9.0},
        "allowed_token_ids": [1, 7, *range(20, 40)],
        "min_tokens": rng.choice([1, 9]),
    }
    return {name: value for name, value in fields.items() if rng.random() < 0.5}


def sampler_of(seed: int, **fields: Any) -> TextSampler:
    asked = TextFields(**fields)
    sampling = Sampling.of(asked, transformers.GenerationConfig())
    return TextSampler(asked, sampling, prompt=PROMPT, ends=ENDS, seed=seed)


def theirs(fields: dict[str, Any], new: list[int], scores: Tensor) -> Tensor:
    """Return a row's logits by transformers' processors, before the draw."""
    asked, ids = TextFields(**fields), torch.tensor([[*PROMPT, *new]])
    own: list[Any] = []
    if asked.allowed_token_ids:
        own.append(transformers.PrefixConstrainedLogitsProcessor(lambda *_: asked.allowed_token_ids, num_beams=1))
    if asked.logit_bias:
        biases: Any = [[[int(token)], bias] for token, bias in asked.logit_bias.items()]
        own.append(transformers.SequenceBiasLogitsProcessor(biases))
    if asked.min_tokens:
        own.append(transformers.MinNewTokensLengthLogitsProcessor(len(PROMPT), asked.min_tokens, ENDS))
    if asked.repetition_penalty:
        own.append(transformers.RepetitionPenaltyLogitsProcessor(asked.repetition_penalty))
    scores = transformers.LogitsProcessorList(own)(ids, scores.unsqueeze(0))
    counts = torch.bincount(torch.tensor(new, dtype=torch.long), minlength=NUM_TOKENS)
    scores = scores - asked.presence_penalty * (counts > 0) - asked.frequency_penalty * counts
    if asked.temperature == 0.0:
        return scores[0]
    own = [transformers.TemperatureLogitsWarper(1.0 if asked.temperature is None else asked.temperature)]
    own += [transformers.MinPLogitsWarper(asked.min_p)] if asked.min_p else []
    own += [transformers.TopKLogitsWarper(asked.top_k)] if asked.top_k else []
    own += [transformers.TopPLogitsWarper(asked.top_p)] if asked.top_p is not None else []
    return transformers.LogitsProcessorList(own)(ids, scores)[0]


@pytest.mark.parametrize("seed", range(30))
def test_each_row_is_that_of_transformers_processors(seed: int) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    fields = [random_fields(rng) for _ in range(6)]
    samplers = [sampler_of(index, **own) for index, own in enumerate(fields)]
    texts: list[list[int]] = [[] for _ in fields]
    for _ in range(5):
        logits = 4 * torch.randn(len(fields), NUM_TOKENS)
        tokens = draw(logits.clone(), samplers)
        for index, (token, sampler) in enumerate(zip(tokens, samplers, strict=True)):
            assert isinstance(token, int)
            wanted = theirs(fields[index], texts[index], logits[index])
            if fields[index].get("temperature") == 0.0:
                assert token == int(wanted.argmax())
            else:
                assert wanted[token] > float("-inf")
            texts[index].append(token)
            sampler.add(token)
    last = 4 * torch.randn(len(fields), NUM_TOKENS)
    rows = last.clone()
    for row, sampler in zip(rows, samplers, strict=True):
        sampler.restrict(row)
    drawn = [index for index, sampler in enumerate(samplers) if sampler.sampling.temperature]
    truncated = _truncated(rows[drawn], [samplers[index].sampling for index in drawn])
    for row, index in zip(truncated, drawn, strict=True):
        assert torch.equal(row, theirs(fields[index], texts[index], last[index])), fields[index]


def test_draws_do_not_depend_on_other_texts() -> None:
    torch.manual_seed(0)
    logits = torch.randn(3, NUM_TOKENS)

    def samplers() -> list[TextSampler]:
        return [sampler_of(index, temperature=2.0, top_p=0.9 if index else 1.0) for index in range(3)]

    together = [draw(logits.clone(), own) for own in [samplers()] for _ in range(20)]
    alone = [
        [draw(logits[index : index + 1].clone(), [own])[0] for _ in range(20)] for index, own in enumerate(samplers())
    ]
    assert [list(row) for row in zip(*together, strict=True)] == alone
    assert len({*alone[0]}) > 5


def test_an_error_concerns_its_own_text() -> None:
    bad, good = sampler_of(0, temperature=0.0), sampler_of(0, temperature=0.0)

    def fail(_: Tensor) -> None:
        raise ValueError("a rule fails")

    bad.rules = [fail]
    error, token = draw(torch.eye(2, NUM_TOKENS), [bad, good])
    assert isinstance(error, ValueError)
    assert token == 1


@pytest.mark.parametrize("temperature", [1e-6, 1e-320])
def test_a_temperature_near_zero_draws_the_likeliest_token(temperature: float) -> None:
    scores = torch.arange(1.0, NUM_TOKENS + 1).unsqueeze(0)
    assert draw(scores, [sampler_of(0, temperature=temperature)]) == [NUM_TOKENS - 1]
