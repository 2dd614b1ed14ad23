"""Models and their blocks."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from typing_extensions import override

from lightning_swarm.core.errors import ConfigError
from lightning_swarm.testing import InMemoryStrategy
from tests.features.both import fit_both
from tests.features.mark import PARTLY, REFUSED, WORKS, feature
from tests.parity.harness import LOSS_TOLERANCE, QUIET, assert_same_curve, run_plain, run_swarm
from tests.parity.models import VOCABULARY, DigitsMLP, Images, NanoGPT, Recipe, TinyGPT, digits, loader, sentences

STEPS = 9
LIST = {"pipeline": "transformer.h"}


@feature("one `Sequential` that holds all parameters", WORKS)
def test_one_sequential() -> None:
    fit_both(DigitsMLP, max_steps=STEPS)


class Arranged(TinyGPT):
    def configure_stages(self) -> Any:
        return list(self.net)

    @override
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch[0]).flatten(0, 1), batch[1].flatten())

    @override
    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.net(tokens)
        return logits


@feature("blocks that `configure_stages()` returns", WORKS)
def test_configured_stages() -> None:
    fit_both(Arranged, data=lambda: loader(sentences()), max_steps=STEPS)


@feature(
    "a `ModuleList` cut by its name (`pipeline='transformer.h'`)",
    WORKS,
    "the model's own forward stays unedited; it calls the blocks one after the other: [models](models.md)",
)
def test_a_list_in_a_forward() -> None:
    fit_both(NanoGPT, data=lambda: loader(sentences()), max_steps=STEPS, swarm=LIST)


class Llama(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        sizes = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2}
        config = transformers.LlamaConfig(vocab_size=VOCABULARY, use_cache=False, tie_word_embeddings=True, **sizes)
        self.model = transformers.LlamaForCausalLM(config)

    @override
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        loss = self.model(input_ids=batch[0], labels=batch[0]).loss
        self.log("loss", loss)
        return loss

    @override
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


@feature(
    "Hugging Face models (`pipeline='model.model.layers'`)",
    WORKS,
    "unedited, with masks, rotary tables and keyword arguments: [models](models.md)",
)
def test_hugging_face() -> None:
    fit_both(Llama, data=lambda: loader(sentences()), max_steps=STEPS, swarm={"pipeline": "model.model.layers"})


class TiedGPT(TinyGPT):
    def __init__(self) -> None:
        super().__init__()
        self.net[3].out.weight = self.net[0].token.weight


@feature("weights tied across stages", WORKS, "embeddings and head, or a block that is used several times")
def test_tied_weights() -> None:
    fit_both(TiedGPT, data=lambda: loader(sentences()), max_steps=STEPS)


@feature("parameters outside of the pipeline", WORKS, "the trainer computes with them, and a separate stage steps them")
@feature("`BatchNorm` outside of the pipeline", WORKS, "it normalises whole batches")
def test_parameters_outside() -> None:
    runs = [
        run(Images, loader(digits()), max_steps=STEPS, **options)
        for run, options in ((run_plain, {}), (run_swarm, {"pipeline": "body"}))
    ]
    assert_same_curve(runs[1], runs[0], weight=1e-10)


class Normalizing(DigitsMLP):
    """Cuts a batch into microbatches of `size` itself, or leaves that to a swarm."""

    def __init__(self, size: int | None = None) -> None:
        # The gradient of a bias before a norm is only rounding, which Adam would amplify.
        super().__init__(Recipe(optimizer="sgd"))
        self.size = size
        self.net.insert(1, nn.BatchNorm1d(24))

    @override
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        parts = batch[0].split(self.size or len(batch[0]))
        return F.cross_entropy(torch.cat([self.net(part) for part in parts]), batch[1])


@feature(
    "`BatchNorm` in blocks",
    PARTLY,
    "each microbatch is normalised by its own statistics, as in a plain loop over microbatches, with a warning. "
    "Running statistics count each microbatch once, in `training_step`; calls in train mode in other hooks are refused",
)
def test_batch_norm_in_blocks() -> None:
    runs = [
        run_plain(partial(Normalizing, 2), loader(digits()), max_steps=STEPS),
        run_swarm(Normalizing, loader(digits()), max_steps=STEPS, microbatch_size=2),
    ]
    assert_same_curve(runs[1], runs[0], weight=1e-10)


class WithExample(NanoGPT):
    def __init__(self) -> None:
        super().__init__()
        self.example_input_array = sentences().tensors[0][:4]


@feature("`split='time'`", WORKS, "measures the blocks on this machine with `example_input_array`")
def test_split_by_time() -> None:
    fit_both(WithExample, data=lambda: loader(sentences()), max_steps=STEPS, swarm={**LIST, "split": "time"})


class Checkpoints(NanoGPT):
    @override
    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        x = self.transformer["wte"](idx)
        for block in self.transformer["h"]:  # type: ignore[union-attr]
            x = checkpoint(block, x, use_reentrant=False)
        logits = self.lm_head(self.transformer["ln_f"](x))
        assert torch.is_grad_enabled()
        return logits, None if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())


@feature(
    "`torch.utils.checkpoint` around blocks of a list",
    WORKS,
    "with `use_reentrant=False`; not needed, because servers recompute activations if memory is short",
)
def test_checkpointed_blocks() -> None:
    fit_both(Checkpoints, data=lambda: loader(sentences()), max_steps=STEPS, swarm=LIST)


class OnMeta(DigitsMLP):
    """Creates its layers late, and without memory if `meta` is set."""

    meta = True

    @override
    def configure_model(self) -> None:
        if self.meta and not any(parameter.is_meta for parameter in self.parameters()):
            with torch.device("meta"):
                self.net = DigitsMLP().net


class InMemory(OnMeta):
    @override
    def configure_model(self) -> None:
        if self.meta:
            self.meta, self.net = False, DigitsMLP().net


@feature(
    "layers on the meta device: `with torch.device('meta'):` in `configure_model`, or "
    "`trainer.init_module(empty_init=True)`",
    WORKS,
    "initial weights equal the plain Trainer's without meta; trained weights are only in checkpoints: "
    "[large models](large.md)",
)
def test_on_meta() -> None:
    plain, swarm = (
        run_plain(InMemory, loader(digits()), max_steps=STEPS),
        run_swarm(OnMeta, loader(digits()), max_steps=STEPS),
    )
    assert all(parameter.is_meta for parameter in swarm.module.parameters())
    assert swarm.losses == pytest.approx(plain.losses, rel=LOSS_TOLERANCE)


class Centred(DigitsMLP):
    """Its last block compares the samples of a batch."""

    class Centre(nn.Module):
        @override
        def forward(self, x: Tensor) -> Tensor:
            return x - x.mean(0)

    def __init__(self) -> None:
        super().__init__()
        self.net.append(self.Centre())


@feature(
    "blocks that compare samples, or have time in dimension 0",
    REFUSED,
    "at the first batch that is cut; they work if `microbatch_size` is the length of dimension 0",
)
def test_mixed_rows() -> None:
    with pytest.raises(ConfigError, match="each sample of a batch by itself"):
        run_swarm(Centred, loader(digits()), max_steps=2)


class Renormed(DigitsMLP):
    """An embedding whose forward writes its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(17, 64, max_norm=0.5)

    @override
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self.net(self.table((batch[0][:, 0] * 16).long())), batch[1])


@feature(
    "layers that write their weights in their forward: `nn.Embedding(..., max_norm=1.0)`",
    REFUSED,
    "the error names the parameter; renormalise it in a hook between two steps",
)
def test_weights_written_in_a_forward() -> None:
    with pytest.raises(ConfigError, match=r"'table\.weight' were written.*max_norm"):
        run_swarm(Renormed, loader(digits()), pipeline="net", max_steps=2)


class Graph(DigitsMLP):
    """Passes the edges between a batch's samples to its blocks as well."""

    class Neighbours(nn.Module):
        @override
        def forward(self, x: Tensor, edges: Tensor) -> Tensor:
            if edges.is_sparse:
                return x + torch.sparse.mm(edges, x)
            return x.index_add(0, edges[1], x[edges[0]])

    def __init__(self, *, is_sparse: bool = False) -> None:
        super().__init__()
        self.is_sparse = is_sparse
        self.layers = nn.ModuleList([self.Neighbours(), self.Neighbours()])

    @override
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        count = len(batch[0])
        edges = torch.stack([torch.arange(count), torch.arange(count).roll(1)])
        if self.is_sparse:
            edges = torch.eye(count, dtype=batch[0].dtype).roll(1, 0).to_sparse()
        hidden = batch[0]
        for layer in self.layers:
            hidden = layer(hidden, edges)
        return F.cross_entropy(self.net(hidden), batch[1])


@feature(
    "graphs: edges between a batch's samples as an argument of blocks",
    REFUSED,
    "if a batch is cut; they work if `microbatch_size` covers all samples and `shared` names the edges. Sparse "
    "tensors do not travel; pass their indices and values",
)
def test_graphs() -> None:
    edges = {"pipeline": "layers", "num_stages": 2}
    with pytest.raises(ConfigError, match="dimension 0"):
        run_swarm(Graph, loader(digits()), max_steps=2, **edges)
    with pytest.raises(ConfigError, match="must be dense"):
        run_swarm(lambda: Graph(is_sparse=True), loader(digits()), max_steps=2, microbatch_size=8, **edges)
    weights = []
    for strategy in ("auto", InMemoryStrategy(**edges, microbatch_size=8, shared=["edges"])):
        torch.manual_seed(0)
        module = Graph()
        L.Trainer(**QUIET, max_steps=STEPS, strategy=strategy).fit(module, loader(digits()))
        weights.append(module.state_dict())
    torch.testing.assert_close(weights[1], weights[0], rtol=0.0, atol=1e-9)


class InPlace(DigitsMLP):
    """Its first block changes the batch in place, which the loss reads, too."""

    def __init__(self) -> None:
        super().__init__()
        self.net.insert(0, nn.ReLU(inplace=True))

    @override
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        batch[0] -= 0.3
        return F.cross_entropy(self.net(batch[0]), batch[1]) * (1 + batch[0].mean())


@feature(
    "a first block that works in place on the batch (`nn.ReLU(inplace=True)`)",
    WORKS,
    "the caller's tensor receives the block's writes; items that the block replaces in lists and dicts cannot be read",
)
def test_a_first_block_in_place() -> None:
    fit_both(InPlace, max_steps=STEPS)


class Chance(DigitsMLP):
    class Scale(nn.Module):
        @override
        def forward(self, x: Tensor) -> Tensor:
            return x * random.random()

    def __init__(self) -> None:
        super().__init__()
        self.net.append(self.Scale())


@feature(
    "random numbers in blocks from sources other than torch (`random`, `numpy.random`), clocks and counters",
    REFUSED,
    "at the first batch that is cut; draw random numbers with torch",
)
def test_other_random_numbers() -> None:
    with pytest.raises(ConfigError, match="give equal rows equal outputs"):
        run_swarm(Chance, loader(digits()), max_steps=2)


class Kept(DigitsMLP):
    """Its first block keeps a loss of its own, and a hook takes features of the second."""

    def __init__(self) -> None:
        super().__init__()
        self.net[0] = KeepingLinear(64, 24)
        self.found: dict[str, Tensor] = {}
        self.net[1].register_forward_hook(lambda module, args, output: self.found.update(features=output))

    @override
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss + self.net[0].penalty + self.found["features"].square().mean()


class KeepingLinear(nn.Linear):
    @override
    def forward(self, x: Tensor) -> Tensor:
        hidden = super().forward(x)
        self.penalty = 0.1 * hidden.square().mean()
        return hidden


@feature(
    "tensors that a block's forward keeps in attributes (`self.aux_loss = ...`), and forward hooks on blocks",
    PARTLY,
    "with gradients: one value for each sample, or a mean or sum over samples. Reading any other value is "
    "refused by the attribute's name, unless `microbatch_size` is the whole batch. So are values that a hook "
    "observes and a later layer overwrites in place",
)
def test_what_a_forward_leaves() -> None:
    fit_both(Kept, max_steps=STEPS)
