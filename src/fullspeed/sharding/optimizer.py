"""The optimizer `initialize` returns: any torch optimizer, stepped over this rank's share of every parameter.

`step` is the algorithm: finish reductions, take the global norm, skip on overflow, clip, step, publish.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from fullspeed.base.errors import LossScaleError, UsageError
from fullspeed.base.layout import Piece
from fullspeed.base.log import log_dist
from fullspeed.comm import Group, ReduceOp, all_gather_object, all_reduce
from fullspeed.optim.shards import ShardAware
from fullspeed.precision.loss_scale import LossScale, LossScaleChange
from fullspeed.sharding.group import FlatGroup
from fullspeed.sharding.runtime import ShardingRuntime
from fullspeed.sharding.scopes import uncompiled
from fullspeed.sharding.shard_view import RuntimeShards
from fullspeed.sharding.unfreeze import unfreeze


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


@dataclass(frozen=True, eq=False)
class OwnedPiece:
    """One parameter's part in this rank's optimizer."""

    param: nn.Parameter  # the user's
    tensor: nn.Parameter  # what the inner optimizer steps: a view of the group's master values
    group: FlatGroup
    piece: Piece


class ShardedOptimizer(Optimizer):
    """A torch optimizer over shards. `param_groups` and `state` are the inner optimizer's own, live and mutable."""

    def __init__(
        self,
        inner: Optimizer,
        runtime: ShardingRuntime,
        loss_scale: LossScale,
        policy: StepPolicy,
        dp_group: Group,
    ) -> None:
        # Optimizer.__init__ would build groups of its own; ours are the inner optimizer's.
        self.optimizer = inner
        self.runtime = runtime
        self.loss_scaler = loss_scale
        self.policy = policy
        self.dp_group = dp_group
        self.overflow = False
        self.last_change: LossScaleChange | None = None
        self._global_grad_norm: float | None = None  # before clipping, unscaled; -1 when not finite
        self._clipped_grad_norm: float | None = None  # after clipping
        self.owned: list[OwnedPiece] = []
        self._whole_params: list[list[nn.Parameter]] = []
        self._piece_of: dict[nn.Parameter, OwnedPiece] = {}
        self.before_new_group: Callable[[], None] = lambda: None  # may refuse a new param group; set by the engine
        self._replace_params()
        self.bind_shards()

    def _replace_params(self) -> None:
        """In every param group, put this rank's pieces in the place of whole parameters."""
        state = dict(self.optimizer.state)
        self.optimizer.state.clear()
        for param_group in self.optimizer.param_groups:
            whole: list[nn.Parameter] = list(param_group["params"])
            self._whole_params.append(whole)
            param_group["params"] = self.own(whole)
        for owned in self.owned:
            if owned.param in state:
                self.optimizer.state[owned.tensor] = _own_state(state[owned.param], owned)

    def own(self, params: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        """Take over this rank's pieces of those that are trained; returns what the inner optimizer steps for them."""
        pieces = {
            (group.index, piece.slot): (group, piece)
            for group in self.runtime.trainable
            for piece in group.optimizer_pieces()
        }
        taken = []
        for param in params:
            place = self.runtime.slot_of.get(param)
            found = pieces.get((place[0].index, place[1])) if place is not None else None
            if found is None or not self.runtime.trains(param):
                continue  # frozen, unknown to the model, or all of it lies on other ranks
            owned = _own(param, *found)
            self.owned.append(owned)
            self._piece_of[param] = owned
            taken.append(owned.tensor)
        return taken

    def bind_shards(self) -> None:
        """Tell an optimizer that needs whole parameters which of them it holds what of."""
        if isinstance(self.optimizer, ShardAware):
            self.optimizer.bind_shards(RuntimeShards(self.runtime, self._whole_params, self._piece_of))

    # ------------------------------------------------------------------- step

    @uncompiled
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters with the gradients reduced so far, then clear them. Collective.

        On overflow (fp16, and bf16 with `check_grad_overflow`) nothing changes but the loss scale.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        touched = self.runtime.finish_reduction()
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
            self._step_inner(touched, factor)
            self.last_change = self.loss_scaler.update(False)
            self.runtime.watch_nonfinite = False
            self.runtime.publish()
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
            torch.linalg.vector_norm(group.reduced, dtype=_wide(group.reduced.dtype))
            for group in self.runtime.trainable
            if group.reduced is not None
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

    def _step_inner(self, touched: dict[nn.Parameter, bool], factor: float) -> None:
        for batch in self._sub_groups():
            groups = {owned.group.index: owned.group for owned in batch}
            # Gradients of this sub-group only: freed before the next is widened.
            grads = {index: _step_gradient(group, factor) for index, group in groups.items()}
            for owned in batch:
                owned.tensor.grad = _view_like(grads[owned.group.index], owned) if touched[owned.param] else None
            self.optimizer.step()
            for owned in batch:
                owned.tensor.grad = None
            del grads

    def _sub_groups(self) -> list[list[OwnedPiece]]:
        """Owned pieces in batches of whole groups, each batch at most `sub_group_numel` elements (or one group).

        The cut follows the groups, not what this rank owns of them, so every rank makes as many steps.
        """
        by_group: dict[int, list[OwnedPiece]] = {group.index: [] for group in self.runtime.trainable}
        for owned in self.owned:
            by_group[owned.group.index].append(owned)
        batches: list[list[OwnedPiece]] = [[]]
        numel = 0
        for group in self.runtime.trainable:
            if numel and numel + group.numel > self.policy.sub_group_numel:
                batches.append([])
                numel = 0
            batches[-1].extend(by_group[group.index])
            numel += group.numel
        return batches

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
        for owned in self.owned:
            reduced = owned.group.reduced
            if reduced is not None and not torch.isfinite(_view_like(reduced, owned)).all():
                found = (owned.group.index, owned.piece.slot, self.runtime.name_of(owned.param))
                break
        rows = all_gather_object((found, self.runtime.first_nonfinite), self.dp_group)
        self.runtime.first_nonfinite = None
        sources = [f"rank {rank} ({name})" for rank, (_, name) in enumerate(rows) if name]
        names = sorted(row for row, _ in rows if row is not None)
        where = f", made on {', '.join(sources)}" if sources else ""
        return f"{names[0][2] if names else 'unknown'}{where}"

    # ------------------------------------------------------- optimizer's names

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The inner optimizer's groups; their "params" are this rank's pieces."""
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The inner optimizer's state, keyed by piece."""
        return self.optimizer.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The inner optimizer's defaults."""
        return self.optimizer.defaults

    @property
    def loss_scale(self) -> float:
        """What losses are multiplied with before backward; 1 unless fp16."""
        return float(self.loss_scaler.scale)

    @property
    def cur_scale(self) -> float:
        """The same, under its older name."""
        return self.loss_scale

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

    def owned_piece(self, param: nn.Parameter) -> OwnedPiece | None:
        """This rank's part of one of the user's parameters; None when it owns none of it."""
        return self._piece_of.get(param)

    def override_loss_scale(self, scale: float) -> None:
        """Use `scale` from now on; a dynamic scale moves on from it."""
        self.loss_scaler.override(scale)

    def get_lr(self) -> list[float]:
        """Learning rate of every group."""
        return [float(group["lr"]) for group in self.param_groups]

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of every group."""
        for group in self.param_groups:
            group["lr"] = lr

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
        self.unfreeze(params, None, {name: value for name, value in param_group.items() if name != "params"})

    def unfreeze(self, params: Sequence[nn.Parameter], into: int | None, options: Mapping[str, Any]) -> None:
        """Train parameters that were frozen at initialize. Collective; see `Engine.unfreeze`."""
        unfreeze(self, params, into, options)

    def state_dict(self) -> dict[str, Any]:
        """This rank's shards of the optimizer's state, with the loss scale."""
        return {"optimizer": self.optimizer.state_dict(), "loss_scale": self.loss_scaler.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict` gave, on the same rank of the same number of ranks."""
        self.optimizer.load_state_dict(state_dict["optimizer"])
        self.loss_scaler.load_state_dict(state_dict["loss_scale"])

    def nbytes(self) -> int:
        """Bytes of optimizer state this rank holds."""
        tensors = [
            value for state in self.state.values() for value in state.values() if isinstance(value, torch.Tensor)
        ]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def __repr__(self) -> str:
        return f"ShardedOptimizer({self.optimizer!r})"


def _own(param: nn.Parameter, group: FlatGroup, piece: Piece) -> OwnedPiece:
    """The tensor the inner optimizer steps for `param`: itself where nothing is sharded or rounded."""
    assert group.master is not None
    slot = group.layout.slots[piece.slot]
    if not group.placement.optim and group.master.data_ptr() == group.full.data_ptr() and not group.is_transient:
        return OwnedPiece(param, param, group, piece)
    flat = group.master[piece.shard_offset : piece.shard_offset + piece.numel]
    shaped = flat if group.placement.optim else flat.view(slot.shape)
    tensor = nn.Parameter(shaped, requires_grad=True)
    return OwnedPiece(param, tensor, group, piece)


def _own_state(state: dict[str, Any], owned: OwnedPiece) -> dict[str, Any]:
    """This rank's part of the state an optimizer already has of a whole parameter."""
    mine = {}
    for key, value in state.items():
        is_per_element = isinstance(value, torch.Tensor) and value.shape == owned.param.shape and key != "step"
        if is_per_element:
            cut = value.reshape(-1)[owned.piece.start : owned.piece.stop]
            mine[key] = cut.to(owned.tensor.dtype, copy=True).view(owned.tensor.shape)
        else:
            mine[key] = value
    return mine


def _step_gradient(group: FlatGroup, factor: float) -> torch.Tensor:
    """The group's reduced gradient, unscaled and clipped, in the dtype of its masters."""
    assert group.master is not None
    if group.reduced is None:
        return torch.zeros_like(group.master)
    grad = group.reduced
    if grad.dtype != group.master.dtype:
        grad = grad.to(group.master.dtype)
    if factor != 1.0:
        grad.mul_(factor)
    return grad


def _view_like(flat: torch.Tensor, owned: OwnedPiece) -> torch.Tensor:
    piece = owned.piece
    view = flat[piece.shard_offset : piece.shard_offset + piece.numel]
    return view if owned.group.placement.optim else view.view(owned.group.layout.slots[piece.slot].shape)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
