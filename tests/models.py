"""Tiny models that several test files train, each built from a seed."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

LLAMA = "transformers.models.llama.modeling_llama"  # for the PRELOAD of test files that use `tiny_llama`


def mlp(seed: int = 0) -> nn.Module:
    """Odd sizes on purpose: no parameter divides evenly over 2 or 4 ranks."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def deep_mlp(seed: int = 0) -> nn.Module:
    """Six units, four of them with parameters."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 13), nn.Tanh(), nn.LayerNorm(13), nn.Linear(13, 13), nn.ReLU(), nn.Linear(13, 3))


class Block(nn.Module):
    """A residual block with a LayerNorm, as transformers have them."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 2 * dim)
        self.down = nn.Linear(2 * dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Stack(nn.Module):
    """Blocks between an input and an output layer; takes (B, 5), returns (B, 3)."""

    def __init__(self, num_blocks: int = 3, dim: int = 6) -> None:
        super().__init__()
        self.inner = nn.Linear(5, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(num_blocks))
        self.outer = nn.Linear(dim, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x)
        for block in self.blocks:
            x = block(x)
        return self.outer(x)


def stack(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return Stack()


class Branching(Stack):
    """Runs the blocks the batch names, in that order."""

    def forward(self, batch: Any) -> torch.Tensor:
        x = self.inner(batch["x"])
        for index in batch["path"]:
            x = self.blocks[index](x)
        return self.outer(x)


def branching(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return Branching(num_blocks=4)


def paths_for(batches: list[torch.Tensor], turn: int) -> list[dict[str, Any]]:
    """Every rank its own blocks, in its own order, and as many as it likes; `turn` changes who gets which."""
    paths = [(0, 1, 2), (3,), (2, 2, 0, 3), (1, 0)]
    return [{"x": x, "path": paths[(rank + turn) % 4]} for rank, x in enumerate(batches)]


def tiny_llama(seed: int = 0, *, num_layers: int = 2, attention: str = "sdpa", is_tied: bool = False) -> Any:
    """Random weights, 32 wide, 61 tokens."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=61,
            hidden_size=32,
            intermediate_size=52,
            num_hidden_layers=num_layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=32,
            attn_implementation=attention,
            tie_word_embeddings=is_tied,
        )
    )
