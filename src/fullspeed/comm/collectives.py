"""Collectives over a group of ranks, each seen by the observers; groups of one rank communicate nothing."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist

from fullspeed.base.errors import CommError
from fullspeed.comm.observe import emit

Group = dist.ProcessGroup
ReduceOp = dist.ReduceOp


def get_rank(group: Group | None = None) -> int:
    """This process's rank in the group; 0 before initialisation."""
    return dist.get_rank(group) if dist.is_initialized() else 0


def get_world_size(group: Group | None = None) -> int:
    """Number of ranks in the group; 1 before initialisation."""
    return dist.get_world_size(group) if dist.is_initialized() else 1


def get_global_rank(group: Group | None, group_rank: int) -> int:
    """The global rank of a group's member."""
    return group_rank if group is None else dist.get_global_rank(group, group_rank)


def get_world_group() -> Group:
    """The group of all ranks."""
    world: Group | None = dist.group.WORLD
    assert world is not None, "init_distributed was not called"
    return world


def new_group(ranks: list[int] | None = None, backend: str | None = None) -> Group:
    """A new group; every rank of the world must call this, in the same order."""
    return cast(Group, dist.new_group(ranks, backend=backend))


def all_reduce(tensor: torch.Tensor, op: Any = ReduceOp.SUM, group: Group | None = None) -> torch.Tensor:
    """Reduce `tensor` over the group in place and return it."""
    world_size = get_world_size(group)
    if world_size > 1:
        emit("all_reduce", tensor.numel(), tensor.itemsize, str(tensor.dtype), world_size)
        dist.all_reduce(tensor, op=op, group=group)
    return tensor


def broadcast(tensor: torch.Tensor, group_src: int = 0, group: Group | None = None) -> torch.Tensor:
    """Send the values of the group's member `group_src` to all its ranks, in place."""
    world_size = get_world_size(group)
    if world_size > 1:
        emit("broadcast", tensor.numel(), tensor.itemsize, str(tensor.dtype), world_size)
        dist.broadcast(tensor, src=get_global_rank(group, group_src), group=group)
    return tensor


def all_gather_object(value: Any, group: Group | None = None) -> list[Any]:
    """Every rank's picklable `value`, in rank order. For control data, not tensors."""
    world_size = get_world_size(group)
    if world_size == 1:
        return [value]
    emit("agree", 0, 0, "object", world_size)
    gathered: list[Any] = [None] * world_size
    dist.all_gather_object(gathered, value, group=group)
    return gathered


def broadcast_object(value: Any, group_src: int = 0, group: Group | None = None) -> Any:
    """The picklable `value` of the group's member `group_src`, on every rank."""
    world_size = get_world_size(group)
    if world_size == 1:
        return value
    emit("agree", 0, 0, "object", world_size)
    box = [value]
    dist.broadcast_object_list(box, src=get_global_rank(group, group_src), group=group)
    return box[0]


def barrier(group: Group | None = None) -> None:
    """Wait until every rank of the group is here."""
    world_size = get_world_size(group)
    if world_size > 1:
        emit("barrier", 0, 0, "", world_size)
        dist.barrier(group=group)


def agree(what: str, value: Any, group: Group | None = None) -> Any:
    """Assert that every rank passes the same `value`, and return it.

    Raises:
        CommError: on every rank, listing who said what.
    """
    values = all_gather_object(value, group)
    if any(other != value for other in values):
        said = ", ".join(f"rank {rank}: {other!r}" for rank, other in enumerate(values))
        raise CommError(f"ranks disagree about {what}: {said}")
    return value
