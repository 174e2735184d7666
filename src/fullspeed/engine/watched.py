"""What an engine shows of its watchers, and what it tells them of an update."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fullspeed.base.progress import note_step
from fullspeed.engine.watch import Update, Watch
from fullspeed.monitor.flops_profiler import FlopsProfiler
from fullspeed.monitor.monitor import Monitor
from fullspeed.monitor.timers import NoopTimer, SynchronizedWallClockTimer, ThroughputTimer

if TYPE_CHECKING:
    from fullspeed.config import Config
    from fullspeed.sharding.optimizer import ShardedOptimizer


class Watched:
    """Mixin: the engine's monitor, timers and profiler."""

    _watch: Watch
    _config: Config
    optimizer: ShardedOptimizer | None
    global_steps: int
    global_samples: int
    skipped_steps: int
    get_lr: Callable[[], list[float]]
    get_mom: Callable[[], list[Any]]
    get_global_grad_norm: Callable[[], float | None]
    get_clipped_grad_norm: Callable[[], float | None]
    memory_bytes: Callable[[], dict[str, int]]

    @property
    def monitor(self) -> Monitor:
        """The sinks of this engine's scalars; `write_events` adds your own."""
        return self._watch.monitor

    @property
    def timers(self) -> SynchronizedWallClockTimer | NoopTimer:
        """Named timers; they measure where `wall_clock_breakdown` is on."""
        return self._watch.timers

    @property
    def tput_timer(self) -> ThroughputTimer:
        """Samples per second; it runs where progress lines or sinks show it."""
        return self._watch.throughput

    @property
    def flops_profiler(self) -> FlopsProfiler | None:
        """The configured profiler of this rank, or None."""
        return self._watch.flops_profiler

    def get_wall_clock_timers(self) -> dict[str, float]:
        """Milliseconds of each timer since it was last shown; empty without `wall_clock_breakdown`."""
        return {name: timer.elapsed(reset=False) for name, timer in self.timers.get_timers().items()}

    def _report(self, samples: int) -> None:
        """Tell the watchers, the launcher among them, of an update of `samples` samples."""
        note_step(self.global_steps)
        if not self._watch.wants_updates:
            return
        assert self.optimizer is not None
        update = Update(
            step=self.global_steps,
            samples=self.global_samples,
            num_samples=samples,
            num_skipped=self.skipped_steps,
            lr=self.get_lr(),
            momentum=self.get_mom(),
            loss_scale=self.optimizer.loss_scale if self._config.fp16.enabled else None,
            grad_norm=self.get_global_grad_norm(),
            clipped_grad_norm=self.get_clipped_grad_norm(),
        )
        self._watch.end_update(update, self.memory_bytes)
