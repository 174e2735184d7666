"""Where the scalars of a run go: the sink protocol, and the sinks that need no other package."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Protocol

from typing_extensions import override

EVENTS_FILE = "events.jsonl"
SAMPLES = "samples"  # the key of a JSON line that says where on the x axis its values stand


class Sink(Protocol):
    """Takes the scalars of a run, in the order they happened; lives on rank 0 only."""

    def write_scalars(self, samples: int, values: Mapping[str, float]) -> None:
        """Write `values`, named as `Train/Samples/lr`, at the position `samples` (seen so far, over all ranks)."""

    def close(self) -> None:
        """Write what is still held back and let go of files and connections. Idempotent."""


class CSVSink(Sink):
    """One CSV file per name, with a header; a file that is there already is continued.

    `Train/Samples/lr` goes to `folder/Train_Samples_lr.csv` with the columns `step,lr`.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, IO[str]] = {}
        folder.mkdir(parents=True, exist_ok=True)

    @override
    def write_scalars(self, samples: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            if name not in self._files:
                self._files[name] = self._open(name)
            csv.writer(self._files[name]).writerow([samples, value])
            self._files[name].flush()

    def _open(self, name: str) -> IO[str]:
        file = (self._folder / f"{name.replace('/', '_')}.csv").open("a", newline="")
        if file.tell() == 0:
            csv.writer(file).writerow(["step", name.rsplit("/", 1)[-1]])
        return file

    @override
    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()


class JSONSink(Sink):
    """One line per write, `{"samples": 8, "Train/Samples/lr": 0.1}`; a file that is there already is continued."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = (folder / EVENTS_FILE).open("a")

    @override
    def write_scalars(self, samples: int, values: Mapping[str, float]) -> None:
        self._file.write(json.dumps({SAMPLES: samples, **values}) + "\n")
        self._file.flush()  # a run that is killed has written all it said

    @override
    def close(self) -> None:
        self._file.close()
