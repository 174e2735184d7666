"""Reading and writing one parameter's full-precision value, gradient and optimizer state, wherever they live.

`param` is the user's own parameter. The `full` functions are collective when the stage shards what they touch: every
rank calls them, in the same order. They return None for a parameter no engine trains. The `local` functions touch this
rank's shard only and return None where it owns nothing of the parameter.
"""

from __future__ import annotations

import weakref

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from fullspeed.base.errors import StorageError, UsageError
from fullspeed.comm.rendezvous import together
from fullspeed.sharding.group import FlatGroup
from fullspeed.sharding.optimizer import ShardedOptimizer
from fullspeed.sharding.pieces import OwnedPiece
from fullspeed.sharding.state_files import read_together, write_together

_optimizers: WeakIdKeyDictionary = WeakIdKeyDictionary()  # user's parameter -> weakref to its ShardedOptimizer


def register(optimizer: ShardedOptimizer) -> None:
    """Make the optimizer's parameters known to the accessors. Keeps nothing alive."""
    reference = weakref.ref(optimizer)
    for param in optimizer.runtime.slot_of:  # frozen ones too: they may be trained later
        _optimizers[param] = reference


def _owner(param: nn.Parameter) -> ShardedOptimizer | None:
    optimizer: ShardedOptimizer | None = _optimizers[param]() if param in _optimizers else None
    if optimizer is None or param not in optimizer.runtime.slot_of or not optimizer.runtime.trains(param):
        return None
    return optimizer


@torch.no_grad()
def safe_get_full_fp32_param(param: nn.Parameter) -> torch.Tensor | None:
    """The master value of `param`: fp32 in 16-bit training, else its own dtype; a copy of the parameter's shape."""
    optimizer = _owner(param)
    if optimizer is None:
        return None
    group, slot = optimizer.runtime.slot_of[param]
    if group.master is None:
        return None
    optimizer.runtime.meet()
    with group.awake():
        found = _slot_of(group, slot, _whole(group, read_together(group.master, optimizer.dp_group)))
    optimizer.runtime.check_files()
    return found


@torch.no_grad()
def safe_set_full_fp32_param(param: nn.Parameter, value: torch.Tensor) -> None:
    """Set the master value and everything forward reads. Every rank passes the same whole `value`."""
    optimizer = _require(param)
    group, slot = optimizer.runtime.slot_of[param]
    _check_shape(param, value)
    optimizer.runtime.sync()
    optimizer.runtime.gatherer.free_idle()
    write_together(lambda: group.write_slot(slot, value), [group], optimizer.dp_group)
    optimizer.runtime.check_files()


@torch.no_grad()
def safe_get_full_grad(param: nn.Parameter) -> torch.Tensor | None:
    """The gradient the next step will use: averaged over ranks, without loss scale; None before any backward.

    Between backward and step. Reduces what is not reduced yet.
    """
    optimizer = _owner(param)
    if optimizer is None:
        return None
    touched = optimizer.runtime.finish_reduction()
    group, slot = optimizer.runtime.slot_of[param]
    reduced = group.grads.reduced
    if reduced is None or not touched.get(param, False):
        return None
    grad = _slot_of(group, slot, _whole(group, reduced)).to(torch.promote_types(reduced.dtype, torch.float32))
    return grad / optimizer.loss_scale if optimizer.loss_scale != 1.0 else grad


@torch.no_grad()
def safe_set_full_grad(param: nn.Parameter, value: torch.Tensor) -> None:
    """Replace the gradient the next step will use. Every rank passes the same whole, unscaled `value`."""
    optimizer = _require(param)
    _check_shape(param, value)
    optimizer.runtime.finish_reduction()
    group, slot = optimizer.runtime.slot_of[param]
    group.grads.touched[slot] = True
    reduced = group.grads.ensure_reduced()
    owned = optimizer.owned.get(param)
    if owned is not None:
        owned.part_of(reduced).copy_(owned.cut(value) * optimizer.loss_scale)
    group.grads.expose()


@torch.no_grad()
def safe_get_full_optimizer_state(param: nn.Parameter, key: str) -> torch.Tensor | None:
    """One optimizer state tensor of `param`, `exp_avg` for example, whole; None before the first step."""
    optimizer = _owner(param)
    if optimizer is None:
        return None
    group, slot = optimizer.runtime.slot_of[param]
    optimizer.runtime.meet()
    read: list[torch.Tensor | None] = []

    def read_own() -> tuple[bool, bool]:
        read.append(_own_state(optimizer, group, key))
        return read[0] is not None, bool(optimizer.state)

    # A rank may own no element of the group, or no state yet: what there is to gather is settled by all.
    present = together(read_own, StorageError, optimizer.dp_group)
    own = read[0]
    if not any(has_key for has_key, _ in present):
        if not any(has_state for _, has_state in present):
            return None
        raise UsageError(f"the optimizer keeps no state named {key!r} of a parameter's own shape")
    if own is None:
        assert group.master is not None
        own = torch.zeros_like(group.master)
    return _slot_of(group, slot, _whole(group, own))


def _own_state(optimizer: ShardedOptimizer, group: FlatGroup, key: str) -> torch.Tensor | None:
    """This rank's flat part of one per-element state of a whole group; zeros where a parameter has none."""
    flat: torch.Tensor | None = None
    for owned in optimizer.owned.values():
        if owned.group is not group or owned.tensor not in optimizer.state:
            continue
        value = optimizer.state[owned.tensor].get(key)
        if isinstance(value, torch.Tensor) and value.shape == owned.tensor.shape:
            if flat is None:
                assert group.master is not None
                flat = torch.zeros(group.master.numel(), dtype=value.dtype, device=value.device)
            owned.part_of(flat).copy_(value)
    return flat


@torch.no_grad()
def safe_set_full_optimizer_state(param: nn.Parameter, value: torch.Tensor, key: str) -> None:
    """Replace one optimizer state tensor. Every rank passes the same whole `value`."""
    optimizer = _require(param)
    _check_shape(param, value)
    owned = optimizer.owned.get(param)
    if owned is not None:
        state = optimizer.state[owned.tensor]
        if key not in state:
            raise UsageError(f"the optimizer has no state {key!r} of this parameter yet; it has {list(state)}")
        state[key].copy_(owned.cut(value))


def safe_get_local_fp32_param(param: nn.Parameter) -> torch.Tensor | None:
    """This rank's slice of the master value, 1-D, live; a copy where it waits in a file."""
    owned = _owned(param)
    if owned is None or owned.group.master is None:
        return None
    if owned.group.master_waits:
        return owned.part_of(owned.group.store)
    return owned.part_of(owned.group.master).detach().reshape(-1)


def safe_set_local_fp32_param(param: nn.Parameter, value: torch.Tensor) -> None:
    """Write this rank's slice of the master value; forward sees it after the next step."""
    owned = _owned(param)
    if owned is None or owned.group.master is None:
        return
    with owned.group.awake(write=True), torch.no_grad():
        owned.part_of(owned.group.master).view(-1).copy_(value.reshape(-1))
    owned.group.resident.sleep()


def safe_get_local_grad(param: nn.Parameter) -> torch.Tensor | None:
    """This rank's slice of the reduced gradient, 1-D, live, still loss-scaled; None before any backward."""
    owned = _owned(param)
    if owned is None or owned.group.grads.reduced is None:
        return None
    return owned.part_of(owned.group.grads.reduced).view(-1)


def safe_set_local_grad(param: nn.Parameter, value: torch.Tensor) -> None:
    """Write this rank's slice of the reduced gradient."""
    grad = safe_get_local_grad(param)
    if grad is not None:
        grad.copy_(value.reshape(-1))


def safe_get_local_optimizer_state(param: nn.Parameter, key: str) -> torch.Tensor | None:
    """This rank's slice of one optimizer state tensor, 1-D, live; None before the first step."""
    owned, optimizer = _owned(param), _owner(param)
    if owned is None or optimizer is None or owned.tensor not in optimizer.state:
        return None
    value: torch.Tensor = optimizer.state[owned.tensor][key]
    return value.reshape(-1)


def safe_set_local_optimizer_state(param: nn.Parameter, value: torch.Tensor, key: str) -> None:
    """Write this rank's slice of one optimizer state tensor."""
    state = safe_get_local_optimizer_state(param, key)
    if state is not None:
        state.copy_(value.reshape(-1))


def _owned(param: nn.Parameter) -> OwnedPiece | None:
    optimizer = _owner(param)
    return None if optimizer is None else optimizer.owned.get(param)


def _require(param: nn.Parameter) -> ShardedOptimizer:
    optimizer = _owner(param)
    if optimizer is None:
        raise UsageError("no engine trains this parameter; pass the model's own parameter, after initialize")
    return optimizer


def _check_shape(param: nn.Parameter, value: torch.Tensor) -> None:
    if value.shape != param.shape:
        raise UsageError(f"the value has shape {tuple(value.shape)}, the parameter {tuple(param.shape)}")


def _whole(group: FlatGroup, own: torch.Tensor) -> torch.Tensor:
    """The flat whole of which `own` is this rank's part."""
    if not group.placement.optim:
        return own
    full = torch.empty(group.numel, dtype=own.dtype, device=own.device)
    group.links.gather.all_gather(full, own.contiguous()).wait()
    return full


def _slot_of(group: FlatGroup, slot: int, full: torch.Tensor) -> torch.Tensor:
    where = group.layout.slots[slot]
    return full[where.offset : where.end].view(where.shape).clone()
