"""Which checkpoints are complete, and what making room leaves, whenever it is interrupted."""

from __future__ import annotations

import os
import pathlib
import shutil

import pytest

from fullspeed.base.errors import CheckpointError
from fullspeed.checkpoint import folder as folder_module
from fullspeed.checkpoint.folder import available_tags, latest_tag
from fullspeed.checkpoint.inventory import advice, complete_checkpoints, keep_newest
from tests.unit.checkpoint import mini
from tests.unit.checkpoint.test_folder import die_before


def save_four(folder: pathlib.Path) -> None:
    for number in range(4):
        mini.save(folder, f"n{number}", number, saved_at=10.0 + number)


def test_the_one_saved_last_comes_first_and_damaged_ones_not_at_all(tmp_path):
    save_four(tmp_path)
    mini.save(tmp_path, "n0", 7, saved_at=99.0)
    next((tmp_path / "n2" / "data-0").glob("*.safetensors")).write_bytes(b"short")
    (tmp_path / "n3" / "manifest.json").write_bytes(b"\xff\xfe")
    assert [each.tag for each in complete_checkpoints(tmp_path)] == ["n0", "n1"]
    assert "'n1'" in advice(tmp_path, "n0")
    (tmp_path / "n1" / "manifest.json").unlink()
    assert advice(tmp_path, "n0") == f"{tmp_path} has no other complete checkpoint"


def test_the_newest_stay_and_the_latest_whatever_its_age(tmp_path):
    save_four(tmp_path)
    folder_module.write_latest(tmp_path, "n0")
    assert keep_newest(tmp_path, 2) == ["n1"]
    assert available_tags(tmp_path) == ["n0", "n2", "n3"]
    assert keep_newest(tmp_path, 2) == []
    assert keep_newest(tmp_path, 1) == ["n2"]
    assert mini.load(tmp_path, "n0") == 0


def test_killed_at_any_moment_what_is_listed_loads_and_the_next_call_removes_the_rest(tmp_path):
    step, is_done, left = 0, False, set()
    while not is_done:
        folder = tmp_path / str(step)
        save_four(folder)
        pid = os.fork()
        if not pid:
            try:
                die_before(step)
                keep_newest(folder, 2)
            finally:
                os._exit(1)
        is_done = not os.WIFSIGNALED(os.waitpid(pid, 0)[1])
        left.add(tuple(available_tags(folder)))
        assert all(mini.load(folder, tag) == int(tag[1:]) for tag in available_tags(folder))
        assert latest_tag(folder) == "n3"
        keep_newest(folder, 2)
        assert sorted(path.name for path in folder.iterdir()) == ["latest", "n2", "n3"]
        step += 1
    assert left == {("n0", "n1", "n2", "n3"), ("n0", "n2", "n3"), ("n2", "n3")}


def test_a_tag_half_removed_may_be_written_again(tmp_path, monkeypatch):
    save_four(tmp_path)

    def refuse(path):
        raise OSError("no")

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", refuse)
        with pytest.raises(OSError, match="no"):
            keep_newest(tmp_path, 3)
    assert available_tags(tmp_path) == ["n1", "n2", "n3"]
    mini.save(tmp_path, "n0", 5, saved_at=50.0)
    assert keep_newest(tmp_path, 4) == []
    assert mini.load(tmp_path, "n0") == 5
    assert sorted(path.name for path in (tmp_path / "n0").iterdir()) == ["data-1", "manifest.json"]


@pytest.mark.parametrize("text", [b"", b"gone", b"a/b", b"\xff\xfe"])
def test_a_damaged_latest_is_named_with_the_tags_there_are(tmp_path, text):
    mini.save(tmp_path, "one", 1)
    (tmp_path / "latest").write_bytes(text)
    with pytest.raises(CheckpointError, match=r"latest names .*has one: load one by its tag"):
        latest_tag(tmp_path)
