"""Rank-aware logging: one standard `logging.Logger`, quiet on every rank but the ones asked for."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence

from fullspeed.base import env

LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "critical": logging.CRITICAL,
}


def _make_logger() -> logging.Logger:
    made = logging.getLogger("fullspeed")
    if not made.handlers:
        handler = logging.StreamHandler(sys.stdout)
        handler.setFormatter(logging.Formatter("[%(asctime)s] [%(levelname)s] [fullspeed] %(message)s", "%H:%M:%S"))
        made.addHandler(handler)
        made.propagate = False
        made.setLevel(logging.INFO)
    return made


logger = _make_logger()
_said: set[str] = set()


def current_rank() -> int:
    """This process's global rank as its launcher announced it; 0 when nobody did."""
    return env.get_int("RANK", 0) or 0


def log_dist(message: str, ranks: Sequence[int] | None = (0,), level: int = logging.INFO) -> None:
    """Log `message` on the given global ranks; `None`, an empty list or -1 in it means every rank."""
    rank = current_rank()
    if not ranks or rank in ranks or -1 in ranks:
        logger.log(level, f"[rank {rank}] {message}")


def warn_once(message: str) -> None:
    """Warn on rank 0, once per process for the same text."""
    if message not in _said:
        _said.add(message)
        log_dist(message, level=logging.WARNING)


def set_log_level(name: str) -> None:
    """Set the level by name: debug, info, warning, error or critical. Raises ValueError for another name."""
    if name.lower() not in LEVELS:
        raise ValueError(f"log level is {name!r}; choose one of {', '.join(LEVELS)}")
    logger.setLevel(LEVELS[name.lower()])
