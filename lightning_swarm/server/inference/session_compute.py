"""Computes a stage's blocks on the next tokens of inference sessions."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_swarm.core.errors import ConfigError
from lightning_swarm.core.readable import few
from lightning_swarm.model import autocast as modes
from lightning_swarm.model.fidelity.module_states import ServerStates
from lightning_swarm.model.inference.attention_cache import LayerLengths, is_in_session, without_cache
from lightning_swarm.model.inference.joint_attention import JointCache, attending_jointly, join_rows, split_rows
from lightning_swarm.model.inference.linear_layers import joint_step
from lightning_swarm.model.inference.padded_cache import PaddedCache, leave_slab, pads
from lightning_swarm.model.partition import StageModule
from lightning_swarm.model.random import KeyedRandom
from lightning_swarm.protocol import serialization
from lightning_swarm.protocol.compression import Codecs, decoded, encoded, on_cpu
from lightning_swarm.protocol.messages.calls import ComputeMode
from lightning_swarm.server.inference.adapters import Adapter


@dataclass(eq=False)
class SessionPart:
    """The arguments of a stage's blocks for one step of a session."""

    hidden: serialization.Tree  # the first block's input ``[rows, tokens, ...]``, as received
    extras: Mapping[str, Any]  # the blocks' other arguments; the cache itself never travels
    cache: Any = None  # receives the keys and values of these tokens; None: the blocks use no cache
    adapter: Adapter | None = None  # the adapter of the session's client

    @property
    def rows(self) -> int:
        """The number of rows."""
        return serialization.leaves(self.hidden)[0].shape[0]

    @property
    def tokens(self) -> int:
        """The number of tokens in each row."""
        return serialization.leaves(self.hidden)[0].shape[1]


class SessionComputation:
    """Computes steps of sessions, on the compute thread, one call at a time."""

    def __init__(self, module: StageModule, device: torch.device, codecs: Codecs, states: ServerStates) -> None:
        self._module, self._device, self._codecs, self._states = module, device, codecs, states
        self._modules = list(module.modules())

    def steps(
        self, parts: Sequence[SessionPart], mode: ComputeMode, first_block: int, *, seed: int | None = None
    ) -> list[serialization.Tree]:
        """Run the blocks on the next tokens of several sessions in one forward; return each session's output.

        Args:
            parts: The blocks' arguments for each session; raises `CannotJoin` if they cannot be rows of one forward.
            mode: A mode without gradients.
            first_block: The number of blocks in the stages before.
            seed: Key of all random draws; None if no module is in train mode.
        """
        codec = self._codecs.activations
        # Copy, because a block may work in place, and a replay sends the originals again. `join_rows` copies anyway.
        arguments = [self._arguments(part, copy=len(parts) == 1) for part in parts]
        caches, rows = [part.cache for part in parts], [part.rows for part in parts]
        padded = None
        if len(parts) == 1:
            joint = caches[0]
            leave_slab(joint)
        elif pads(caches, parts[0].tokens):
            joint = padded = PaddedCache(caches, rows, parts[0].tokens)
        else:
            joint = JointCache(caches, rows)
        with torch.no_grad(), self._entered(mode, None if seed is None else KeyedRandom(seed)):
            inputs, keywords = arguments[0] if len(parts) == 1 else join_rows(arguments, rows)
            layer_lengths = [
                LayerLengths(part.cache, first_block=first_block, rows=part.rows, length=part.tokens)
                for part in parts
                if part.cache is not None
            ]
            if padded is not None:
                keywords = padded.arguments(keywords, like=serialization.flatten(inputs)[1][0])
            keywords = {name: joint if is_in_session(value) else value for name, value in keywords.items()}
            attending = attending_jointly(self._modules) if type(joint) is JointCache else contextlib.nullcontext()
            with attending, contextlib.nullcontext() if len(parts) == 1 else joint_step():
                output = without_cache(self._module.uncompiled((inputs,), keywords), joint)
            outputs = [output] if len(parts) == 1 else split_rows(output, rows)
            for lengths in layer_lengths:
                lengths.follow()
        return [to_send(encoded(output, codec), self._device) for output in outputs]

    def blocks(
        self, part: SessionPart, mode: ComputeMode, first_block: int, *, seed: int | None = None
    ) -> Generator[None, None, serialization.Tree]:
        """Compute a step as `steps` does, one block for each `next`; return the output as it travels."""
        with torch.no_grad():
            hidden, keywords = self._arguments(part)
        keywords = {name: part.cache if is_in_session(value) else value for name, value in keywords.items()}
        lengths, num_drawn = None, 0
        if part.cache is not None:
            leave_slab(part.cache)
            lengths = LayerLengths(part.cache, first_block=first_block, rows=part.rows, length=part.tokens)
        for number in range(len(self._module.blocks)):
            if number:
                yield
            # Continue the random draws of earlier blocks, as in a forward of all blocks.
            drawing = None if seed is None else KeyedRandom(seed, first_draw=num_drawn)
            with torch.no_grad(), self._entered(mode, drawing):
                hidden = self._module.run_block(number, (hidden,), keywords)
            num_drawn = 0 if drawing is None else drawing.draw
        with torch.no_grad():
            output = without_cache(hidden, part.cache)
            if lengths is not None:
                lengths.follow()
            return to_send(encoded(output, self._codecs.activations), self._device)

    @contextlib.contextmanager
    def _entered(self, mode: ComputeMode, drawing: KeyedRandom | None) -> Iterator[None]:
        """Apply the modes of a step of a session."""
        keeping = self._keeping_buffers() if mode.training else contextlib.nullcontext()
        entering = modes.enter_modes(mode, self._device.type)
        with self._states.entered(mode), keeping, entering, drawing or contextlib.nullcontext():
            yield

    @contextlib.contextmanager
    def _keeping_buffers(self) -> Iterator[None]:
        """Run a forward on copies of the modules' buffers; raise `ConfigError` if it changes any of them."""
        registers = [(module._buffers, dict(module._buffers)) for module in self._modules if module._buffers]
        originals = (buffer for _, original in registers for buffer in original.values() if buffer is not None)
        copies = {id(buffer): buffer.clone() for buffer in originals}
        replaced = [{name: copies.get(id(buffer)) for name, buffer in original.items()} for _, original in registers]
        for (buffers, _), copied in zip(registers, replaced, strict=True):
            buffers.update(copied)
        try:
            yield
            changed = {
                name
                for (buffers, original), copied in zip(registers, replaced, strict=True)
                for name in {*buffers, *copied}
                # Values, not `_version`, which kernels of batch norms do not raise.
                if buffers.get(name) is not copied.get(name) or not _equal(copied[name], original[name])
            }
        finally:
            for buffers, original in registers:
                buffers.clear()
                buffers.update(original)
        if changed:
            raise ConfigError(
                "generating text must not change the model, and in train mode its blocks change "
                f"{few(sorted(changed))}. Generate under `model.eval()`."
            )

    def _arguments(self, part: SessionPart, *, copy: bool = True) -> tuple[Any, dict[str, Any]]:
        """Return a step's arguments on this device."""
        hidden = decoded(part.hidden, self._codecs.activations, self._device)
        structure, tensors = serialization.flatten((hidden, dict(part.extras)))
        arguments: tuple[Any, dict[str, Any]] = serialization.unflatten(
            structure, [tensor.to(self._device, copy=copy) for tensor in tensors]
        )
        return arguments


def to_send(tree: serialization.Tree, device: torch.device) -> serialization.Tree:
    """Copy tensors to the CPU if they are elsewhere, so that they can be sent."""
    # Call this on the compute thread: it waits for the GPU, while the loop must keep answering peers.
    return tree if device.type == "cpu" else on_cpu(tree)


def _equal(first: Tensor | None, second: Tensor | None) -> bool:
    """Compare two buffers; NaN equals NaN."""
    if first is None or second is None:
        return first is second
    may_be_nan = first.is_floating_point()
    return torch.equal(first, second) or (may_be_nan and first.allclose(second, 0.0, 0.0, equal_nan=True))
