"""What an unknown key was probably meant to be: a known key nearby, or one that belongs elsewhere."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from functools import cache
from typing import Any

from fullspeed.base.errors import ConfigFault
from fullspeed.config.section import Section, names, shapes

MAX_PLACES = 3
MAX_LISTED = 14


def unknown_key(model: type[Section], path: str, key: object, value: Any) -> ConfigFault:
    """The fault for `key` in the block at `path`, with the best advice there is."""
    where = f"{path}.{key}" if path else str(key)
    block = path or "the top level"
    text = str(key)
    places = [place for place in _places().get(text, ()) if place != path]
    if 0 < len(places) <= MAX_PLACES:
        belongs = " or ".join(place or "the top level" for place in places)
        preposition = "belongs under" if places != [""] else "belongs at"
        return ConfigFault(where, value, f"is not a key of {block}; it {preposition} {belongs}", "move it there")
    return ConfigFault(where, value, f"is not a known key of {block}", _advice(model, path, text))


def _advice(model: type[Section], path: str, key: str) -> str:
    local = names(model)
    near = difflib.get_close_matches(key.lower(), local, n=1, cutoff=0.6)
    if near:
        found = f"{path}.{near[0]}" if path else near[0]
        return f"did you mean {found}?"
    far = difflib.get_close_matches(key.lower(), _places(), n=1, cutoff=0.8)
    if far and len(_places()[far[0]]) <= MAX_PLACES:
        return (
            "did you mean " + " or ".join(f"{place}.{far[0]}" if place else far[0] for place in _places()[far[0]]) + "?"
        )
    keys = list(model.model_fields)
    return f"known keys: {', '.join(keys)}" if 0 < len(keys) <= MAX_LISTED else "remove it or see docs/config.md"


@cache
def _places() -> dict[str, tuple[str, ...]]:
    """For every name of every key, the blocks that have it."""
    from fullspeed.config.root import (
        Config,
    )  # here, because the root is made of sections that are read with hints

    found: dict[str, tuple[str, ...]] = {}
    for path, model in walk(Config, ""):
        for name in names(model):
            found[name] = (*found.get(name, ()), path)
    return found


def walk(model: type[Section], path: str) -> Iterator[tuple[str, type[Section]]]:
    """Every block with its dotted path; `*` stands for a name the user chooses."""
    yield path, model
    for key, shape in shapes(model).items():
        inner = f"{path}.{key}" if path else key
        yield from walk(shape.model, inner if shape.kind == "one" else f"{inner}.*")
