"""A few of the kills of `python -m tests.checkpoint_kills`."""

import pathlib

from tests.checkpoint_kills import kill_often


def test_whatever_a_killed_rank_leaves_is_whole_and_right(tmp_path: pathlib.Path) -> None:
    unfinished, step = kill_often(str(tmp_path), range(6))
    assert unfinished > 0, "no kill met a save"
    assert step > 0
