"""Hostfiles, and which hosts and slots ranks run on."""

from __future__ import annotations

import pytest

from fullspeed.base.errors import UsageError
from fullspeed.launcher.slots import Wish, choose_slots, read_hostfile

HOSTS = {"work1": 2, "work2": 4}
ALL = {"work1": (0, 1), "work2": (0, 1, 2, 3)}


def test_hostfile():
    text = "# cluster\n\nwork1 slots=2\n  me@work2\tslots=4   # new\n"
    assert read_hostfile(text, "hosts") == {"work1": 2, "me@work2": 4}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("work1", "write 'host slots=N'"),
        ("work1 slots=", "write 'host slots=N'"),
        ("work1 slots=two", "write 'host slots=N'"),
        ("work1 slots=0", "at least 1"),
        ("work1 slots 2", "write 'host slots=N'"),
        ("work1 slots=2 slots=3", "write 'host slots=N'"),
        ("first slots=4", "'first' is there already"),
    ],
)
def test_bad_lines_are_quoted(line, message):
    with pytest.raises(UsageError, match=message) as caught:
        read_hostfile(f"first slots=1\n{line}\n", "my/hosts")
    assert f"line 2 of hostfile my/hosts is {line!r}" in str(caught.value)


def test_hostfile_without_hosts():
    with pytest.raises(UsageError, match="names no host"):
        read_hostfile("# nothing\n", "hosts")


@pytest.mark.parametrize(
    ("wish", "expected"),
    [
        (Wish(), ALL),
        (Wish(num_hosts=1), {"work1": (0, 1)}),
        (Wish(num_slots=1), {"work1": (0,), "work2": (0,)}),
        (Wish(num_hosts=2, num_slots=2), {"work1": (0, 1), "work2": (0, 1)}),
        (Wish(include="work2"), {"work2": ALL["work2"]}),
        (Wish(include="work2:3,1"), {"work2": (1, 3)}),
        (Wish(include="work2:0@work1:1"), {"work1": (1,), "work2": (0,)}),
        (Wish(include="work2:0@work2:2"), {"work2": (0, 2)}),
        (Wish(exclude="work1"), {"work2": ALL["work2"]}),
        (Wish(exclude="work1:0@work2:0,2"), {"work1": (1,), "work2": (1, 3)}),
    ],
)
def test_chosen(wish, expected):
    chosen = choose_slots(HOSTS, wish)
    assert chosen == expected
    assert list(chosen) == list(expected)


@pytest.mark.parametrize(
    ("wish", "message"),
    [
        (Wish(num_slots=3), "3, but host work1 has 2"),
        (Wish(num_hosts=3), "3, but there are 2 hosts: work1, work2"),
        (Wish(include="work1:0", exclude="work2:1"), "exclude each other"),
        (Wish(num_slots=2, include="work1:0"), "--num_gpus cannot be combined"),
        (Wish(num_hosts=1, exclude="work1:0"), "--num_nodes cannot be combined"),
        (Wish(include="other:0"), "host 'other'; the hosts are work1, work2"),
        (Wish(include="work1:2,3"), r"slot '2' of work1; slots are indices 0\.\.1"),
        (Wish(include="work1:-1"), "slot '-1'"),
        (Wish(include="work1:"), "slot ''"),
        (Wish(exclude="work1:a"), "slot 'a'"),
        (Wish(exclude="work1@work2"), "leaves no slot"),
    ],
)
def test_refused(wish, message):
    with pytest.raises(UsageError, match=message):
        choose_slots(HOSTS, wish)
