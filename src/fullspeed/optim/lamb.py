"""LAMB: Adam scaled per parameter by a trust ratio (arXiv:1904.00962, algorithm 2), also on shards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

from fullspeed.base.errors import ConfigError, ConfigFault
from fullspeed.optim.moments import adam_directions, advance_moments, begin_update
from fullspeed.optim.shards import ShardView, WholeParams
from fullspeed.optim.stepping import check_hyperparameters, run_closure


class _Update(NamedTuple):
    """Pieces of one group and the unscaled updates u waiting for their trust ratio."""

    group: dict[str, Any]
    params: list[Tensor]
    updates: list[Tensor]


class Lamb(Optimizer):
    """Layer-wise adaptive moments for large batches.

    u = m^ / (sqrt(v^) + eps) + weight_decay * p
    p <- p - lr * clamp(|p| / |u|, min_coeff, max_coeff) * u, the ratio being 1 when a norm is 0

    Norms are those of the whole parameter. Sharded, every rank adds up the squares of its pieces and one
    all-reduce of 2 * num_params numbers per `step` completes them. State: step, exp_avg, exp_avg_sq as in
    `moments`.
    """

    _shards: ShardView | None = None

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
    ) -> None:
        check_hyperparameters(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        if not 0 <= min_coeff <= max_coeff:
            raise ConfigError([ConfigFault("min_coeff", min_coeff, f"must lie in 0 .. max_coeff ({max_coeff:g})")])
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": tuple(betas),
            "eps": eps,
            "eps_inside_sqrt": eps_inside_sqrt,
            "weight_decay": weight_decay,
            "max_coeff": max_coeff,
            "min_coeff": min_coeff,
        }
        super().__init__(params, defaults)
        self._coeffs: list[Tensor] = []

    def bind_shards(self, shards: ShardView) -> None:
        """From now on the parameters are pieces that `shards` knows."""
        self._shards = shards

    def get_lamb_coeffs(self) -> list[float]:
        """Trust ratios of the last `step`, one per parameter updated on this rank, in group order."""
        return [float(coeff) for coeff in self._coeffs]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient. Returns what `closure` returned, if given.

        With bound shards a collective: every rank calls it, also one without gradients.
        """
        loss = run_closure(closure)
        shards = self._shards or WholeParams(self.param_groups)
        waiting = [update for group in self.param_groups if (update := self._begin(group)).params]
        norms = _whole_norms(waiting, shards)
        self._coeffs = []
        for group, params, updates in waiting:
            index = [shards.param_index(param) for param in params]
            ratios = _trust_ratios(norms[:, index], group["min_coeff"], group["max_coeff"])
            coeffs = ratios.to(params[0].device).unbind()
            scaled = [update.mul_(coeff) for update, coeff in zip(updates, coeffs, strict=True)]
            torch._foreach_add_(params, scaled, alpha=-float(group["lr"]))
            self._coeffs.extend(coeffs)
        return loss

    def _begin(self, group: dict[str, Any]) -> _Update:
        batch = begin_update(self.state, group)
        if not batch.params:
            return _Update(group, [], [])
        advance_moments(batch, *group["betas"])
        updates = adam_directions(
            batch,
            group["betas"],
            group["eps"],
            bias_correction=group["bias_correction"],
            eps_inside_sqrt=group["eps_inside_sqrt"],
        )
        if group["weight_decay"]:
            torch._foreach_add_(updates, batch.params, alpha=group["weight_decay"])
        return _Update(group, batch.params, updates)


def _whole_norms(waiting: Sequence[_Update], shards: ShardView) -> Tensor:
    """(2, num_params): norms of whole parameters and of their updates. One collective in any case."""
    # fp64 makes the sum independent of where the parameter was cut; mps has none
    dtype = torch.float32 if shards.device.type == "mps" else torch.float64
    squares = torch.zeros(2, shards.num_params(), dtype=dtype, device=shards.device)
    for _, params, updates in waiting:
        index = torch.tensor([shards.param_index(param) for param in params], device=shards.device)
        for row, tensors in zip(squares, (params, updates), strict=True):
            wide = reduce(torch.promote_types, {tensor.dtype for tensor in tensors}, torch.float32)
            norms = torch.stack(list(torch._foreach_norm(list(tensors), 2, dtype=wide)))
            row.index_add_(0, index, norms.to(device=shards.device, dtype=dtype).square_())
    shards.all_reduce_sum(squares.view(-1))
    return squares.sqrt_()


def _trust_ratios(norms: Tensor, min_coeff: float, max_coeff: float) -> Tensor:
    """(n,) ratios for (2, n) norms."""
    weight, update = norms
    ratio = (weight / update).clamp(min_coeff, max_coeff)
    return torch.where((weight > 0) & (update > 0), ratio, 1.0)
