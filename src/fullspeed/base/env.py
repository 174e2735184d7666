"""The only reader and writer of process environment variables."""

from __future__ import annotations

import os
from collections.abc import Mapping

from fullspeed.base.errors import UsageError


def get(name: str, default: str | None = None) -> str | None:
    """Value of `name`, or `default` when it is unset or empty."""
    value = os.environ.get(name)
    return value if value else default


def get_int(name: str, default: int | None = None) -> int | None:
    """Integer value of `name`, or `default` when unset. Raises UsageError naming the variable when it is no integer."""
    value = get(name)
    if value is None:
        return default
    try:
        return int(value)
    except ValueError:
        raise UsageError(f"environment variable {name} is {value!r}; it must be an integer") from None


def first(*names: str) -> str | None:
    """Value of the first of `names` that is set, or None."""
    return next((value for name in names if (value := get(name)) is not None), None)


def snapshot() -> dict[str, str]:
    """A copy of the whole environment, for child processes."""
    return dict(os.environ)


def export(values: Mapping[str, str]) -> None:
    """Set several variables for this process and its children."""
    os.environ.update(values)


def export_default(name: str, value: str) -> None:
    """Set `name` unless the user has set it."""
    os.environ.setdefault(name, value)
