"""Orthogonalising a matrix by Newton-Schulz iteration, the heart of Muon."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

NsMethod = Literal["gram", "standard"]

NUM_STEPS = 5
# the steepest slope at 0 that still leaves every singular value near 1, though not exactly at it
_A, _B, _C = 3.4445, -4.7750, 2.0315
_RESTART = 2  # the Gram form multiplies back into X here: rounding of the products has not grown yet


def orthogonalize(matrices: Tensor, method: NsMethod = "gram") -> Tensor:
    """The nearest (semi-)orthogonal matrices, roughly: singular values end up in about 0.7 .. 1.2.

    matrices: (..., rows, cols); a stack is treated matrix by matrix. Returns fp32 of the same shape.

    X <- X / (|X| + 1e-7), then five times X <- aX + (bA + cA^2) X with A = X X^T, transposed so that
    rows <= cols. `gram` runs the same iteration on A alone, cheaper when cols is much larger than rows;
    square matrices always take `standard`. Computed in fp32 on a CPU and in fp16 on an accelerator.
    Source: Jordan et al., Muon, 2024 (https://kellerjordan.github.io/posts/muon).
    """
    is_tall = matrices.size(-2) > matrices.size(-1)
    x = matrices.float()
    x = x.mT if is_tall else x
    x = x / (torch.linalg.matrix_norm(x, keepdim=True) + 1e-7)
    use_gram = method == "gram" and x.size(-2) != x.size(-1)
    if x.device.type != "cpu":
        # all entries are within 1, where fp16 rounds 8 times finer than bf16 at the same speed
        x = x.half()
    x = _iterate_gram(x) if use_gram else _iterate(x, NUM_STEPS)
    return (x.mT if is_tall else x).float()


def _iterate(x: Tensor, num_steps: int) -> Tensor:
    for _ in range(num_steps):
        a = x @ x.mT
        x = _A * x + (_B * a + _C * (a @ a)) @ x
    return x


def _iterate_gram(x: Tensor) -> Tensor:
    """`_iterate` by products of P = aI + bA + cA^2, which commutes with A: A <- P A P, Q <- P Q; X <- Q X."""
    for num_steps in (_RESTART, NUM_STEPS - _RESTART):
        a = x @ x.mT
        q = torch.eye(a.size(-1), dtype=a.dtype, device=a.device)
        for step in range(num_steps):
            p = _B * a + _C * (a @ a)
            p.diagonal(dim1=-2, dim2=-1).add_(_A)
            q = p @ q
            if step + 1 < num_steps:
                a = p @ a @ p
        x = q @ x
    return x
