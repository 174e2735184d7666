"""Rank 0 learns from files when all ranks have written, or why one has not."""

from __future__ import annotations

import pytest

from fullspeed.base.errors import CheckpointError
from fullspeed.checkpoint.manifest import FileRecord
from fullspeed.checkpoint.markers import Markers


def test_the_files_of_all_ranks_come_together_and_the_notes_go(tmp_path):
    for rank in (1, 0):
        Markers(tmp_path, rank, 2).note_written({f"file{rank}": FileRecord(rank, 7)})
    assert Markers(tmp_path, 0, 2).collect(lambda: False) == {"file0": FileRecord(0, 7), "file1": FileRecord(1, 7)}
    assert list(tmp_path.iterdir()) == []


def test_a_rank_that_failed_is_named_with_its_cause(tmp_path):
    Markers(tmp_path, 0, 2).note_written({})
    Markers(tmp_path, 1, 2).note_failed("OSError: full")
    with pytest.raises(CheckpointError, match="rank 1: OSError: full"):
        Markers(tmp_path, 0, 2).collect(lambda: False)


def test_the_wait_for_a_silent_rank_ends_when_cancelled(tmp_path):
    Markers(tmp_path, 0, 3).note_written({})
    asked = iter([False, False, True])
    with pytest.raises(CheckpointError, match="no word from ranks 1, 2"):
        Markers(tmp_path, 0, 3).collect(lambda: next(asked))
    assert next(asked, None) is None


def test_a_failure_that_cannot_be_noted_is_no_second_failure(tmp_path):
    Markers(tmp_path / "nowhere", 1, 2).note_failed("cause")
