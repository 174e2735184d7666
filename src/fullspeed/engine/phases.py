"""Where the time of an update goes: forward, backward, step (`wall_clock_breakdown`)."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from fullspeed.accelerator import Accelerator

PHASES = ("forward", "backward", "step")


class PhaseTimer:
    """Milliseconds per phase since the last report. Waits for the device at both ends of a phase, so it costs overlap.

    Disabled, `phase` does nothing.
    """

    def __init__(self, accelerator: Accelerator, *, is_enabled: bool) -> None:
        self._accelerator, self.is_enabled = accelerator, is_enabled
        self._spent_ms = dict.fromkeys(PHASES, 0.0)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time of the block as `name`, one of PHASES."""
        if not self.is_enabled:
            yield
            return
        self._accelerator.synchronize()
        begin = time.perf_counter()
        try:
            yield
        finally:
            self._accelerator.synchronize()
            self._spent_ms[name] += (time.perf_counter() - begin) * 1e3

    def report(self) -> str:
        """One line for people; starts over."""
        line = ", ".join(f"{name}={spent:.1f} ms" for name, spent in self._spent_ms.items())
        self._spent_ms = dict.fromkeys(PHASES, 0.0)
        return line
