"""`see_memory_usage`: the memory of device and host at one point of a program."""

from __future__ import annotations

import gc

import psutil

from fullspeed.accelerator import Accelerator, get_accelerator
from fullspeed.base.log import log_dist


def memory_usage_bytes() -> dict[str, int]:
    """Bytes now: `allocated`, `max_allocated`, `reserved`, `max_reserved` of the device; `host_used`, `host_rss`.

    `host_used` is what all processes of the host use, `host_rss` what this one does.
    """
    device = get_accelerator()
    return {
        "allocated": device.memory_allocated(),
        "max_allocated": device.max_memory_allocated(),
        "reserved": device.memory_reserved(),
        "max_reserved": device.max_memory_reserved(),
        "host_used": psutil.virtual_memory().used,
        "host_rss": psutil.Process().memory_info().rss,
    }


def see_memory_usage(message: str, force: bool = False) -> None:
    """Log `message` and the memory of rank 0, then start the peaks anew. Does nothing unless `force`.

    Collects Python's garbage first, so that what is reported is what is in use.
    """
    if not force:
        return
    gc.collect()
    usage = memory_usage_bytes()
    shown = ", ".join(f"{name}={nbytes / 2**30:.2f} GiB" for name, nbytes in usage.items())
    log_dist(f"{message}: {shown}")
    get_accelerator().reset_peak_memory_stats()


def memory_text(accelerator: Accelerator) -> str:
    """Allocated and peak memory of this rank's device, for people."""
    allocated, peak = accelerator.memory_allocated(), accelerator.max_memory_allocated()
    return f"allocated={allocated / 2**30:.2f} GiB, peak={peak / 2**30:.2f} GiB"
