"""Opening a checkpoint, whoever wrote it: the files tell."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence

from fullspeed.base.errors import CheckpointError
from fullspeed.checkpoint.deepspeed import files
from fullspeed.checkpoint.deepspeed.read import read_deepspeed
from fullspeed.checkpoint.deepspeed.universal import read_universal
from fullspeed.checkpoint.folder import LATEST, MANIFEST, check_tag, latest_tag
from fullspeed.checkpoint.reader import CheckpointReader
from fullspeed.checkpoint.saved import GroupNames, SavedState


def default_tag(folder: pathlib.Path, *, universal: bool = False) -> str | None:
    """The tag to load when none is given: that of `latest`; with `universal` that of `latest_universal`, if there."""
    pointer = folder / files.LATEST_UNIVERSAL
    if universal and pointer.exists():
        return check_tag(pointer.read_text().strip())
    return latest_tag(folder)


def open_checkpoint(
    folder: pathlib.Path, tag: str, rank: int = 0, group_names: Sequence[GroupNames] = ()
) -> SavedState:
    """Open the checkpoint `tag`: ours, DeepSpeed's of any stage, or a universal one.

    Args:
        folder: the directory that was given to `save_checkpoint`.
        tag: its name.
        rank: for which rank.
        group_names: see `read_deepspeed`.

    Raises:
        CheckpointError: there is none, or it cannot be read.
    """
    path = folder / tag
    if not (path / MANIFEST).exists():
        if files.is_universal(path):
            return read_universal(path, rank)
        if files.is_deepspeed(path):
            return read_deepspeed(path, rank, group_names)
    return CheckpointReader(folder, tag, rank)


def find_checkpoint(folder: str | pathlib.Path, tag: str | None = None, rank: int = 0) -> SavedState:
    """Open a checkpoint outside of training.

    Args:
        folder: the directory that was given to `save_checkpoint`; or, without a tag, one checkpoint's own folder.
        tag: which one; by default the one named in `latest`.
        rank: for which rank.

    Raises:
        CheckpointError: there is none, or it cannot be read.
    """
    path = pathlib.Path(folder)
    name = tag or default_tag(path, universal=True)
    if name is not None:
        return open_checkpoint(path, check_tag(name), rank)
    if (path / MANIFEST).exists() or files.is_deepspeed(path):
        return open_checkpoint(path.absolute().parent, path.absolute().name, rank)
    raise CheckpointError(f"{path} has no file `latest` and is no checkpoint itself; name a tag")


def is_checkpoint(folder: str | pathlib.Path) -> bool:
    """Whether it is a directory of checkpoints, with a `latest` one, or one checkpoint's own folder."""
    path = pathlib.Path(folder)
    return any((path / name).exists() for name in (LATEST, MANIFEST)) or files.is_deepspeed(path)
