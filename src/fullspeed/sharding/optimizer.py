"""The optimizer `initialize` returns: any torch optimizer, stepped over this rank's share of every parameter.

`step` is the algorithm: finish reductions, take the global norm, skip on overflow, clip; a `Stepper` then steps the
inner optimizer and publishes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from fullspeed.base.errors import LossScaleError, UsageError
from fullspeed.base.log import log_dist
from fullspeed.comm import Group, ReduceOp, all_gather_object, all_reduce
from fullspeed.optim.shards import ShardAware
from fullspeed.precision.loss_scale import LossScale, LossScaleChange
from fullspeed.sharding.file_stepper import FileStepper
from fullspeed.sharding.parameter_offload import ParameterOffload
from fullspeed.sharding.pieces import OwnedPiece, own_pieces, own_state
from fullspeed.sharding.runtime import ShardingRuntime
from fullspeed.sharding.scopes import uncompiled
from fullspeed.sharding.shard_view import RuntimeShards
from fullspeed.sharding.stepping import MemoryStepper, Stepper
from fullspeed.sharding.unfreeze import unfreeze
from fullspeed.sharding.wrapped import WrappedOptimizer


@dataclass(frozen=True)
class StepPolicy:
    """What a step checks and limits.

    Attributes:
        clip_norm: largest global L2 norm of gradients; 0 means no limit.
        check_overflow: skip the step, on all ranks, when any gradient is not finite.
        compute_norm: take the global norm even when nothing but reports need it.
        sub_group_numel: elements of parameters stepped at once; bounds the fp32 gradients of 16-bit training.
        require_all_used: raise when a parameter got no gradient.
    """

    clip_norm: float = 0.0
    check_overflow: bool = False
    compute_norm: bool = True
    sub_group_numel: int = 10**9
    require_all_used: bool = False


class ShardedOptimizer(WrappedOptimizer):
    """A torch optimizer over shards: in its param groups, this rank's pieces stand for the user's parameters.

    Attributes:
        owned: this rank's pieces, by the parameter they belong to.
        overflow: whether the last step was skipped because a gradient was not finite.
        last_change: what the last step did to the loss scale.
        stepper: carries updates out.
        before_new_group: may refuse a new param group; set by the engine.
        before_step: may refuse a step; set by the engine.
    """

    def __init__(
        self,
        inner: Optimizer,
        runtime: ShardingRuntime,
        loss_scale: LossScale,
        policy: StepPolicy,
        dp_group: Group,
    ) -> None:
        super().__init__(inner, loss_scale)
        self.runtime = runtime
        self.policy = policy
        self.dp_group = dp_group
        self.overflow = False
        self.last_change: LossScaleChange | None = None
        self._global_grad_norm: float | None = None  # before clipping, unscaled; -1 when not finite
        self._clipped_grad_norm: float | None = None  # after clipping
        self.owned: dict[nn.Parameter, OwnedPiece] = {}
        self._whole_params: list[list[nn.Parameter]] = []
        self.before_new_group: Callable[[], None] = lambda: None
        self.before_step: Callable[[], None] = lambda: None
        self._replace_params()
        self.stepper = self._make_stepper()
        self.bind_shards()

    def _make_stepper(self) -> Stepper:
        how = (self.optimizer, self.runtime, self.owned, self.policy.sub_group_numel)
        return MemoryStepper(*how) if self.runtime.state_files is None else FileStepper(*how, self.dp_group)

    def _replace_params(self) -> None:
        """In every param group, put this rank's pieces in the place of whole parameters."""
        state = dict(self.optimizer.state)
        self.optimizer.state.clear()
        for param_group in self.optimizer.param_groups:
            whole: list[nn.Parameter] = list(param_group["params"])
            self._whole_params.append(whole)
            param_group["params"] = self.own(whole)
        for param, owned in self.owned.items():
            if param in state:
                self.optimizer.state[owned.tensor] = own_state(state[param], owned)

    def own(self, params: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        """Take over this rank's pieces of those that are trained; returns what the inner optimizer steps for them."""
        taken = own_pieces(self.runtime, params)
        self.owned.update((owned.param, owned) for owned in taken)
        return [owned.tensor for owned in taken]

    def bind_shards(self) -> None:
        """Tell an optimizer that needs whole parameters which of them it holds what of."""
        if isinstance(self.optimizer, ShardAware):
            self.optimizer.bind_shards(RuntimeShards(self.runtime, self._whole_params, self.owned))

    # ------------------------------------------------------------------- step

    @uncompiled
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters with the gradients reduced so far, then clear them. Collective.

        On overflow (fp16, and bf16 with `check_grad_overflow`) nothing changes but the loss scale.
        """
        self.before_step()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        touched = self.runtime.finish_reduction()
        self.runtime.keep_edits()
        self._check_use(touched)
        norm = self._reduced_norm()
        self.overflow = self.policy.check_overflow and norm is not None and not math.isfinite(norm)
        scale = self.loss_scaler.scale
        if norm is not None:
            self._global_grad_norm = norm / scale if math.isfinite(norm) else -1.0
        if self.overflow:
            self._skip()
        else:
            factor = self._clip_factor() / scale
            self._clipped_grad_norm = None if norm is None else self._global_grad_norm_times(factor * scale)
            self.stepper.step(touched, factor)
            self.last_change = self.loss_scaler.update(False)
            self.runtime.watch_nonfinite = False
        self.runtime.clear_grads()
        return loss

    def _global_grad_norm_times(self, factor: float) -> float:
        assert self._global_grad_norm is not None
        return self._global_grad_norm * factor if self._global_grad_norm >= 0 else -1.0

    def _check_use(self, touched: dict[nn.Parameter, bool]) -> None:
        if self.policy.require_all_used and not all(touched.values()):
            unused = [self.runtime.name_of(param) for param, used in touched.items() if not used]
            raise UsageError(
                f"no gradient reached {', '.join(unused)}, and zero_optimization.ignore_unused_parameters is false; "
                f"use these parameters in forward, freeze them, or set the key to true"
            )
        for group in self.runtime.groups:
            if all(group.trained):
                continue
            for fqn, param, is_trained in zip(group.fqns, group.params, group.trained, strict=True):
                if param.requires_grad and not is_trained:
                    raise UsageError(
                        f"parameter {fqn} was frozen at initialize and requires gradients now, which it did not get; "
                        f"call engine.unfreeze([{fqn!r}]) before the forward"
                    )

    def _reduced_norm(self) -> float | None:
        """L2 norm of the reduced, still loss-scaled gradients of all ranks; None when nobody asked for it."""
        if not (self.policy.compute_norm or self.policy.check_overflow or self.policy.clip_norm > 0):
            return None
        device = self.runtime.device
        norms = [
            torch.linalg.vector_norm(reduced, dtype=_wide(reduced.dtype))
            for reduced in (group.grads.reduced for group in self.runtime.trainable)
            if reduced is not None
        ]
        total = torch.zeros((), dtype=torch.float64, device=device)
        for norm in norms:
            total += norm.double().square()
        if any(group.placement.optim for group in self.runtime.trainable):
            # Over replicas too, though they hold equal shards: so all ranks clip by the same number, to the last bit.
            all_reduce(total, ReduceOp.SUM, self.dp_group).div_(self.runtime.links.num_replicas)
        return math.sqrt(total.item()) if math.isfinite(total.item()) else float(total.item())

    def _clip_factor(self) -> float:
        clip, norm = self.policy.clip_norm, self._global_grad_norm
        if clip <= 0 or norm is None or norm < 0:
            return 1.0
        return min(1.0, clip / (norm + 1e-6))

    # --------------------------------------------------------------- overflow

    def _skip(self) -> None:
        culprit = self._first_nonfinite()
        self._clipped_grad_norm = None
        self.runtime.watch_nonfinite = True
        try:
            self.last_change = self.loss_scaler.update(True)
        except LossScaleError as error:
            self.runtime.clear_grads()
            raise LossScaleError(f"{error}; first non-finite gradient: {culprit}") from None
        log_dist(f"overflow, step skipped: {self.last_change.message}; first non-finite gradient: {culprit}")

    def _first_nonfinite(self) -> str:
        """Name of the first parameter whose gradient is not finite, agreed by all ranks. Collective.

        After a first overflow, gradients are watched as they arrive, so the rank that made the value is known too.
        """
        found = None
        for owned in self.owned.values():
            reduced = owned.group.grads.reduced
            if reduced is not None and not torch.isfinite(owned.part_of(reduced)).all():
                found = (owned.group.index, owned.piece.slot, self.runtime.name_of(owned.param))
                break
        rows = all_gather_object((found, self.runtime.first_nonfinite), self.dp_group)
        self.runtime.first_nonfinite = None
        sources = [f"rank {rank} ({name})" for rank, (_, name) in enumerate(rows) if name]
        names = sorted(row for row, _ in rows if row is not None)
        where = f", made on {', '.join(sources)}" if sources else ""
        return f"{names[0][2] if names else 'unknown'}{where}"

    # ------------------------------------------------- parameters and gradients

    @property
    def dtype(self) -> torch.dtype:
        """Dtype the first trainable group is stored in."""
        return self.runtime.trainable[0].dtypes.storage

    @property
    def bit16_groups(self) -> list[list[nn.Parameter]]:
        """The user's parameters, by param group."""
        return self._whole_params

    @property
    def fp16_groups(self) -> list[list[nn.Parameter]]:
        """The same, under its older name."""
        return self._whole_params

    @property
    def parameter_offload(self) -> ParameterOffload:
        """What TRL takes for the hooks of stage 3."""
        return ParameterOffload(self.runtime.groups)

    def keep_state(self, owned: OwnedPiece) -> None:
        """The state of a piece was set from outside: put it where states are between steps."""
        self.stepper.keep_state(owned)

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's state as it is on this rank, with the loss scale and the stepper's counts."""
        return {**super().state_dict(), "stepper": self.stepper.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict` gave, on the same rank of the same number of ranks."""
        super().load_state_dict(state_dict)
        for owned in self.owned.values():
            self.keep_state(owned)
        self.stepper.load_state_dict(state_dict.get("stepper", {}))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients accumulated and reduced so far."""
        del set_to_none
        self.runtime.clear_grads()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Train parameters that were frozen at initialize, as a new param group. Collective; see `Engine.unfreeze`."""
        given = param_group["params"]
        params: list[Any] = [given] if isinstance(given, torch.Tensor) else list(given)
        members = {param for whole in self._whole_params for param in whole}
        if any(param in members for param in params):
            raise UsageError("some parameters are in a param group already; engine.unfreeze trains them there")
        options = {name: value for name, value in param_group.items() if name != "params"}
        unfreeze(self, params, None, options)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
