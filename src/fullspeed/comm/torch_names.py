"""torch.distributed's functions under their own names and arguments, seen by the observers.

For programs written against `deepspeed.comm`, which has these names: every function takes besides the keywords `prof`,
`log_name` and `debug`, of which nothing is left to do.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fullspeed.accelerator import get_accelerator
from fullspeed.base import env
from fullspeed.base.errors import UsageError
from fullspeed.comm.collectives import Group, get_world_group, global_ranks
from fullspeed.comm.init import destroy_process_group as _destroy_world
from fullspeed.comm.observe import emit, finished

ReduceOp = dist.ReduceOp
CallableT = TypeVar("CallableT", bound=Callable[..., Any])
_IGNORED = ("prof", "log_name", "debug")


def _seen(op: str, message: int, call: Callable[..., Any], world_size: Callable[[Any], int]) -> Callable[..., Any]:
    """`call` with its events; `message` is the position of the argument that is the whole message."""

    @functools.wraps(call)
    def seen(*args: Any, **kwargs: Any) -> Any:
        for name in _IGNORED:
            kwargs.pop(name, None)
        whole = args[message] if len(args) > message else None
        tensors = [whole] if isinstance(whole, torch.Tensor) else list(whole or ())
        finish = None
        if tensors and all(isinstance(tensor, torch.Tensor) for tensor in tensors):
            numel, first = sum(tensor.numel() for tensor in tensors), tensors[0]
            finish = emit(op, numel, first.itemsize, str(first.dtype), world_size(kwargs.get("group")))
        work = call(*args, **kwargs)
        finished(finish)
        return work

    return seen


def _of_torch(name: str, *, message: int = 0, op: str | None = None) -> Callable[..., Any]:
    return _seen(op or name, message, getattr(dist, name), lambda group: dist.get_world_size(group))


all_reduce = inference_all_reduce = _of_torch("all_reduce")
reduce = _of_torch("reduce")
broadcast = _of_torch("broadcast")
all_gather = _of_torch("all_gather")
all_gather_into_tensor = allgather_fn = _of_torch("all_gather_into_tensor", op="all_gather")
reduce_scatter = _of_torch("reduce_scatter", message=1)
reduce_scatter_tensor = reduce_scatter_fn = _of_torch("reduce_scatter_tensor", message=1, op="reduce_scatter")
all_to_all = _of_torch("all_to_all")
all_to_all_single = _of_torch("all_to_all_single")
gather = _of_torch("gather")
scatter = _of_torch("scatter")
send = _of_torch("send")
recv = _of_torch("recv")
isend = _of_torch("isend")
irecv = _of_torch("irecv")
barrier = _of_torch("barrier")
monitored_barrier = _of_torch("monitored_barrier")
broadcast_object_list = _of_torch("broadcast_object_list")
all_gather_object = _of_torch("all_gather_object")
batch_isend_irecv = _of_torch("batch_isend_irecv")
get_rank, get_world_size = dist.get_rank, dist.get_world_size


def all_gather_coalesced(
    output_tensors: Sequence[torch.Tensor],
    input_tensors: Sequence[torch.Tensor],
    group: Group | None = None,
    async_op: bool = False,
) -> Any:
    """Gather several flat tensors; with `async_op` returns what has a `wait`."""
    return _all(
        [
            all_gather_into_tensor(whole, part, group=group, async_op=async_op)
            for whole, part in zip(output_tensors, input_tensors, strict=True)
        ]
    )


def all_reduce_coalesced(
    tensors: Sequence[torch.Tensor], op: Any = ReduceOp.SUM, group: Group | None = None, async_op: bool = False
) -> Any:
    """Reduce several tensors; with `async_op` returns what has a `wait`."""
    return _all([all_reduce(tensor, op=op, group=group, async_op=async_op) for tensor in tensors])


class _Works:
    """Several transfers as one."""

    def __init__(self, works: Sequence[Any]) -> None:
        self._works = works

    def wait(self) -> None:
        """Wait for all of them."""
        for work in self._works:
            work.wait()


def _all(works: Sequence[Any]) -> _Works | None:
    return _Works(works) if any(work is not None for work in works) else None


def new_group(ranks: Sequence[int] | None = None) -> Any:
    """A new group; every rank of the world must call this, in the same order."""
    return dist.new_group(None if ranks is None else list(ranks))


def destroy_process_group(group: Group | None = None) -> None:
    """Tear down one group, or by default torch.distributed."""
    if group is None:
        _destroy_world()
    else:
        dist.destroy_process_group(group)


def is_available() -> bool:
    """Whether torch was built with torch.distributed."""
    return dist.is_available()


def get_local_rank() -> int:
    """This process's rank on its host."""
    return env.get_int("LOCAL_RANK", 0) or 0


def get_global_rank(group: Group | None = None, group_rank: int = 0) -> int:
    """The global rank of a group's member."""
    return group_rank if group is None else dist.get_global_rank(group, group_rank)


def get_all_ranks_from_group(group: Group | None = None) -> list[int]:
    """The global ranks of a group's members."""
    return list(global_ranks(group or get_world_group()))


def initialize_mesh_device(mesh_shape: Sequence[int], mesh_dim_names: Sequence[str]) -> DeviceMesh:
    """A grid of all ranks with named axes."""
    device = torch.device(get_accelerator().current_device_name()).type
    return init_device_mesh(device, tuple(mesh_shape), mesh_dim_names=tuple(mesh_dim_names))


def enable_symm_mem_for_group(group_name: str) -> None:
    """Symmetric memory for a group; raises UsageError, collectives here do not use it."""
    raise UsageError(f"symmetric memory for group {group_name!r} is not available in this version; leave it out")


def _yes() -> bool:
    """Whether torch has the operation: always."""
    return True


has_all_gather_into_tensor = has_reduce_scatter_tensor = has_all_reduce_coalesced = has_coalescing_manager = _yes
