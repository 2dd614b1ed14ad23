"""Generates text through the pipeline; sessions on servers hold the caches of keys and values."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lightning_swarm.client.inference.forwards import SessionForwards, TextStep
from lightning_swarm.client.inference.routes import RunRoutes
from lightning_swarm.client.inference.session import SessionWeights
from lightning_swarm.client.pipeline.call_factory import by_stage
from lightning_swarm.client.pipeline.differentiation import trained_weights
from lightning_swarm.core.errors import ConfigError
from lightning_swarm.model.autocast import capture
from lightning_swarm.model.fidelity.hooks import check_global, describe
from lightning_swarm.protocol import serialization

if TYPE_CHECKING:
    from lightning_swarm.client.pipeline.pipeline import Pipeline


class TextGeneration:
    """Runs the steps of growing texts through a pipeline, with the run's weights."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline

    @cached_property
    def _forwards(self) -> SessionForwards:
        pipeline, config = self._pipeline, self._pipeline.config
        return SessionForwards(
            pipeline.factory.runtime,
            RunRoutes(pipeline.context),
            codec=config.codecs.activations,
            device=config.device,
            num_blocks=sum(name is not None for stage in config.stages for name in stage.block_names),
        )

    @cached_property
    def _weights(self) -> list[nn.Parameter]:
        return [weight for stage in self._pipeline.config.stages for weight in stage.parameters()]

    @cached_property
    def _modules(self) -> list[nn.Module]:
        return [module for named in self._named_modules for _, module in named]

    @cached_property
    def _named_modules(self) -> list[list[tuple[str, nn.Module]]]:
        return [list(stage.named_block_modules()) for stage in self._pipeline.config.stages]

    def step(self, hidden: Any, extras: dict[str, Any], cache: Any) -> Any:
        """Compute the next tokens of a text; ``hidden`` is [rows, tokens, ...], and `cache` is the user's object."""
        pipeline = self._pipeline
        factory = pipeline.factory
        states = [state.read() for state in factory.states]
        training = any(training for training, _ in states)
        self._check_generates(training=training)
        pipeline.check_transforms(serialization.flatten((hidden, extras))[1])
        if pipeline.before_call is not None:
            pipeline.before_call(pipeline.batch is None)
        weights = SessionWeights(
            generation=factory.generation, version=factory.version, number=factory.evaluation_number
        )
        mode = capture(pipeline.config.device.type, training=training, grad=False, input_grad=False)
        step = TextStep(hidden=hidden, extras=extras, cache=cache, weights=weights, modes=by_stage(mode, states))
        return self._forwards.step(step)

    def _check_generates(self, *, training: bool) -> None:
        if torch.is_grad_enabled() and trained_weights(self._weights):
            raise ConfigError(
                "a cache of keys and values supports only generating text, without gradients. Generate under "
                "`torch.no_grad()`; otherwise use no cache, by `use_cache=False` in a Hugging Face model's config."
            )
        if training and any(getattr(module, "gradient_checkpointing", False) for module in self._modules):
            raise ConfigError(
                "blocks with gradient checkpointing have no cache in train mode. Generate under `model.eval()`, or "
                "call `activation_checkpointing_disable()` first."
            )
        check_global()
        if any(describe(named) for named in self._named_modules):
            raise ConfigError(
                "blocks that generate with a cache must contain no forward hooks, because their values are on servers. "
                "Remove the hooks, or generate with `use_cache=False`."
            )
