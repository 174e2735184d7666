"""Host memory that a rank's share is copied into, so that training goes on while the copy is written."""

from __future__ import annotations

import contextlib
import mmap
import sys
from collections.abc import Mapping

import torch

from fullspeed.accelerator import get_accelerator
from fullspeed.checkpoint.tensor_file import flat_bytes, plan_file
from fullspeed.kernels.copy import copy_past_caches


class StagingBuffer:
    """Memory for the bytes of one file; kept from save to save, as fresh pages cost more than the copy itself.

    Page-locked where tensors come from a device. Whoever reads what `fill` returned must be done before the next one.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory = torch.empty(0, dtype=torch.uint8)

    @property
    def nbytes(self) -> int:
        """Bytes held now."""
        return self._memory.nbytes

    def fill(self, tensors: Mapping[str, torch.Tensor]) -> memoryview:
        """The bytes of a safetensors file with these tensors; all are copied when this returns."""
        plan = plan_file(tensors)
        if self.nbytes < plan.nbytes:
            self._memory = torch.empty(0, dtype=torch.uint8)  # let go of the old first
            self._memory = _host_memory(plan.nbytes, self._device)
        into: memoryview = self._memory.numpy().data[: plan.nbytes]
        into[: len(plan.head)] = plan.head
        offset = len(plan.head)
        for tensor in plan.tensors:
            end = offset + tensor.nbytes
            if tensor.device.type == "cpu":
                copy_past_caches(self._memory[offset:end], flat_bytes(tensor))
            else:
                target = self._memory[offset:end].view(tensor.dtype).view(tensor.shape)
                target.copy_(tensor.detach(), non_blocking=True)
            offset = end
        if self._device.type != "cpu":
            get_accelerator().synchronize()
        return into


def _host_memory(nbytes: int, device: torch.device) -> torch.Tensor:
    if device.type != "cpu":
        return get_accelerator().pin_memory(torch.empty(nbytes, dtype=torch.uint8))
    if sys.platform != "linux":
        return torch.empty(nbytes, dtype=torch.uint8)
    pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8)
