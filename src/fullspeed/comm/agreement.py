"""A few integers that every rank learns from every other: how ranks settle what to communicate next.

Always on CPU tensors over a group of its own, so an agreement neither waits behind bulk transfers nor stops a GPU.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from fullspeed.comm.collectives import Group, get_global_rank, get_rank, get_world_size
from fullspeed.comm.observe import emit

_control_groups: dict[tuple[int, ...], Group] = {}


class Agreement:
    """Exchange fixed-length integer vectors over the ranks of `group`."""

    def __init__(self, group: Group) -> None:
        self._rank, self._world_size = get_rank(group), get_world_size(group)
        self._ranks = [get_global_rank(group, rank) for rank in range(self._world_size)]
        self._control = _control_group(self._ranks) if self._world_size > 1 else None

    def exchange(self, values: list[int]) -> list[list[int]]:
        """Every rank's `values`, in rank order. All ranks pass vectors of the same length."""
        if self._control is None:
            return [values]
        emit("agree", len(values) * self._world_size, 8, "torch.int64", self._world_size)
        table = torch.zeros((self._world_size, len(values)), dtype=torch.int64)
        table[self._rank] = torch.tensor(values, dtype=torch.int64)
        # Broadcasts of a row each take half the time of gloo's all-gather at this size.
        works = [
            dist.broadcast(table[rank], src=self._ranks[rank], group=self._control, async_op=True)
            for rank in range(self._world_size)
        ]
        for work in works:
            work.wait()
        rows: list[list[int]] = table.tolist()
        return rows

    def maximum(self, values: torch.Tensor) -> torch.Tensor:
        """Elementwise maximum over ranks of a CPU integer vector, in place."""
        if self._control is not None:
            emit("agree", values.numel(), values.itemsize, str(values.dtype), self._world_size)
            dist.all_reduce(values, op=dist.ReduceOp.MAX, group=self._control)
        return values


def _control_group(ranks: list[int]) -> Group:
    """One gloo group per set of ranks, shared by every agreement over it: making one costs up to 0.2 s."""
    key = tuple(ranks)
    made = _control_groups.get(key)
    if made is None or not _is_alive(made):
        made = dist.new_group(ranks, backend="gloo", use_local_synchronization=len(ranks) < dist.get_world_size())
        _control_groups[key] = made
    return made


def _is_alive(group: Group) -> bool:
    """Whether the group belongs to the process group now initialised (tests tear down and begin again)."""
    return group in dist.distributed_c10d._world.pg_map
