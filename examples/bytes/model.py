"""A byte-level GPT as an ordinary LightningModule. It knows nothing of swarms."""

import math
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F

NUM_BYTES = 256


class Embedding(nn.Module):
    """Bytes ``[batch, time]`` to vectors ``[batch, time, d_model]``, each with a learned position added."""

    def __init__(self, d_model: int, context: int) -> None:
        super().__init__()
        self.token = nn.Embedding(NUM_BYTES, d_model)
        self.position = nn.Embedding(context, d_model)
        for table in (self.token, self.position):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Look up both tables."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        hidden: Tensor = self.token(tokens) + self.position(positions)
        return hidden


class Block(nn.Module):
    """A pre-norm transformer block with causal attention; shape in is shape out."""

    def __init__(self, d_model: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.attention_norm = nn.LayerNorm(d_model)
        self.query_key_value = nn.Linear(d_model, 3 * d_model)
        self.attention_out = nn.Linear(d_model, d_model)
        self.mlp_norm = nn.LayerNorm(d_model)
        self.mlp = nn.Sequential(nn.Linear(d_model, 4 * d_model), nn.GELU(), nn.Linear(4 * d_model, d_model))

    def forward(self, hidden: Tensor) -> Tensor:
        """Attend, then the MLP, each beside a residual connection."""
        hidden = hidden + self._attend(self.attention_norm(hidden))
        out: Tensor = hidden + self.mlp(self.mlp_norm(hidden))
        return out

    def _attend(self, hidden: Tensor) -> Tensor:
        batch, time, d_model = hidden.shape
        heads = self.query_key_value(hidden).view(batch, time, 3, self.num_heads, d_model // self.num_heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        out: Tensor = self.attention_out(mixed.transpose(1, 2).reshape(batch, time, d_model))
        return out


class ByteGPT(L.LightningModule):
    """Predicts the next byte.

    Args:
        d_model: Width; a multiple of `num_heads`.
        num_blocks: Transformer blocks.
        num_heads: Attention heads in each.
        context: Longest input in bytes.
        learning_rate: The peak, reached after `warmup_steps`.
        warmup_steps: Steps of linear warm-up; a cosine down to a tenth of the peak follows.
        weight_decay: For matrices and embeddings; biases and norms are left alone.
    """

    def __init__(
        self,
        d_model: int = 128,
        num_blocks: int = 4,
        num_heads: int = 4,
        context: int = 128,
        learning_rate: float = 3e-3,
        warmup_steps: int = 20,
        weight_decay: float = 0.1,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.context = context
        self.net = nn.Sequential(
            Embedding(d_model, context),
            *(Block(d_model, num_heads) for _ in range(num_blocks)),
            nn.Sequential(nn.LayerNorm(d_model), nn.Linear(d_model, NUM_BYTES)),
        )

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits ``[batch, time, 256]`` of the byte that follows each of ``tokens [batch, time]``."""
        logits: Tensor = self.net(tokens)
        return logits

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Mean cross entropy per byte, in nats."""
        loss = self._loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """The same, on files that training never sees."""
        self.log("val_loss", self._loss(batch), prog_bar=True)

    def configure_optimizers(self) -> Any:
        """AdamW in two parameter groups; warm-up and cosine, once per step."""
        matrices = [p for p in self.parameters() if p.dim() >= 2]
        vectors = [p for p in self.parameters() if p.dim() < 2]
        optimizer = torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": self.hparams["weight_decay"]},
                {"params": vectors, "weight_decay": 0.0},
            ],
            lr=self.hparams["learning_rate"],
            betas=(0.9, 0.95),
        )
        num_steps = self.trainer.estimated_stepping_batches
        warmup_steps = self.hparams["warmup_steps"]
        scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: warmup_cosine(step, warmup_steps, num_steps)
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    @torch.no_grad()
    def generate(
        self,
        prompt: bytes,
        num_bytes: int,
        temperature: float = 0.8,
        generator: torch.Generator | None = None,
    ) -> bytes:
        """Continue `prompt`, one byte at a time.

        Args:
            prompt: At least one byte; only the last `context` of them are seen.
            num_bytes: How many to add.
            temperature: 0 always takes the likeliest byte; higher is wilder.
            generator: Source of chance; torch's global one by default.

        Returns:
            The bytes added, without the prompt.

        Raises:
            ValueError: The prompt is empty.
        """
        if not prompt:
            raise ValueError("`prompt` must have at least one byte to continue from, got none. A newline will do.")
        was_training = self.training
        self.eval()
        tokens = torch.tensor([list(prompt)], device=self.device)
        for _ in range(num_bytes):
            logits = self(tokens[:, -self.context :])[:, -1]
            if temperature == 0:
                choice = logits.argmax(dim=-1, keepdim=True)
            else:
                choice = torch.multinomial(F.softmax(logits / temperature, dim=-1), 1, generator=generator)
            tokens = torch.cat([tokens, choice], dim=1)
        self.train(was_training)
        return bytes(tokens[0, len(prompt) :].tolist())

    def _loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        tokens, targets = batch
        return F.cross_entropy(self(tokens).flatten(0, 1), targets.flatten())


def warmup_cosine(step: int, warmup_steps: int, num_steps: float) -> float:
    """The learning rate's share of its peak. With infinite `num_steps` it stays at the peak."""
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    progress = min(1.0, (step - warmup_steps) / max(1.0, num_steps - warmup_steps))
    return 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * progress))
