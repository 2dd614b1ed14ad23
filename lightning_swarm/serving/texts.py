"""Texts that a served model writes for an endpoint, piece by piece."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Collection, Hashable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Final

from lightning_swarm.serving.http_fields import RequestError, TextFields
from lightning_swarm.serving.pieces import StopFinder, TextPiece, TokenScore

if TYPE_CHECKING:
    from lightning_swarm.serving.grammar_masks import GrammarCompiler, NewMask
    from lightning_swarm.serving.growing_text import GrowingText, TextListener
    from lightning_swarm.serving.text_scheduler import TextScheduler

_CONTEXT: Final = 4  # last tokens of the prompt, decoded together with the first new tokens
_MAX_SCORED: Final = 2048  # largest number of tokens of a prompt whose logprobs are reported
_MAX_UNREAD: Final = 4096  # pieces of a text that wait for its client
_UNLIMITED: Final = 1 << 24  # positions; tokenizers without a limit report a huge number


def end_tokens(config: Any) -> list[int]:
    """Return the tokens that end a text, according to a model's generation config."""
    ends = config.eos_token_id
    return [] if ends is None else [ends] if isinstance(ends, int) else list(ends)


@dataclass(frozen=True)
class ServedText:
    """A served model and its tokenizer, as an endpoint uses them."""

    name: str
    model: Any
    tokenizer: Any
    tool_parser: str | None = None  # format of tool calls, by its name in `FORMATS`; None: found by the chat template
    parent: str | None = None  # name of the model whose adapter this is

    @cached_property
    def scheduler(self) -> TextScheduler:
        """Writes the model's texts."""
        from lightning_swarm.serving import remote_model
        from lightning_swarm.serving.joint_forward import JointForward
        from lightning_swarm.serving.model_traits import positions_depend_on_length
        from lightning_swarm.serving.text_scheduler import TextScheduler

        client = getattr(self.model, "swarm", None)
        return TextScheduler(
            JointForward(None if client is None else client.served),
            part_tokens=remote_model.prefill_chunk(self.model),
            step_tokens=partial(remote_model.step_tokens, self.model),
            # Texts whose position tables depend on their present length are written one after the other.
            max_texts=1 if positions_depend_on_length(self.model) else None,
        )

    def new_text(
        self,
        encoded: Mapping[str, Any],
        fields: TextFields,
        prompt: Sequence[int],
        grammar: NewMask | None,
        listener: TextListener,
        *,
        num_new: int,
        choice: int,
        scope: Hashable = "",
    ) -> GrowingText:
        """Return a text for the scheduler; `encoded` is the tokenized prompt, and `fields` are the request's."""
        from lightning_swarm.serving.growing_text import GrowingText
        from lightning_swarm.serving.sampling import Sampling, TextSampler

        config = self.model.generation_config
        ends = [*end_tokens(config), *fields.stop_token_ids]
        sampler = TextSampler(
            fields,
            Sampling.of(fields, config),
            prompt=prompt,
            ends=ends,
            seed=None if fields.seed is None else fields.seed + choice,
            mask=None if grammar is None else grammar(),
        )
        # `generate` must not draw or penalize: the sampler does, in vLLM's order.
        options = {"num_beams": 1, "num_return_sequences": 1, "do_sample": False, "repetition_penalty": 1.0}
        make = partial(GrowingText, self.model, encoded, options, sampler, listener)
        return make(num_new=num_new, ends=ends, is_exact=fields.exact, scope=scope)

    @cached_property
    def context(self) -> int | None:
        """The maximum number of tokens of a prompt and its text together. None: no limit."""
        longest = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        if not isinstance(longest, int):
            longest = getattr(self.tokenizer, "model_max_length", None)
        limits = [longest] if isinstance(longest, int) and longest < _UNLIMITED else []
        if getattr(self.model.generation_config, "use_cache", True) is False:  # each step computes the whole text
            from lightning_swarm.serving.remote_model import step_tokens

            limits.append(step_tokens(self.model))
        return min(limits, default=None)

    @cached_property
    def longest_token(self) -> int:
        """The maximum number of bytes of a token, for a lower bound on a prompt's number of tokens."""
        return max((len(token.encode()) for token in self.tokenizer.get_vocab()), default=1)

    @cached_property
    def special_tokens(self) -> frozenset[int]:
        """The tokens that decoding leaves out of a text, unless the request asks for them."""
        return frozenset(number for number, token in self.tokenizer.added_tokens_decoder.items() if token.special)

    @cached_property
    def grammars(self) -> GrammarCompiler:
        """The compiler of grammars for the model's tokens. Raises RequestError if the model can follow none."""
        from lightning_swarm.serving.grammar_masks import GrammarCompiler

        num_tokens = self.model.config.get_text_config().vocab_size
        return GrammarCompiler(self.tokenizer, num_tokens=num_tokens, ends=end_tokens(self.model.generation_config))

    def check_text(self, num_bytes: int) -> None:
        """Refuse, before tokenizing, a prompt whose bytes alone show that it exceeds the context."""
        if self.context is not None and num_bytes > self.context * max(16, self.longest_token):
            self._refuse(f"a prompt of {num_bytes} bytes")

    def num_new(self, num_prompt: int, requested: int | None) -> int:
        """Return the maximum number of new tokens: the requested number, or as many as fit into the context."""
        if num_prompt == 0:
            raise RequestError(400, "a prompt must have at least one token, got none", param="prompt")
        default: int | None = getattr(self.model.generation_config, "max_new_tokens", None)
        if self.context is None:
            num_new = default if requested is None else requested
            if num_new is None:
                text = f"model {self.name!r} sets no limit on the length of texts. Set `max_tokens`"
                raise RequestError(400, text, param="max_tokens")
            return num_new
        left = self.context - num_prompt
        if left < (1 if requested is None else requested):
            limit = "" if requested is None else f" and `max_tokens` {requested}"
            self._refuse(f"{num_prompt} of the prompt{limit}")
        return min(left, default or left) if requested is None else requested

    def check_scored(self, num_prompt: int) -> None:
        """Refuse to score a long prompt, because the logits of all its positions are in memory at once."""
        if num_prompt > _MAX_SCORED:
            text = f"`echo` with `logprobs` is for prompts of at most {_MAX_SCORED} tokens, got {num_prompt}"
            raise RequestError(400, text, param="echo")

    def _refuse(self, what: str) -> None:
        raise RequestError(
            400,
            f"this model's texts have at most {self.context} tokens, got {what}. Ask for fewer",
            code="context_length_exceeded",
        )


class PromptScores:
    """The scores of a prompt's tokens, computed once for all of its choices."""

    def __init__(self, served: ServedText, encoded: Mapping[str, Any], num_top: int) -> None:
        self._served, self._encoded, self._num_top = served, encoded, num_top
        self._lock = threading.Lock()
        self._scores: Future[list[TokenScore]] = Future()

    def get(self) -> list[TokenScore]:
        """Return the scores, or raise the error of their computation, which runs on the first caller's thread."""
        with self._lock:
            if not self._scores.done():
                try:
                    self._scores.set_result(self._compute())
                except Exception as error:  # noqa: BLE001 - each choice raises it
                    self._scores.set_exception(error)
        return self._scores.result()

    def _compute(self) -> list[TokenScore]:
        import torch

        with torch.no_grad():
            logits = self._served.model(**self._encoded, use_cache=False).logits[0]
        return [
            TokenScore.of(self._served.tokenizer, token, row, self._num_top)
            for token, row in zip(self._encoded["input_ids"][0].tolist(), [None, *logits[:-1]], strict=True)
        ]


class TextWriter:
    """Streams one text, piece by piece, from the scheduler's threads to the event loop. It ends soon after `abort`."""

    def __init__(
        self,
        served: ServedText,
        encoded: Mapping[str, Any],
        fields: TextFields,
        *,
        num_new: int,
        prompt: str = "",  # the prompt's text
        choice: int = 0,  # index among the choices of the prompt
        prompt_scores: PromptScores | None = None,  # None: not requested
        grammar: NewMask | None = None,
        scope: Hashable = "",  # only texts of the same scope share prefixes
        kept_tokens: Collection[int] = (),  # special tokens that are part of the text
        on_end: Callable[[], None] = lambda: None,  # called on the event loop when the text has ended
    ) -> None:
        self._on_end = on_end
        self.served, self.fields = served, fields
        self.prompt, self._prompt_scores = prompt, prompt_scores
        self.kept_tokens = kept_tokens
        self.is_cancelled = self.is_done = False
        self._pieces: asyncio.Queue[TextPiece] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self.num_prompt = int(encoded["input_ids"].shape[1])
        self.num_tokens = 0  # new tokens so far
        self.num_cached = 0  # tokens of the prompt that servers had computed before
        self._scores: list[TokenScore] = []  # scores of tokens whose text was not passed on yet
        tokens = encoded["input_ids"][0].tolist()
        self._text = _TokenText(self, tokens[-_CONTEXT:])
        text = served.new_text(encoded, fields, tokens, grammar, self, num_new=num_new, choice=choice, scope=scope)
        served.scheduler.submit(text)

    def abort(self) -> None:
        """Stop writing: no further step is computed."""
        self.is_cancelled = True

    async def pieces(self) -> AsyncIterator[TextPiece]:
        """Yield the text in pieces as it is written; the last piece has the finish reason."""
        finder = StopFinder(self.fields.stops, keeps=self.fields.include_stop_str_in_output)
        scores: list[TokenScore] = []
        if self.fields.echo:
            yield TextPiece(self.prompt, scores=(await self._next()).scores if self._prompt_scores else ())
        while True:
            piece = await self._next()
            scores += piece.scores
            if piece.finish_reason is not None:
                yield TextPiece(finder.rest(), piece.finish_reason, scores=scores)
                return
            text = finder.take(piece.text)
            if finder.has_stop:
                self.abort()
                yield TextPiece(text, "stop", scores=scores)
                return
            if text:
                yield TextPiece(text, scores=scores)
                scores = []

    async def _next(self) -> TextPiece:
        piece = await self._pieces.get()
        if piece.error is not None:
            raise piece.error
        return piece

    # ------------------------------------------------------------------ on the scheduler's threads

    def begin(self) -> None:
        """Score the prompt, if requested."""
        if self._prompt_scores is not None:
            self._put(TextPiece(scores=self._prompt_scores.get()))

    def add(self, token: int, logits: Any) -> None:
        """Pass a token's text on, with its score."""
        if self.fields.num_logprobs is not None:
            self._scores.append(TokenScore.of(self.served.tokenizer, token, logits, self.fields.num_logprobs))
        self.num_tokens += 1
        if text := self._text.add(token):
            self._put(TextPiece(text, scores=self._take_scores()))

    def end(self, *, is_complete: bool, error: BaseException | None) -> None:
        """Pass on the rest of the text with the finish reason, or the error."""
        try:
            if error is not None:
                raise error
            if text := self._text.rest():
                self._put(TextPiece(text, scores=self._take_scores()))
            reason = "stop" if is_complete or self.is_cancelled else "length"
            self._put(TextPiece(finish_reason=reason, scores=self._take_scores()))
        except BaseException as problem:  # noqa: BLE001 - `pieces` raises it
            self._put(TextPiece(error=problem))
        self.is_done = True
        with contextlib.suppress(RuntimeError):  # the endpoint has ended
            self._loop.call_soon_threadsafe(self._on_end)

    def _take_scores(self) -> list[TokenScore]:
        scores, self._scores = self._scores, []
        return scores

    def _put(self, piece: TextPiece) -> None:
        if self._pieces.qsize() > _MAX_UNREAD and not self.is_cancelled:
            self.abort()
            text = f"a client must read its text while it is written, got more than {_MAX_UNREAD} unread pieces"
            piece = TextPiece(error=RequestError(408, text))
        with contextlib.suppress(RuntimeError):  # the endpoint has ended
            self._loop.call_soon_threadsafe(self._pieces.put_nowait, piece)


class _TokenText:
    """Decodes tokens one by one, and returns only text that later tokens cannot change."""

    def __init__(self, writer: TextWriter, prompt_end: Sequence[int]) -> None:
        self._decode = writer.served.tokenizer.decode
        self._skips = writer.fields.skip_special_tokens and not writer.kept_tokens
        special = writer.served.special_tokens if writer.kept_tokens else frozenset[int]()
        self._dropped = special - {*writer.kept_tokens} if writer.fields.skip_special_tokens else frozenset[int]()
        # Decoding drops a space at the beginning, so the decoded tokens begin with some of the prompt.
        self._tokens = [token for token in prompt_end if token not in self._dropped]
        self._num_passed = len(self._tokens)  # tokens whose text was passed on
        self._passed = self._decoded()  # their text

    def add(self, token: int) -> str:
        """Append a token; return the text to pass on."""
        if token not in self._dropped:
            self._tokens.append(token)
        text = self._decoded()
        # Part of a character decodes to this sign, until further tokens complete it.
        return "" if text.endswith("\N{REPLACEMENT CHARACTER}") else self._pass(text)

    def rest(self) -> str:
        """After the last token, return the text that was not passed on."""
        return self._pass(self._decoded())

    def _pass(self, text: str) -> str:
        new = text[len(self._passed) :]
        if new:
            # The next decoding begins with these tokens, as the first one began with tokens of the prompt.
            self._tokens = self._tokens[self._num_passed :]
            self._num_passed, self._passed = len(self._tokens), self._decoded()
        return new

    def _decoded(self) -> str:
        text: str = self._decode(self._tokens, skip_special_tokens=self._skips, clean_up_tokenization_spaces=False)
        return text
