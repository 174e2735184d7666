"""Which parameters a new engine takes over, whether it can, and the values they start with."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn

from fullspeed.base.errors import UsageError
from fullspeed.comm import Group, broadcast, get_world_size
from fullspeed.sharding import placeholder
from fullspeed.sharding.group import ValuesOf
from fullspeed.sharding.holder import ShardHolder


def managed_params(model: nn.Module, optimized: Collection[nn.Parameter] | None) -> dict[str, nn.Parameter]:
    """The parameters an engine manages, by name: those in `optimized` and frozen ones nobody manages; all when None.

    Raises:
        UsageError: one belongs to another engine.
    """
    members = None if optimized is None else set(optimized)
    managed: dict[str, nn.Parameter] = {}
    for fqn, param in model.named_parameters():
        is_wanted = members is None or param in members
        is_free = _holder_of(param) is not None or not placeholder.is_adopted(param)
        if is_wanted and not is_free:
            raise UsageError(f"parameter {fqn} belongs to another engine; destroy() that one first")
        if is_wanted or (not param.requires_grad and is_free):
            managed[fqn] = param
    return managed


def check_params(params: Mapping[str, nn.Parameter], device: torch.device) -> None:
    """Raise UsageError for a parameter that is not on `device` or shares memory with another one."""
    owners: dict[int, str] = {}
    for fqn, param in params.items():
        if param.is_meta:
            raise UsageError(
                f"parameter {fqn} is on the meta device and has no values; load the model's weights with "
                f"zero.load_weights, or give it memory with model.to_empty and initialise it, before initialize"
            )
        if param.device.type != device.type:
            raise UsageError(
                f"parameter {fqn} is on {param.device}, training runs on {device}; "
                f"move the model there, or build it there, before initialize"
            )
        if not param.numel() or placeholder.is_adopted(param):
            continue
        first = owners.setdefault(param.untyped_storage().data_ptr(), fqn)
        if first != fqn:
            raise UsageError(
                f"parameters {first} and {fqn} are different objects over the same memory; tie them by using one "
                f"Parameter object in both places"
            )


@torch.no_grad()
def broadcast_first_values(model: nn.Module, managed: Mapping[str, nn.Parameter], group: Group) -> None:
    """Give every rank the values of rank 0's parameters and buffers; those sharded already are rank 0's."""
    if get_world_size(group) == 1:
        return
    whole = [param for param in managed.values() if not placeholder.is_adopted(param)]
    for tensor in (*whole, *model.buffers()):
        if not tensor.numel():
            continue
        dense = tensor.detach().contiguous()
        broadcast(dense, 0, group)
        if dense.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(dense)


@contextmanager
def first_values() -> Iterator[ValuesOf]:
    """A function that gives a parameter's values, gathered from whoever holds its shards. Collective."""
    holders: dict[int, ShardHolder] = {}

    def values_of(param: nn.Parameter) -> torch.Tensor:
        holder = _holder_of(param)
        if holder is None:
            return param.detach()
        holders[id(holder)] = holder
        return holder.take(param)

    yield values_of
    for holder in holders.values():
        holder.end_taking()


def _holder_of(param: nn.Parameter) -> ShardHolder | None:
    owner = placeholder.owner_of(param)
    return owner if isinstance(owner, ShardHolder) else None
