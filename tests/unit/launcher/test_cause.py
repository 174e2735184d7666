"""Which failure came first."""

from __future__ import annotations

import signal

import pytest

from fullspeed.launcher.cause import RankEnd, Whereabouts, find_first_cause
from fullspeed.launcher.rank import FailureRecord

KILLED, ABORTED, ENDED = -signal.SIGKILL, -signal.SIGABRT, -signal.SIGTERM


def record(rank, at_ns):
    return FailureRecord(rank, at_ns, f"Traceback of {rank}\n")


@pytest.mark.parametrize(
    ("ends", "records", "first", "exit_code"),
    [
        # one exception; the peer was ended by the agent
        ([RankEnd(0, ENDED), RankEnd(1, 1)], [record(1, 5)], 1, 1),
        # two exceptions: the earlier one
        ([RankEnd(0, 1), RankEnd(1, 1)], [record(0, 9), record(1, 5)], 1, 1),
        # the first to raise was slow to leave, so the agent ended it
        ([RankEnd(0, 1)], [record(0, 9), record(1, 5)], 1, 1),
        # killed, and the peer complained
        ([RankEnd(0, 1), RankEnd(1, KILLED)], [record(0, 9)], 1, 128 + 9),
        # left with its own code, and the peer complained
        ([RankEnd(0, 1), RankEnd(1, 3)], [record(0, 9)], 1, 3),
        # raised, and the peer's transport aborted
        ([RankEnd(0, ABORTED), RankEnd(1, 1)], [record(1, 9)], 1, 1),
        # nothing but aborts, or one rank ended by somebody else
        ([RankEnd(2, ABORTED)], [], 2, 128 + 6),
        ([RankEnd(1, ENDED)], [], 1, 128 + 15),
    ],
)
def test_first_cause(ends, records, first, exit_code):
    cause = find_first_cause(ends, records)
    assert cause.exit_code == exit_code
    lines = cause.text.splitlines()
    assert sum("failed first" in line for line in lines) == 1
    assert f"rank {first} failed first" in cause.text
    if first in {one.rank for one in records}:
        assert lines[-1] == f"Traceback of {first}"


def test_others_stand_before_the_cause():
    ends = [RankEnd(0, 7), RankEnd(1, KILLED), RankEnd(2, ENDED)]
    lines = find_first_cause(ends, []).text.splitlines()
    assert lines == ["rank 1 failed later (killed by SIGKILL, often because memory ran out)", lines[-1]]
    assert lines[-1] == "rank 0 failed first (exit code 7)"


def test_host_step_and_the_signal_behind_a_code_are_told_where_known():
    where = Whereabouts({0: "work1", 1: "work2"}, {1: 12})
    assert find_first_cause([RankEnd(0, 7)], [], where).text == "rank 0 on work1 failed first (exit code 7)"
    text = find_first_cause([RankEnd(1, 143)], [], where).text
    assert text == "rank 1 on work2 failed first (exit code 143, after SIGTERM; after step 12)"
