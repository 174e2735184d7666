"""The CPU as an accelerator: memory is the process's, random numbers and streams are torch's host ones."""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Callable
from typing import Any

import psutil
import torch

from fullspeed.accelerator.base import Accelerator
from fullspeed.base import env

_STATUS = pathlib.Path("/proc/self/status")
_CLEAR_REFS = pathlib.Path("/proc/self/clear_refs")
_has_onednn: Callable[[], bool] = torch.backends.mkldnn.is_available
_RESET_PEAK = "5"  # what the kernel takes as "set the peak resident size to the present one"


class CpuAccelerator(Accelerator):
    """Ranks of one host share its CPU; each is a "device" of its own, so indices are local ranks."""

    def __init__(self) -> None:
        super().__init__("cpu")
        self._process = psutil.Process()
        self._peak_seen_bytes = 0

    def is_available(self) -> bool:
        """Always."""
        return True

    def device_count(self) -> int:
        """Number of ranks the launcher started on this host; 1 without a launcher."""
        return env.get_int("LOCAL_WORLD_SIZE") or env.get_int("LOCAL_SIZE") or 1

    def set_device(self, device_index: int) -> None:
        """No-op: there is one CPU."""

    def current_device(self) -> int:
        """This process's local rank."""
        return env.get_int("LOCAL_RANK", 0) or 0

    def current_device_name(self) -> str:
        """Always "cpu"."""
        return "cpu"

    def device_name(self, device_index: int | None = None) -> str:
        """Always "cpu"."""
        return "cpu"

    def synchronize(self, device_index: int | None = None) -> None:
        """No-op: an operation is finished when its call returns."""

    def is_bf16_supported(self) -> bool:
        """Always; `has_native_matmul` says whether it is fast."""
        return True

    def is_fp16_supported(self) -> bool:
        """Always; `has_native_matmul` says whether it is fast."""
        return True

    def has_native_matmul(self, dtype: torch.dtype) -> bool:
        """Half dtypes as oneDNN reports them for this CPU (False without oneDNN); fp32 and fp64 always."""
        if dtype == torch.bfloat16:
            return _has_onednn() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
        if dtype == torch.float16:
            return _has_onednn() and bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
        return dtype in (torch.float32, torch.float64)

    def memory_allocated(self, device_index: int | None = None) -> int:
        """Resident bytes of this process."""
        resident = int(self._process.memory_info().rss)
        self._peak_seen_bytes = max(self._peak_seen_bytes, resident)
        return resident

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        """Peak resident bytes as the kernel keeps it; without /proc the highest that calls here saw."""
        now = self.memory_allocated()
        if not _STATUS.exists():
            return self._peak_seen_bytes
        lines = (line.split() for line in _STATUS.read_text().splitlines())
        peak_kib = next((int(words[1]) for words in lines if words and words[0] == "VmHWM:"), 0)
        return max(now, peak_kib * 1024)

    def memory_reserved(self, device_index: int | None = None) -> int:
        """Same as allocated: the host allocator keeps no books."""
        return self.memory_allocated()

    def max_memory_reserved(self, device_index: int | None = None) -> int:
        """Same as allocated."""
        return self.max_memory_allocated()

    def memory_stats(self, device_index: int | None = None) -> dict[str, Any]:
        """Current and peak bytes under the names device allocators use."""
        return {
            "allocated_bytes.all.current": self.memory_allocated(),
            "allocated_bytes.all.peak": self.max_memory_allocated(),
        }

    def reset_peak_memory_stats(self, device_index: int | None = None) -> None:
        """Start the peak anew; the kernel's own record too, where it may be written."""
        with contextlib.suppress(OSError):
            _CLEAR_REFS.write_text(_RESET_PEAK)
        self._peak_seen_bytes = self.memory_allocated()

    def total_memory(self, device_index: int | None = None) -> int:
        """Bytes of memory this host has."""
        return int(psutil.virtual_memory().total)

    def available_memory(self, device_index: int | None = None) -> int:
        """Bytes of host memory that can be used without swapping."""
        return int(psutil.virtual_memory().available)

    def empty_cache(self) -> None:
        """No-op: nothing is cached."""

    def pin_memory(self, tensor: torch.Tensor, align_bytes: int = 1) -> torch.Tensor:
        """`tensor` itself: host work needs no page-locked memory."""
        return tensor

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor is on the host, where no transfer is needed."""
        return tensor.device.type == "cpu"

    def unpin_memory(self, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor` itself: nothing was pinned."""
        return tensor

    def set_rng_state(self, new_state: torch.Tensor, device_index: int | None = None) -> None:
        """Set the host generator's state."""
        torch.set_rng_state(new_state)

    def get_rng_state(self, device_index: int | None = None) -> torch.Tensor:
        """State of the host generator."""
        return torch.get_rng_state()

    def manual_seed(self, seed: int) -> None:
        """Seed torch, the host generator included."""
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        """Seed torch, the host generator included."""
        torch.manual_seed(seed)

    def initial_seed(self) -> int:
        """Seed of the host generator."""
        return torch.initial_seed()

    def default_generator(self, device_index: int) -> torch.Generator:
        """The host generator."""
        return torch.default_generator

    @property
    def Stream(self) -> Any:  # noqa: N802 - the documented name
        """Torch's host stream, which orders nothing."""
        return torch.cpu.Stream

    @property
    def Event(self) -> Any:  # noqa: N802 - the documented name
        """Torch's host event, which is always complete."""
        return torch.cpu.Event

    def stream(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        """A context that changes nothing."""
        return contextlib.nullcontext(stream)

    def current_stream(self, device_index: int | None = None) -> Any:
        """The one host stream."""
        return torch.cpu.current_stream()

    def default_stream(self, device_index: int | None = None) -> Any:
        """The one host stream."""
        return torch.cpu.current_stream()

    def create_graph(self) -> Any:
        """None: host work is not recorded."""
        return None

    def capture_to_graph(
        self, graph: Any, pool: Any = None, stream: Any = None
    ) -> contextlib.AbstractContextManager[Any]:
        """A context whose work simply runs."""
        return contextlib.nullcontext()

    def replay_graph(self, graph: Any) -> None:
        """No-op: the work has run already."""

    def communication_backend_version(self) -> str | None:
        """None: gloo comes with torch and has no version of its own."""
        return None

    def is_triton_supported(self) -> bool:
        """False: on CPU Triton only interprets."""
        return False
