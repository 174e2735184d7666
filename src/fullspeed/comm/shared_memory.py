"""Memory that the ranks of one host share, and flags in it by which they tell each other what is ready.

Every rank owns one anonymous file that its peers map. The first pages are flags, the rest an arena from which buffers
are taken. A buffer goes back to the arena when the last tensor over it dies; the file goes when the last rank does, so
a killed run leaves nothing behind.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import time
import weakref

import numpy as np
import torch

from fullspeed.base.errors import CommError
from fullspeed.base.layout import round_up
from fullspeed.comm.collectives import Group, all_gather_object, get_rank
from fullspeed.comm.init import default_timeout

# Sparse as well. An engine takes some 400 flags and returns none: enough for 5,000 engines in a process.
_FLAG_BYTES = 1 << 24
_PAGE_BYTES = 4096
_SPINS = 50
_NAP_S = 5e-5


def can_share(group: Group, device: torch.device) -> bool:
    """Whether all ranks of the group can map each other's memory. Collective.

    Only on x86-64 Linux: there stores are seen in the order they are made, which the flags rely on.
    """
    is_able = device.type == "cpu" and platform.machine() == "x86_64" and hasattr(os, "memfd_create")
    boot = ""
    if is_able:
        try:
            with open("/proc/sys/kernel/random/boot_id") as file:
                boot = file.read().strip()
            boot += str(os.stat("/proc/self/ns/pid").st_ino)
        except OSError:
            is_able = False
    places = all_gather_object((is_able, boot), group)
    return all(place == (True, boot) for place in places)


class SharedArena:
    """This rank's shared memory and views of its peers'."""

    def __init__(self, group: Group) -> None:
        self.rank = get_rank(group)
        # Sparse: pages exist once they are written. As large as the machine's memory, so it never has to grow.
        self._nbytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        descriptor = os.memfd_create("fullspeed")
        os.ftruncate(descriptor, self._nbytes)
        where = all_gather_object((os.getpid(), descriptor, self._nbytes), group)
        self.pids = [pid for pid, _, _ in where]
        self._maps = [self._map(descriptor if rank == self.rank else None, *place) for rank, place in enumerate(where)]
        all_gather_object(None, group)  # nobody closes a file that a peer has yet to open
        os.close(descriptor)
        self.flags = [np.frombuffer(each, dtype=np.int64, count=_FLAG_BYTES // 8) for each in self._maps]
        self._own_address = ctypes.addressof(ctypes.c_char.from_buffer(self._maps[self.rank]))
        self._top = _FLAG_BYTES
        self._free: dict[int, list[int]] = {}
        self._flags_used = 0

    @staticmethod
    def _map(own: int | None, pid: int, descriptor: int, nbytes: int) -> mmap.mmap:
        opened = own if own is not None else os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR)
        try:
            return mmap.mmap(opened, nbytes)
        finally:
            if own is None:
                os.close(opened)

    def take_flags(self, count: int) -> int:
        """Reserve `count` flags in every rank's memory; returns the index of the first. All ranks take alike."""
        first = self._flags_used
        self._flags_used += count
        if self._flags_used * 8 > _FLAG_BYTES:
            raise CommError("no flags are left in shared memory; destroy() engines that are no longer used")
        return first

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised 1-D tensor that peers can read."""
        nbytes = round_up(max(1, numel * dtype.itemsize), _PAGE_BYTES)
        free = self._free.setdefault(nbytes, [])
        if free:
            offset = free.pop()
        else:
            offset, self._top = self._top, self._top + nbytes
            if self._top > self._nbytes:
                raise CommError(f"shared memory is exhausted: {self._top} bytes wanted of {self._nbytes}")
        memory = memoryview(self._maps[self.rank])[offset : offset + nbytes]
        weakref.finalize(memory, free.append, offset)
        return torch.frombuffer(memory, dtype=dtype, count=numel)

    def trim(self) -> None:
        """Give the pages of unused buffers back to the system; they come again, zeroed, when they are next used."""
        own = self._maps[self.rank]
        for nbytes, offsets in self._free.items():
            for offset in offsets:
                own.madvise(mmap.MADV_REMOVE, offset, nbytes)

    def offset_of(self, tensor: torch.Tensor) -> int | None:
        """Where in this rank's memory a contiguous tensor begins; None when it lies elsewhere."""
        offset = tensor.data_ptr() - self._own_address
        return offset if _FLAG_BYTES <= offset < self._top else None

    def view(self, rank: int, offset: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A peer's memory as a tensor."""
        return torch.frombuffer(self._maps[rank], dtype=dtype, count=numel, offset=offset)

    def wait_for(self, rank: int, flag: int, value: int) -> None:
        """Return when the rank has raised one of its flags to `value` at least.

        Raises:
            CommError: the rank died, or did not get there within the process group's time-out.
        """
        flags = self.flags[rank]
        for _ in range(_SPINS):
            if flags[flag] >= value:
                return
        begin = checked = time.monotonic()
        limit = default_timeout().total_seconds()
        while flags[flag] < value:
            time.sleep(_NAP_S)
            now = time.monotonic()
            if now - checked > 0.2:
                checked = now
                self._check_alive(rank)
                if now - begin > limit:
                    raise CommError(
                        f"rank {self.rank} waited {limit:.0f} s for rank {rank} (process {self.pids[rank]})"
                    )

    def _check_alive(self, rank: int) -> None:
        try:
            with open(f"/proc/{self.pids[rank]}/stat") as file:
                state = file.read().rpartition(")")[2].split()[0]
        except OSError:
            state = "X"
        if state in "XZ":
            raise CommError(f"rank {rank} (process {self.pids[rank]}) died while rank {self.rank} waited for it")


_arenas: dict[tuple[int, ...], SharedArena] = {}


def shared_arena(group: Group) -> SharedArena:
    """The arena of a group of ranks, made at first use. Collective at first use."""
    key = tuple(all_gather_object(os.getpid(), group))
    if key not in _arenas:
        _arenas[key] = SharedArena(group)
    return _arenas[key]


def trim_shared_memory() -> None:
    """Give shared memory back that no tensor uses. No peer may still read what was in it."""
    for arena in _arenas.values():
        arena.trim()
