"""Where checkpoints lie, and how a new one takes its place.

    save_dir/
      latest                 the tag of the newest checkpoint, written last
      TAG/manifest.json      the commit: it names the data folder and every file in it
      TAG/data-N/            tensors and other state; N grows when the tag is written again
      .TAG.partial/          a checkpoint being written; whoever finds one after a crash may delete it

A new tag appears by renaming `.TAG.partial`. A tag that exists gets the new data folder beside the old one,
then a new manifest by an atomic replace, and only then loses the old data. So at every moment each name leads
to a whole checkpoint.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import shutil
import time
from collections.abc import Mapping

from fullspeed.base.errors import CheckpointError
from fullspeed.checkpoint.durable import replace_file, sync_folder, write_file
from fullspeed.checkpoint.manifest import FileRecord, Manifest

LATEST = "latest"
MANIFEST = "manifest.json"
_DATA = "data-"
_PARTIAL = ".partial"
_STALE_S = 3600.0


def check_tag(tag: object) -> str:
    """The tag as a string that can name a folder. Raises CheckpointError when it cannot."""
    name = str(tag)
    if not name.strip():
        raise CheckpointError(f"the checkpoint tag is {name!r}; give it a name, or pass None for the default one")
    if "/" in name or "\\" in name or "\0" in name:
        raise CheckpointError(
            f"the checkpoint tag {name!r} contains a path; put the folder into the directory argument"
        )
    if name.startswith(".") or name == LATEST:
        raise CheckpointError(f"the checkpoint tag {name!r} is reserved; choose another name")
    return name


def latest_tag(folder: pathlib.Path) -> str | None:
    """The tag that `latest` names; None when there is no such file.

    Raises:
        CheckpointError: the file is damaged, or the checkpoint it names is not there.
    """
    path = folder / LATEST
    try:
        text = path.read_bytes().decode(errors="replace").strip()
    except FileNotFoundError:
        return None
    if not text or "/" in text or not (folder / text).is_dir():
        tags = ", ".join(available_tags(folder)) or "no checkpoint"
        raise CheckpointError(f"{path} names {text!r}, which is not there; {folder} has {tags}: load one by its tag")
    return text


def write_latest(folder: pathlib.Path, tag: str) -> None:
    """Make `tag` the one that is loaded by default."""
    replace_file(folder / LATEST, [tag.encode()])


def available_tags(folder: pathlib.Path) -> list[str]:
    """Tags of the checkpoints in a folder."""
    names = (found.parent.name for found in folder.glob(f"*/{MANIFEST}"))
    return sorted(name for name in names if not name.startswith("."))


def partial_folder(folder: pathlib.Path, tag: str) -> pathlib.Path:
    """Where a checkpoint is put together before it gets its name."""
    return folder / f".{tag}{_PARTIAL}"


def remove_stale(folder: pathlib.Path) -> None:
    """Remove checkpoints that a killed process left unfinished: those in which nothing was written for an hour.

    A younger one may be another job's that saves into the same directory.
    """
    for partial in folder.glob(f".*{_PARTIAL}"):
        with contextlib.suppress(OSError):  # its owner, or another one who cleans up, was faster
            newest = max(path.stat().st_mtime for path in (partial, *partial.rglob("*")))
            if partial.is_dir() and time.time() - newest > _STALE_S:
                shutil.rmtree(partial)


class PendingCheckpoint:
    """A checkpoint being written. Rank 0: `prepare`, then `commit` or `discard`; the others only use `data`."""

    def __init__(self, folder: pathlib.Path, tag: str, generation: int) -> None:
        self.folder, self.tag = folder, tag
        self.final = folder / tag
        self.partial = partial_folder(folder, tag)
        self.data_name = f"{_DATA}{generation}"
        self.data = self.partial / self.data_name

    @classmethod
    def prepare(cls, folder: pathlib.Path, tag: str) -> PendingCheckpoint:
        """Make room for a new checkpoint; what earlier attempts left behind is removed, see `remove_stale`."""
        folder.mkdir(parents=True, exist_ok=True)
        final = folder / tag
        if final.exists() and not final.is_dir():
            raise CheckpointError(f"{final} is a file; move it away or choose another tag")
        pending = cls(folder, tag, 1 + max(_generations(final), default=-1))
        pending.discard()
        remove_stale(folder)
        pending.data.mkdir(parents=True)
        return pending

    @property
    def generation(self) -> int:
        """The N of the data folder."""
        return int(self.data_name.removeprefix(_DATA))

    def commit(self, manifest: Manifest) -> None:
        """Make the checkpoint the one its tag leads to."""
        self._check_visible(manifest.files)
        write_file(self.partial / MANIFEST, [manifest.to_json().encode()])
        sync_folder(self.data)
        sync_folder(self.partial)
        if not self.final.exists():
            os.rename(self.partial, self.final)
            sync_folder(self.folder)
            return
        os.rename(self.data, self.final / self.data_name)
        sync_folder(self.final)
        os.replace(self.partial / MANIFEST, self.final / MANIFEST)
        sync_folder(self.final)
        for old in _generations(self.final):
            if old != self.generation:
                shutil.rmtree(self.final / f"{_DATA}{old}")
        self.discard()

    def discard(self) -> None:
        """Remove what was written so far."""
        if self.partial.exists():
            shutil.rmtree(self.partial)

    def _check_visible(self, files: Mapping[str, FileRecord]) -> None:
        """Whether this rank sees what the others wrote."""
        for name, record in files.items():
            path = self.data / name
            if not path.exists() or path.stat().st_size != record.nbytes:
                raise CheckpointError(
                    f"rank 0 does not see {path} as another rank wrote it; the checkpoint directory must lie "
                    f"on storage that all ranks share"
                )


def _generations(final: pathlib.Path) -> list[int]:
    numbers = (path.name.removeprefix(_DATA) for path in final.glob(f"{_DATA}*"))
    return [int(number) for number in numbers if number.isdigit()]
