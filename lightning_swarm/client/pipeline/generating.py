"""Forwards that generate text through the pipeline: their caches of keys and values are on servers, in sessions."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lightning_swarm.client.inference import InferenceSession, InferenceSessions, SessionInput, SessionWeights
from lightning_swarm.client.pipeline.differentiation import trained
from lightning_swarm.client.pipeline.pipeline_call import by_stage, to_send
from lightning_swarm.core.errors import ConfigError
from lightning_swarm.model.attention_cache import CacheHandle
from lightning_swarm.model.autocast import capture
from lightning_swarm.model.partition.hooks import check_global, describe
from lightning_swarm.protocol import serialization
from lightning_swarm.protocol.compression import decoded, on_cpu
from lightning_swarm.protocol.messages.calls import ModuleStates

if TYPE_CHECKING:
    from lightning_swarm.client.pipeline.pipeline import Pipeline


class TextGeneration:
    """Takes the steps of texts that grow through a pipeline. A text's rows stay together: nothing is cut."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self._sessions: InferenceSessions | None = None  # from the first one on

    @cached_property
    def _weights(self) -> list[nn.Parameter]:
        return [weight for stage in self._pipeline.config.stages for weight in stage.parameters()]

    @cached_property
    def _named_modules(self) -> list[list[tuple[str, nn.Module]]]:
        return [list(stage.named_block_modules()) for stage in self._pipeline.config.stages]

    @cached_property
    def _num_blocks(self) -> int:
        return sum(name is not None for stage in self._pipeline.config.stages for name in stage.block_names)

    def step(self, hidden: Any, extras: dict[str, Any], cache: Any) -> Any:
        """Compute the next tokens of a text: ``hidden`` is [rows, tokens, ...], and `cache` the forward's own."""
        pipeline, config = self._pipeline, self._pipeline.config
        states = [one.read() for one in pipeline.states]
        self._check_generates(states)
        if pipeline.before_call is not None:
            pipeline.before_call(pipeline.batch is None)
        handle = CacheHandle.of(cache)
        session = self._session_of(cache, handle)
        mode = capture(config.device.type, training=False, grad=False, input_grad=False)
        codec = config.codecs.activations
        with torch.inference_mode(False), torch.no_grad():
            structure, tensors = serialization.flatten(hidden)
            given = SessionInput(
                hidden=serialization.unflatten(structure, to_send(tensors, codec, copy=True)),
                extras=on_cpu(extras, copy=True),
                operations=handle.take_operations(),
                modes=by_stage(mode, states),
            )
            found = pipeline.runtime.run(session.step(given))
            output = decoded(on_cpu(found, copy=True), codec, config.device)
        rows, length = tensors[0].shape[:2]
        handle.grow(cache, rows=rows, length=length, num_layers=self._num_blocks)
        return output

    def _check_generates(self, states: Sequence[tuple[bool, ModuleStates | None]]) -> None:
        if any(training for training, _ in states) or (torch.is_grad_enabled() and trained(self._weights)):
            raise ConfigError(
                "a cache of keys and values is for generating text, in eval mode and without gradients. Generate under "
                "`model.eval()` and `torch.no_grad()`; elsewhere do without a cache, by `use_cache=False` in a Hugging "
                "Face model's config."
            )
        check_global()
        if any(describe(named) for named in self._named_modules):
            raise ConfigError(
                "blocks that generate with a cache must have no forward hooks within: what they see is on servers. "
                "Remove them, or generate with `use_cache=False`."
            )

    def _session_of(self, cache: Any, handle: CacheHandle) -> InferenceSession:
        """Return the session of a cache, which begins with its first step."""
        pipeline = self._pipeline
        weights = SessionWeights(
            generation=pipeline.generation, version=pipeline.version, number=pipeline.evaluation_number
        )
        session: InferenceSession | None = handle.session
        if session is None:
            session = handle.session = pipeline.runtime.run(self._open(handle, weights))
            weakref.finalize(cache, self._end, session).atexit = False
        if session.is_broken:
            raise ConfigError(
                "a cache is of no use any more once a step of its text has failed. Begin with a new cache."
            )
        if session.weights != weights or self._sessions is None or not self._sessions.has(session):
            raise ConfigError(
                f"a text is generated with the same weights from begin to end: this cache is of {session.weights}, "
                f"and the run is at {weights}. Begin with a new cache."
            )
        return session

    async def _open(self, handle: CacheHandle, weights: SessionWeights) -> InferenceSession:
        if self._sessions is None:
            self._sessions = InferenceSessions(self._pipeline.context)
        return self._sessions.open(handle.recipe, weights)

    def _end(self, session: InferenceSession) -> None:
        """Called when the forward's cache is gone, on whatever thread finds that."""
        sessions = self._sessions
        if sessions is not None:
            self._pipeline.runtime.post(lambda: sessions.close_soon(session))
