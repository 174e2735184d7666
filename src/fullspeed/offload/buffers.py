"""Host memory that files can be read into and written from without a copy: aligned, allocated once, reused."""

from __future__ import annotations

import mmap

import torch
from torch import Tensor

from fullspeed.base.errors import UsageError
from fullspeed.base.layout import round_up

ALIGNMENT_BYTES = 4096
"""Of addresses, lengths and offsets that bypass the page cache; what every disk accepts."""


def aligned_empty(numel: int, dtype: torch.dtype) -> Tensor:
    """An uninitialised tensor (numel,) that begins at a page. Its pages are the process's own, and zero at first."""
    nbytes = max(round_up(numel * dtype.itemsize, ALIGNMENT_BYTES), ALIGNMENT_BYTES)
    return torch.frombuffer(mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=dtype)[:numel]


def bytes_of(tensor: Tensor) -> Tensor:
    """The memory of a contiguous CPU tensor as (nbytes,) uint8. Raises UsageError for another."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise UsageError(f"files take contiguous tensors in host memory, not {tuple(tensor.shape)} on {tensor.device}")
    return tensor.detach().reshape(-1).view(torch.uint8)


class BufferPool:
    """A fixed number of equal aligned buffers.

    Attributes:
        num_buffers: how many there are.
        buffer_bytes: bytes of each.
        num_in_use: acquired and not released; zero between steps.
    """

    def __init__(self, num_buffers: int, buffer_bytes: int) -> None:
        self.num_buffers = num_buffers
        self.buffer_bytes = max(round_up(buffer_bytes, ALIGNMENT_BYTES), ALIGNMENT_BYTES)
        self._free = [aligned_empty(self.buffer_bytes, torch.uint8) for _ in range(num_buffers)]
        self._in_use: dict[int, Tensor] = {}

    @property
    def num_in_use(self) -> int:
        """Buffers that are acquired now."""
        return len(self._in_use)

    @property
    def total_bytes(self) -> int:
        """Host memory of all buffers."""
        return self.num_buffers * self.buffer_bytes

    def acquire(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A tensor (numel,) at the beginning of a free buffer; its values are whatever was there."""
        nbytes = numel * dtype.itemsize
        if nbytes > self.buffer_bytes:
            raise UsageError(f"{nbytes} bytes do not fit in a buffer of {self.buffer_bytes}; make buffer_size larger")
        if not self._free:
            raise UsageError(f"all {self.num_buffers} buffers are in use; release one, or make buffer_count larger")
        buffer = self._free.pop()
        self._in_use[buffer.data_ptr()] = buffer
        return buffer[:nbytes].view(dtype)

    def release(self, tensor: Tensor) -> None:
        """Give back what `acquire` returned; nothing may use it from now on."""
        buffer = self._in_use.pop(tensor.data_ptr(), None)
        if buffer is None:
            raise UsageError("this tensor is no buffer in use: it was released before, or is not this pool's")
        self._free.append(buffer)
