"""Which slots ranks run on."""

from __future__ import annotations

import pytest

from fullspeed.base.errors import UsageError
from fullspeed.launcher.slots import choose_slots

HOSTS = {"localhost", "me"}


@pytest.mark.parametrize(
    ("num_wanted", "include", "exclude", "expected"),
    [
        (None, "", "", [0, 1, 2, 3]),
        (2, "", "", [0, 1]),
        (None, "localhost", "", [0, 1, 2, 3]),
        (None, "localhost:3,1", "", [1, 3]),
        (None, "me:0@localhost:2", "", [0, 2]),
        (None, "", "localhost:0,2", [1, 3]),
    ],
)
def test_chosen(num_wanted, include, exclude, expected):
    assert choose_slots(4, num_wanted, include, exclude, HOSTS) == expected


@pytest.mark.parametrize(
    ("num_wanted", "include", "exclude", "message"),
    [
        (5, "", "", "5, but this host has 4"),
        (None, "localhost:0", "localhost:1", "exclude each other"),
        (2, "localhost:0", "", "cannot be combined"),
        (None, "other:0", "", "host 'other'"),
        (None, "localhost:4", "", "slot '4' of localhost; slots are indices 0 to 3"),
        (None, "localhost:-1", "", "slot '-1'"),
        (None, "localhost:", "", "slot ''"),
        (None, "localhost:a", "", "slot 'a'"),
        (None, "", "localhost", "leaves no slot"),
    ],
)
def test_refused(num_wanted, include, exclude, message):
    with pytest.raises(UsageError, match=message):
        choose_slots(4, num_wanted, include, exclude, HOSTS)
