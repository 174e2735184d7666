"""JSON as people write it: with comments and trailing commas, and without keys that are given twice."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from fullspeed.base.errors import ConfigError, ConfigFault

TOKEN = re.compile(
    r"""
    (?P<text>"(?:\\.|[^"\\\n])*")                 # a string, kept
    | (?P<comment>//[^\n]*|\#[^\n]*|/\*.*?\*/)    # a comment, blanked
    """,
    re.VERBOSE | re.DOTALL,
)
TRAILING_COMMA = re.compile(r'("(?:\\.|[^"\\\n])*")|,(?=\s*[}\]])')


class Repeated(dict[str, Any]):
    """A JSON object in which some keys came twice."""

    def __init__(self, pairs: list[tuple[str, Any]]) -> None:
        super().__init__(pairs)
        seen: set[str] = set()
        self.twice = [key for key, _ in pairs if key in seen or seen.add(key)]  # type: ignore[func-returns-value]


def parse(text: str, origin: str) -> dict[str, Any]:
    """The object that `text` describes.

    Args:
        text: JSON, in which comments (`//`, `#` and `/* */`) and commas before a closing bracket are allowed.
        origin: file name or other source, for error texts.

    Raises:
        ConfigError: no valid JSON, with line and column; not an object; or a key given twice at any level.
    """
    try:
        value = json.loads(_plain(text), object_pairs_hook=Repeated)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{origin}, line {error.lineno}, column {error.colno}: {error.msg}") from None
    if not isinstance(value, Repeated):
        raise ConfigError(f"{origin} holds {type(value).__name__}; it must hold an object in braces")
    faults = list(_twice(value, ""))
    if faults:
        raise ConfigError(faults)
    return value


def _plain(text: str) -> str:
    """`text` as strict JSON of the same length and lines, so that positions in error texts are right."""
    spaced = TOKEN.sub(lambda found: found["text"] or re.sub(r"[^\n]", " ", found["comment"]), text)
    return TRAILING_COMMA.sub(lambda found: found[1] or " ", spaced)


def _twice(value: Any, path: str) -> Iterator[ConfigFault]:
    if isinstance(value, Repeated):
        for key in value.twice:
            yield ConfigFault(f"{path}.{key}" if path else key, value[key], "is given twice", "keep one of them")
        for key, part in value.items():
            yield from _twice(part, f"{path}.{key}" if path else key)
    elif isinstance(value, list):
        for index, part in enumerate(value):
            yield from _twice(part, f"{path}.{index}")
