"""A few integers that every rank learns from every other: how ranks settle what to communicate next.

Over shared memory where the ranks have it, else on CPU tensors over a gloo group of its own, so that an agreement
neither waits behind bulk transfers nor stops a GPU.
"""

from __future__ import annotations

import itertools
from typing import Protocol

import torch
import torch.distributed as dist
from typing_extensions import override

from fullspeed.comm.collectives import Group, get_global_rank, get_rank, get_world_size, subgroup
from fullspeed.comm.observe import emit
from fullspeed.comm.shared_memory import SharedArena, can_share, shared_arena

# Vectors up to this length go through shared memory; longer ones are rare and take the gloo group.
_SHARED_LENGTH = 4


class Posted(Protocol):
    """Integers on their way."""

    def poll(self) -> bool:
        """Whether `rows` would return at once."""

    def rows(self) -> list[list[int]]:
        """Every rank's integers, in rank order; waits for them."""


class Agreement:
    """Exchange fixed-length integer vectors over the ranks of `group`. Made collectively, used in the same order."""

    def __init__(self, group: Group) -> None:
        self._rank, self._world_size = get_rank(group), get_world_size(group)
        self._ranks = [get_global_rank(group, rank) for rank in range(self._world_size)]
        self._control = subgroup(self._ranks, "gloo") if self._world_size > 1 else None
        self._board: _SharedBoard | None = None
        if self._world_size > 1 and can_share(group, torch.device("cpu")):
            self._board = _SharedBoard(shared_arena(group), self._world_size)
        self._bell = _Bell(self._ranks)

    def post(self, values: list[int]) -> Posted:
        """Say `values` without waiting for the others. All ranks post vectors of the same length.

        The answer to one post must be read before the next.
        """
        if self._control is None:
            return _Alone(values)
        emit("agree", len(values) * self._world_size, 8, "torch.int64", self._world_size)
        if self._board is not None and len(values) <= _SHARED_LENGTH:
            return self._board.post(values)
        self._bell.answered()
        return _Broadcasts(values, self._rank, self._ranks, self._control)

    def announce(self) -> None:
        """Say that a post of this rank is coming, to ranks that look for it with `is_called` and do not wait."""
        if self._control is not None and self._board is None:
            self._bell.ring()

    def is_called(self, above: int) -> bool:
        """Whether a rank waits for this one's next post, having announced its own or posted a first value over `above`.

        Any thread may ask.
        """
        if self._control is None:
            return False
        return self._board.is_called(above) if self._board is not None else self._bell.is_rung()

    def exchange(self, values: list[int]) -> list[list[int]]:
        """Every rank's `values`, in rank order."""
        return self.post(values).rows()

    def maximum(self, values: torch.Tensor) -> torch.Tensor:
        """Elementwise maximum over ranks of a CPU integer vector, in place."""
        if self._control is not None:
            emit("agree", values.numel(), values.itemsize, str(values.dtype), self._world_size)
            dist.all_reduce(values, op=dist.ReduceOp.MAX, group=self._control)
        return values


class _Alone(Posted):
    def __init__(self, values: list[int]) -> None:
        self._values = values

    @override
    def poll(self) -> bool:
        return True

    @override
    def rows(self) -> list[list[int]]:
        return [self._values]


class _Broadcasts(Posted):
    """A broadcast of a row by each rank: half the time of gloo's all-gather at this size."""

    def __init__(self, values: list[int], rank: int, ranks: list[int], control: Group) -> None:
        self._table = torch.zeros((len(ranks), len(values)), dtype=torch.int64)
        self._table[rank] = torch.tensor(values, dtype=torch.int64)
        self._works = [
            dist.broadcast(row, src=source, group=control, async_op=True)
            for row, source in zip(self._table, ranks, strict=True)
        ]

    @override
    def poll(self) -> bool:
        return all(work.is_completed() for work in self._works)

    @override
    def rows(self) -> list[list[int]]:
        for work in self._works:
            work.wait()
        table: list[list[int]] = self._table.tolist()
        return table


class _Bell:
    """How a rank without shared memory learns that another one is about to post: a key in the ranks' store."""

    _count = itertools.count()

    def __init__(self, ranks: list[int]) -> None:
        # Every rank makes its agreements in the same order, so the numbers agree without a message.
        self._name = f"fullspeed/bell/{','.join(map(str, ranks))}/{next(self._count)}"
        self._next = 0

    def answered(self) -> None:
        self._next += 1

    def ring(self) -> None:
        store = dist.distributed_c10d._get_default_store()
        store.set(f"{self._name}/{self._next}", "")
        if self._next:
            store.delete_key(f"{self._name}/{self._next - 1}")

    def is_rung(self) -> bool:
        store = dist.distributed_c10d._get_default_store()
        return bool(store.check([f"{self._name}/{self._next}"]))


class _SharedBoard:
    """A place in every rank's shared memory for two posts: one being read, one being written.

    Two are enough: whoever writes post k + 2 has read everybody's post k + 1, so everybody has read post k.
    """

    _PLACES = 2
    _FIELDS = 2 + _SHARED_LENGTH  # number of the post + 1, length, values

    def __init__(self, arena: SharedArena, world_size: int) -> None:
        self._arena, self._world_size = arena, world_size
        self._first_flag = arena.take_flags(self._PLACES * self._FIELDS)
        self._next = 0

    def is_called(self, above: int) -> bool:
        number = self._next
        first = self._first_flag + number % self._PLACES * self._FIELDS
        return any(flags[first] > number and flags[first + 2] > above for flags in self._arena.flags)

    def post(self, values: list[int]) -> Posted:
        number, self._next = self._next, self._next + 1
        first = self._first_flag + number % self._PLACES * self._FIELDS
        own = self._arena.flags[self._arena.rank]
        own[first + 1] = len(values)
        own[first + 2 : first + 2 + len(values)] = values
        own[first] = number + 1
        return _OnBoard(self._arena, self._world_size, first, number)


class _OnBoard(Posted):
    def __init__(self, arena: SharedArena, world_size: int, first: int, number: int) -> None:
        self._arena, self._world_size, self._first, self._number = arena, world_size, first, number

    @override
    def poll(self) -> bool:
        return all(flags[self._first] > self._number for flags in self._arena.flags)

    @override
    def rows(self) -> list[list[int]]:
        found = []
        for rank in range(self._world_size):
            self._arena.wait_for(rank, self._first, self._number + 1)
            flags, begin = self._arena.flags[rank], self._first + 2
            row: list[int] = flags[begin : begin + int(flags[self._first + 1])].tolist()
            found.append(row)
        return found
