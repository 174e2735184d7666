"""pydantic's errors in our words: full dotted path, value, what must hold, how to fix it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from fullspeed.base.errors import ConfigFault

RULES: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    "missing": lambda _: "is required",
    "bool_type": lambda _: "must be true or false",
    "int_type": lambda _: "must be a whole number",
    "float_type": lambda _: "must be a number",
    "string_type": lambda _: "must be text",
    "none_required": lambda _: "must be null",
    "tuple_type": lambda _: "must be a list",
    "dict_type": lambda _: "must be a block in braces",
    "mapping_type": lambda _: "must be a block in braces",
    "model_type": lambda _: "must be a block in braces",
    "finite_number": lambda _: "must be a finite number",
    "greater_than": lambda ctx: f"must be greater than {ctx['gt']:g}",
    "greater_than_equal": lambda ctx: f"must be at least {ctx['ge']:g}",
    "less_than": lambda ctx: f"must be less than {ctx['lt']:g}",
    "less_than_equal": lambda ctx: f"must be at most {ctx['le']:g}",
    "literal_error": lambda ctx: f"choose {ctx['expected']}",
    "too_long": lambda ctx: f"must have {ctx['max_length']} items",
    "too_short": lambda ctx: f"must have at least {ctx['min_length']} items",
}
"""What must hold, by the type of pydantic's error."""


def translate(error: ValidationError, raw: Mapping[str, Any], path: str = "") -> list[ConfigFault]:
    """One fault for each key that `error` names, in the order of the text. `raw` is what was validated."""
    rules: dict[str, list[str]] = {}
    values: dict[str, Any] = {}
    faults: list[ConfigFault] = []
    for detail in error.errors(include_url=False):
        keys, value = _locate(detail, raw)
        where = ".".join([*([path] if path else []), *map(str, keys)])
        cause = detail.get("ctx", {}).get("error")
        if isinstance(cause, ValidationError):
            faults += translate(cause, value if isinstance(value, Mapping) else {}, where)
            continue
        rules.setdefault(where, []).append(_rule(detail))
        values[where] = value
    return [
        ConfigFault(where, values[where], " or ".join(dict.fromkeys(texts)), _fix(values[where]))
        for where, texts in rules.items()
    ] + faults


def locations(error: ValidationError, raw: Mapping[str, Any]) -> list[tuple[str | int, ...]]:
    """Where in `raw` the faults are, as key sequences, each once."""
    return list(dict.fromkeys(_locate(detail, raw)[0] for detail in error.errors(include_url=False)))


def _locate(detail: ErrorDetails, raw: Mapping[str, Any]) -> tuple[tuple[str | int, ...], Any]:
    """The keys that lead to the fault and the value there, without the branches of unions."""
    keys: list[str | int] = []
    here: Any = raw
    for step in detail["loc"]:
        is_key = isinstance(here, Mapping) and step in here
        is_index = (
            isinstance(here, Sequence) and not isinstance(here, str) and isinstance(step, int) and step < len(here)
        )
        if is_key or is_index:
            here = here[step]
            keys.append(step)
        elif detail["type"] == "missing" and step == detail["loc"][-1]:
            return (*keys, step), None
    return tuple(keys), here


def _rule(detail: ErrorDetails) -> str:
    make = RULES.get(detail["type"])
    if make is None:
        return detail["msg"].removeprefix("Value error, ")
    return make(detail.get("ctx", {}))


def _fix(value: Any) -> str:
    if not isinstance(value, str):
        return ""
    text = value.strip().lower()
    if text in ("true", "false"):
        return f"write {text} without quotes"
    try:
        float(text)
    except ValueError:
        return ""
    return "write the number without quotes"
