"""Copying host memory that will not be read soon, as the staged copy of a checkpoint: past the caches where it can be.

A store that streams past the caches does not first load the line it overwrites: two thirds of the traffic, and of the
time. Training finds its own data still in the caches afterwards.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from fullspeed.kernels.native import needs_native, require
from fullspeed.kernels.registry import Implementation, Op, runs_anywhere

_copy: Op[Callable[[Tensor, Tensor], None]] = Op(
    "staging_copy",
    Implementation("native", "fullspeed.kernels.copy:copy_native", needs_native),
    Implementation("torch", "fullspeed.kernels.copy:copy_torch", runs_anywhere),
)


def copy_past_caches(target: Tensor, source: Tensor) -> None:
    """Copy bytes: 1-D contiguous uint8 tensors of one length in host memory, which do not overlap."""
    _copy.on(target.device)(target, source)


def copy_native(target: Tensor, source: Tensor) -> None:
    """See `copy_past_caches`."""
    assert target.numel() == source.numel()
    require().functions.fs_copy_past_caches(target.data_ptr(), source.data_ptr(), source.numel())


def copy_torch(target: Tensor, source: Tensor) -> None:
    """See `copy_past_caches`."""
    target.numpy().data[:] = source.numpy().data  # the C library's copy: faster than torch's on one core
