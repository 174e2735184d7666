"""Lion: sign of an interpolated momentum (arXiv:2302.06675, algorithm 2)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, ParamsT

from fullspeed.optim.moments import with_grads
from fullspeed.optim.stepping import check_hyperparameters, run_closure


class Lion(Optimizer):
    """Sign momentum: one state tensor per parameter, every element moves by exactly the learning rate.

    p <- p * (1 - lr * weight_decay) - lr * sign(beta1 * m + (1 - beta1) * g)
    m <- beta2 * m + (1 - beta2) * g

    State: exp_avg (m), of the parameter's shape and dtype.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        check_hyperparameters(lr=lr, betas=betas, weight_decay=weight_decay)
        super().__init__(params, {"lr": lr, "betas": tuple(betas), "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient. Returns what `closure` returned, if given."""
        loss = run_closure(closure)
        for group in self.param_groups:
            self._update(group)
        return loss

    def _update(self, group: dict[str, Any]) -> None:
        params, grads = with_grads(group)
        if not params:
            return
        for param in params:
            if not self.state[param]:
                self.state[param]["exp_avg"] = torch.zeros_like(param, memory_format=torch.preserve_format)
        exp_avgs = [self.state[param]["exp_avg"] for param in params]
        lr, (beta1, beta2) = float(group["lr"]), group["betas"]
        signs = torch._foreach_lerp(exp_avgs, grads, 1 - beta1)
        torch._foreach_sign_(signs)
        if group["weight_decay"]:
            torch._foreach_mul_(params, 1 - lr * group["weight_decay"])
        torch._foreach_add_(params, signs, alpha=-lr)
        torch._foreach_lerp_(exp_avgs, grads, 1 - beta2)
