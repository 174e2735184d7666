"""Gradient moments as Adam keeps them (arXiv:1412.6980), over lists of tensors.

exp_avg     m, (same shape as the parameter), in its dtype
exp_avg_sq  v, likewise
step        number of updates of this parameter, () fp32 on the CPU, as in `torch.optim`
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fullspeed.base.errors import UsageError


class MomentBatch(NamedTuple):
    """The parameters of one group that have a gradient now, with their state; lists of equal length."""

    params: list[Tensor]
    grads: list[Tensor]
    exp_avgs: list[Tensor]
    exp_avg_sqs: list[Tensor]
    steps: list[float]  # counting the update that is under way


def with_grads(group: Mapping[str, Any]) -> tuple[list[Tensor], list[Tensor]]:
    """Parameters of the group that have a gradient, and the gradients. Raises UsageError for a sparse one."""
    params = [param for param in group["params"] if param.grad is not None]
    grads = [param.grad for param in params]
    if any(grad.is_sparse for grad in grads):
        raise UsageError("this optimizer cannot take sparse gradients; build the embedding with sparse=False")
    return params, grads


def begin_update(state: Mapping[Tensor, dict[str, Any]], group: Mapping[str, Any]) -> MomentBatch:
    """Collect a group's parameters with gradients, counting the step and making absent moments (zeros)."""
    params, grads = with_grads(group)
    entries = [state[param] for param in params]
    for param, entry in zip(params, entries, strict=True):
        if not entry:
            entry["step"] = torch.tensor(0.0)
            entry["exp_avg"] = torch.zeros_like(param, memory_format=torch.preserve_format)
            entry["exp_avg_sq"] = torch.zeros_like(param, memory_format=torch.preserve_format)
        entry["step"] += 1
    return MomentBatch(
        params,
        grads,
        [entry["exp_avg"] for entry in entries],
        [entry["exp_avg_sq"] for entry in entries],
        [float(entry["step"]) for entry in entries],
    )


def advance_moments(batch: MomentBatch, beta1: float, beta2: float) -> None:
    """In place: m <- beta1 m + (1 - beta1) g and v <- beta2 v + (1 - beta2) g^2."""
    torch._foreach_lerp_(batch.exp_avgs, batch.grads, 1 - beta1)
    torch._foreach_mul_(batch.exp_avg_sqs, beta2)
    torch._foreach_addcmul_(batch.exp_avg_sqs, batch.grads, batch.grads, 1 - beta2)


def adam_directions(
    batch: MomentBatch,
    betas: tuple[float, float],
    eps: float,
    *,
    bias_correction: bool = True,
    eps_inside_sqrt: bool = False,
) -> list[Tensor]:
    """New tensors m^ / (sqrt(v^) + eps), or m^ / sqrt(v^ + eps) with `eps_inside_sqrt`.

    m^ = m / (1 - beta1^t), v^ = v / (1 - beta2^t); without `bias_correction` they are m and v themselves.
    """
    correct1 = [1 - betas[0] ** step if bias_correction else 1.0 for step in batch.steps]
    correct2 = [1 - betas[1] ** step if bias_correction else 1.0 for step in batch.steps]
    denominators = list(torch._foreach_div(batch.exp_avg_sqs, correct2))
    if eps_inside_sqrt:
        torch._foreach_add_(denominators, eps)
    torch._foreach_sqrt_(denominators)
    if not eps_inside_sqrt:
        torch._foreach_add_(denominators, eps)
    directions = list(torch._foreach_div(batch.exp_avgs, correct1))
    torch._foreach_div_(directions, denominators)
    return directions
