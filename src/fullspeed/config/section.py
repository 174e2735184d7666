"""What every section of the configuration is: a frozen, strict model that knows the other names of its keys.

The modules that define sections evaluate their annotations at once: pydantic would compile each of a
thousand from its text, which is a third of the time of the import.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from functools import cache
from typing import Any, ClassVar, Literal, NamedTuple, TypeAlias, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict

from fullspeed.base.errors import ConfigFault

AUTO = "auto"


def describe_other_names(schema: dict[str, Any], model: type[BaseModel]) -> None:
    """Let the JSON schema of a section accept what the loader does: other names, "auto", comments."""
    assert issubclass(model, Section)
    properties: dict[str, Any] = schema.setdefault("properties", {})
    for key, spec in list(properties.items()):
        properties[key] = {
            "anyOf": [
                {k: v for k, v in spec.items() if k not in ("title", "description", "default")},
                {"const": AUTO},
            ],
            **{k: v for k, v in spec.items() if k in ("description", "default")},
        }
    for old, new in {**model.aliases, **model.deprecated}.items():
        properties[old] = {**properties.get(new, {}), "description": f"Other name of `{new}`."}
        if old in model.deprecated:
            properties[old]["deprecated"] = True
    schema["patternProperties"] = {"^(_|//|#)": {"description": "A comment."}}


class Notes(NamedTuple):
    """What reading the raw input brought to light: faults, "auto" values left open, warnings."""

    faults: list[ConfigFault]
    unresolved: list[str]
    warnings: list[str]


class Section(BaseModel):
    """One block of the configuration.

    A field's name is its canonical JSON key. The class variables say what else the block's text may hold:
    `aliases` are other names of a key, `deprecated` old names that warn, `refused` names that are errors and
    why. `auto_means` says what "auto" is where a key has no such value of its own: the default, a gap that
    someone must fill and that reads as unset until then, or a gap that keeps the word.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, defer_build=True, json_schema_extra=describe_other_names
    )

    aliases: ClassVar[Mapping[str, str]] = {}
    deprecated: ClassVar[Mapping[str, str]] = {}
    refused: ClassVar[Mapping[str, str]] = {}
    auto_means: ClassVar[Literal["default", "unset", "kept"]] = "default"

    @classmethod
    def rewrite(cls, raw: Mapping[str, Any], path: str, notes: Notes) -> Mapping[str, Any]:
        """The block's text with old forms (not mere names) replaced by today's."""
        return raw

    @classmethod
    def chosen(cls, raw: Mapping[str, Any]) -> Chosen:
        """Sections of keys whose shape depends on another key, such as `params` on `type`."""
        return {}


Chosen: TypeAlias = Mapping[str, type[Section]]


class Shape(NamedTuple):
    """How sections are nested in a field: `one` block, `many` in a list, or a `map` from names to blocks."""

    kind: Literal["one", "many", "map"]
    model: type[Section]


def _shape(annotation: Any) -> Shape | None:
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return Shape("one", annotation)
    origin, args = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        return next((found for arg in args if (found := _shape(arg))), None)
    if origin is tuple and (found := _shape(args[0])):
        return Shape("many", found.model)
    if origin is Mapping and (found := _shape(args[1])):
        return Shape("map", found.model)
    return None


@cache
def shapes(model: type[Section]) -> Mapping[str, Shape]:
    """The fields of `model` that hold sections, and how."""
    found = {name: _shape(field.annotation) for name, field in model.model_fields.items()}
    return {name: shape for name, shape in found.items() if shape}


def _has_auto(annotation: Any) -> bool:
    if get_origin(annotation) is Literal:
        return AUTO in get_args(annotation)
    return any(_has_auto(arg) for arg in get_args(annotation))


@cache
def own_auto(model: type[Section]) -> frozenset[str]:
    """Fields for which "auto" is a value of its own, not a gap to fill."""
    return frozenset(name for name, field in model.model_fields.items() if _has_auto(field.annotation))


@cache
def names(model: type[Section]) -> Mapping[str, str]:
    """Every name a key of `model` may be written as, with its canonical key."""
    return {**{name: name for name in model.model_fields}, **model.aliases, **model.deprecated}
