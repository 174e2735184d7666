"""Optimizers under DeepSpeed's class names and arguments; the algorithms are torch's and `fullspeed.optim`'s."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.optimizer import Optimizer, ParamsT

from fullspeed.base.errors import UsageError
from fullspeed.optim.cpu import CPUAdagrad, CPULion
from fullspeed.optim.factory import declare_elementwise, is_shardable
from fullspeed.optim.lamb import Lamb
from fullspeed.optim.lion import Lion


@declare_elementwise
class FusedAdam(torch.optim.Adam):
    """Adam, with decoupled weight decay unless `adam_w_mode` is false."""

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        del set_grad_none
        _refuse_amsgrad(amsgrad)
        _require_correction(bias_correction)
        super().__init__(params, lr, betas, eps, weight_decay, decoupled_weight_decay=adam_w_mode)


@declare_elementwise
class DeepSpeedCPUAdagrad(CPUAdagrad):
    """Adagrad in host memory. `adamw_mode` is accepted: Accelerate passes it to every optimizer."""

    def __init__(self, *args: Any, adamw_mode: bool = True, **kwargs: Any) -> None:
        del adamw_mode
        super().__init__(*args, **kwargs)


@declare_elementwise
class DeepSpeedCPULion(CPULion):
    """Lion in host memory. `adamw_mode` is accepted: Accelerate passes it to every optimizer."""

    def __init__(self, *args: Any, adamw_mode: bool = True, **kwargs: Any) -> None:
        del adamw_mode
        super().__init__(*args, **kwargs)


@declare_elementwise
class FusedLion(Lion):
    """Lion."""

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
    ) -> None:
        del set_grad_none
        super().__init__(params, lr=lr, betas=betas, weight_decay=weight_decay)


class FusedLamb(Lamb):
    """LAMB. Gradients are clipped by the engine: `max_grad_norm` must stay 0."""

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        amsgrad: bool = False,
    ) -> None:
        _refuse_amsgrad(amsgrad)
        if max_grad_norm:
            raise UsageError(f"max_grad_norm is {max_grad_norm}; set gradient_clipping in the configuration instead")
        super().__init__(params, lr, bias_correction, betas, eps, eps_inside_sqrt, weight_decay, max_coeff, min_coeff)


def is_zero_supported_optimizer(optimizer: Optimizer) -> bool:
    """Whether the optimizer is known to be right on shards."""
    return is_shardable(optimizer)


def _refuse_amsgrad(amsgrad: bool) -> None:
    if amsgrad:
        raise UsageError("amsgrad is true; these optimizers have no such variant: use torch.optim.Adam(amsgrad=True)")


def _require_correction(bias_correction: bool) -> None:
    if not bias_correction:
        raise UsageError(
            "bias_correction is false; name the optimizer in the configuration instead, with bias_correction: false"
        )
