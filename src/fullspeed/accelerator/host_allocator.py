"""What the C allocator does with freed memory: keep it for the next step, or return it while a model is built."""

from __future__ import annotations

import ctypes

from fullspeed.base import env

# glibc's names for mallopt (malloc.h).
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_KEEP_BYTES = 1 << 30
_RETURN_BYTES = 1 << 17
_USER_SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "GLIBC_TUNABLES", "LD_PRELOAD")


def keep_freed_memory() -> bool:
    """Have glibc hold on to freed memory instead of returning it to the kernel after every large `free`.

    Gathered parameters and gradients are freed and allocated again at every layer; by default each time costs a page
    fault per 4 KiB (measured on a 29M-parameter model at stage 3: 29,000 faults a step before, 200 after, a tenth of
    a second of system time less). The peak stays what it is. Process-wide; returns False, changing nothing, where the
    user has tuned the allocator or the C library is another.
    """
    return _tune(_KEEP_BYTES)


def return_freed_memory() -> bool:
    """Have glibc give every large block pages of its own and return them when it is freed.

    While a model is built shard by shard, large parameters come and go between small shards that stay. In one heap a
    freed block is seldom exactly large enough for the next, aligned one (measured: at the end, all memory of the whole
    model). The same holds while buffers come and go beside a disk. Undone by `keep_freed_memory`; process-wide and
    returns False as that.
    """
    return _tune(_RETURN_BYTES)


def _tune(limit: int) -> bool:
    if env.first(*_USER_SETTINGS) is not None:
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, limit)) and bool(mallopt(_M_TRIM_THRESHOLD, limit))
