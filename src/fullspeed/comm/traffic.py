"""Counts and times every collective of this process, and says how much of the network it used.

Latency runs from the call of a collective until its result has been waited for, with the device idle at both ends. A
transfer that overlaps with computing therefore shows how long it was under way, and its bandwidth is a lower bound.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fullspeed.accelerator import get_accelerator
from fullspeed.base.errors import ConfigError, ConfigFault
from fullspeed.base.log import log_dist
from fullspeed.comm.collectives import all_gather_object
from fullspeed.comm.observe import CommEvent, Finish, add_observer, remove_observer
from fullspeed.config import Config, load_config
from fullspeed.config.monitor import CommsLogger as Section

# With n ranks. What crosses a link makes the bandwidth of different operations comparable with the link's speed.
_BUS_SHARE: Mapping[str, Callable[[int], float]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
}
OPS = (*_BUS_SHARE, "broadcast", "reduce", "gather", "scatter", "send", "recv", "barrier")
_SUFFIXES = ("_into_tensor", "_tensor", "_single", "_coalesced", "_base")  # of torch's names for the same operations
_KEPT_LATENCIES = 4096  # per operation and size, for comparing ranks; totals count everything


class OpSummary(NamedTuple):
    """All calls of one operation with one message size."""

    num_calls: int
    total_ms: float
    mean_ms: float
    algbw_gb_per_s: float  # message bytes over mean latency
    busbw_gb_per_s: float  # bytes that cross a rank's link over mean latency
    straggler_ms: float | None  # time this rank spent beyond the fastest rank's, call by call; None if not asked for


Summary = dict[str, dict[int, OpSummary]]
"""Operation -> message bytes -> what its calls cost."""


class _Calls:
    """The calls of one operation with one size."""

    def __init__(self, op: str) -> None:
        self.op = op
        self.count, self.total_s, self.bus_bytes = 0, 0.0, 0.0
        self.latest_s: deque[float] = deque(maxlen=_KEPT_LATENCIES)

    def add(self, latency_s: float, bus_bytes: float) -> None:
        self.count += 1
        self.total_s += latency_s
        self.bus_bytes += bus_bytes  # groups of different sizes may send messages of one size
        self.latest_s.append(latency_s)

    def summary(self, nbytes: int, straggler_s: float | None) -> OpSummary:
        mean_s = self.total_s / self.count
        total_ns = max(self.total_s * 1e9, 1.0)  # bytes a nanosecond are GB/s; a clock may not tick within a barrier
        algorithm, bus = nbytes * self.count / total_ns, self.bus_bytes / total_ns
        straggler_ms = None if straggler_s is None else straggler_s * 1e3
        return OpSummary(self.count, self.total_s * 1e3, mean_s * 1e3, algorithm, bus, straggler_ms)


class CommsLogger:
    """Records collectives between `start` and `stop`. One per process: `comms_logger`."""

    def __init__(self) -> None:
        self._section = Section()
        self._ops: frozenset[str] = frozenset()
        self._calls: dict[tuple[str, int], _Calls] = {}  # (name, bytes)

    def configure(self, section: Section) -> None:
        """Take over the settings and start or stop as `enabled` says. Raises ConfigError for an unknown operation."""
        ops = frozenset(map(_plain_name, section.prof_ops))
        unknown = sorted(ops.difference(OPS))
        if unknown:
            rule = f"{', '.join(unknown)} is no operation; choose among {', '.join(OPS)}"
            raise ConfigError([ConfigFault("comms_logger.prof_ops", list(section.prof_ops), rule)])
        self._section, self._ops = section, ops
        if section.enabled:
            self.start()
        else:
            self.stop()

    @property
    def settings(self) -> Section:
        """What `configure` was last given."""
        return self._section

    def start(self) -> None:
        """Record from now on."""
        remove_observer(self._observe)
        add_observer(self._observe)

    def stop(self) -> None:
        """Record nothing more; what was recorded stays."""
        remove_observer(self._observe)

    def reset(self) -> None:
        """Forget what was recorded."""
        self._calls.clear()

    def has_data(self) -> bool:
        """Whether anything was recorded."""
        return bool(self._calls)

    def counts(self) -> dict[str, int]:
        """Calls of each operation, whoever made them."""
        found: dict[str, int] = {}
        for calls in self._calls.values():
            found[calls.op] = found.get(calls.op, 0) + calls.count
        return found

    def summary(self, *, show_straggler: bool = False) -> Summary:
        """What every operation and size cost here. With `show_straggler` a collective call."""
        stragglers = self._stragglers_s() if show_straggler else {}
        found: Summary = {}
        for (name, nbytes), calls in sorted(self._calls.items()):
            found.setdefault(name, {})[nbytes] = calls.summary(nbytes, stragglers.get((name, nbytes)))
        return found

    def _stragglers_s(self) -> dict[tuple[str, int], float]:
        own = {key: list(calls.latest_s) for key, calls in self._calls.items()}
        everyone: list[dict[tuple[str, int], list[float]]] = all_gather_object(own)
        found = {}
        for key, latencies in own.items():
            per_rank = [theirs[key] for theirs in everyone if key in theirs]
            fastest = [min(call) for call in zip(*per_rank, strict=False)]
            found[key] = sum(mine - least for mine, least in zip(latencies, fastest, strict=False))
        return found

    def _observe(self, event: CommEvent) -> Finish | None:
        is_wanted = event.op in self._ops or self._section.prof_all
        if not is_wanted or event.op == "agree":  # those are the library's own few bytes, and never waited for here
            return None
        name = f"{event.op} by {_caller()}" if self._section.debug else event.op
        get_accelerator().synchronize()
        began_s = time.perf_counter()

        def finish() -> None:
            get_accelerator().synchronize()
            self._record(name, event, time.perf_counter() - began_s)

        return finish

    def _record(self, name: str, event: CommEvent, latency_s: float) -> None:
        calls = self._calls.setdefault((name, event.nbytes), _Calls(event.op))
        calls.add(latency_s, event.nbytes * bus_share(event.op, event.world_size))
        if self._section.verbose:
            speed = event.nbytes / latency_s / 1e9 if latency_s else 0.0
            log_dist(
                f"{name}: {event.nbytes} bytes over {event.world_size} ranks, {latency_s * 1e3:.3f} ms, "
                f"{speed:.2f} GB/s"
            )


comms_logger = CommsLogger()


def configure(
    deepspeed_config: Config | Mapping[str, Any] | str | Path | None = None,
    enabled: bool | None = None,
    prof_all: bool | None = None,
    prof_ops: Sequence[str] | None = None,
    verbose: bool | None = None,
    debug: bool | None = None,
) -> None:
    """Set up the log of collectives from a configuration, from arguments, which win over it, or from both.

    Args:
        deepspeed_config: anything `load_config` takes; its `comms_logger` section counts.
        enabled: record from now on, or stop.
        prof_all: record every operation, not only `prof_ops`.
        prof_ops: operations to record; torch's names for them are understood.
        verbose: log each call as it ends.
        debug: add the calling function to each name.
    """
    section = comms_logger.settings
    if deepspeed_config is not None:
        section = load_config(deepspeed_config, check_supported=False).comms_logger
    given = {
        "enabled": enabled,
        "prof_all": prof_all,
        "prof_ops": prof_ops,
        "verbose": verbose,
        "debug": debug,
    }
    changes = {key: value for key, value in given.items() if value is not None}
    changed = {"comms_logger": {**section.model_dump(), **changes}}
    comms_logger.configure(load_config(changed, check_supported=False).comms_logger)


def bus_share(op: str, world_size: int) -> float:
    """Bytes that cross a rank's link, as a share of the whole message."""
    return _BUS_SHARE[op](world_size) if op in _BUS_SHARE else 1.0


def log_summary(show_straggler: bool = False, return_dict: bool = False) -> Summary:
    """Log a table of what was recorded, on rank 0, and return it.

    Args:
        show_straggler: add the time each rank spent beyond the fastest; then every rank must call this.
        return_dict: return the table without logging it.
    """
    summary = comms_logger.summary(show_straggler=show_straggler)
    if not return_dict:
        log_dist(f"collectives of rank 0\n{_table(summary)}")
    return summary


def reset_log() -> None:
    """Forget what was recorded."""
    comms_logger.reset()


def has_comm_data() -> bool:
    """Whether anything was recorded."""
    return comms_logger.has_data()


def get_logged_comm_ops() -> list[str]:
    """Operations that were recorded."""
    return list(comms_logger.counts())


def get_comm_operation_count(op: str | None = None) -> int:
    """Calls of `op`, or of all operations."""
    counts = comms_logger.counts()
    return sum(counts.values()) if op is None else counts.get(_plain_name(op), 0)


def _plain_name(op: str) -> str:
    for suffix in _SUFFIXES:
        op = op.removesuffix(suffix)
    return op


def _caller() -> str:
    """The nearest function outside this package that led to the collective."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("fullspeed.comm"):
        frame = frame.f_back
    return frame.f_code.co_qualname if sys.version_info >= (3, 11) else frame.f_code.co_name


def _table(summary: Summary) -> str:
    lines = [
        f"{'operation':<20}{'bytes':>14}{'calls':>8}{'total ms':>12}{'mean ms':>10}{'alg GB/s':>10}{'bus GB/s':>10}"
    ]
    has_stragglers = any(row.straggler_ms is not None for sizes in summary.values() for row in sizes.values())
    lines[0] += f"{'straggler ms':>14}" if has_stragglers else ""
    for name, sizes in summary.items():
        for nbytes, row in sizes.items():
            line = f"{name:<20}{nbytes:>14}{row.num_calls:>8}{row.total_ms:>12.2f}{row.mean_ms:>10.3f}"
            line += f"{row.algbw_gb_per_s:>10.2f}{row.busbw_gb_per_s:>10.2f}"
            lines.append(line + (f"{row.straggler_ms:>14.2f}" if row.straggler_ms is not None else ""))
    return "\n".join(lines)
