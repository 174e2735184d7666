"""Everything that watches an engine train: sinks, progress lines, timers, profilers, the log of collectives.

The engine tells a `Watch` when things happen; parts that the configuration does not ask for cost nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from fullspeed.accelerator import get_accelerator
from fullspeed.base.log import log_dist
from fullspeed.comm import Group, all_reduce, comms_logger, get_world_size
from fullspeed.config import Config
from fullspeed.config.monitor import ThroughputTimer as ThroughputSection
from fullspeed.monitor.flops_profiler import FlopsProfiler
from fullspeed.monitor.monitor import PREFIX, Monitor
from fullspeed.monitor.peak import peak_flops
from fullspeed.monitor.timers import NoopTimer, SynchronizedWallClockTimer, ThroughputTimer
from fullspeed.monitor.trace import TraceWindow

PHASES = ("forward", "backward", "backward_inner", "backward_allreduce", "step")


class Update(NamedTuple):
    """What an update was like."""

    step: int  # updates so far, this one included
    samples: int  # seen so far, over all ranks
    num_samples: int  # of this update
    num_skipped: int  # updates skipped so far
    lr: Sequence[float]
    momentum: Sequence[object]
    loss_scale: float | None  # None without fp16
    grad_norm: float | None
    clipped_grad_norm: float | None


class Watch:
    """One engine's watchers. Every rank has one and calls it alike; only rank 0 writes.

    Attributes:
        monitor: the sinks.
        timers: time of forward, backward and step (`wall_clock_breakdown`).
        throughput: samples per second; runs only where something shows it.
        flops_profiler: counts the first micro-batch of one update on rank 0, or None.
    """

    def __init__(self, config: Config, engine: Any, group: Group, rank: int) -> None:
        """Open the sinks and start what is to be recorded.

        Args:
            config: the whole configuration.
            engine: whose module and batch sizes the profiler describes.
            group: the data-parallel ranks, over which losses are averaged.
            rank: global rank.
        """
        self._config, self._group = config, group
        self._module: nn.Module = engine.module
        self._device: torch.device = engine.device
        self._micro_batch_size: Callable[[], int] = engine.train_micro_batch_size_per_gpu
        self.monitor = Monitor(config, rank)
        self.timers = SynchronizedWallClockTimer() if config.wall_clock_breakdown else NoopTimer()
        self._shows_updates = self.monitor.enabled or config.steps_per_print is not None
        section = config.timers.throughput if self._shows_updates else ThroughputSection(enabled=False)
        self.throughput = ThroughputTimer(section, engine.train_batch_size())
        self.flops_profiler: FlopsProfiler | None = None
        if config.flops_profiler.enabled and rank == 0:
            factor = config.flops_profiler.recompute_fwd_factor
            self.flops_profiler = FlopsProfiler(self._module, engine, factor)
        self._flops_per_sample: float | None = None
        self._trace: TraceWindow | None = None
        if config.torch_profiler.enabled and rank in config.torch_profiler.ranks:
            self._trace = TraceWindow(config.torch_profiler, rank, self._device)
        if config.comms_logger.enabled:
            comms_logger.configure(config.comms_logger)
        self._losses_of_update, self._losses_of_line = _Losses(), _Losses()

    @property
    def wants_updates(self) -> bool:
        """Whether `end_update` does anything."""
        return self._shows_updates or self._trace is not None

    # ------------------------------------------------------- told by the engine

    def begin_forward(self, num_updates: int) -> None:
        """A training forward begins, after `num_updates` updates."""
        self.throughput.start()
        profiler = self.flops_profiler
        if profiler is None or profiler.started or self._flops_per_sample is not None:
            return
        if num_updates == self._config.flops_profiler.profile_step:
            profiler.start_profile()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time of the block as `name`, one of PHASES."""
        timer = self.timers(name)
        timer.start()
        try:
            yield
        finally:
            timer.stop()

    def add_loss(self, loss: torch.Tensor) -> None:
        """A backward from `loss`, without loss scale or division, has ended. Waits for no device."""
        if not self._shows_updates:
            return
        loss = loss.detach().float().mean()
        if self.monitor.enabled:
            self._losses_of_update.add(loss)
        if self._config.steps_per_print:
            self._losses_of_line.add(loss)

    def end_micro_batch(self) -> None:
        """Forward and backward of a micro-batch are over; its step has not begun."""
        profiler = self.flops_profiler
        if profiler is None or not profiler.started:
            return
        profiler.stop_profile()
        section, total = self._config.flops_profiler, profiler.costs[""]
        self._flops_per_sample = (total.flops + total.backward.total()) / self._micro_batch_size()
        profiler.print_model_profile(
            section.profile_step, section.module_depth, section.top_modules, section.detailed, section.output_file
        )

    def end_update(self, update: Update, memory_bytes: Callable[[], dict[str, int]]) -> None:
        """An update is over. Collective where the configuration asks for sinks."""
        self.throughput.batch_size = update.num_samples
        self.throughput.stop(global_step=True)
        every = self._config.steps_per_print
        is_line_due = every is not None and update.step % every == 0
        spent_ms = self._take_spent_ms() if is_line_due else {}
        if self.monitor.enabled:
            self.monitor.write_scalars(update.samples, self._scalars(update, spent_ms))
        if is_line_due:
            self._log(update, spent_ms, memory_bytes)
        if self._trace is not None:
            self._trace.update()

    def close(self) -> None:
        """Close the sinks and end whatever still records. Idempotent."""
        self.monitor.close()
        if self.flops_profiler is not None:
            self.flops_profiler.end_profile()
            self.flops_profiler = None
        if self._trace is not None:
            self._trace.close()
        if self._config.comms_logger.enabled:
            comms_logger.stop()

    # ------------------------------------------------------------------ inside

    def _scalars(self, update: Update, spent_ms: dict[str, float]) -> dict[str, float]:
        accelerator = get_accelerator()
        found: dict[str, float | None] = {
            "train_loss": self._take_mean_loss(),
            "lr": update.lr[0] if update.lr else None,
            "loss_scale": update.loss_scale,
            "grad_norm": update.grad_norm,
            "clipped_grad_norm": update.clipped_grad_norm,
            "skipped_steps": update.num_skipped,
            "samples_per_s": self.throughput.current_samples_per_sec() or None,
            **self._model_flops(),
            "memory_allocated_bytes": accelerator.memory_allocated(),
            "max_memory_allocated_bytes": accelerator.max_memory_allocated(),
            **{f"elapsed_time_ms_{name}": ms for name, ms in spent_ms.items()},
        }
        return {PREFIX + name: float(value) for name, value in found.items() if value is not None}

    def _take_mean_loss(self) -> float | None:
        """Mean over the losses of this update on all ranks; None if no backward came through the engine."""
        losses, self._losses_of_update = self._losses_of_update, _Losses()
        total = torch.zeros(()) if losses.total is None else losses.total
        both = torch.stack([total.to(self._device), torch.tensor(float(losses.count), device=self._device)])
        summed, count = all_reduce(both, group=self._group).tolist()
        return summed / count if count else None

    def _model_flops(self) -> dict[str, float | None]:
        """FLOPs of forward and backward per second and rank, once they have been profiled, and their share of peak."""
        if self._flops_per_sample is None:
            return {}
        rate = self._flops_per_sample * self.throughput.current_samples_per_sec() / get_world_size(self._group)
        param = next(self._module.parameters(), None)
        peak = None if param is None else peak_flops(self._device, param.dtype)
        return {"model_flops_per_s": rate, "model_flops_utilization": None if peak is None else rate / peak}

    def _take_spent_ms(self) -> dict[str, float]:
        """Milliseconds per phase since they were last taken; empty without `wall_clock_breakdown`."""
        if isinstance(self.timers, NoopTimer):
            return {}
        spent = {name: self.timers(name).elapsed() for name in PHASES}
        # What backward takes beyond autograd is communication that nothing hides.
        spent["backward_allreduce"] = spent["backward"] - spent["backward_inner"]
        return spent

    def _log(self, update: Update, spent_ms: dict[str, float], memory_bytes: Callable[[], dict[str, int]]) -> None:
        losses, self._losses_of_line = self._losses_of_line, _Losses()
        log_dist(_line(update, losses, self.throughput))
        if spent_ms:
            log_dist(", ".join(f"{name}={ms:.1f} ms" for name, ms in spent_ms.items()))
        if self._config.memory_breakdown:
            held = ", ".join(f"{name}={nbytes / 1e6:.1f} MB" for name, nbytes in memory_bytes().items())
            log_dist(f"held by this rank: {held}")


class _Losses:
    """The sum of losses so far, on their device, and their number: lines may be a million updates apart."""

    def __init__(self) -> None:
        self.total: torch.Tensor | None = None
        self.count = 0

    def add(self, loss: torch.Tensor) -> None:
        """Count one more."""
        self.total = loss if self.total is None else self.total + loss
        self.count += 1


def _line(update: Update, losses: _Losses, throughput: ThroughputTimer) -> str:
    """The progress line; its loss is this rank's mean since the last line."""
    parts = [f"step={update.step}", f"skipped={update.num_skipped}"]
    if losses.total is not None:
        parts.append(f"loss={losses.total.item() / losses.count:.4f}")
    parts.append(f"lr={[float(f'{value:.6g}') for value in update.lr]}")
    if update.momentum:
        parts.append(f"mom={list(update.momentum)}")
    if update.grad_norm is not None:
        parts.append(f"grad_norm={update.grad_norm:.4f}")
    if throughput.current_samples_per_sec():
        parts.append(f"samples/s={throughput.current_samples_per_sec():.2f}")
        parts.append(f"average={throughput.avg_samples_per_sec():.2f}")
    return ", ".join(parts)
