"""Texts that a served model writes for an endpoint: each on a thread of its own, piece by piece."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

from lightning_swarm.serving.http_fields import RequestError, TextFields
from lightning_swarm.serving.pieces import StopFinder, TextPiece, TokenScore

if TYPE_CHECKING:
    from lightning_swarm.serving.grammar_masks import CompiledGrammar, GrammarCompiler, GrammarMask

_CONTEXT: Final = 4  # last tokens of the prompt, decoded together with the first new tokens
_MAX_SCORED: Final = 2048  # largest number of tokens of a prompt whose logprobs are reported
_UNLIMITED: Final = 1 << 24  # positions; tokenizers without a limit report a huge number


def end_tokens(config: Any) -> list[int]:
    """Return the tokens that end a text by a model's generation config."""
    own = config.eos_token_id
    return [] if own is None else [own] if isinstance(own, int) else list(own)


@dataclass(frozen=True)
class ServedText:
    """A served model and its tokenizer."""

    name: str
    model: Any
    tokenizer: Any
    tool_parser: str | None = None  # name of the format of calls; None: found in the chat template
    parent: str | None = None  # name of the model whose adapter this is

    @cached_property
    def turn(self) -> AbstractContextManager[Any]:
        """A lock if the model's position tables depend on the text so far: then it writes one text at a time."""
        from lightning_swarm.serving.remote_model import positions_depend_on_length

        return threading.Lock() if positions_depend_on_length(self.model) else nullcontext()

    @cached_property
    def context(self) -> int | None:
        """The maximum number of tokens of a prompt and its text together. None: no limit."""
        longest = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        if not isinstance(longest, int):
            longest = getattr(self.tokenizer, "model_max_length", None)
        known = [longest] if isinstance(longest, int) and longest < _UNLIMITED else []
        if getattr(self.model.generation_config, "use_cache", True) is False:  # each step computes the whole text
            from lightning_swarm.serving.remote_model import step_tokens

            known.append(step_tokens(self.model))
        return min(known, default=None)

    @cached_property
    def longest_token(self) -> int:
        """The maximum number of bytes of a token, for a lower bound on a prompt's number of tokens."""
        return max((len(token.encode()) for token in self.tokenizer.get_vocab()), default=1)

    @cached_property
    def special_tokens(self) -> frozenset[int]:
        """The tokens that are no part of a text, unless the request asks for them."""
        return frozenset(number for number, token in self.tokenizer.added_tokens_decoder.items() if token.special)

    @cached_property
    def grammars(self) -> GrammarCompiler:
        """The compiler of grammars for the model's tokens. Raises RequestError if the model can follow none."""
        from lightning_swarm.serving.grammar_masks import GrammarCompiler

        config, number = self.model.generation_config, self.model.config.get_text_config().vocab_size
        return GrammarCompiler(self.tokenizer, num_tokens=number, ends=end_tokens(config))

    def check_text(self, num_bytes: int) -> None:
        """Refuse, before tokenizing, a prompt whose bytes alone show that it exceeds the context."""
        if self.context is not None and num_bytes > self.context * max(16, self.longest_token):
            self._refuse(f"a prompt of {num_bytes} bytes")

    def num_new(self, num_prompt: int, asked: int | None) -> int:
        """Return the maximum number of new tokens: the requested number, or as many as the context has left."""
        if num_prompt == 0:
            raise RequestError(400, "a prompt has at least one token, and this one has none", param="prompt")
        own: int | None = getattr(self.model.generation_config, "max_new_tokens", None)
        if self.context is None:
            wanted = own if asked is None else asked
            if wanted is None:
                text = f"nothing limits the texts of {self.name!r}: say `max_tokens`"
                raise RequestError(400, text, param="max_tokens")
            return wanted
        left = self.context - num_prompt
        if left < (1 if asked is None else asked):
            self._refuse(f"{num_prompt} of the prompt{'' if asked is None else f' and `max_tokens` {asked}'}")
        return min(left, own or left) if asked is None else asked

    def check_scored(self, num_prompt: int) -> None:
        """Refuse to score a long prompt, because the logits of all its places are in memory at once."""
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

    def __init__(self, served: ServedText, given: Mapping[str, Any], number: int) -> None:
        self._served, self._given, self._number = served, given, number
        self._lock = threading.Lock()
        self._found: Future[list[TokenScore]] = Future()

    def get(self) -> list[TokenScore]:
        """Return the scores, or raise the error of computing them; the first caller's thread computes them."""
        with self._lock:
            if not self._found.done():
                try:
                    self._found.set_result(self._compute())
                except Exception as error:  # noqa: BLE001 - each choice raises it
                    self._found.set_exception(error)
        return self._found.result()

    def _compute(self) -> list[TokenScore]:
        import torch

        with torch.no_grad():
            logits = self._served.model(**self._given, use_cache=False).logits[0]
        return [
            TokenScore.of(self._served.tokenizer, token, of_place, self._number)
            for token, of_place in zip(self._given["input_ids"][0].tolist(), [None, *logits[:-1]], strict=True)
        ]


class TextWriter:
    """Writes one text on a thread of its own, which ends soon after `abort`."""

    def __init__(
        self,
        served: ServedText,
        given: Mapping[str, Any],
        asked: TextFields,
        *,
        num_new: int,
        prompt: str = "",  # the prompt's text
        choice: int = 0,  # index among the choices of the prompt
        prompt_scores: PromptScores | None = None,  # None: not requested
        grammar: CompiledGrammar | None = None,
        kept_tokens: Collection[int] = (),  # special tokens that are part of the text
        on_end: Callable[[], None] = lambda: None,  # called on the event loop when the text's thread ends
    ) -> None:
        self._on_end = on_end
        self.served, self._given, self.asked = served, given, asked
        self.prompt, self._choice, self._prompt_scores = prompt, choice, prompt_scores
        self._mask = None if grammar is None else grammar.new_text(int(given["input_ids"].shape[1]))
        self.kept_tokens = kept_tokens
        self._aborted = threading.Event()
        self._pieces: asyncio.Queue[TextPiece] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self.num_prompt = int(given["input_ids"].shape[1])
        self.num_new = num_new
        self.prompt_end: list[int] = given["input_ids"][0, -_CONTEXT:].tolist()
        self.num_tokens = 0  # new tokens so far
        self._logits: Any = None  # logits of the next token
        self._scores: list[TokenScore] = []  # scores of tokens whose text was not passed on yet
        self._thread = threading.Thread(target=self._run, name="text", daemon=True)
        self._thread.start()

    def abort(self) -> None:
        """Stop writing; the thread ends soon."""
        self._aborted.set()

    @property
    def is_done(self) -> bool:
        """Return whether the text's thread has ended."""
        return not self._thread.is_alive()

    async def pieces(self) -> AsyncIterator[TextPiece]:
        """Yield the text in pieces as it is written; the last piece has the finish reason."""
        finder = StopFinder(self.asked.stops, keeps=self.asked.include_stop_str_in_output)
        scores: list[TokenScore] = []
        if self.asked.echo:
            yield TextPiece(self.prompt, scores=(await self._next()).scores if self._prompt_scores else ())
        while True:
            piece = await self._next()
            scores += piece.scores
            if piece.finish_reason is not None:
                yield TextPiece(finder.rest(), piece.finish_reason, scores=scores)
                return
            text = finder.take(piece.text)
            if finder.found:
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

    def see(self, logits: Any) -> None:
        """Record the logits of the next token; called on the text's thread."""
        if self.asked.num_logprobs is not None:
            self._logits = logits.detach().clone()

    def score(self, token: int) -> None:
        """Score a drawn token; called on the text's thread."""
        if self.asked.num_logprobs is not None:
            self._scores.append(TokenScore.of(self.served.tokenizer, token, self._logits, self.asked.num_logprobs))

    def give(self, text: str) -> None:
        """Pass text on to the reader, with the scores of its tokens; called on the text's thread."""
        scores, self._scores = self._scores, []
        self._put(TextPiece(text, scores=scores))

    def _put(self, piece: TextPiece) -> None:
        with contextlib.suppress(RuntimeError):  # the endpoint has ended
            self._loop.call_soon_threadsafe(self._pieces.put_nowait, piece)

    def _run(self) -> None:
        """Write the text on its own thread; its last piece has the finish reason or the error."""
        try:
            with self.served.turn:
                if self._prompt_scores is not None and not self._aborted.is_set():
                    self._put(TextPiece(scores=self._prompt_scores.get()))
                reason = "stop" if self._aborted.is_set() else self._generate()
        except BaseException as error:  # noqa: BLE001 - the request's task raises it
            self._put(TextPiece(error=error))
        else:
            scores, self._scores = self._scores, []
            self._put(TextPiece(finish_reason=reason, scores=scores))
        finally:
            with contextlib.suppress(RuntimeError):  # the endpoint has ended
                self._loop.call_soon_threadsafe(self._on_end)

    def _generate(self) -> str:
        """Write the text, and return the finish reason."""
        if self.num_new == 0:
            return "length"
        found = self._write()
        is_complete = self._mask is not None and self._mask.is_done(found)
        return "length" if int(found.shape[1]) - self.num_prompt >= self.num_new and not is_complete else "stop"

    def _write(self) -> Any:
        import transformers

        from lightning_swarm.serving.remote_model import prefill_in_chunks
        from lightning_swarm.serving.sampling import Sampling, processors

        model, asked = self.served.model, self.asked
        config = model.generation_config
        ends = [*end_tokens(config), *asked.stop_token_ids]
        drawing = processors(
            asked,
            Sampling.of(asked, config),
            prompt=self.num_prompt,
            ends=ends,
            seed=None if asked.seed is None else asked.seed + self._choice,
            see=self.see,
            mask=self._mask,
            device=model.device,
        )
        return model.generate(
            **self._given,
            **prefill_in_chunks(model, self.num_prompt),
            **({"eos_token_id": ends} if asked.stop_token_ids else {}),
            num_beams=1,
            num_return_sequences=1,
            max_new_tokens=self.num_new,
            do_sample=False,  # `processors` draw the token
            repetition_penalty=1.0,  # `processors` applies it in vLLM's order
            logits_processor=transformers.LogitsProcessorList(drawing),
            stopping_criteria=transformers.StoppingCriteriaList([_Until(self._aborted, self._mask)]),
            streamer=_Streamer(self),
        )


class _Until:
    """Stops a text when an event is set, or when its grammar allows no more."""

    def __init__(self, event: threading.Event, mask: GrammarMask | None) -> None:
        self._event, self._mask = event, mask

    def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
        import torch

        ends = self._event.is_set() or (self._mask is not None and self._mask.is_done(input_ids))
        return torch.full((len(input_ids),), ends, dtype=torch.bool, device=input_ids.device)


class _Streamer:
    """Turns tokens into text that later tokens no longer change."""

    def __init__(self, writer: TextWriter) -> None:
        self._writer = writer
        self._skips = writer.asked.skip_special_tokens and not writer.kept_tokens
        special = writer.served.special_tokens if writer.kept_tokens else frozenset[int]()
        self._dropped = special - {*writer.kept_tokens} if writer.asked.skip_special_tokens else frozenset[int]()
        # Decoding drops a space at the beginning of a text, so it begins with tokens of the prompt.
        self._tokens = [token for token in writer.prompt_end if token not in self._dropped]
        self._begin, self._given = 0, len(self._tokens)  # first decoded token; first token not passed on
        self._is_prompt = True

    def put(self, value: Any) -> None:
        """Receive the prompt, and then each token."""
        if self._is_prompt:
            self._is_prompt = False
            return
        for token in value.flatten().tolist():
            self._tokens += [] if token in self._dropped else [token]
            self._writer.score(token)
        self._writer.num_tokens += value.numel()
        text = self._new_text()
        if text and not text.endswith("\N{REPLACEMENT CHARACTER}"):  # else a character is not complete
            self._give(text)

    def end(self) -> None:
        """Pass on the rest of the text."""
        if text := self._new_text():
            self._give(text)

    def _new_text(self) -> str:
        """Return the text of the tokens that were not passed on."""
        return self._decoded(len(self._tokens))[len(self._decoded(self._given)) :]

    def _decoded(self, end: int) -> str:
        text: str = self._writer.served.tokenizer.decode(
            self._tokens[self._begin : end],
            skip_special_tokens=self._skips,
            clean_up_tokenization_spaces=False,
        )
        return text

    def _give(self, text: str) -> None:
        self._writer.give(text)
        # The next decoding begins with these tokens, as the first began with the prompt's.
        self._begin, self._given = self._given, len(self._tokens)
