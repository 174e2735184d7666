"""Collectives over a group of ranks, each seen by the observers; groups of one rank communicate nothing."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist

from fullspeed.base.errors import CommError
from fullspeed.comm.mismatch import check
from fullspeed.comm.observe import emit, finished

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


def get_group_rank(group: Group, global_rank: int) -> int:
    """The rank in the group of one of its members, given by global rank."""
    return dist.get_group_rank(group, global_rank)


def global_ranks(group: Group) -> tuple[int, ...]:
    """The global ranks of a group's members, in the order of their ranks in it."""
    return tuple(get_global_rank(group, rank) for rank in range(get_world_size(group)))


def get_world_group() -> Group:
    """The group of all ranks."""
    world: Group | None = dist.group.WORLD
    assert world is not None, "init_distributed was not called"
    return world


def new_group(ranks: list[int] | None = None, backend: str | None = None) -> Group:
    """A new group; every rank of the world must call this, in the same order."""
    return cast(Group, dist.new_group(ranks, backend=backend))


_subgroups: dict[tuple[tuple[int, ...], str | None], Group] = {}


def subgroup(ranks: list[int], backend: str | None = None) -> Group:
    """The group of these global ranks, this one among them; only they need to call this, in the same order.

    One group for each set of ranks and backend, made at first use: making one costs up to 0.2 s.
    """
    key = (tuple(ranks), backend)
    made = _subgroups.get(key)
    if made is None or not _is_alive(made):
        is_local = len(ranks) < dist.get_world_size()
        made = cast(Group, dist.new_group(ranks, backend=backend, use_local_synchronization=is_local))
        _subgroups[key] = made
    return made


def _is_alive(group: Group) -> bool:
    """Whether the group belongs to the process group now initialised (tests tear down and begin again)."""
    return group in dist.distributed_c10d._world.pg_map


def all_reduce(tensor: torch.Tensor, op: Any = ReduceOp.SUM, group: Group | None = None) -> torch.Tensor:
    """Reduce `tensor` over the group in place and return it."""
    world_size = get_world_size(group)
    if world_size > 1:
        check("all_reduce", group, tensor, detail=op)
        finish = emit("all_reduce", tensor.numel(), tensor.itemsize, str(tensor.dtype), world_size)
        dist.all_reduce(tensor, op=op, group=group)
        finished(finish)
    return tensor


def broadcast(tensor: torch.Tensor, group_src: int = 0, group: Group | None = None) -> torch.Tensor:
    """Send the values of the group's member `group_src` to all its ranks, in place."""
    world_size = get_world_size(group)
    if world_size > 1:
        check("broadcast", group, tensor, detail=f"from {group_src}")
        finish = emit("broadcast", tensor.numel(), tensor.itemsize, str(tensor.dtype), world_size)
        dist.broadcast(tensor, src=get_global_rank(group, group_src), group=group)
        finished(finish)
    return tensor


def all_gather(full: torch.Tensor, shard: torch.Tensor, group: Group | None = None) -> torch.Tensor:
    """Fill `full` (world_size * n,) with every rank's `shard` (n,), in rank order, and return it."""
    world_size = get_world_size(group)
    if world_size == 1:
        return full.copy_(shard)
    check("all_gather", group, full, shard)
    finish = emit("all_gather", full.numel(), full.itemsize, str(full.dtype), world_size)
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in torch 2.13
    gather(full, shard, group=group)
    finished(finish)
    return full


def all_gather_object(value: Any, group: Group | None = None) -> list[Any]:
    """Every rank's picklable `value`, in rank order. For control data, not tensors."""
    world_size = get_world_size(group)
    if world_size == 1:
        return [value]
    check("all_gather_object", group)
    emit("agree", 0, 0, "object", world_size)
    gathered: list[Any] = [None] * world_size
    dist.all_gather_object(gathered, value, group=group)
    return gathered


def broadcast_object(value: Any, group_src: int = 0, group: Group | None = None) -> Any:
    """The picklable `value` of the group's member `group_src`, on every rank."""
    world_size = get_world_size(group)
    if world_size == 1:
        return value
    check("broadcast_object", group, detail=f"from {group_src}")
    emit("agree", 0, 0, "object", world_size)
    box = [value]
    dist.broadcast_object_list(box, src=get_global_rank(group, group_src), group=group)
    return box[0]


def barrier(group: Group | None = None) -> None:
    """Wait until every rank of the group is here."""
    world_size = get_world_size(group)
    if world_size > 1:
        check("barrier", group)
        finish = emit("barrier", 0, 0, "", world_size)
        dist.barrier(group=group)
        finished(finish)


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
