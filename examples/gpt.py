"""A byte-level GPT in plain PyTorch: pre-norm blocks, causal attention, tied input and output bytes.

Letters in shape comments: B batch, S sequence, H heads, D model width, V vocabulary (256 bytes).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of the model. The default has 9.8 million parameters."""

    vocab_size: int = 256
    num_layers: int = 4
    num_heads: int = 7
    width: int = 448  # D


def rotary_turns(length: int, head_width: int, device: torch.device) -> Tensor:
    """Unit complex numbers (S, D / H / 2) that rotate pair i at position s by s / 10000 ** (2 i H / D).

    Source: arXiv:2104.09864, section 3.2.
    """
    speeds = 10000.0 ** -(torch.arange(0, head_width, 2, device=device) / head_width)
    angles = torch.outer(torch.arange(length, device=device), speeds)
    return torch.polar(torch.ones_like(angles), angles)


def rotate(x: Tensor, turns: Tensor) -> Tensor:
    """Rotate each pair of numbers in the last dimension of `x` (B, H, S, D / H), in fp32."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * turns).flatten(-2).type_as(x)


class Attention(nn.Module):
    """Causal self-attention. Rotated queries and keys tell it how far apart two positions are."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        """(B, S, D) to (B, S, D); position s reads positions up to s."""
        heads = self.qkv(x).unflatten(-1, (3, self.num_heads, -1))  # (B, S, 3, H, D / H)
        q, k, v = heads.permute(2, 0, 3, 1, 4)  # each (B, H, S, D / H)
        mixed = F.scaled_dot_product_attention(rotate(q, turns), rotate(k, turns), v, is_causal=True)
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(-2))
        return out


class Block(nn.Module):
    """Attention, then a two-layer perceptron, each added to what came in."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.mlp_norm = nn.LayerNorm(config.width)
        self.mlp = nn.Sequential(
            nn.Linear(config.width, 4 * config.width, bias=False),
            nn.GELU(approximate="tanh"),
            nn.Linear(4 * config.width, config.width, bias=False),
        )

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        """(B, S, D) to (B, S, D)."""
        x = x + self.attention(self.attention_norm(x), turns)
        out: Tensor = x + self.mlp(self.mlp_norm(x))
        return out


class GPT(nn.Module):
    """Predict the next byte."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocab_size, bias=False)
        self.head.weight = self.embedding.weight
        self._initialise()

    def _initialise(self) -> None:
        """Draw the matrices so that what the blocks add keeps its scale at any depth."""
        for name, param in self.named_parameters():
            if param.ndim == 2:
                is_added = name.endswith(("attention.out.weight", "mlp.2.weight"))
                nn.init.normal_(param, std=0.02 / math.sqrt(2 * self.config.num_layers) if is_added else 0.02)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Score the byte after each position.

        tokens, targets: (B, S) integers. Returns the mean loss in nats per byte, or the scores (B, S, V) when
        there are no targets.
        """
        turns = rotary_turns(tokens.shape[1], self.config.width // self.config.num_heads, tokens.device)
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, turns)
        logits: Tensor = self.head(self.norm(x))
        if targets is None:
            return logits
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
