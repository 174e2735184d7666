"""A window of updates recorded by `torch.profiler`, chosen in the configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import profiler

from fullspeed.base.log import log_dist
from fullspeed.config.monitor import TorchProfiler


class TraceWindow:
    """Records updates `start_step` to `start_step + num_steps` and writes them as a Chrome trace.

    The file, `output_path/trace_rank0.json`, opens in Perfetto or `chrome://tracing`.
    """

    def __init__(self, section: TorchProfiler, rank: int, device: torch.device) -> None:
        self._path = Path(section.output_path) / f"trace_rank{rank}.json"
        activities = [profiler.ProfilerActivity.CPU]
        if device.type in ("cuda", "xpu"):
            activities.append(profiler.ProfilerActivity[device.type.upper()])
        warmup = min(section.num_warmup, section.start_step)
        self._updates_left = section.start_step + section.num_steps
        self._profile: Any = profiler.profile(
            activities=activities,
            schedule=profiler.schedule(
                wait=section.start_step - warmup, warmup=warmup, active=section.num_steps, repeat=1
            ),
            on_trace_ready=self._write,
            record_shapes=section.record_shapes,
            profile_memory=section.profile_memory,
            with_stack=section.with_stack,
        )
        self._profile.start()

    def update(self) -> None:
        """An update has ended."""
        if self._updates_left == 0:
            return
        self._updates_left -= 1
        self._profile.step()
        if self._updates_left == 0:
            self.close()

    def close(self) -> None:
        """End recording; writes what the window has so far. Idempotent."""
        if self._profile is not None:
            self._profile.stop()
            self._profile, self._updates_left = None, 0

    def _write(self, profile: Any) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        profile.export_chrome_trace(str(self._path))
        log_dist(f"trace written to {self._path}", ranks=None)
