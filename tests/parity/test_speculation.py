"""Texts with drafts, of which several chunks are under way at once: each token is that of the model without drafts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers.generation.streamers import BaseStreamer

from lightning_swarm.client.inference.session import InferenceSession
from lightning_swarm.network import PeerId
from lightning_swarm.protocol.messages.inference import WINDOW
from lightning_swarm.serving.draft_policy import DraftPolicy
from lightning_swarm.serving.speculation import Speculation, _assisted
from tests.served import ServedSwarm, make_model

PROMPT = torch.tensor([[4, 11, 2, 9, 2, 6, 4, 11]])
NUM_NEW = 24
FAMILIES = ("llama", "gpt2", "gemma3", "bloom")  # unlike positions, windows and outputs of blocks


def num_under_way(session: InferenceSession) -> int:
    """Return the number of steps whose outputs have not come."""
    return session.num_steps - session._newest_output


class Swarm:
    """A served model, its client, and what its texts sent ahead."""

    def __init__(self, folder: Path, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        model.save_pretrained(folder)
        self.served = ServedSwarm(folder, num_stages=4)
        self.served.serve("a")
        for name in "bcde":
            self.served.serve(name, join="a", share=0.5)
        self.remote = self.served.connect()
        self.texts: list[Speculation] = []
        self.most_under_way = 0
        begin, made = InferenceSession.begin, Speculation.__init__

        def counted(session: InferenceSession, *args: Any) -> int:
            number = begin(session, *args)
            self.most_under_way = max(self.most_under_way, num_under_way(session))
            return number

        def noted(text: Speculation, *args: Any, **options: Any) -> None:
            made(text, *args, **options)
            self.texts.append(text)

        monkeypatch.setattr(InferenceSession, "begin", counted)
        monkeypatch.setattr(Speculation, "__init__", noted)

    @property
    def session(self) -> InferenceSession:
        sessions = self.served.clients[-1].served.forwards._sessions
        assert sessions is not None
        return next(reversed(sessions._open.values()))


@pytest.fixture
def serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Any], Swarm]]:
    swarms: list[Swarm] = []

    def make(model: Any) -> Swarm:
        swarms.append(Swarm(tmp_path, model, monkeypatch))
        return swarms[-1]

    # Chosen by measured seconds otherwise, which are short on a network in memory.
    monkeypatch.setattr(DraftPolicy, "num_ahead", 12)
    monkeypatch.setattr(DraftPolicy, "chunk", 2)
    yield make
    for swarm in swarms:
        swarm.served.close()


def write(model: Any, prompt: Tensor = PROMPT, **options: Any) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        own = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": NUM_NEW, "do_sample": False}
        return model.generate(prompt, **{**own, **options})


def half_right(model: Any) -> Any:
    """Return an assistant that foresees about half of a model's tokens."""
    assistant = make_model("llama")
    assistant.load_state_dict(model.state_dict())
    with torch.no_grad():
        assistant.lm_head.weight.add_(
            0.5 * assistant.lm_head.weight.std() * torch.randn(assistant.lm_head.weight.shape)
        )
    return assistant


@pytest.mark.first_cells(0, 1)
@pytest.mark.parametrize("family", FAMILIES)
def test_each_token_is_that_of_the_model_without_drafts(serve: Callable[[Any], Swarm], family: str) -> None:
    model, other = make_model(family), make_model(family, seed=1)
    swarm = serve(model)
    drafts = [{"prompt_lookup_num_tokens": 5}, {"assistant_model": model}, {"assistant_model": other}]
    rules: dict[str, Any]
    for options in drafts:
        for rules in ({}, {"do_sample": True, "top_k": 7}, {"repetition_penalty": 1.3}):
            found = write(swarm.remote, **options, **rules)
            assert torch.equal(found, write(model, **rules)), (options, rules)
    assert len(swarm.texts) == len(drafts) * 3
    assert 4 < swarm.most_under_way <= WINDOW


def test_tokens_that_no_draft_foresees_end_it_and_another_one_begins(serve: Callable[[Any], Swarm]) -> None:
    model = make_model("llama")
    swarm = serve(model)
    assert torch.equal(write(swarm.remote, assistant_model=half_right(model)), write(model))
    shares = [text.policy.acceptance for text in swarm.texts]
    crops = [one for step in swarm.session.log for one in step.operations if one.kind == "crop"]
    assert 0.1 < shares[0] < 0.95
    assert sum(bool(one.values[0]) for one in crops) > 2


class Noted(BaseStreamer):
    """Notes what processors, criteria and streamers get, in order."""

    def __init__(self) -> None:
        self.events: list[tuple[str, list[int]]] = []

    def process(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.events.append(("process", input_ids[0].tolist()))
        scores = scores.clone()
        scores[:, len(self.events) % 29] = -torch.inf  # depends on the number of calls
        return scores

    def stop(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        self.events.append(("stop", input_ids[0].tolist()))
        return torch.full((1,), input_ids.shape[1] >= PROMPT.shape[1] + 15)

    def put(self, value: Tensor) -> None:
        self.events.append(("put", value.flatten().tolist()))

    def end(self) -> None:
        self.events.append(("end", []))


@pytest.mark.parametrize("drafts", [{"prompt_lookup_num_tokens": 4}, {"assistant_model": None}], ids=["lookup", "own"])
def test_processors_criteria_and_streamers_see_each_token_once(
    serve: Callable[[Any], Swarm], drafts: dict[str, Any]
) -> None:
    model = make_model("llama")
    drafts = {"assistant_model": model} if "assistant_model" in drafts else drafts
    swarm = serve(model)
    found = []
    for one, options in ((swarm.remote, drafts), (model, {})):
        noted = Noted()
        result = write(
            one,
            logits_processor=[noted.process],
            stopping_criteria=[noted.stop],
            streamer=noted,
            return_dict_in_generate=True,
            output_scores=True,
            output_logits=True,
            **options,
        )
        found.append((noted.events, result))
    (events, result), (wanted_events, wanted) = found
    assert events == wanted_events
    assert torch.equal(result.sequences, wanted.sequences)
    torch.testing.assert_close(result.scores, wanted.scores)
    torch.testing.assert_close(result.logits, wanted.logits)
    assert result.past_key_values.get_seq_length() == wanted.past_key_values.get_seq_length()
    # The caches at the servers hold the text alone, whatever was under way at its end.
    assert swarm.most_under_way > 4
    mask = torch.ones_like(result.sequences)
    more = {"attention_mask": mask, "max_new_tokens": 4, "do_sample": False}
    onward = swarm.remote.generate(result.sequences, past_key_values=result.past_key_values, **more)
    assert torch.equal(onward, model.generate(wanted.sequences, **more))


def test_a_text_ends_at_its_end_token_or_string(serve: Callable[[Any], Swarm]) -> None:
    model = make_model("llama")
    swarm = serve(model)
    end = int(write(model)[0, PROMPT.shape[1] + 9])
    for options in ({"prompt_lookup_num_tokens": 4}, {"assistant_model": model}):
        found = write(swarm.remote, eos_token_id=[end], **options)
        assert torch.equal(found, write(model, eos_token_id=[end]))
        assert found[0, -1] == end
    config = transformers.GenerationConfig(max_new_tokens=7, prompt_lookup_num_tokens=4, pad_token_id=0)
    mask = torch.ones_like(PROMPT)
    found = swarm.remote.generate(PROMPT, config, attention_mask=mask)
    assert torch.equal(found, model.generate(PROMPT, attention_mask=mask, max_new_tokens=7))
    assert config.prompt_lookup_num_tokens == 4
    assert len(swarm.texts) == 3


def test_options_that_a_call_leaves_out_are_those_of_the_model(serve: Callable[[Any], Swarm]) -> None:
    """As Hugging Face does, even if the call has a config: here tokens that pad, which are masked, and the drafts."""
    model = make_model("llama")
    swarm = serve(model)
    padded = torch.cat([torch.zeros(1, 3, dtype=torch.long), PROMPT], dim=1)
    for one in (model, swarm.remote):
        one.generation_config.update(pad_token_id=0, eos_token_id=None)
    wanted = [model.generate(prompt, max_new_tokens=NUM_NEW) for prompt in (padded, PROMPT)]
    config = transformers.GenerationConfig(max_new_tokens=NUM_NEW, prompt_lookup_num_tokens=4)
    assert torch.equal(swarm.remote.generate(padded, generation_config=config), wanted[0])
    assert not swarm.texts
    swarm.remote.generation_config.prompt_lookup_num_tokens = 4
    config.prompt_lookup_num_tokens = None
    assert torch.equal(swarm.remote.generate(PROMPT, generation_config=config), wanted[1])
    assert len(swarm.texts) == 1


def test_an_assistant_goes_on_from_the_text_after_tokens_without_a_draft() -> None:
    model = make_model("llama")
    text = write(model, eos_token_id=[])
    draft, _ = _assisted(model, make_model("llama"), PROMPT, {}, 100)  # type: ignore[misc]
    with torch.no_grad():
        draft(torch.cat([text[:, :10], (text[:, 10:13] + 1) % 29], dim=1), 4)  # a draft that turns out wrong
        assert draft(text[:, :20], 6) == text[0, 20:26].tolist()


LEFT: dict[str, dict[str, Any]] = {
    "beams": {"num_beams": 2},
    "own cache": {"past_key_values": None},
    "served assistant": {"assistant_model": None},
    "padding": {"attention_mask": torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1]])},
}


def test_other_calls_are_left_to_hugging_face(serve: Callable[[Any], Swarm]) -> None:
    model = make_model("llama")
    swarm = serve(model)
    for name, own in LEFT.items():
        lookup = {"prompt_lookup_num_tokens": 4}
        drafts = {"assistant_model": swarm.remote} if name == "served assistant" else lookup
        assert torch.equal(write(swarm.remote, **{**own, **drafts}), write(model, **{**own, **lookup})), name
    with pytest.raises(ValueError, match="only supported for batch_size = 1"):
        write(swarm.remote, PROMPT.repeat(2, 1), **lookup)
    assert not swarm.texts
    # A processor that calls the model itself, with a cache of its own, does not disturb the draft.
    for own in ({"guidance_scale": 1.5}, {"prefill_chunk_size": 3}):
        assert torch.equal(write(swarm.remote, **own, **lookup), write(model, **own))
    assert len(swarm.texts) == 2


@pytest.mark.each_value
@pytest.mark.parametrize("mode", ["lookup", "right", "half right", "sampled"])
@pytest.mark.parametrize("victims", ["b", "bc", "a"])
def test_no_death_of_a_server_with_chunks_under_way_changes_a_token(
    serve: Callable[[Any], Swarm], mode: str, victims: str
) -> None:
    model = make_model("llama")
    swarm = serve(model)
    assistant = half_right(model) if mode == "half right" else model
    drafts: dict[str, Any] = {"prompt_lookup_num_tokens": 4} if mode == "lookup" else {"assistant_model": assistant}
    killed: list[int] = []

    def strike(input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        """Kill servers when several chunks are under way, as a stopping criterion, which runs between forwards."""
        if not killed and input_ids.shape[1] > PROMPT.shape[1] + 3 and num_under_way(swarm.session) > 2:
            killed.append(num_under_way(swarm.session))
            for name in victims:
                swarm.served.network.kill(PeerId(name))
        return torch.zeros(1, dtype=torch.bool)

    found = write(swarm.remote, stopping_criteria=[strike], do_sample=mode == "sampled", **drafts)
    assert killed, "no server was killed"
    assert torch.equal(found, write(model, do_sample=mode == "sampled"))
