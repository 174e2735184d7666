"""Which checkpoints of a folder are complete, which is the one to fall back on, and which make room for newer ones."""

from __future__ import annotations

import contextlib
import os
import pathlib
import shutil
from typing import NamedTuple

from fullspeed.base.errors import CheckpointError
from fullspeed.checkpoint.durable import sync_folder
from fullspeed.checkpoint.folder import MANIFEST, available_tags, latest_tag
from fullspeed.checkpoint.manifest import Manifest

_DELETED = f"{MANIFEST}.deleted"  # what is being removed, or was when the process died


class Complete(NamedTuple):
    """A checkpoint whose manifest is sound and whose files are all there, in full length."""

    tag: str
    manifest: Manifest


def complete_checkpoints(folder: pathlib.Path) -> list[Complete]:
    """The complete checkpoints of a folder, the one saved last first. Reads manifests, not the files."""
    found = [Complete(tag, manifest) for tag in available_tags(folder) if (manifest := _manifest_of(folder / tag))]
    return sorted(found, key=lambda each: -each.manifest.saved_at)


def advice(folder: pathlib.Path, damaged: str) -> str:
    """What to load in place of a damaged checkpoint, as the end of an error's text."""
    others = [each for each in complete_checkpoints(folder) if each.tag != damaged]
    if not others:
        return f"{folder} has no other complete checkpoint"
    step = others[0].manifest.counters.get("global_steps")
    made = "" if step is None else f", of step {step}"
    return f"the previous complete checkpoint is {others[0].tag!r}{made}: load it with tag={others[0].tag!r}"


def keep_newest(folder: pathlib.Path, count: int) -> list[str]:
    """Remove checkpoints that were once the latest, but for the `count` newest; returns the tags removed.

    Never touched: the one `latest` names, those saved without becoming the latest, damaged ones, and files that are not
    a checkpoint's. A checkpoint loses its manifest first, in one step: killed at any moment, what still has a manifest
    is whole, and the next call removes the rest.
    """
    latest = latest_tag(folder)
    rotating = [each.tag for each in complete_checkpoints(folder) if each.manifest.in_rotation]
    removed = [tag for tag in rotating[count:] if tag != latest]
    for tag in removed:
        os.replace(folder / tag / MANIFEST, folder / tag / _DELETED)
        sync_folder(folder / tag)
    for marked in folder.glob(f"*/{_DELETED}"):
        _remove_data(marked)
    return removed


def _remove_data(marked: pathlib.Path) -> None:
    final = marked.parent
    if not (final / MANIFEST).exists():  # else the tag has been written again since, and removed its old data
        for data in final.glob("data-*"):
            shutil.rmtree(data)
    marked.unlink()
    with contextlib.suppress(OSError):  # the user's own files are in there too
        final.rmdir()


def _manifest_of(final: pathlib.Path) -> Manifest | None:
    try:
        manifest = Manifest.from_json((final / MANIFEST).read_text(), str(final / MANIFEST))
        sizes = {name: (final / manifest.data / name).stat().st_size for name in manifest.files}
    except (CheckpointError, OSError, ValueError):
        return None
    return manifest if all(sizes[name] == record.nbytes for name, record in manifest.files.items()) else None
