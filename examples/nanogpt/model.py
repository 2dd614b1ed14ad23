"""A GPT in the shape that most people's have: embeddings, a list of blocks, a norm, a head tied to the embeddings.

Its forward walks through the list by itself and returns the loss when it is given targets. Nothing here is written for
a swarm.
"""

import math
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F


class SelfAttention(nn.Module):
    """Several heads, each position attending to itself and to those before it."""

    def __init__(self, n_embd: int, n_head: int, dropout: float) -> None:
        super().__init__()
        self.n_head = n_head
        self.dropout = dropout
        self.qkv = nn.Linear(n_embd, 3 * n_embd, bias=False)
        self.proj = nn.Linear(n_embd, n_embd, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Shape in is shape out, ``[batch, time, n_embd]``."""
        query, key, value = self.qkv(x).unflatten(2, (3, self.n_head, -1)).permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        out: Tensor = self.proj(mixed.transpose(1, 2).flatten(2))
        return out


class Block(nn.Module):
    """Attention, then an MLP, each normed before and beside a residual connection."""

    def __init__(self, n_embd: int, n_head: int, dropout: float) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(n_embd)
        self.attn = SelfAttention(n_embd, n_head, dropout)
        self.ln_2 = nn.LayerNorm(n_embd)
        self.mlp = nn.Sequential(
            nn.Linear(n_embd, 4 * n_embd, bias=False), nn.GELU(), nn.Linear(4 * n_embd, n_embd, bias=False)
        )
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Shape in is shape out, ``[batch, time, n_embd]``."""
        x = x + self.drop(self.attn(self.ln_1(x)))
        out: Tensor = x + self.drop(self.mlp(self.ln_2(x)))
        return out


class GPT(L.LightningModule):
    """Predicts the next token.

    Args:
        vocab_size: Different tokens.
        block_size: Longest input.
        n_layer: Blocks.
        n_head: Attention heads in each.
        n_embd: Width; a multiple of `n_head`.
        dropout: Share of what is dropped in training.
        learning_rate: The peak of a one-cycle schedule.
        weight_decay: For matrices; norms are left alone.
    """

    transformer: Any  # a `ModuleDict` whose parts are attributes, which its type does not know
    lm_head: nn.Linear

    def __init__(
        self,
        vocab_size: int = 256,
        block_size: int = 128,
        n_layer: int = 6,
        n_head: int = 4,
        n_embd: int = 64,
        dropout: float = 0.0,
        learning_rate: float = 3e-3,
        weight_decay: float = 0.1,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.block_size = block_size
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(vocab_size, n_embd),
                "wpe": nn.Embedding(block_size, n_embd),
                "drop": nn.Dropout(dropout),
                "h": nn.ModuleList([Block(n_embd, n_head, dropout) for _ in range(n_layer)]),
                "ln_f": nn.LayerNorm(n_embd),
            }
        )
        self.lm_head = nn.Linear(n_embd, vocab_size, bias=False)
        self.apply(self._init_weights)
        self.lm_head.weight = self.transformer.wte.weight
        for block in self.transformer.h:
            # What goes into the residual stream is smaller the more blocks add to it.
            for out in (block.attn.proj, block.mlp[-1]):
                nn.init.normal_(out.weight, std=0.02 / math.sqrt(2 * n_layer))

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Logits, and the loss if there are targets.

        Args:
            tokens: ``int64 [batch, time]``, at most `block_size` of them.
            targets: The tokens that follow, in the same shape.

        Returns:
            ``[batch, time, vocab_size]``; the mean cross entropy in nats, or None.
        """
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.transformer.drop(self.transformer.wte(tokens) + self.transformer.wpe(positions))
        for block in self.transformer.h:
            x = block(x)
        logits: Tensor = self.lm_head(self.transformer.ln_f(x))
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """The loss of a batch."""
        loss: Tensor = self(*batch)[1]
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """The same, on text that training never sees."""
        self.log("val_loss", self(*batch)[1], prog_bar=True)

    def configure_optimizers(self) -> Any:
        """AdamW that decays matrices and nothing else, and a cycle of warm-up and cosine."""
        decay = [p for p in self.parameters() if p.dim() >= 2]
        no_decay = [p for p in self.parameters() if p.dim() < 2]
        learning_rate = self.hparams["learning_rate"]
        optimizer = torch.optim.AdamW(
            [
                {"params": decay, "weight_decay": self.hparams["weight_decay"]},
                {"params": no_decay, "weight_decay": 0.0},
            ],
            lr=learning_rate,
            betas=(0.9, 0.95),
        )
        scheduler = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, learning_rate, total_steps=int(self.trainer.estimated_stepping_batches), pct_start=0.1
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    @torch.no_grad()
    def generate(self, tokens: Tensor, num_tokens: int, temperature: float = 0.8) -> Tensor:
        """Continue ``tokens [batch, time]`` by chance; the last `block_size` are seen."""
        for _ in range(num_tokens):
            logits = self(tokens[:, -self.block_size :])[0][:, -1]
            chosen = torch.multinomial(F.softmax(logits / temperature, dim=-1), 1)
            tokens = torch.cat([tokens, chosen], dim=1)
        return tokens

    @staticmethod
    def _init_weights(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
