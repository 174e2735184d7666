"""The contract every accelerator keeps, with what is the same on all of them.

The method names are those of DeepSpeed's `get_accelerator()`, so user code keeps working. Amounts of memory
are bytes; a device index of None means the current device.
"""

from __future__ import annotations

import abc
import contextlib
import functools
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any

import torch

VISIBLE_DEVICES = {
    "cuda": ["CUDA_VISIBLE_DEVICES"],
    "xpu": ["ZE_AFFINITY_MASK"],
    "npu": ["ASCEND_RT_VISIBLE_DEVICES"],
    "hpu": ["HABANA_VISIBLE_MODULES"],
    "mlu": ["MLU_VISIBLE_DEVICES"],
    "sdaa": ["SDAA_VISIBLE_DEVICES"],
}
# Collective library of each device type, as torch.distributed names it.
BACKENDS = {
    "cpu": "gloo",
    "cuda": "nccl",
    "xpu": "xccl",
    "mps": "gloo",
    "npu": "hccl",
    "hpu": "hccl",
    "mlu": "cncl",
    "sdaa": "tccl",
}


def _tensor_maker(dtype: torch.dtype) -> property:
    """A property holding `torch.tensor` bound to the accelerator's device and to `dtype`."""

    def make(self: Accelerator) -> Callable[..., torch.Tensor]:
        return functools.partial(torch.tensor, dtype=dtype, device=self.device())

    return property(make, doc=f"Makes {dtype} tensors on this accelerator from Python data.")


class Accelerator(abc.ABC):
    """One kind of device. Building one touches no device; methods that need it initialise it then."""

    def __init__(self, device_type: str) -> None:
        self.device_type = device_type
        self._compile_backend = "inductor"

    BFloat16Tensor = _tensor_maker(torch.bfloat16)
    ByteTensor = _tensor_maker(torch.uint8)
    DoubleTensor = _tensor_maker(torch.float64)
    FloatTensor = _tensor_maker(torch.float32)
    HalfTensor = _tensor_maker(torch.float16)
    IntTensor = _tensor_maker(torch.int32)
    LongTensor = _tensor_maker(torch.int64)

    # --- devices

    @abc.abstractmethod
    def is_available(self) -> bool:
        """Whether at least one device of this kind can be used now."""

    @abc.abstractmethod
    def device_count(self) -> int:
        """Number of devices this process may use; on CPU the number of ranks on this host."""

    @abc.abstractmethod
    def set_device(self, device_index: int) -> None:
        """Make `device_index` the current device of this process."""

    @abc.abstractmethod
    def current_device(self) -> int:
        """Index of the current device."""

    @abc.abstractmethod
    def current_device_name(self) -> str:
        """Name of the current device as torch writes it: "cuda:0", or "cpu"."""

    @abc.abstractmethod
    def device_name(self, device_index: int | None = None) -> str:
        """Name of the kind ("cuda"), or of one device ("cuda:1")."""

    def device(self, device_index: int | None = None) -> torch.device:
        """The device with that index as a `torch.device`; without an index the kind alone."""
        return torch.device(self.device_name(device_index))

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` lives on this kind of device."""
        return tensor.device.type == self.device_type

    @abc.abstractmethod
    def synchronize(self, device_index: int | None = None) -> None:
        """Wait until all work queued on the device is done."""

    def is_synchronized_device(self) -> bool:
        """Whether an operation is finished when its call returns."""
        return self.device_type == "cpu"

    def use_host_timers(self) -> bool:
        """Whether the host's clock times device work rightly."""
        return self.is_synchronized_device()

    def resolves_data_dependency(self) -> bool:
        """Whether operations run in order without streams or events."""
        return self.is_synchronized_device()

    def handles_memory_backpressure(self) -> bool:
        """Whether allocation waits by itself for memory that queued work still holds."""
        return self.is_synchronized_device()

    # --- dtypes

    @abc.abstractmethod
    def is_bf16_supported(self) -> bool:
        """Whether the device computes with bfloat16 at all."""

    @abc.abstractmethod
    def is_fp16_supported(self) -> bool:
        """Whether the device computes with float16 at all."""

    @abc.abstractmethod
    def has_native_matmul(self, dtype: torch.dtype) -> bool:
        """Whether a matmul in `dtype` runs on hardware made for it, and not in slow emulation."""

    def supported_dtypes(self) -> list[torch.dtype]:
        """Floating dtypes a model can be trained in."""
        half = [torch.float16] if self.is_fp16_supported() else []
        return [torch.float32, *half, *([torch.bfloat16] if self.is_bf16_supported() else [])]

    # --- memory

    @abc.abstractmethod
    def memory_stats(self, device_index: int | None = None) -> dict[str, Any]:
        """Allocator counters by name; at least the current and peak allocated bytes."""

    @abc.abstractmethod
    def memory_allocated(self, device_index: int | None = None) -> int:
        """Bytes held by tensors; on CPU the resident bytes of this process."""

    @abc.abstractmethod
    def max_memory_allocated(self, device_index: int | None = None) -> int:
        """Peak of `memory_allocated` since the last reset."""

    @abc.abstractmethod
    def memory_reserved(self, device_index: int | None = None) -> int:
        """Bytes the allocator took from the device."""

    @abc.abstractmethod
    def max_memory_reserved(self, device_index: int | None = None) -> int:
        """Peak of `memory_reserved` since the last reset."""

    @abc.abstractmethod
    def reset_peak_memory_stats(self, device_index: int | None = None) -> None:
        """Start both peaks anew from the present amounts."""

    @abc.abstractmethod
    def total_memory(self, device_index: int | None = None) -> int:
        """Bytes of memory the device has."""

    @abc.abstractmethod
    def available_memory(self, device_index: int | None = None) -> int:
        """Bytes that can still be allocated."""

    @abc.abstractmethod
    def empty_cache(self) -> None:
        """Give cached, unused memory back to the device."""

    def memory_cached(self, device_index: int | None = None) -> int:
        """Older name of `memory_reserved`."""
        return self.memory_reserved(device_index)

    def max_memory_cached(self, device_index: int | None = None) -> int:
        """Older name of `max_memory_reserved`."""
        return self.max_memory_reserved(device_index)

    def reset_max_memory_allocated(self, device_index: int | None = None) -> None:
        """Older name of `reset_peak_memory_stats`."""
        self.reset_peak_memory_stats(device_index)

    def reset_max_memory_cached(self, device_index: int | None = None) -> None:
        """Older name of `reset_peak_memory_stats`."""
        self.reset_peak_memory_stats(device_index)

    @abc.abstractmethod
    def pin_memory(self, tensor: torch.Tensor, align_bytes: int = 1) -> torch.Tensor:
        """A page-locked copy, which the device reads asynchronously; `tensor` itself on CPU."""

    @abc.abstractmethod
    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Whether transfers from `tensor` need no staging copy."""

    def unpin_memory(self, tensor: torch.Tensor) -> torch.Tensor:
        """Pageable twin of `tensor`; page-locked memory is returned when the last tensor on it is gone."""
        return tensor.clone() if self.is_pinned(tensor) else tensor

    # --- random numbers

    def random(self) -> Any:
        """The module that seeds host generators."""
        return torch.random

    @abc.abstractmethod
    def set_rng_state(self, new_state: torch.Tensor, device_index: int | None = None) -> None:
        """Put the device's default generator into a state that `get_rng_state` returned."""

    @abc.abstractmethod
    def get_rng_state(self, device_index: int | None = None) -> torch.Tensor:
        """State of the device's default generator, (n,) uint8 on the host."""

    @abc.abstractmethod
    def manual_seed(self, seed: int) -> None:
        """Seed the current device's default generator."""

    @abc.abstractmethod
    def manual_seed_all(self, seed: int) -> None:
        """Seed the default generators of all devices."""

    @abc.abstractmethod
    def initial_seed(self) -> int:
        """Seed of the current device's default generator."""

    @abc.abstractmethod
    def default_generator(self, device_index: int) -> torch.Generator:
        """The device's default generator itself."""

    # --- streams and graphs

    @property
    @abc.abstractmethod
    def Stream(self) -> Any:  # noqa: N802 - the documented name
        """Class of this device's streams."""

    @property
    @abc.abstractmethod
    def Event(self) -> Any:  # noqa: N802 - the documented name
        """Class of this device's events."""

    @abc.abstractmethod
    def stream(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        """Context in which work is queued on `stream`."""

    @abc.abstractmethod
    def current_stream(self, device_index: int | None = None) -> Any:
        """The stream work is queued on now."""

    @abc.abstractmethod
    def default_stream(self, device_index: int | None = None) -> Any:
        """The stream work is queued on outside any `stream` context."""

    @abc.abstractmethod
    def create_graph(self) -> Any:
        """An empty graph of device work, or None where the device has no graphs."""

    @abc.abstractmethod
    def capture_to_graph(
        self, graph: Any, pool: Any = None, stream: Any = None
    ) -> contextlib.AbstractContextManager[Any]:
        """Context whose work is recorded in `graph` and not run; without a graph it runs."""

    @abc.abstractmethod
    def replay_graph(self, graph: Any) -> None:
        """Run what was recorded in `graph`; no-op where graphs are missing."""

    # --- everything around

    def amp(self) -> Any:
        """The module of automatic mixed precision."""
        return torch.amp

    def lazy_call(self, callback: Callable[[], Any]) -> None:
        """Run `callback` once the device is initialised; at once where there is nothing to wait for."""
        callback()

    def range_push(self, msg: str) -> None:  # noqa: B027 - only profiled devices have ranges
        """Open a named range in the device's profiler; no-op where it has none."""

    def range_pop(self) -> None:  # noqa: B027 - only profiled devices have ranges
        """Close the range opened last; no-op where the profiler has none."""

    def communication_backend_name(self) -> str:
        """Name of the collective library for this device; gloo for devices not known here."""
        return BACKENDS.get(self.device_type, "gloo")

    @abc.abstractmethod
    def communication_backend_version(self) -> str | None:
        """Version of that library, None when it does not say."""

    @abc.abstractmethod
    def is_triton_supported(self) -> bool:
        """Whether Triton kernels run on the device."""

    def prefer_triton_grouped_mm(self) -> bool:
        """Whether a Triton grouped matmul is to be used rather than torch's own."""
        return False

    def export_envs(self) -> list[str]:
        """Prefixes of the environment variables that a launcher hands to other hosts."""
        return ["NCCL"] if self.device_type == "cuda" else []

    def visible_devices_envs(self) -> list[str]:
        """Environment variables that limit which devices a process sees."""
        return VISIBLE_DEVICES.get(self.device_type, [])

    def set_visible_devices_envs(
        self, current_env: MutableMapping[str, str], local_accelerator_ids: Sequence[int]
    ) -> None:
        """Limit a child's environment to those devices of this host; no-op where no variable does that."""
        for name in self.visible_devices_envs():
            current_env[name] = ",".join(map(str, local_accelerator_ids))

    def get_compile_backend(self) -> str:
        """Backend that `torch.compile` is to use."""
        return self._compile_backend

    def set_compile_backend(self, backend: str) -> None:
        """Choose the backend of `torch.compile`. Raises ValueError when torch does not list it."""
        known = torch.compiler.list_backends(exclude_tags=())
        if backend not in known:
            raise ValueError(f"compile backend is {backend!r}; choose one of {', '.join(known)}")
        self._compile_backend = backend
