"""The environment is read in one place, and numbers in it are checked."""

from __future__ import annotations

import pytest

from fullspeed.base import env
from fullspeed.base.errors import UsageError


@pytest.fixture(autouse=True)
def _clean(monkeypatch):
    for name in ("FS_A", "FS_B"):
        monkeypatch.delenv(name, raising=False)


def test_empty_counts_as_unset(monkeypatch):
    assert env.get("FS_A") is None
    assert env.get("FS_A", "x") == "x"
    monkeypatch.setenv("FS_A", "")
    assert env.get("FS_A", "x") == "x"
    monkeypatch.setenv("FS_A", "0")
    assert env.get("FS_A", "x") == "0"


def test_integers(monkeypatch):
    assert env.get_int("FS_A") is None
    assert env.get_int("FS_A", 3) == 3
    monkeypatch.setenv("FS_A", "-7")
    assert env.get_int("FS_A") == -7
    monkeypatch.setenv("FS_A", "seven")
    with pytest.raises(UsageError, match="FS_A is 'seven'"):
        env.get_int("FS_A")


def test_first_that_is_set(monkeypatch):
    assert env.first("FS_A", "FS_B") is None
    monkeypatch.setenv("FS_B", "b")
    assert env.first("FS_A", "FS_B") == "b"
    monkeypatch.setenv("FS_A", "a")
    assert env.first("FS_A", "FS_B") == "a"


def test_export(monkeypatch):
    monkeypatch.setenv("FS_A", "user")
    monkeypatch.setenv("FS_B", "old")
    env.export_default("FS_A", "ours")
    env.export({"FS_B": "new"})
    assert (env.get("FS_A"), env.get("FS_B")) == ("user", "new")
    copy = env.snapshot()
    copy["FS_A"] = "changed"
    assert env.get("FS_A") == "user"
