"""Logging speaks on the ranks asked for, once where it says once."""

from __future__ import annotations

import logging

import pytest

from fullspeed.base import log


@pytest.fixture
def messages(monkeypatch):
    """What the logger emitted, as (level, text)."""
    heard: list[tuple[int, str]] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            heard.append((record.levelno, record.getMessage()))

    monkeypatch.setattr(log.logger, "handlers", [Listener()])
    monkeypatch.setattr(log, "_said", set())
    level = log.logger.level
    yield heard
    log.logger.setLevel(level)


@pytest.mark.parametrize(
    ("rank", "ranks", "speaks"),
    [
        ("0", (0,), True),
        ("1", (0,), False),
        ("1", (0, 1), True),
        ("3", None, True),
        ("3", [], True),
        ("3", [-1], True),
    ],
)
def test_only_the_ranks_asked_for_speak(messages, monkeypatch, rank, ranks, speaks):
    monkeypatch.setenv("RANK", rank)
    log.log_dist("hello", ranks)
    assert messages == ([(logging.INFO, f"[rank {rank}] hello")] if speaks else [])


def test_without_a_launcher_this_is_rank_0(messages):
    log.log_dist("hello")
    assert messages == [(logging.INFO, "[rank 0] hello")]


def test_a_warning_is_given_once(messages):
    for text in ("a", "b", "a"):
        log.warn_once(text)
    assert messages == [(logging.WARNING, "[rank 0] a"), (logging.WARNING, "[rank 0] b")]


def test_level_by_name(messages):
    log.set_log_level("ERROR")
    log.log_dist("quiet")
    assert messages == []
    with pytest.raises(ValueError, match="'loud'; choose one of debug"):
        log.set_log_level("loud")
