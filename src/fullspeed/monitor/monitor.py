"""The sinks a configuration asks for, as one."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from fullspeed.config import Config
from fullspeed.monitor.dashboard import DashboardSink
from fullspeed.monitor.services import CometSink, TensorBoardSink, WandBSink, require_package
from fullspeed.monitor.sinks import CSVSink, JSONSink, Sink

PREFIX = "Train/Samples/"
PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb", "comet": "comet_ml"}
"""The package that each section's sink needs."""

Event = tuple[str, float, int]  # name, value, samples seen so far


class Monitor:
    """Writes scalars to every sink of the configuration. Sinks exist on rank 0; elsewhere writing does nothing.

    Attributes:
        enabled: whether the configuration asks for any sink; the same on every rank.
    """

    def __init__(self, config: Config, rank: int) -> None:
        """Open the sinks. Raises ConfigError, on every rank, when a package that one needs is missing."""
        for section, module in PACKAGES.items():
            if getattr(config, section).enabled:
                require_package(section, module)
        makers = _asked_for(config)
        self.enabled = bool(makers)
        self._sinks: list[Sink] = [make() for make in makers] if rank == 0 else []
        self._close = weakref.finalize(self, _close_all, self._sinks)  # at the latest when the process ends

    def write_scalars(self, samples: int, values: Mapping[str, float]) -> None:
        """Write `values` by their full names at the position `samples`."""
        for sink in self._sinks:
            sink.write_scalars(samples, values)

    def write_events(self, events: Iterable[Event]) -> None:
        """Write (name, value, samples) triples: the form DeepSpeed's monitor takes."""
        by_samples: dict[int, dict[str, float]] = {}
        for name, value, samples in events:
            by_samples.setdefault(samples, {})[name] = float(value)
        for samples, values in by_samples.items():
            self.write_scalars(samples, values)

    def close(self) -> None:
        """Close every sink; afterwards writing does nothing. Idempotent."""
        self._close()


def _close_all(sinks: list[Sink]) -> None:
    for sink in sinks:
        sink.close()
    sinks.clear()


def _asked_for(config: Config) -> list[Callable[[], Sink]]:
    tensorboard, csv, json = config.tensorboard, config.csv_monitor, config.json_monitor
    makers: list[tuple[bool, Callable[[], Sink]]] = [
        (tensorboard.enabled, lambda: TensorBoardSink(Path(tensorboard.output_path) / tensorboard.job_name)),
        (config.wandb.enabled, lambda: WandBSink(config.wandb)),
        (config.comet.enabled, lambda: CometSink(config.comet)),
        (csv.enabled, lambda: CSVSink(Path(csv.output_path) / csv.job_name)),
        (json.enabled, lambda: JSONSink(Path(json.output_path) / json.job_name)),
        (config.dashboard.enabled, lambda: DashboardSink(config.dashboard.updates_per_second)),
    ]
    return [make for is_enabled, make in makers if is_enabled]
