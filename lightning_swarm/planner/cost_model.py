"""A model cut into stages: what each computes, keeps and sends. Pure."""

from __future__ import annotations

from typing import Final, Literal, TypeAlias

from lightning_swarm.core.limits import Limits
from lightning_swarm.model.partition.policy import balanced
from lightning_swarm.planner.records import BlockProfile, Machine, ModelProfile, StageProfile, TransferSize, travelling

Ends: TypeAlias = Literal["stages", "trainer"]
"""Where embeddings and head are: in the first and the last stage (which computes the loss, too), or around all."""

_TOKEN_BYTES: Final = 8
_GRAPH_PER_WIDTH: Final = 17
"""Numbers that a block's backward needs of a token, by its width, where no matrix of attention is kept.
Source: Korthikanti et al., arXiv:2205.05198, section 4."""


def block(width: int, sequence: int, element_bytes: int = 4) -> BlockProfile:
    """A block of attention and a feed-forward network of four times the width.

    Its products of matrices take 2 flop a parameter and token, attention 4 a feature and pair of tokens; the backward
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
    """A transformer of equal blocks.

    Args:
        layers: How many blocks.
        width: Features of a token.
        sequence: Tokens of a sample.
        vocabulary: Of the embeddings and the head; 0: there are neither, and samples are ``[sequence, width]``.
        ends: Where these are.
        element_bytes: Of weights and activations.
    """
    middle = (block(width, sequence, element_bytes),) * layers
    hidden = sequence * width * element_bytes
    if not vocabulary:
        return ModelProfile(
            blocks=middle,
            input_bytes=hidden,
            input_gradient=False,
            weight_bytes=element_bytes,
            input_number_bytes=element_bytes,
        )
    logits = sequence * vocabulary * element_bytes
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
    if ends == "stages":
        tokens = sequence * _TOKEN_BYTES
        blocks = (embeddings, *middle, head)
        return ModelProfile(
            blocks=blocks,
            input_bytes=tokens,
            input_gradient=False,
            extra_bytes=tokens,
            weight_bytes=element_bytes,
            input_number_bytes=0,
        )
    around = BlockProfile(
        parameters=embeddings.parameters + head.parameters,
        flop=head.flop,
        output_bytes=0,
        graph_bytes=head.graph_bytes,
    )
    return ModelProfile(
        blocks=middle,
        input_bytes=hidden,
        input_gradient=True,
        around=around,
        weight_bytes=element_bytes,
        input_number_bytes=element_bytes,
    )


FLOAT32: Final = 4
"""Bytes. Sums of gradients have at least these."""

ADAM: Final = 2
"""Numbers that the optimizer keeps for each parameter: that many with Adam, the most that is usual."""


def cut(model: ModelProfile, num_stages: int) -> tuple[StageProfile, ...]:
    """The stages, so that the slowest one has as little to compute as can be.

    Args:
        model: What is cut.
        num_stages: 1 to the number of its blocks.
    """
    blocks = model.blocks
    # Blocks that compute nothing, embeddings, go with their neighbours.
    ranges = balanced([max(1, round(block.flop / 1e6)) for block in blocks], num_stages)
    stages = []
    for span in ranges:
        run = [blocks[index] for index in span]
        first, last = span[0] == 0, span[-1] == len(blocks) - 1
        (came, gradient), (out, back) = _crossing(model, span[0] - 1), _crossing(model, span[-1])
        if first and not model.input_gradient:
            gradient = TransferSize(0.0, 0.0)
        parameters = sum(block.parameters for block in run)
        stages.append(
            StageProfile(
                blocks=len(run),
                parameters=parameters,
                flop=sum(block.flop for block in run),
                input_bytes=came.num_bytes,
                extra_bytes=model.extra_bytes if last else 0,
                gradient_bytes=gradient.num_bytes,
                output_bytes=out.num_bytes,
                output_gradient_bytes=back.num_bytes,
                graph_bytes=sum(block.graph_bytes for block in run),
                state_bytes=state_bytes(model, parameters),
                # The other half of each is somebody else's.
                coding_s=((came.coding_s + out.coding_s) / 2, (gradient.coding_s + back.coding_s) / 2),
            )
        )
    return tuple(stages)


def _crossing(model: ModelProfile, index: int) -> tuple[TransferSize, TransferSize]:
    """Of a sample what goes on from a block, -1 for the trainer before the first one, and what comes back of that."""
    num_bytes, number_bytes = float(model.input_bytes), model.input_number_bytes
    if index >= 0:
        num_bytes, number_bytes = model.blocks[index].output_bytes, model.blocks[index].number_bytes
    if 0 <= index < len(model.blocks) - 1:
        num_bytes /= model.wire.boundary_ratio
    forward, backward = model.wire.activations, model.wire.gradients
    return travelling(num_bytes, number_bytes, forward), travelling(num_bytes, number_bytes, backward)


def sum_bytes(model: ModelProfile) -> int:
    """Of one number of a sum of gradients."""
    return max(FLOAT32, model.weight_bytes)


def state_bytes(model: ModelProfile, parameters: int) -> float:
    """What a server keeps where it computes of so many of the parameters, but for activations.

    The weights, what the optimizer keeps, the gradients of one microbatch, their sum over the step, and the mean; and
    with error feedback what was lost of the sum. Snapshots are not counted: beyond `Limits.snapshot_bytes` they are in
    files.
    """
    sums = 2 + model.wire.error_feedback
    return float(parameters * ((2 + ADAM) * model.weight_bytes + sums * sum_bytes(model)))


def room_samples(stage: StageProfile, machine: Machine) -> float:
    """Of how many samples a machine has room for the graph, beside the stage; below 0: it has none for the stage."""
    return (machine.memory_bytes - stage.state_bytes) / max(1, stage.graph_bytes)


def kept_samples(stage: StageProfile, machine: Machine, limits: Limits) -> float:
    """Of how many samples a server keeps the graph until their backward; of others it computes the forward again."""
    return min(room_samples(stage, machine), limits.cache_bytes / max(1, stage.graph_bytes))
