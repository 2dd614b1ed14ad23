"""Tune an adapter of your own over a served model: python tune.py ADDRESS TEXT_FILE ADAPTER_FOLDER."""

import sys
from pathlib import Path
from typing import Any

import lightning as L
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_swarm import AttachStrategy


class Tuning(L.LightningModule):
    """Any LightningModule: only where its model comes from is new."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return self.model(input_ids=batch, labels=batch).loss

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([weight for weight in self.parameters() if weight.requires_grad], lr=3e-3)


def main() -> None:
    """Tune for a while, save the adapter, and write a text with it."""
    address, text, folder = sys.argv[1:]
    strategy = AttachStrategy(address)
    tokenizer = strategy.base_model().swarm.tokenizer()
    model = get_peft_model(strategy.base_model(), LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"))
    tokens = tokenizer(Path(text).read_text(), return_tensors="pt").input_ids[0]
    rows = [tokens[start : start + 16] for start in range(0, len(tokens) - 16, 8)]
    trainer = L.Trainer(strategy=strategy, devices=1, max_steps=60, logger=False, enable_checkpointing=False)
    trainer.fit(Tuning(model), DataLoader(rows, batch_size=8, shuffle=True))  # type: ignore[arg-type]
    model.save_pretrained(folder)
    found = model.eval().generate(input_ids=tokens[None, :2], max_new_tokens=12, do_sample=False)
    print("It writes:", tokenizer.decode(found[0]))


if __name__ == "__main__":
    main()
