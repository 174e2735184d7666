"""One rank's part in writing one checkpoint: its files, then rank 0's commit."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import threading
import time
from collections.abc import Callable, Iterable, Mapping

from fullspeed.base.log import log_dist
from fullspeed.checkpoint.durable import sync_folder, write_file
from fullspeed.checkpoint.folder import PendingCheckpoint, write_latest
from fullspeed.checkpoint.inventory import keep_newest
from fullspeed.checkpoint.manifest import FileRecord, Manifest
from fullspeed.checkpoint.markers import Markers

_SILENCE_S = 60.0  # after which a program that has ended no longer waits for the files of a rank


@dataclasses.dataclass(frozen=True)
class Writing:
    """What to write, and what becomes of it.

    Attributes:
        pending: the checkpoint being made.
        manifest: its description, complete but for `files` and `saved_at`.
        rank: this rank.
        contents: this rank's files, as bytes or as something that yields them.
        keep_last: older checkpoints to leave, this one included; None leaves all.
        shows_speed: log how long it took.
    """

    pending: PendingCheckpoint
    manifest: Manifest
    rank: int
    contents: Mapping[str, Callable[[], Iterable[bytes | memoryview]]]
    keep_last: int | None
    shows_speed: bool

    def write(self) -> dict[str, FileRecord]:
        """Write this rank's files; they are on the disk when this returns."""
        self.pending.data.mkdir(parents=True, exist_ok=True)
        begin = time.perf_counter()
        files = {name: write_file(self.pending.data / name, parts()) for name, parts in self.contents.items()}
        sync_folder(self.pending.data)
        if self.shows_speed:
            nbytes, seconds = sum(record.nbytes for record in files.values()), time.perf_counter() - begin
            log_dist(f"wrote {nbytes / 1e6:.1f} MB in {seconds:.2f} s, {nbytes / 1e9 / seconds:.2f} GB/s on this rank")
        return files

    def commit(self, files: Mapping[str, FileRecord]) -> None:
        """Make the checkpoint visible, and the latest one where it is to be. Rank 0, with every rank's files."""
        self.pending.commit(dataclasses.replace(self.manifest, files=files, saved_at=time.time()))
        folder: pathlib.Path = self.pending.folder
        if self.manifest.in_rotation:
            write_latest(folder, self.pending.tag)
            if self.keep_last is not None:
                keep_newest(folder, self.keep_last)
        log_dist(f"saved checkpoint {self.pending.final}")

    def abandon(self) -> None:
        """Remove what was written, when no rank writes any more. Only rank 0 does something."""
        if self.rank:
            return
        with contextlib.suppress(OSError):  # the cause of the failure is more telling
            self.pending.discard()

    def run_alone(self, stop: threading.Event) -> None:
        """Write, and on rank 0 wait for the others and commit, without a word to them: for another thread.

        `stop` ends the wait for ranks that will not finish. Raises what went wrong.
        """
        markers = Markers(self.pending.partial, self.rank, self.manifest.world_size)
        try:
            markers.note_written(self.write())
            if self.rank == 0:
                self.commit(markers.collect(_Patience(self.pending.data, stop)))
        except Exception as error:
            markers.note_failed(f"{type(error).__name__}: {error}")
            raise


class _Patience:
    """Whether waiting for other ranks' files has become pointless.

    While the program runs, it would be told: `stop`. When it is ending, there is nobody to tell it; then files that no
    longer grow belong to a rank that is gone.
    """

    def __init__(self, data: pathlib.Path, stop: threading.Event) -> None:
        self._data, self._stop = data, stop
        self._seen, self._since = -1, time.monotonic()

    def __call__(self) -> bool:
        if self._stop.is_set():
            return True
        if threading.main_thread().is_alive():
            return False
        written = sum(path.stat().st_size for path in self._data.iterdir())
        if written != self._seen:
            self._seen, self._since = written, time.monotonic()
        return time.monotonic() - self._since > _SILENCE_S
