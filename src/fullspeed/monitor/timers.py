"""Timers of a training loop: named intervals, and samples per second."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

from fullspeed.accelerator import Accelerator, get_accelerator
from fullspeed.base.errors import UsageError
from fullspeed.base.log import log_dist
from fullspeed.config.monitor import ThroughputTimer as ThroughputSection
from fullspeed.monitor.memory import memory_text


class WallClockTimer:
    """Milliseconds between `start` and `stop`, summed. Waits for the device at both ends, so it costs overlap."""

    def __init__(self, name: str, accelerator: Accelerator) -> None:
        self.name = name
        self._accelerator = accelerator
        self._began_s: float | None = None
        self._total_ms = 0.0
        self._records_ms: list[float] = []

    def start(self) -> None:
        """Begin an interval. Raises UsageError inside one."""
        if self._began_s is not None:
            raise UsageError(f"timer {self.name!r} is running already; stop it first")
        self._accelerator.synchronize()
        self._began_s = time.perf_counter()

    def stop(self, reset: bool = False, record: bool = True) -> None:
        """End the interval. `reset` forgets those before it; without `record`, `mean` leaves it out."""
        if self._began_s is None:
            raise UsageError(f"timer {self.name!r} is not running; start it first")
        self._accelerator.synchronize()
        spent_ms = (time.perf_counter() - self._began_s) * 1e3
        self._began_s = None
        self._total_ms = spent_ms if reset else self._total_ms + spent_ms
        if record:
            self._records_ms.append(spent_ms)

    def elapsed(self, reset: bool = True) -> float:
        """Milliseconds of all intervals so far, one that runs included; `reset` starts over."""
        was_running = self._began_s is not None
        if was_running:
            self.stop(record=False)
        total_ms = self._total_ms
        if reset:
            self.reset()
        if was_running:
            self.start()
        return total_ms

    def mean(self) -> float:
        """Milliseconds of a recorded interval on average; 0 before the first."""
        return sum(self._records_ms) / len(self._records_ms) if self._records_ms else 0.0

    def reset(self) -> None:
        """Forget everything, an interval that runs included."""
        self._began_s, self._total_ms, self._records_ms = None, 0.0, []


class SynchronizedWallClockTimer:
    """A set of named timers, made at first use: `timers("forward").start()`."""

    def __init__(self, accelerator: Accelerator | None = None) -> None:
        self._accelerator = accelerator or get_accelerator()
        self._timers: dict[str, WallClockTimer] = {}

    def __call__(self, name: str) -> WallClockTimer:
        """The timer of that name."""
        if name not in self._timers:
            self._timers[name] = WallClockTimer(name, self._accelerator)
        return self._timers[name]

    def get_timers(self) -> dict[str, WallClockTimer]:
        """Every timer by name."""
        return self._timers

    def get_mean(self, names: Iterable[str], normalizer: float = 1.0, reset: bool = True) -> dict[str, float]:
        """Milliseconds of a recorded interval on average, divided by `normalizer`, of the timers that exist."""
        means = {name: self(name).mean() / normalizer for name in names if name in self._timers}
        if reset:
            for name in means:
                self(name).reset()
        return means

    def log(
        self,
        names: Iterable[str],
        normalizer: float = 1.0,
        reset: bool = True,
        memory_breakdown: bool = False,
        ranks: Sequence[int] | None = None,
    ) -> None:
        """Log the milliseconds of the timers that exist, divided by `normalizer`, on `ranks` (rank 0 by default)."""
        spent = {name: self(name).elapsed(reset) / normalizer for name in names if name in self._timers}
        text = f"time (ms) | {' | '.join(f'{name}: {ms:.2f}' for name, ms in spent.items())}"
        if memory_breakdown:
            text += f" | {memory_text(self._accelerator)}"
        log_dist(text, ranks or (0,))


class NoopTimer:
    """Takes the calls of `SynchronizedWallClockTimer` and measures nothing."""

    class Timer:
        """The only timer there is."""

        def start(self) -> None:
            """Nothing."""

        def stop(self, reset: bool = False, record: bool = True) -> None:
            """Nothing."""

        def reset(self) -> None:
            """Nothing."""

        def elapsed(self, reset: bool = True) -> float:
            """0."""
            return 0.0

        def mean(self) -> float:
            """0."""
            return 0.0

    def __call__(self, name: str) -> NoopTimer.Timer:
        """A timer that measures nothing."""
        return NoopTimer.Timer()

    def get_timers(self) -> dict[str, NoopTimer.Timer]:
        """None."""
        return {}

    def get_mean(self, names: Iterable[str], normalizer: float = 1.0, reset: bool = True) -> dict[str, float]:
        """None."""
        return {}

    def log(
        self,
        names: Iterable[str],
        normalizer: float = 1.0,
        reset: bool = True,
        memory_breakdown: bool = False,
        ranks: Sequence[int] | None = None,
    ) -> None:
        """Nothing."""


class ThroughputTimer:
    """Samples per second of whole updates, however many micro-batches each has.

    `start` opens an update and does nothing inside one; `stop(global_step=True)` ends it and counts `batch_size`
    samples. What happens between two updates, such as waiting for data, is not counted. Updates before `start_step`
    are warm-up: they count for the current speed, not for the average.
    """

    def __init__(
        self,
        config: ThroughputSection,
        batch_size: int,
        start_step: int = 2,
        steps_per_output: int | None = None,
        monitor_memory: bool = False,
        logging_fn: Callable[[str], None] | None = None,
        accelerator: Accelerator | None = None,
    ) -> None:
        self.batch_size = batch_size  # samples of an update, over all ranks
        self.global_step_count = 0
        self._config, self._start_step, self._steps_per_output = config, start_step, steps_per_output
        self._monitor_memory, self._log = monitor_memory, logging_fn or log_dist
        self._accelerator = accelerator or get_accelerator()
        self._began_s: float | None = None
        self._counted_samples, self._counted_s = 0, 0.0
        self._last_samples, self._last_s = 0, 0.0

    def start(self) -> None:
        """An update begins, unless one is under way."""
        if self._config.enabled and self._began_s is None:
            self._began_s = time.perf_counter()

    def stop(self, global_step: bool = False, report_speed: bool = True) -> None:
        """A micro-batch ends; with `global_step` so does the update, and every `steps_per_output`-th logs its speed."""
        if not global_step or self._began_s is None:
            return
        if self._config.synchronized:
            self._accelerator.synchronize()
        self._last_s, self._last_samples = time.perf_counter() - self._began_s, self.batch_size
        self._began_s = None
        self.global_step_count += 1
        if self.global_step_count >= self._start_step:
            self._counted_s += self._last_s
            self._counted_samples += self.batch_size
        every = self._steps_per_output
        if report_speed and every and self.global_step_count % every == 0:
            self._log(self._line())

    def current_samples_per_sec(self) -> float:
        """The speed of the last update; 0 before one."""
        return self._last_samples / self._last_s if self._last_s else 0.0

    def avg_samples_per_sec(self) -> float:
        """The speed of all updates since `start_step`; 0 before one."""
        return self._counted_samples / self._counted_s if self._counted_s else 0.0

    def _line(self) -> str:
        speed = f"samples/s={self.current_samples_per_sec():.2f}, average={self.avg_samples_per_sec():.2f}"
        memory = f", {memory_text(self._accelerator)}" if self._monitor_memory else ""
        return f"global_step={self.global_step_count}, {speed}{memory}"
