"""Reading a run's scalars back from the files its sinks wrote."""

from __future__ import annotations

import csv
import json
from pathlib import Path

from fullspeed.base.errors import UsageError
from fullspeed.monitor.sinks import EVENTS_FILE, SAMPLES

Curves = dict[str, list[tuple[int, float]]]
"""For each name, (samples, value) in the order they were written."""


def read_run(path: Path) -> Curves:
    """The curves of a run.

    Args:
        path: an `events.jsonl`, or a folder that holds one, or a folder of CSV files.

    Raises:
        UsageError: there is neither, or a line cannot be read.
    """
    events = path / EVENTS_FILE if path.is_dir() else path
    if events.is_file():
        return _read_json_lines(events)
    files = sorted(path.glob("*.csv")) if path.is_dir() else []
    if not files:
        raise UsageError(
            f"no run at {path}: expected {EVENTS_FILE} or CSV files; name the folder that json_monitor or csv_monitor "
            f"wrote, output_path/job_name"
        )
    return {file.stem: _read_csv(file) for file in files}


def _read_json_lines(file: Path) -> Curves:
    curves: Curves = {}
    lines = file.read_text().splitlines()
    for number, line in enumerate(lines, 1):
        try:
            values = json.loads(line)
            samples = values.pop(SAMPLES)
        except (json.JSONDecodeError, KeyError, AttributeError, TypeError) as error:
            if number == len(lines):
                break  # the run was killed while it wrote
            raise UsageError(f"{file} line {number} is no event ({error!r}): {line[:80]!r}") from None
        for name, value in values.items():
            curves.setdefault(name, []).append((samples, value))
    return curves


def _read_csv(file: Path) -> list[tuple[int, float]]:
    with file.open(newline="") as opened:
        rows = list(csv.reader(opened))[1:]
    try:
        return [(int(samples), float(value)) for samples, value in rows]
    except ValueError as error:
        raise UsageError(f"{file} is no file of csv_monitor: {error}") from None
