"""A checkpoint appears whole or not at all, whenever the writer dies."""

from __future__ import annotations

import os
import pathlib
import shutil
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest

from fullspeed.base.errors import CheckpointError
from fullspeed.checkpoint import folder as folder_module
from fullspeed.checkpoint.folder import PendingCheckpoint, available_tags, check_tag, latest_tag
from tests.unit.checkpoint import mini

STEPS = ((os, "fsync"), (os, "rename"), (os, "replace"), (os, "mkdir"), (shutil, "rmtree"), (os, "unlink"))


@pytest.mark.parametrize("tag", ["", "  ", "a/b", "..", ".hidden", "a\\b", "latest", "a\0b"])
def test_tags_that_name_no_folder_are_refused(tag):
    with pytest.raises(CheckpointError, match="checkpoint tag"):
        check_tag(tag)


def test_tags_become_strings():
    assert check_tag(12) == "12"
    assert check_tag("global_step3") == "global_step3"


def test_latest_is_the_bare_tag(tmp_path):
    assert latest_tag(tmp_path) is None
    mini.save(tmp_path, "one", 1)
    assert (tmp_path / "latest").read_bytes() == b"one"
    assert latest_tag(tmp_path) == "one"
    assert available_tags(tmp_path) == ["one"]


def test_a_tag_written_again_leaves_nothing_of_the_old_data(tmp_path):
    for seed in range(3):
        mini.save(tmp_path, "same", seed)
        assert mini.load(tmp_path, "same") == seed
        assert sorted(path.name for path in (tmp_path / "same").iterdir()) == [f"data-{seed}", "manifest.json"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "same"]


def test_other_files_in_the_tags_folder_stay(tmp_path):
    (tmp_path / "tag").mkdir()
    (tmp_path / "tag" / "notes.txt").write_text("mine")
    mini.save(tmp_path, "tag", 1)
    assert mini.load(tmp_path, "tag") == 1
    assert (tmp_path / "tag" / "notes.txt").read_text() == "mine"


def test_a_file_in_the_way_is_named(tmp_path):
    (tmp_path / "tag").write_text("")
    with pytest.raises(CheckpointError, match="is a file"):
        mini.save(tmp_path, "tag", 1)


def test_leftovers_of_a_crash_are_removed_by_the_next_attempt(tmp_path):
    first = PendingCheckpoint.prepare(tmp_path, "tag")
    (first.data / "junk").write_text("junk")
    mini.save(tmp_path, "tag", 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "tag"]
    assert not list(tmp_path.rglob("junk"))


def test_what_a_kill_left_behind_is_removed_by_a_later_save_of_any_tag(tmp_path):
    """But not what another job may be writing into the same directory just now."""
    for tag in ("killed", "running"):
        (PendingCheckpoint.prepare(tmp_path, tag).data / "part").write_text("some")
    long_ago = time.time() - 2 * 3600
    for path in (tmp_path / ".killed.partial", *(tmp_path / ".killed.partial").rglob("*")):
        os.utime(path, (long_ago, long_ago))
    (tmp_path / ".notes.partial").write_text("a file of the user's")
    mini.save(tmp_path, "next", 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".notes.partial", ".running.partial", "latest", "next"]


def test_files_that_rank_0_does_not_see_are_no_checkpoint(tmp_path, monkeypatch):
    mini.save(tmp_path, "tag", 1)
    monkeypatch.setattr(mini, "write_file", lambda path, parts: folder_module.FileRecord(5, 5))
    with pytest.raises(CheckpointError, match="storage that all ranks share"):
        mini.save(tmp_path, "tag", 2)
    assert mini.load(tmp_path, "tag") == 1


def die_before(step: int) -> None:
    """In this process, kill it before its `step`-th change of the file system."""
    left = [step]

    def watched(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if not left[0]:
                os.kill(os.getpid(), signal.SIGKILL)
            left[0] -= 1
            return real(*args, **kwargs)

        return call

    for module, name in STEPS:
        setattr(module, name, watched(getattr(module, name)))


def save_and_die(folder: pathlib.Path, tag: str, seed: int, step: int) -> bool:
    """Save in another process that dies before its `step`-th change; True if it ended before that."""
    return run_and_die(lambda: mini.save(folder, tag, seed), step)


def run_and_die(action: Callable[[], Any], step: int) -> bool:
    """The same for any action."""
    pid = os.fork()
    if not pid:
        try:
            die_before(step)
            action()
        finally:
            os._exit(1)
    _, status = os.waitpid(pid, 0)
    return not os.WIFSIGNALED(status)


@pytest.mark.parametrize("tag", ["new", "old"])
def test_killed_at_any_moment_a_whole_checkpoint_stays(tmp_path, tag):
    """With tag "old" the tag is written again: at every moment it leads to the old values or to the new ones."""
    seen, step, is_done = set(), 0, False
    while not is_done:
        folder = tmp_path / str(step)
        mini.save(folder, "old", 1)
        is_done = save_and_die(folder, tag, 2, step)
        latest = latest_tag(folder)
        assert latest is not None
        seed = mini.load(folder, latest)
        seen.add(seed)
        assert seed == 2 or not is_done
        assert all(mini.load(folder, each) for each in available_tags(folder))
        mini.save(folder, tag, 3)  # and the next save is not disturbed
        assert mini.load(folder, tag) == 3
        assert sorted(path.name for path in folder.iterdir()) == sorted({"latest", "old", tag})
        step += 1
    assert seen == {1, 2}
    assert step > 12, "hardly anything was interrupted"
