"""`SampleText`: generates texts with the model while it trains, and logs them."""

from __future__ import annotations

import contextlib
import csv
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn
from typing_extensions import override

from lightning_swarm.core.errors import ConfigError, ProtocolError, StageError, SwarmError
from lightning_swarm.core.rebase import written_once
from lightning_swarm.peer.text_requests import TextRequests, WaitingPrompt
from lightning_swarm.protocol.messages.inference import RunText
from lightning_swarm.strategy.framework import CallbackBase

__all__ = ["Sample", "SampleText"]

_COLUMNS: Final = ("step", "prompt", "text", "tokens_per_s")
_MAX_PROMPTS: Final = 4  # other peers' prompts that are continued after one step
_MAX_TOKENS: Final = 4096  # tokens of such a prompt and its text together, because all servers compute them
_TOKENS_PER_STEP: Final = 16  # new tokens after each step, if a text follows the weights through several steps
_NUM_BYTES: Final = 256  # tokens that are bytes, if there is no tokenizer; a model may have further tokens


@dataclass(frozen=True)
class Sample:
    """A text that the model generated."""

    step: int  # the Trainer's `global_step`
    prompt: str
    text: str  # the continuation, without the prompt
    tokens_per_s: float  # characters per second, if the user's `generate` made the text


@written_once(Callback)
class SampleText(CallbackBase):
    """Generates texts with the model while it trains, and logs them.

    The texts are the same as on one machine with the weights of that step. Training is the same with and without this
    callback, because all random generators and the modules' modes are restored. In a swarm the text is generated
    through the stages, without gathering weights; the swarm waits meanwhile, as in any callback.

    TensorBoard and Weights & Biases get the texts by their own methods. Other loggers that have a folder get a file
    ``samples.csv`` in it. `samples` has all texts of this fit.

    Args:
        prompts: Beginnings of the texts.
        tokenizer: Converts text to tokens and back, like Hugging Face's tokenizers. None: a token is a byte.
        every_n_steps: Optimizer steps between texts of the same prompt.
        max_new_tokens: Most tokens of each text. Training waits while it is generated.
        seed: Seed of the random draws, if `options` request sampling. Each text starts from this seed.
        answers: In the lead of a swarm, after each step, also continue the prompts that other peers of the run send by
            ``lightning-swarm generate --version``. Training waits meanwhile, for at most four texts of
            `max_new_tokens`. `prompts` may then be empty.
        generate: Called with the LightningModule and a prompt; returns the continuation. It replaces
            ``model.generate`` of Hugging Face, and `tokenizer`, `max_new_tokens` and `options`.
        options: Further arguments of ``model.generate``, such as ``do_sample=True, temperature=0.8``.

    Raises:
        ConfigError: An argument is out of range, or the module has no method `generate`.

    Example:
        >>> SampleText(["Once upon a time"], tokenizer=tokenizer, every_n_steps=100, do_sample=True)
    """

    def __init__(
        self,
        prompts: Sequence[str],
        *,
        tokenizer: Any = None,
        every_n_steps: int = 100,
        max_new_tokens: int = 64,
        seed: int = 0,
        answers: bool = False,
        generate: Callable[[LightningModule, str], str] | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        for name, value in {"every_n_steps": every_n_steps, "max_new_tokens": max_new_tokens}.items():
            if type(value) is not int or value < 1:
                raise ConfigError(f"`{name}` of `SampleText` must be a whole number of at least 1, got {value!r}.")
        if (
            isinstance(prompts, str)
            or not (prompts or answers)
            or not all(type(prompt) is str and prompt for prompt in prompts)
        ):
            raise ConfigError(f"`prompts` of `SampleText` must be texts that are not empty, got {prompts!r}.")
        if generate is not None and (options or answers or tokenizer is not None):
            raise ConfigError(
                "`generate` of `SampleText` writes the whole text: leave `tokenizer`, `answers` and options out."
            )
        self.prompts, self.every_n_steps = list(prompts), every_n_steps
        self.samples: list[Sample] = []
        self._tokenizer, self._max_new_tokens, self._seed = tokenizer, max_new_tokens, seed
        self._generate, self._options = generate, options
        self._answers_requests = answers
        self._requests: TextRequests | None = None  # set during training if this process leads a swarm and answers
        self._newest_step = 0  # the newest step that has ended

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._generate is None:
            _generator_of(pl_module)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # The fit's first step is known here. After a rollback, texts of later steps are generated again.
        self._newest_step = trainer.global_step
        self.samples = [sample for sample in self.samples if sample.step <= self._newest_step]
        peer = getattr(trainer.strategy, "peer", None)  # None in a plain Trainer
        if self._answers_requests and trainer.is_global_zero and peer is not None:
            self._requests = peer.text_requests
            self._requests.is_open = True

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._close_requests()

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._close_requests()

    def _close_requests(self) -> None:
        if self._requests is not None:
            self._requests.close()
            self._requests = None

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.global_step
        if not trainer.is_global_zero or step == self._newest_step:
            return
        self._newest_step = step
        if self._requests is not None and (waiting := self._requests.waiting(_MAX_PROMPTS)):
            with _evaluating(pl_module):
                for prompt in waiting:
                    self._answer(pl_module, step, prompt)
        if step % self.every_n_steps or not self.prompts:
            return
        with _evaluating(pl_module):
            samples = [self._generate_sample(pl_module, step, text) for text in self.prompts]
        self.samples += samples
        for logger in trainer.loggers:
            _log(logger, samples)

    def _generate_sample(self, module: LightningModule, step: int, prompt: str) -> Sample:
        torch.manual_seed(self._seed)
        begin_s = time.perf_counter()
        if self._generate is not None:
            text = self._generate(module, prompt)
            num_tokens = len(text)  # characters, because the tokens are unknown here
        else:
            tokens = self._encode(prompt).to(module.device)
            output = _generator_of(module).generate(
                tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=self._max_new_tokens, **self._options
            )
            new_tokens = getattr(output, "sequences", output)[0, tokens.shape[1] :]
            text, num_tokens = self._decode(new_tokens), len(new_tokens)
        elapsed_s = max(time.perf_counter() - begin_s, 1e-9)
        return Sample(step, prompt, text, num_tokens / elapsed_s)

    def _answer(self, module: LightningModule, step: int, waiting: WaitingPrompt) -> None:
        """Continue another peer's text after a step. An error goes to that peer, and never ends the training."""
        assert self._requests is not None
        try:
            text = self._continue(module, step, waiting)
        except SwarmError as error:
            self._requests.finish(waiting, error)
        except Exception as error:  # noqa: BLE001 - the model may fail on a stranger's prompt in any way
            self._requests.finish(waiting, StageError(f"the model cannot continue this prompt: {error!r}"))
        else:
            if text is not None:
                self._requests.finish(waiting, text)

    def _continue(self, module: LightningModule, step: int, waiting: WaitingPrompt) -> RunText | None:
        """Continue a text after a step; return the whole text once it is complete, None before."""
        request, model = waiting.request, _generator_of(module)
        if not waiting.tokens:
            waiting.tokens = self._encode(request.prompt)[0].tolist()
            waiting.num_prompt = len(waiting.tokens)
            self._check(model, waiting)
        num_left = waiting.num_prompt + request.max_new_tokens - len(waiting.tokens)
        num_requested = min(num_left, _TOKENS_PER_STEP, self._max_new_tokens) if request.follows else num_left
        sampling: dict[str, Any] = {"do_sample": False}
        if request.seed is not None:
            sampling = {"do_sample": True, "temperature": request.temperature}
            torch.manual_seed(request.seed + len(waiting.steps))  # each piece of the text draws other numbers
        tokens = torch.tensor([waiting.tokens], device=module.device)
        lengths = {"max_new_tokens": num_requested, "attention_mask": torch.ones_like(tokens)}
        output = model.generate(tokens, **{**self._options, **sampling, **lengths})
        num_before, waiting.tokens = len(waiting.tokens), getattr(output, "sequences", output)[0].tolist()
        waiting.steps.append(step)
        num_new = len(waiting.tokens) - waiting.num_prompt
        has_ended = len(waiting.tokens) - num_before < num_requested  # by an end token
        if num_new < request.max_new_tokens and not has_ended:
            return None
        text = self._decode(torch.tensor(waiting.tokens[waiting.num_prompt :]))
        return RunText(text=text, num_tokens=num_new, steps=waiting.steps)

    def _check(self, model: Any, waiting: WaitingPrompt) -> None:
        """Refuse a text that is too long, or with tokens beyond the model's vocabulary, which would crash a GPU."""
        request, config = waiting.request, getattr(model, "config", None)
        if not request.follows and request.max_new_tokens > self._max_new_tokens:
            raise ProtocolError(
                f"between two steps, this run writes at most {self._max_new_tokens} tokens of a text (`max_new_tokens` "
                f"of `SampleText`), got {request.max_new_tokens}. Request fewer, or follow the weights through several "
                "steps."
            )
        limit = min(_MAX_TOKENS, getattr(config, "max_position_embeddings", None) or _MAX_TOKENS)
        if waiting.num_prompt + request.max_new_tokens > limit:
            raise ProtocolError(
                f"prompt and text must have at most {limit} tokens together, got {waiting.num_prompt} of the prompt "
                f"and {request.max_new_tokens} new ones. Shorten one of them."
            )
        size = getattr(config, "vocab_size", None) or math.inf
        if not waiting.tokens or max(waiting.tokens) >= size:
            raise ProtocolError(f"a prompt must have tokens, each below the model's {size}. Write another prompt.")

    def _encode(self, prompt: str) -> Tensor:
        if self._tokenizer is None:
            return torch.tensor([list(prompt.encode())])
        tokens: Tensor = self._tokenizer(prompt, return_tensors="pt")["input_ids"]
        return tokens

    def _decode(self, tokens: Tensor) -> str:
        if self._tokenizer is None:
            values = [token for token in tokens.tolist() if token < _NUM_BYTES]
            return bytes(values).decode("utf-8", errors="replace")
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=True)
        return text


def _generator_of(module: LightningModule) -> Any:
    """Return the first module with a method `generate`: `module` itself, or a module up to two levels below it."""
    for candidate in _with_two_levels(module):
        if callable(getattr(candidate, "generate", None)):
            return candidate
    raise ConfigError(
        "`SampleText` needs a model that has a method `generate`, as Hugging Face's models have, in the "
        "LightningModule or in one of its attributes; there is none. Pass `generate=`, a function of the module and a "
        "prompt."
    )


def _with_two_levels(module: nn.Module) -> Iterator[nn.Module]:
    yield module
    yield from module.children()
    for child in module.children():
        yield from child.children()


@contextlib.contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    """Inside, the module is in eval mode, without gradients. Restores the modes and all random generators."""
    modes = [(submodule, submodule.training) for submodule in module.modules()]
    try:
        with isolate_rng(), torch.no_grad():
            module.eval()
            yield
    finally:
        for submodule, training in modes:
            submodule.training = training


def _log(logger: Any, samples: Sequence[Sample]) -> None:
    """Log the texts by the logger's own method, or in a CSV file in its folder."""
    rows = [[sample.step, sample.prompt, sample.text, sample.tokens_per_s] for sample in samples]
    step = samples[0].step
    if callable(getattr(logger, "log_text", None)):  # Weights & Biases, and loggers with the same method
        logger.log_text("samples", columns=list(_COLUMNS), data=rows, step=step)
    elif callable(getattr(getattr(logger, "experiment", None), "add_text", None)):  # TensorBoard
        for number, sample in enumerate(samples):
            lines = [f"    {line}" for line in (sample.prompt + sample.text).splitlines()]  # code in Markdown
            text = "\n".join(lines) + f"\n\n{sample.tokens_per_s:.1f} tokens/s"
            logger.experiment.add_text(f"samples/{number}", text, step)
    elif (folder := logger.log_dir if hasattr(logger, "log_dir") else logger.save_dir) is not None:
        _append(Path(folder) / "samples.csv", [dict(zip(_COLUMNS, row, strict=True)) for row in rows])


def _append(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    is_new = not path.exists()
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, _COLUMNS)
        if is_new:
            writer.writeheader()
        writer.writerows(rows)
