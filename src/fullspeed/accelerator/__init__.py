"""Which device this process computes on: one object over `torch.accelerator`, the CPU included."""

from fullspeed.accelerator.base import Accelerator
from fullspeed.accelerator.choose import get_accelerator, is_current_accelerator_supported, set_accelerator
from fullspeed.accelerator.host_allocator import keep_freed_memory, return_freed_memory

__all__ = [
    "Accelerator",
    "get_accelerator",
    "is_current_accelerator_supported",
    "keep_freed_memory",
    "return_freed_memory",
    "set_accelerator",
]
