"""What a transformer costs, from its measures alone. Pure."""

from __future__ import annotations

from typing import Final, Literal, TypeAlias

from lightning_swarm.planner.records import Block, Model

Ends: TypeAlias = Literal["stages", "trainer"]
"""Where embeddings and head are: in the first and the last stage (which computes the loss, too), or around all."""

_TOKEN_BYTES: Final = 8
_GRAPH_PER_WIDTH: Final = 17
"""Numbers that a block's backward needs of a token, by its width, where no matrix of attention is kept.
Source: Korthikanti et al., arXiv:2205.05198, section 4."""


def block(width: int, sequence: int, element_bytes: int = 4) -> Block:
    """A block of attention and a feed-forward network of four times the width.

    Its products of matrices take 2 flop a parameter and token, attention 4 a feature and pair of tokens; the backward
    takes twice as much as the forward.
    """
    parameters = 12 * width * width + 13 * width
    return Block(
        parameters=parameters,
        flop=3.0 * sequence * (2.0 * 12 * width * width + 4.0 * sequence * width),
        output_bytes=sequence * width * element_bytes,
        graph_bytes=_GRAPH_PER_WIDTH * sequence * width * element_bytes,
        number_bytes=element_bytes,
    )


def transformer(
    layers: int, width: int, sequence: int, vocabulary: int = 0, *, ends: Ends = "stages", element_bytes: int = 4
) -> Model:
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
        return Model(
            blocks=middle,
            input_bytes=hidden,
            input_gradient=False,
            weight_bytes=element_bytes,
            input_number_bytes=element_bytes,
        )
    logits = sequence * vocabulary * element_bytes
    embeddings = Block(
        parameters=(vocabulary + sequence) * width,
        flop=0.0,
        output_bytes=hidden,
        graph_bytes=0,
        number_bytes=element_bytes,
    )
    head = Block(
        parameters=vocabulary * width,
        flop=6.0 * sequence * vocabulary * width,
        output_bytes=element_bytes,
        graph_bytes=hidden + 2 * logits,
        number_bytes=element_bytes,
    )
    if ends == "stages":
        tokens = sequence * _TOKEN_BYTES
        blocks = (embeddings, *middle, head)
        return Model(
            blocks=blocks,
            input_bytes=tokens,
            input_gradient=False,
            extra_bytes=tokens,
            weight_bytes=element_bytes,
            input_number_bytes=0,
        )
    around = Block(
        parameters=embeddings.parameters + head.parameters,
        flop=head.flop,
        output_bytes=0,
        graph_bytes=head.graph_bytes,
    )
    return Model(
        blocks=middle,
        input_bytes=hidden,
        input_gradient=True,
        around=around,
        weight_bytes=element_bytes,
        input_number_bytes=element_bytes,
    )
