"""Working through tensors that wait in a file, a group at a time, while others are read and written.

Every group passes through one of a few buffers: it is read into it, computed with, and written back from it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from fullspeed.base.errors import StorageError
from fullspeed.base.layout import round_up
from fullspeed.offload.buffers import ALIGNMENT_BYTES, BufferPool
from fullspeed.offload.files import Handle
from fullspeed.offload.store import FileStore


class Action(NamedTuple):
    """One thing to do for a group; group g passes through buffer g modulo their number."""

    kind: Literal["read", "await read", "compute", "write", "await write"]
    group: int


class Spent(NamedTuple):
    """Where the time of a stream went, in seconds. What reading and writing took besides was hidden."""

    read_s: float = 0.0  # waited for reads
    compute_s: float = 0.0
    write_s: float = 0.0  # waited for writes
    moved_bytes: int = 0  # read and written


def plan(num_groups: int, num_buffers: int, *, pipeline_read: bool, pipeline_write: bool) -> list[Action]:
    """The order in which groups are read, computed with and written.

    With `pipeline_read` later groups are being read while one is computed with, as many as buffers allow; with
    `pipeline_write` a group is being written while the next is. One buffer allows neither, two one of them (writing, if
    both are asked for), three both.

    >>> [f"{action.kind} {action.group}" for action in plan(2, 2, pipeline_read=True, pipeline_write=False)]
    ... # doctest: +NORMALIZE_WHITESPACE
    ['read 0', 'read 1', 'await read 0', 'compute 0', 'write 0', 'await write 0',
     'await read 1', 'compute 1', 'write 1', 'await write 1']
    """
    # A group being written keeps its buffer: reading into it would wait for the write at once.
    ahead = max(1, num_buffers - pipeline_write) if pipeline_read else 1
    actions: list[Action] = []
    written = 0  # groups whose writes have been waited for
    num_read = 0
    for group in range(num_groups):
        while num_read < min(num_groups, group + ahead):
            while written <= num_read - num_buffers:
                actions.append(Action("await write", written))
                written += 1
            actions.append(Action("read", num_read))
            num_read += 1
        actions += [Action("await read", group), Action("compute", group), Action("write", group)]
        if not pipeline_write:
            actions.append(Action("await write", group))
            written = group + 1
    return actions + [Action("await write", group) for group in range(written, num_groups)]


def stream(
    store: FileStore,
    pool: BufferPool,
    groups: Sequence[Sequence[str]],
    compute: Callable[[int, Mapping[str, Tensor]], None],
    *,
    pipeline_read: bool = True,
    pipeline_write: bool = True,
) -> Spent:
    """Read each group of the store's tensors, have `compute` change them in place, and write them back.

    groups: names of tensors; those of a group fit in one buffer of the pool, each begun at a multiple of 4096 bytes.
    compute: gets the group's index and its tensors by name, which are the pool's after it has returned.

    All buffers of the pool are used, and given back also when something fails; then groups before the failure are
    written, the others as they were. Returns where the time went.
    """
    run = _Run(store, pool, groups, compute)
    spent_s = dict.fromkeys(run.actions, 0.0)
    try:
        for kind, group in plan(
            len(groups), pool.num_buffers, pipeline_read=pipeline_read, pipeline_write=pipeline_write
        ):
            began = time.perf_counter()
            run.actions[kind](group)
            spent_s[kind] += time.perf_counter() - began
    finally:
        run.finish()
    return Spent(
        spent_s["read"] + spent_s["await read"],
        spent_s["compute"],
        spent_s["write"] + spent_s["await write"],
        2 * sum(store.slot(name).nbytes for names in groups for name in names),
    )


class _Run:
    """Carries out a plan."""

    def __init__(
        self,
        store: FileStore,
        pool: BufferPool,
        groups: Sequence[Sequence[str]],
        compute: Callable[[int, Mapping[str, Tensor]], None],
    ) -> None:
        self._store = store
        self._pool = pool
        self._groups = groups
        self._compute = compute
        self._buffers: dict[int, Tensor] = {}
        self._tensors: dict[int, dict[str, Tensor]] = {}
        self._handles: dict[int, list[Handle]] = {}
        self.actions: Mapping[str, Callable[[int], None]] = {
            "read": self._read,
            "await read": self._wait,
            "compute": lambda group: self._compute(group, self._tensors[group]),
            "write": self._write,
            "await write": self._end,
        }

    def _read(self, group: int) -> None:
        # A group without tensors has a buffer too: it is computed with in its turn.
        self._buffers[group] = self._pool.acquire(max(1, self._num_bytes(group)), torch.uint8)
        self._tensors[group] = self._views(group)
        self._submit(group, self._store.submit_read)

    def _num_bytes(self, group: int) -> int:
        slots = [self._store.slot(name) for name in self._groups[group]]
        return sum(round_up(slot.nbytes, ALIGNMENT_BYTES) for slot in slots)

    def _views(self, group: int) -> dict[str, Tensor]:
        views, begin = {}, 0
        for name in self._groups[group]:
            slot = self._store.slot(name)
            memory = self._buffers[group][begin : begin + slot.nbytes]
            views[name] = memory.view(slot.dtype).view(slot.shape)
            begin += round_up(slot.nbytes, ALIGNMENT_BYTES)
        return views

    def _write(self, group: int) -> None:
        self._submit(group, self._store.submit_write)

    def _submit(self, group: int, submit: Callable[[str, Tensor], Handle]) -> None:
        handles = self._handles.setdefault(group, [])
        for name, tensor in self._tensors[group].items():
            handles.append(submit(name, tensor))

    def _wait(self, group: int) -> None:
        for handle in self._handles[group]:
            handle.wait()
        self._handles[group].clear()

    def _end(self, group: int) -> None:
        self._wait(group)
        del self._tensors[group]
        self._pool.release(self._buffers.pop(group))

    def finish(self) -> None:
        """Leave no transfer under way and no buffer in use, whatever happened."""
        for handles in self._handles.values():
            for handle in handles:
                try:
                    handle.wait()
                except StorageError:
                    continue  # another failure ends the run already
        for buffer in self._buffers.values():
            self._pool.release(buffer)
        self._buffers.clear()
