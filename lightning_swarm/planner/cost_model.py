"""Costs of a model and of its stages: what they compute, keep and send. Pure."""

from __future__ import annotations

from dataclasses import replace
from typing import Final, Literal, TypeAlias

from lightning_swarm.core.limits import Limits
from lightning_swarm.model.partition.policy import balanced_ranges
from lightning_swarm.planner.records import (
    BlockProfile,
    Machine,
    ModelProfile,
    StageProfile,
    TransferSize,
    encoded_size,
)

Ends: TypeAlias = Literal["stages", "trainer"]
"""Place of embeddings and head: in the first and the last stage (which computes the loss, too), or around all."""

_TOKEN_BYTES: Final = 8
_GRAPH_PER_WIDTH: Final = 17
"""Numbers that a block's backward needs of a token, as a multiple of its width, if no attention matrix is kept.
Source: Korthikanti et al., arXiv:2205.05198, section 4."""


def block(width: int, sequence: int, element_bytes: int = 4) -> BlockProfile:
    """Count a block of attention and a feed-forward network of four times the width.

    Its matrix products take 2 flop a parameter and token, attention 4 a feature and pair of tokens; the backward
    takes twice as much as the forward.
    """
    parameters = 12 * width * width + 13 * width
    return BlockProfile(
        parameters=parameters,
        flop=3.0 * sequence * (2.0 * 12 * width * width + 4.0 * sequence * width),
        output_bytes=sequence * width * element_bytes,
        graph_bytes=_GRAPH_PER_WIDTH * sequence * width * element_bytes,
        number_bytes=element_bytes,
    )


def transformer(
    layers: int, width: int, sequence: int, vocabulary: int = 0, *, ends: Ends = "stages", element_bytes: int = 4
) -> ModelProfile:
    """Count a transformer of equal blocks; with a vocabulary of 0 its samples are ``[sequence, width]``."""
    middle = (block(width, sequence, element_bytes),) * layers
    hidden = sequence * width * element_bytes
    if vocabulary and ends == "stages":
        embeddings, head = _embeddings_and_head(width, sequence, vocabulary, element_bytes)
        tokens = sequence * _TOKEN_BYTES
        return ModelProfile(
            blocks=(embeddings, *middle, head),
            input_bytes=tokens,
            input_gradient=False,
            extra_bytes=tokens,
            weight_bytes=element_bytes,
            input_number_bytes=0,
        )
    around = BlockProfile(parameters=0, flop=0.0, output_bytes=0, graph_bytes=0)
    if vocabulary:
        embeddings, head = _embeddings_and_head(width, sequence, vocabulary, element_bytes)
        around = replace(head, parameters=embeddings.parameters + head.parameters, output_bytes=0, number_bytes=4)
    return ModelProfile(
        blocks=middle,
        input_bytes=hidden,
        input_gradient=bool(vocabulary),
        around=around,
        weight_bytes=element_bytes,
        input_number_bytes=element_bytes,
    )


def _embeddings_and_head(
    width: int, sequence: int, vocabulary: int, element_bytes: int
) -> tuple[BlockProfile, BlockProfile]:
    hidden, logits = sequence * width * element_bytes, sequence * vocabulary * element_bytes
    embeddings = BlockProfile(
        parameters=(vocabulary + sequence) * width,
        flop=0.0,
        output_bytes=hidden,
        graph_bytes=0,
        number_bytes=element_bytes,
    )
    head = BlockProfile(
        parameters=vocabulary * width,
        flop=6.0 * sequence * vocabulary * width,
        output_bytes=element_bytes,
        graph_bytes=hidden + 2 * logits,
        number_bytes=element_bytes,
    )
    return embeddings, head


FLOAT32: Final = 4
"""Bytes; sums of gradients have at least float32."""

ADAM: Final = 2
"""Numbers that Adam keeps for each parameter, the most that is usual of an optimizer."""


def stage_profiles(model: ModelProfile, num_stages: int) -> tuple[StageProfile, ...]:
    """Partition a model so that its slowest stage has as little to compute as can be, and count each stage."""
    # Blocks that compute nothing, embeddings, go with their neighbours.
    ranges = balanced_ranges([max(1, round(block.flop / 1e6)) for block in model.blocks], num_stages)
    return tuple(_stage_profile(model, indices) for indices in ranges)


def _stage_profile(model: ModelProfile, indices: range) -> StageProfile:
    blocks = model.blocks[indices.start : indices.stop]
    (incoming, gradient), (out, back) = _crossing(model, indices.start - 1), _crossing(model, indices.stop - 1)
    if indices.start == 0 and not model.input_gradient:
        gradient = TransferSize(0.0, 0.0)
    parameters = sum(block.parameters for block in blocks)
    return StageProfile(
        blocks=len(blocks),
        parameters=parameters,
        flop=sum(block.flop for block in blocks),
        input_bytes=incoming.num_bytes,
        extra_bytes=model.extra_bytes if indices.stop == len(model.blocks) else 0,
        gradient_bytes=gradient.num_bytes,
        output_bytes=out.num_bytes,
        output_gradient_bytes=back.num_bytes,
        graph_bytes=sum(block.graph_bytes for block in blocks),
        state_bytes=state_bytes(model, parameters),
        # The other half of each is the other end's.
        coding_s=((incoming.coding_s + out.coding_s) / 2, (gradient.coding_s + back.coding_s) / 2),
    )


def _crossing(model: ModelProfile, index: int) -> tuple[TransferSize, TransferSize]:
    """Size a sample's output of a block, and its gradient; -1 is the trainer before the first block."""
    num_bytes, number_bytes = float(model.input_bytes), model.input_number_bytes
    if index >= 0:
        num_bytes, number_bytes = model.blocks[index].output_bytes, model.blocks[index].number_bytes
    if 0 <= index < len(model.blocks) - 1:
        num_bytes /= model.wire.boundary_ratio
    forward, backward = model.wire.activations, model.wire.gradients
    return encoded_size(num_bytes, number_bytes, forward), encoded_size(num_bytes, number_bytes, backward)


def sum_bytes(model: ModelProfile) -> int:
    """Bytes of one number of a gradient sum."""
    return max(FLOAT32, model.weight_bytes)


def state_bytes(model: ModelProfile, parameters: int) -> float:
    """Bytes that a server keeps where it computes, for that many parameters, without activations.

    They are the weights, the optimizer's state, the gradients of one microbatch, their sum over the step, and the mean;
    with error feedback also what encoding lost of the sum. Snapshots are not counted: beyond `Limits.snapshot_bytes`
    they are in files.
    """
    sums = 2 + model.wire.error_feedback
    return float(parameters * ((2 + ADAM) * model.weight_bytes + sums * sum_bytes(model)))


def graph_capacity(stage: StageProfile, machine: Machine) -> float:
    """The number of samples whose graphs fit into a machine beside a stage; below 0: the stage itself does not fit."""
    return (machine.memory_bytes - stage.state_bytes) / max(1, stage.graph_bytes)


def kept_samples(stage: StageProfile, machine: Machine, limits: Limits) -> float:
    """The number of samples whose graphs a server keeps until backward; it computes the forward of others again."""
    return min(graph_capacity(stage, machine), limits.cache_bytes / max(1, stage.graph_bytes))
