"""What a process leaves for its launcher."""

from __future__ import annotations

import subprocess
import sys

from fullspeed.base import progress

NOTE = "from fullspeed.base.progress import *; note_step(12); note_step(3); note_saves(); print(last_step())"


def test_the_last_step_and_the_wish_to_save_are_read_by_rank(tmp_path, monkeypatch):
    monkeypatch.setenv(progress.FOLDER_VARIABLE, str(tmp_path))
    for rank in (0, 11):
        monkeypatch.setenv("RANK", str(rank))
        assert not progress.is_any_saving(str(tmp_path)) or rank
        assert subprocess.check_output([sys.executable, "-c", NOTE], text=True) == "3\n"
    (tmp_path / "step5").touch()  # of a rank that ended while it noted its first
    assert progress.noted_steps(str(tmp_path)) == {0: 3, 11: 3}
    assert progress.is_any_saving(str(tmp_path))
    for rank in (0, 5, 11):
        progress.forget_notes(str(tmp_path), rank)
    assert list(tmp_path.iterdir()) == []


def test_without_a_launcher_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.delenv(progress.FOLDER_VARIABLE, raising=False)
    assert subprocess.check_output([sys.executable, "-c", NOTE], text=True, cwd=tmp_path) == "3\n"
    monkeypatch.setenv(progress.FOLDER_VARIABLE, str(tmp_path / "gone"))
    assert subprocess.check_output([sys.executable, "-c", NOTE], text=True, cwd=tmp_path) == "3\n"
    assert list(tmp_path.iterdir()) == []
