"""One optimizer step of many tensors at once: parameters, states and 16-bit copies in one pass over memory.

The arithmetic is fp32 whatever the tensors hold; results are rounded to their dtypes once, to the nearest. With g the
gradient, t the number of the step and wd the weight decay, which is added to the gradient (g + wd p) or, decoupled,
shrinks the parameter first (p (1 - lr wd)):

    adam      m <- m + (1 - beta1)(g - m)        v <- beta2 v + (1 - beta2) g^2
              p <- p - lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps)     (arXiv:1412.6980)
    adagrad   s <- s + g^2                       p <- p - lr g / (sqrt(s) + eps)        (Duchi et al., JMLR 2011)
    lion      p <- p - lr sign(m + (1 - beta1)(g - m)),  then  m <- m + (1 - beta2)(g - m)   (arXiv:2302.06675)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from fullspeed.kernels.native import needs_native
from fullspeed.kernels.registry import Implementation, Op, runs_anywhere

STATE_DTYPES = (torch.float32, torch.bfloat16)
NARROW_DTYPES = (torch.bfloat16, torch.float16)


class Item(NamedTuple):
    """One parameter with all that a step reads and writes; tensors of one number of elements, contiguous, no overlap.

    Attributes:
        param: fp32, or bf16 or fp16 with a gradient of the same dtype and no copy.
        grad: fp32, bf16 or fp16.
        first: adam, lion: m; adagrad: s. fp32 or bf16.
        second: adam: v, of the same dtype; else None.
        copy: gets the new values as well, in bf16 or fp16; None without.
        step: t, counting this one; inf leaves out adam's bias correction.
        lr: learning rate of this step.
    """

    param: Tensor
    grad: Tensor
    first: Tensor
    second: Tensor | None
    copy: Tensor | None
    step: float
    lr: float


class Update(NamedTuple):
    """The rule and its constants."""

    rule: Literal["adam", "adagrad", "lion"]
    weight_decay: float
    is_decoupled: bool
    betas: tuple[float, float] = (0.0, 0.0)
    eps: float = 0.0


class Kind(NamedTuple):
    """What items that one call can update have in common."""

    param: torch.dtype
    grad: torch.dtype
    state: torch.dtype
    copy: torch.dtype | None
    shrink: float


_update: Op[Callable[[Sequence[Item], Update], None]] = Op(
    "optimizer_update",
    Implementation("native", "fullspeed.kernels.update_native:update", needs_native),
    Implementation("torch", "fullspeed.kernels.update_torch:update", runs_anywhere),
)


def update(items: Sequence[Item], how: Update) -> None:
    """Carry out one step, in place. All items are on one device."""
    if not items:
        return
    _update.on(items[0].param.device)(items, how)


def kinds(items: Sequence[Item], how: Update) -> dict[Kind, list[Item]]:
    """Items by the dtypes of param, grad, states and copy, and by what decoupled decay multiplies parameters with."""
    found: dict[Kind, list[Item]] = {}
    for item in items:
        param, grad, first, second, copy, _, lr = item
        numel = param.numel()
        # An implementation that works with addresses relies on this.
        assert numel == grad.numel() == first.numel(), item
        assert second is None or second.numel() == numel, item
        assert copy is None or copy.numel() == numel, item
        shrink = 1.0 - lr * how.weight_decay if how.is_decoupled else 1.0
        kind = Kind(param.dtype, grad.dtype, first.dtype, copy.dtype if copy is not None else None, shrink)
        found.setdefault(kind, []).append(item)
    for kind in found:
        _check(kind)
    return found


def _check(kind: Kind) -> None:
    assert kind.state in STATE_DTYPES, kind
    if kind.param == torch.float32:
        assert kind.grad in (torch.float32, *NARROW_DTYPES), kind
        assert kind.copy in (None, *NARROW_DTYPES), kind
    else:
        assert kind.param in NARROW_DTYPES, kind
        assert kind.grad == kind.param, kind
        assert kind.copy is None, kind
