"""The demo's model: a byte-level transformer of 1.3 million parameters, small enough for one CPU thread."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY = 256  # bytes


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes; the defaults give 1,288,640 parameters and about 0.1 s per step on one thread of a shared core."""

    width: int = 160
    layers: int = 4
    heads: int = 4
    context: int = 64  # bytes
    dropout: float = 0.1


class Block(nn.Module):
    """Pre-norm attention and MLP, each with dropout on its way back to the residual stream."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.norm_attention = nn.LayerNorm(config.width)
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)
        self.norm_mlp = nn.LayerNorm(config.width)
        self.mlp = nn.Sequential(
            nn.Linear(config.width, 4 * config.width), nn.GELU(), nn.Linear(4 * config.width, config.width)
        )
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, context, width) -> the same."""
        batch, length, width = x.shape
        qkv = self.qkv(self.norm_attention(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.dropout(self.out(attended.transpose(1, 2).reshape(batch, length, width)))
        mixed: Tensor = x + self.dropout(self.mlp(self.norm_mlp(x)))
        return mixed


class ByteTransformer(nn.Module):
    """Predicts the next byte. The embedding and the output head are one matrix."""

    def __init__(self, config: ModelConfig | None = None) -> None:
        super().__init__()
        self.config = config or ModelConfig()
        self.embed = nn.Embedding(VOCABULARY, self.config.width)
        self.position = nn.Embedding(self.config.context, self.config.width)
        self.dropout = nn.Dropout(self.config.dropout)
        self.blocks = nn.ModuleList(Block(self.config) for _ in range(self.config.layers))
        self.norm = nn.LayerNorm(self.config.width)
        self.head = nn.Linear(self.config.width, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, text: Tensor) -> Tensor:
        """(batch, length ≤ context) int64 bytes -> (batch, length, 256) logits."""
        places = torch.arange(text.shape[1], device=text.device)
        x = self.dropout(self.embed(text) + self.position(places))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits

    def loss(self, text: Tensor) -> Tensor:
        """Mean cross-entropy, in nats per byte, of predicting each byte of (batch, length + 1) from those before."""
        logits = self(text[:, :-1])
        return functional.cross_entropy(logits.reshape(-1, VOCABULARY), text[:, 1:].reshape(-1))
