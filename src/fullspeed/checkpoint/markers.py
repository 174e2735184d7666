"""How ranks that write in the background tell rank 0 that they are done: by files.

So no message gets in the way of training's, and none needs the process group when the program ends.
"""

from __future__ import annotations

import contextlib
import json
import pathlib
import time
from collections.abc import Callable, Mapping

from fullspeed.base.errors import CheckpointError
from fullspeed.checkpoint.durable import replace_file
from fullspeed.checkpoint.manifest import FileRecord

_POLL_S = 0.01
_WRITTEN, _FAILED = "written_", "failed_"


class Markers:
    """The notes of all ranks about one checkpoint, beside its data folder."""

    def __init__(self, folder: pathlib.Path, rank: int, world_size: int) -> None:
        self._folder, self._rank, self._world_size = folder, rank, world_size

    def note_written(self, files: Mapping[str, FileRecord]) -> None:
        """Say that this rank's files are on the disk."""
        text = json.dumps({name: record._asdict() for name, record in files.items()})
        replace_file(self._path(_WRITTEN, self._rank), [text.encode()])

    def note_failed(self, cause: str) -> None:
        """Say that this rank cannot write its files. Does nothing where even that cannot be written."""
        with contextlib.suppress(OSError):
            self._path(_FAILED, self._rank).write_text(cause)

    def collect(self, is_cancelled: Callable[[], bool]) -> dict[str, FileRecord]:
        """Wait for all ranks; returns the record of every file, and removes the notes.

        Raises:
            CheckpointError: a rank failed, or the wait was cancelled.
        """
        while missing := [rank for rank in range(self._world_size) if not self._path(_WRITTEN, rank).exists()]:
            for rank in missing:
                if (failed := self._path(_FAILED, rank)).exists():
                    raise CheckpointError(f"rank {rank}: {failed.read_text()}")
            if is_cancelled():
                raise CheckpointError(f"no word from ranks {', '.join(map(str, missing))}")
            time.sleep(_POLL_S)
        found: dict[str, FileRecord] = {}
        for rank in range(self._world_size):
            path = self._path(_WRITTEN, rank)
            found |= {name: FileRecord(**row) for name, row in json.loads(path.read_text()).items()}
            path.unlink()
        return found

    def _path(self, kind: str, rank: int) -> pathlib.Path:
        return self._folder / f"{kind}{rank:05d}"
