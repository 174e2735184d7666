"""Adam and AdamW without bias correction, for configurations that ask for `bias_correction: false`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, ParamsT

from fullspeed.optim.moments import MomentBatch, adam_directions, advance_moments, begin_update
from fullspeed.optim.stepping import check_hyperparameters, run_closure


class UncorrectedAdam(Optimizer):
    """Adam (arXiv:1412.6980) whose moments are used as they are, as in BERT's original training.

    p <- p - lr * m / (sqrt(v) + eps). Weight decay is added to the gradient, or with `decoupled_weight_decay`
    shrinks the parameter: p <- p * (1 - lr * weight_decay) first (arXiv:1711.05101).
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        decoupled_weight_decay: bool = False,
    ) -> None:
        check_hyperparameters(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        defaults = {
            "lr": lr,
            "betas": tuple(betas),
            "eps": eps,
            "weight_decay": weight_decay,
            "decoupled_weight_decay": decoupled_weight_decay,
        }
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient. Returns what `closure` returned, if given."""
        loss = run_closure(closure)
        for group in self.param_groups:
            batch = begin_update(self.state, group)
            if batch.params:
                self._update(group, batch)
        return loss

    def _update(self, group: dict[str, Any], batch: MomentBatch) -> None:
        params, lr, decay = batch.params, float(group["lr"]), group["weight_decay"]
        if decay and group["decoupled_weight_decay"]:
            torch._foreach_mul_(params, 1 - lr * decay)
        elif decay:
            batch = batch._replace(grads=list(torch._foreach_add(batch.grads, params, alpha=decay)))
        advance_moments(batch, *group["betas"])
        directions = adam_directions(batch, group["betas"], group["eps"], bias_correction=False)
        torch._foreach_add_(params, directions, alpha=-lr)
