"""Which cores ranks are bound to."""

from __future__ import annotations

import pytest

from fullspeed.base.errors import UsageError
from fullspeed.launcher import cores
from fullspeed.launcher.cores import one_thread_each, parse_core_list, share_cores


def test_core_list():
    assert parse_core_list("8, 0-2,2") == [0, 1, 2, 8]
    for text in ("", "a", "3-1", "1-", "-1"):
        with pytest.raises(UsageError, match="bind_core_list"):
            parse_core_list(text)


def test_listed_cores_are_shared_out_in_equal_runs():
    assert share_cores("0-3,8", range(16), 2) == [[0, 1], [2, 3]]
    assert share_cores("5", range(16), 1) == [[5]]


def test_second_threads_of_a_core_are_left_alone(monkeypatch):
    monkeypatch.setattr(cores, "_siblings", lambda core: [core % 4, core % 4 + 4])
    assert one_thread_each(list(range(8))) == [0, 1, 2, 3]
    assert one_thread_each([2, 5, 6, 7]) == [2, 5, 7]
    assert share_cores("", range(8), 2) == [[0, 1], [2, 3]]


@pytest.mark.parametrize(("wanted", "num_ranks", "message"), [("0-4", 2, "names core 4"), ("0-1", 3, "3 ranks")])
def test_refused(wanted, num_ranks, message):
    with pytest.raises(UsageError, match=message):
        share_cores(wanted, range(4), num_ranks)
