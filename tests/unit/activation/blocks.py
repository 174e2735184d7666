"""Transformer blocks with every kind of activation: dropout, attention, a fused projection, a wide middle."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    """Pre-norm attention and MLP; takes and returns (B, S, M)."""

    def __init__(self, dim: int = 32, dropout: float = 0.1) -> None:
        super().__init__()
        self.num_heads = 4
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        batch, length, dim = x.shape
        heads = self.qkv(self.norm1(x)).view(batch, length, 3, self.num_heads, -1)
        q, k, v = heads.permute(2, 0, 3, 1, 4)  # each (B, H, S, D)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(batch, length, dim)
        x = x + scale * self.dropout(self.out(mixed))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def blocks(num_blocks: int = 4, dim: int = 32, dropout: float = 0.1) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(dim, dropout) for _ in range(num_blocks)))


def hidden_states(batch: int = 2, length: int = 16, dim: int = 32) -> torch.Tensor:
    """(B, S, M), requires gradients."""
    return torch.randn(batch, length, dim, generator=torch.Generator().manual_seed(1)).requires_grad_()


def gradients(model: nn.Module, x: torch.Tensor, seed: int = 5) -> list[torch.Tensor]:
    """Of the input and every parameter after one forward and backward."""
    torch.manual_seed(seed)
    loss = model(x).square().mean()
    params = [x, *model.parameters()]
    for param in params:
        param.grad = None
    loss.backward()
    return [param.grad.clone() for param in params if param.grad is not None]


def assert_same(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    assert len(ours) == len(theirs) > 0
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.equal(mine, other)
