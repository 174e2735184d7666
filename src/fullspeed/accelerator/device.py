"""Any device torch calls an accelerator (CUDA, XPU, MPS, ...), through `torch.accelerator` and its module."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch

from fullspeed.accelerator.base import Accelerator

# Smallest compute capability whose matrix units multiply this dtype.
_TENSOR_CORES_SINCE = {torch.float16: (7, 0), torch.bfloat16: (8, 0)}


class DeviceAccelerator(Accelerator):
    """The accelerator of this torch build. What only CUDA has stands behind `_is_cuda`."""

    def __init__(self, device_type: str) -> None:
        super().__init__(device_type)
        self._module: Any = torch.get_device_module(device_type)
        self._is_cuda = device_type == "cuda"

    def is_available(self) -> bool:
        """Whether a device answers."""
        return torch.accelerator.is_available()

    def device_count(self) -> int:
        """Number of devices this process sees."""
        return torch.accelerator.device_count()

    def set_device(self, device_index: int) -> None:
        """Make `device_index` the current device."""
        torch.accelerator.set_device_index(device_index)

    def current_device(self) -> int:
        """Index of the current device."""
        return torch.accelerator.current_device_index()

    def current_device_name(self) -> str:
        """Kind and index of the current device."""
        return f"{self.device_type}:{self.current_device()}"

    def device_name(self, device_index: int | None = None) -> str:
        """The kind, with the index when one is given."""
        return self.device_type if device_index is None else f"{self.device_type}:{device_index}"

    def synchronize(self, device_index: int | None = None) -> None:
        """Wait for all streams of the device."""
        torch.accelerator.synchronize(device_index)

    def is_bf16_supported(self) -> bool:
        """As CUDA reports it; other accelerators always."""
        return not self._is_cuda or bool(self._module.is_bf16_supported())

    def is_fp16_supported(self) -> bool:
        """CUDA from compute capability 6.0; other accelerators always."""
        return not self._is_cuda or self._module.get_device_capability() >= (6, 0)

    def has_native_matmul(self, dtype: torch.dtype) -> bool:
        """CUDA by compute capability (AMD always); other accelerators for every dtype they support."""
        if dtype not in _TENSOR_CORES_SINCE:
            return dtype in (torch.float32, torch.float64)
        if self._is_cuda and torch.version.hip is None:
            return bool(self._module.get_device_capability() >= _TENSOR_CORES_SINCE[dtype])
        return dtype in self.supported_dtypes()

    def memory_stats(self, device_index: int | None = None) -> dict[str, Any]:
        """The caching allocator's counters."""
        return dict(torch.accelerator.memory_stats(device_index))

    def memory_allocated(self, device_index: int | None = None) -> int:
        """Bytes held by tensors."""
        return torch.accelerator.memory_allocated(device_index)

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        """Peak bytes held by tensors."""
        return torch.accelerator.max_memory_allocated(device_index)

    def memory_reserved(self, device_index: int | None = None) -> int:
        """Bytes the caching allocator holds."""
        return torch.accelerator.memory_reserved(device_index)

    def max_memory_reserved(self, device_index: int | None = None) -> int:
        """Peak bytes the caching allocator held."""
        return torch.accelerator.max_memory_reserved(device_index)

    def reset_peak_memory_stats(self, device_index: int | None = None) -> None:
        """Start the allocator's peaks anew."""
        torch.accelerator.reset_peak_memory_stats(device_index)

    def total_memory(self, device_index: int | None = None) -> int:
        """Bytes the device has."""
        return int(torch.accelerator.get_memory_info(device_index)[1])

    def available_memory(self, device_index: int | None = None) -> int:
        """Free bytes of the device plus what the allocator caches unused."""
        free = int(torch.accelerator.get_memory_info(device_index)[0])
        return free + self.memory_reserved(device_index) - self.memory_allocated(device_index)

    def empty_cache(self) -> None:
        """Return the allocator's unused blocks."""
        torch.accelerator.empty_cache()

    def pin_memory(self, tensor: torch.Tensor, align_bytes: int = 1) -> torch.Tensor:
        """A page-locked copy of a host tensor."""
        return tensor.pin_memory()

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor's host memory is page-locked."""
        return tensor.is_pinned()

    def set_rng_state(self, new_state: torch.Tensor, device_index: int | None = None) -> None:
        """Set the generator's state on one device."""
        self._module.set_rng_state(new_state, self._index(device_index))

    def get_rng_state(self, device_index: int | None = None) -> torch.Tensor:
        """State of one device's generator."""
        state: torch.Tensor = self._module.get_rng_state(self._index(device_index))
        return state

    def manual_seed(self, seed: int) -> None:
        """Seed the current device."""
        self._module.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        """Seed every device of this process."""
        self._module.manual_seed_all(seed)

    def initial_seed(self) -> int:
        """Seed of the current device."""
        return int(self._module.initial_seed())

    def default_generator(self, device_index: int) -> torch.Generator:
        """The device's own generator."""
        generator: torch.Generator = self._module.default_generators[device_index]
        return generator

    @property
    def Stream(self) -> Any:  # noqa: N802 - the documented name
        """The device module's stream class."""
        return self._module.Stream

    @property
    def Event(self) -> Any:  # noqa: N802 - the documented name
        """The device module's event class."""
        return self._module.Event

    def stream(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        """Queue work on `stream` inside the context."""
        context: contextlib.AbstractContextManager[Any] = self._module.stream(stream)
        return context

    def current_stream(self, device_index: int | None = None) -> Any:
        """The device's current stream."""
        return self._module.current_stream(self._index(device_index))

    def default_stream(self, device_index: int | None = None) -> Any:
        """The device's default stream; where the module names none, the current one."""
        if self._is_cuda:
            return self._module.default_stream(self._index(device_index))
        return self.current_stream(device_index)

    def create_graph(self) -> Any:
        """An empty CUDA graph, or None."""
        return self._module.CUDAGraph() if self._is_cuda else None

    def capture_to_graph(
        self, graph: Any, pool: Any = None, stream: Any = None
    ) -> contextlib.AbstractContextManager[Any]:
        """Record into a CUDA graph; other devices simply run the work."""
        if graph is None:
            return contextlib.nullcontext()
        context: contextlib.AbstractContextManager[Any] = self._module.graph(graph, pool=pool, stream=stream)
        return context

    def replay_graph(self, graph: Any) -> None:
        """Run a recorded CUDA graph; no-op without one."""
        if graph is not None:
            graph.replay()

    def lazy_call(self, callback: Callable[[], Any]) -> None:
        """Run `callback` when CUDA is initialised; at once on other devices."""
        if self._is_cuda:
            self._module._lazy_call(callback)
        else:
            callback()

    def range_push(self, msg: str) -> None:
        """Open an NVTX range on CUDA."""
        if self._is_cuda:
            self._module.nvtx.range_push(msg)

    def range_pop(self) -> None:
        """Close the last NVTX range on CUDA."""
        if self._is_cuda:
            self._module.nvtx.range_pop()

    def communication_backend_version(self) -> str | None:
        """NCCL's version on CUDA."""
        return ".".join(map(str, self._module.nccl.version())) if self._is_cuda else None

    def is_triton_supported(self) -> bool:
        """CUDA from compute capability 8.0, and XPU."""
        if self._is_cuda:
            return bool(self._module.get_device_capability() >= (8, 0))
        return self.device_type == "xpu"

    def _index(self, device_index: int | None) -> int:
        return self.current_device() if device_index is None else device_index
