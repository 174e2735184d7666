"""The newest scalars of a run as a table in the terminal."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Console
from rich.live import Live
from rich.table import Table
from typing_extensions import override

from fullspeed.monitor.sinks import Sink

_BARS = "▁▂▃▄▅▆▇█"
_WIDTH = 32  # values a curve shows


class DashboardSink(Sink):
    """Draws the newest value of every name, and the course of its last 32, in place.

    Where the output is no terminal, the last table alone is printed at the end.
    """

    def __init__(self, updates_per_second: int = 2, console: Console | None = None) -> None:
        self._samples = 0
        self._courses: dict[str, list[float]] = {}
        self._live = Live(
            get_renderable=self._table, console=console, refresh_per_second=updates_per_second, transient=False
        )
        self._live.start()

    @override
    def write_scalars(self, samples: int, values: Mapping[str, float]) -> None:
        self._samples = samples
        for name, value in values.items():
            self._courses[name] = [*self._courses.get(name, []), value][-_WIDTH:]

    @override
    def close(self) -> None:
        self._live.stop()

    def _table(self) -> Table:
        table = Table(title=f"{self._samples} samples", title_justify="left")
        table.add_column("value")
        table.add_column("now", justify="right")
        table.add_column("course")
        for name, course in list(self._courses.items()):  # a copy: rich draws from a thread of its own
            table.add_row(name.removeprefix("Train/Samples/"), f"{course[-1]:.6g}", curve(course))
        return table


def curve(values: list[float]) -> str:
    """The values as bars between their least and greatest; what is not finite is a blank."""
    finite = [value for value in values if abs(value) < float("inf")]
    if not finite:
        return ""
    low, span = min(finite), max(finite) - min(finite)
    top = len(_BARS) - 1
    return "".join(
        _BARS[round((value - low) / span * top) if span else 0] if abs(value) < float("inf") else " "
        for value in values
    )
