"""Checking the keyword arguments a configuration gives for a class, naming the nearest known one."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fullspeed.base.errors import ConfigFault


def nearest(name: str, known: Iterable[str]) -> str:
    """`did you mean X?` for the most similar of `known`, ignoring case; empty when none is similar.

    >>> nearest("weigth_decay", ["lr", "weight_decay"])
    'did you mean weight_decay?'
    """
    by_lower = {each.lower(): each for each in known}
    close = difflib.get_close_matches(name.lower(), by_lower, n=1)
    return f"did you mean {by_lower[close[0]]}?" if close else ""


def unknown_names(path: str, given: Mapping[str, Any], known: Sequence[str]) -> list[ConfigFault]:
    """A fault for each key of `given` that is not in `known`; `path` is the dotted path of the mapping."""
    rule = f"no such parameter; there are {', '.join(known)}"
    return [
        ConfigFault(f"{path}.{name}", value, rule, nearest(name, known))
        for name, value in given.items()
        if name not in known
    ]


def unknown_arguments(
    path: str, params: Mapping[str, Any], signature: inspect.Signature, given: Sequence[str]
) -> list[ConfigFault]:
    """Faults of `params` as keyword arguments: unknown ones, and required ones that are missing.

    given: names the caller passes itself; they are neither allowed in `params` nor required of it.
    """
    takes = {name: parameter for name, parameter in signature.parameters.items() if name not in given}
    missing = [
        ConfigFault(f"{path}.{name}", None, "is required")
        for name, parameter in takes.items()
        if parameter.default is inspect.Parameter.empty and name not in params
    ]
    return unknown_names(path, params, list(takes)) + missing
