"""Train a language model of Hugging Face, as it is, on a swarm of local peers or with ``--plain`` on none.

The model is built from a config, and nothing is downloaded. It learns paragraphs of the source of Python's own library,
byte by byte; they are of many lengths, so batches are padded, and have masks. The swarm is told one thing of the model:
the name of its list of layers.
"""

import argparse
import logging
import sysconfig
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
import transformers
from lightning.pytorch.strategies import Strategy
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from examples.bytes.data import read_bytes, source_files
from lightning_swarm import SwarmStrategy

LAYERS = {
    "gpt_neox": "model.gpt_neox.layers",
    "llama": "model.model.layers",
    "qwen2": "model.model.layers",
    "stablelm": "model.model.layers",
}
"""Where some types of model have their layers; many others would do."""

PADDING = 0
"""A byte that no source has."""


class LanguageModel(L.LightningModule):
    """What anybody writes around a model of Hugging Face."""

    def __init__(self, config: Any, learning_rate: float) -> None:
        """The config says what the model is, down to its number of layers."""
        super().__init__()
        self.model = transformers.AutoModelForCausalLM.from_config(config)
        self.learning_rate = learning_rate

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """The model computes its own loss."""
        loss: Tensor = self.model(**batch).loss
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """The same, on text that it does not learn."""
        self.log("val_loss", self.model(**batch).loss)

    def configure_optimizers(self) -> Any:
        """AdamW, and a rate that rises and falls."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.learning_rate)
        num_steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=self.learning_rate, total_steps=num_steps + 1)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    @torch.inference_mode()
    def complete(self, text: str, num_bytes: int) -> str:
        """What the model makes of the beginning of a text. For generating, a cache of keys and values is of use."""
        ids = torch.tensor([list(text.encode())], device=self.device)
        found = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=num_bytes,
            do_sample=False,
            use_cache=True,
            pad_token_id=PADDING,
        )
        return bytes(found[0].tolist()).decode(errors="replace")


def paragraphs(context: int, max_bytes: int) -> list[Tensor]:
    """Pieces of Python's library between empty lines, at most `context` bytes of each, as ``int64 [length]``."""
    library = Path(sysconfig.get_paths()["stdlib"])
    text = read_bytes(source_files(library), max_bytes).numpy().tobytes()
    pieces = [piece.strip(b"\n")[:context] for piece in text.split(b"\n\n")]
    return [torch.tensor(list(piece)) for piece in pieces if len(piece) > 1]


def loader(texts: list[Tensor], batch_size: int, *, shuffle: bool) -> DataLoader[dict[str, Tensor]]:
    """Batches, in an order that depends on nothing else."""
    order = torch.Generator().manual_seed(0) if shuffle else None
    return DataLoader(texts, batch_size, shuffle=shuffle, generator=order, collate_fn=padded)  # type: ignore[arg-type]


def padded(texts: Sequence[Tensor]) -> dict[str, Tensor]:
    """A batch, as long as its longest text. What is only padding gives no loss."""
    ids = pad_sequence(list(texts), batch_first=True, padding_value=PADDING)
    mask = torch.arange(ids.shape[1]) < torch.tensor([[len(text)] for text in texts])
    return {"input_ids": ids, "attention_mask": mask.long(), "labels": ids.masked_fill(~mask, -100)}


def make_config(model_type: str, *, width: int, num_layers: int, context: int) -> Any:
    """A model without dropout, so that both ways of training compute the same."""
    return transformers.AutoConfig.for_model(
        model_type,
        vocab_size=256,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=4 * context,
        tie_word_embeddings=True,
        use_cache=False,  # of no use in training, and servers keep none
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=PADDING,
    )


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plain", action="store_true", help="use Lightning's own strategy instead of a swarm")
    parser.add_argument("--model-type", choices=sorted(LAYERS), default="llama", help="which model (default: llama)")
    parser.add_argument("--devices", type=int, default=3, help="local peers of the swarm (default: 3)")
    parser.add_argument("--num-stages", type=int, default=3, help="parts the layers are cut into (default: 3)")
    parser.add_argument("--max-steps", type=int, default=150, help="steps to train (default: 150)")
    parser.add_argument("--width", type=int, default=64, help="of the hidden state (default: 64)")
    parser.add_argument("--num-layers", type=int, default=6, help="of the model (default: 6)")
    parser.add_argument("--batch-size", type=int, default=32, help="paragraphs in a batch (default: 32)")
    parser.add_argument("--precision", default="32-true", help="as the Trainer's (default: 32-true)")
    return parser.parse_args()


def main() -> None:
    """Train, and let the model write a little."""
    arguments = parse_arguments()
    # Small data in memory needs no worker processes.
    warnings.filterwarnings("ignore", message=".*does not have many workers")
    # Lightning's own business with a torch that is newer than it.
    warnings.filterwarnings("ignore", message=".*LeafSpec")
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)

    strategy: str | Strategy = "auto"
    if not arguments.plain:
        strategy = SwarmStrategy(num_stages=arguments.num_stages, pipeline=LAYERS[arguments.model_type])
    L.seed_everything(0, verbose=False)
    context = 96
    config = make_config(arguments.model_type, width=arguments.width, num_layers=arguments.num_layers, context=context)
    model = LanguageModel(config, learning_rate=4e-3)
    texts = paragraphs(context, max_bytes=1 << 22)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1 if arguments.plain else arguments.devices,
        strategy=strategy,
        max_steps=arguments.max_steps,
        limit_val_batches=10,
        val_check_interval=arguments.max_steps,
        num_sanity_val_steps=0,
        precision=arguments.precision,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    size = arguments.batch_size
    trainer.fit(model, loader(texts[500:], size, shuffle=True), loader(texts[:500], size, shuffle=False))
    print(", ".join(f"{name} {float(loss):.4f}" for name, loss in sorted(trainer.callback_metrics.items())))
    print(model.complete("    def __init__(self", num_bytes=60))


if __name__ == "__main__":
    main()
