"""Host memory for tensors that wait: buffers that are used again, and counted."""

from __future__ import annotations

from collections import defaultdict

import torch


class HostPool:
    """Buffers of bytes in host memory.

    A buffer that was given back may still be read by work queued on a device: its next writer must be queued on the
    same stream.

    Attributes:
        used_bytes: in buffers that are taken.
        peak_used_bytes: the highest of these so far.
        free_bytes: in buffers that wait to be taken again.
        num_allocated: buffers that had to be allocated so far.
    """

    def __init__(self, *, pin: bool, max_free: int) -> None:
        """`pin` page-locks, which lets a device copy while it computes; at most `max_free` free buffers are kept."""
        self._pin = pin
        self._max_free = max_free
        self._free: defaultdict[int, list[torch.Tensor]] = defaultdict(list)  # by number of bytes
        self._num_free = 0
        self.used_bytes = 0
        self.peak_used_bytes = 0
        self.free_bytes = 0
        self.num_allocated = 0

    def take(self, nbytes: int) -> torch.Tensor:
        """A buffer of exactly `nbytes`: (nbytes,), uint8, not initialised."""
        self.used_bytes += nbytes
        self.peak_used_bytes = max(self.peak_used_bytes, self.used_bytes)
        if self._free[nbytes]:
            self._num_free -= 1
            self.free_bytes -= nbytes
            return self._free[nbytes].pop()
        self.num_allocated += 1
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=self._pin)

    def give_back(self, buffer: torch.Tensor) -> None:
        """Return what `take` gave. The oldest free buffer makes room when too many are kept."""
        nbytes = buffer.nbytes
        self.used_bytes -= nbytes
        self._free[nbytes].append(buffer)
        self._num_free += 1
        self.free_bytes += nbytes
        if self._num_free > self._max_free:
            self._drop_one()

    def _drop_one(self) -> None:
        """Free a buffer of the size that was asked for first, which is the likeliest to be out of use."""
        nbytes = next(size for size, buffers in self._free.items() if buffers)
        self._free[nbytes].pop()
        self._num_free -= 1
        self.free_bytes -= nbytes
