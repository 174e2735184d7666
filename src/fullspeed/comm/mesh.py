"""Ranks of a group arranged in a grid: rows of consecutive ranks, and columns across the rows.

    ranks 0 1 2 3 4 5 in rows of 2       row of rank 3: 2 3       column of rank 3: 1 3 5

torch's `DeviceMesh` has to be built by every rank of the world, with one grid for all; these are made by their members
alone, so each data-parallel group of a larger job can have a grid of its own.
"""

from __future__ import annotations

from collections import Counter

from fullspeed.base import env
from fullspeed.comm.collectives import Group, get_global_rank, get_rank, get_world_size, subgroup


def row_of(group: Group, row_size: int) -> Group:
    """The `row_size` consecutive ranks of `group` that this rank is one of. Collective over `group`.

    `row_size` divides the number of ranks. A row of all ranks is `group` itself.
    """
    world_size = get_world_size(group)
    assert world_size % row_size == 0
    if row_size == world_size:
        return group
    first = get_rank(group) // row_size * row_size
    return subgroup([get_global_rank(group, rank) for rank in range(first, first + row_size)])


def column_of(group: Group, row_size: int) -> Group:
    """The ranks of `group` at the same place of their rows as this rank. Collective over `group`.

    A column of all ranks is `group` itself.
    """
    world_size = get_world_size(group)
    assert world_size % row_size == 0
    if row_size == 1:
        return group
    first = get_rank(group) % row_size
    return subgroup([get_global_rank(group, rank) for rank in range(first, world_size, row_size)])


def ranks_per_node(group: Group) -> int | None:
    """Ranks of the group on each node it has ranks on; None where nodes differ. Launchers number ranks node by node."""
    world_size, all_per_node = get_world_size(group), env.get_int("LOCAL_WORLD_SIZE") or get_world_size()
    counts = Counter(get_global_rank(group, rank) // all_per_node for rank in range(world_size))
    sizes = set(counts.values())
    return sizes.pop() if len(sizes) == 1 else None
