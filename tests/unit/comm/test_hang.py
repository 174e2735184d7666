"""What ranks that stand still say of one another."""

from __future__ import annotations

import pytest

from fullspeed.base.errors import UsageError
from fullspeed.comm import hang
from fullspeed.comm.hang import Standing, describe


def standing(num_begun: int, is_waiting: bool) -> Standing:
    return Standing(
        "host", 7, num_begun, f"gather {num_begun}", is_waiting, f"line {num_begun}", f"stack {num_begun}\n"
    )


def test_the_rank_that_is_in_no_collective_is_waited_for_and_shown():
    lines = describe({0: standing(5, True), 1: standing(5, False)}, []).splitlines()
    assert lines == [
        "rank 0 on host, after step 7, waits for rank 1 in collective 5 (gather 5) at line 5",
        "rank 1 on host, after step 7, is in no collective (its last was 5, gather 5)",
        "it stands at",
        "stack 5",
    ]


def test_of_ranks_that_all_wait_the_one_behind_is_waited_for_and_shown():
    text = describe({0: standing(6, True), 1: standing(5, True), 2: standing(6, True)}, [])
    assert "rank 0 on host, after step 7, waits for rank 1 in collective 6" in text
    assert "rank 2 on host, after step 7, waits for rank 1 in collective 6" in text
    assert text.count("stack") == 1
    assert "stack 5" in text


def test_of_ranks_that_wait_in_step_all_are_shown():
    text = describe({0: standing(6, True), 1: standing(6, True)}, [])
    assert text.count("waits for rank the others") == 0
    assert text.count("waits for the others") == 2
    assert text.count("stack 6") == 2


def test_a_rank_that_does_not_answer_is_named():
    text = describe({0: standing(6, True)}, [3])
    assert "waits for rank 3" in text
    assert text.splitlines()[-1].startswith("rank 3 does not answer")


@pytest.mark.parametrize("text", ["soon", "0", "-1", "nan"])
def test_a_limit_that_is_none_is_refused(monkeypatch, text):
    monkeypatch.setenv(hang.VARIABLE, text)
    monkeypatch.setattr(hang.dist, "get_world_size", lambda: 2)
    with pytest.raises(UsageError, match=f"FULLSPEED_HANG_TIMEOUT is '{text}'; it is a number of seconds above 0"):
        hang.watch_for_hangs()
