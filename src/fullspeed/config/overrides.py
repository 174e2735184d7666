"""Dotted keys such as `zero_optimization.stage`, set into nested blocks under the names used there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from fullspeed.base.errors import ConfigFault
from fullspeed.config.section import Section, names, shapes


def split_dotted(raw: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The ordinary keys of `raw` as fresh nested dicts, and its dotted keys."""
    plain = {key: _copied(value) for key, value in raw.items() if not _is_dotted(key)}
    return plain, {key: value for key, value in raw.items() if _is_dotted(key)}


def flatten(overrides: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of nested overrides with their dotted paths."""
    for key, value in overrides.items():
        where = f"{path}.{key}" if path else str(key)
        if isinstance(value, Mapping) and value:
            yield from flatten(value, where)
        else:
            yield where, value


def apply(raw: dict[str, Any], overrides: Mapping[str, Any], root: type[Section]) -> list[ConfigFault]:
    """Set each override into `raw`, in place. Returns a fault for each whose path leads through a value."""
    return [fault for path, value in flatten(overrides) if (fault := _set(raw, path.split("."), value, root))]


def _set(raw: dict[str, Any], keys: list[str], value: Any, root: type[Section]) -> ConfigFault | None:
    block: dict[str, Any] = raw
    model: type[Section] | None = root
    for depth, key in enumerate(keys[:-1]):
        found = _find(block, key, model)
        inner = block.get(found)
        if inner is None or inner == "auto":
            inner = block[found] = {}
        if not isinstance(inner, dict):
            above = ".".join(keys[: depth + 1])
            rule = f"cannot be set because {above} is {inner!r}, not a block"
            return ConfigFault(".".join(keys), value, rule, f"write {above} as a block in braces")
        model = _inner_model(model, key)
        block = inner
    found = _find(block, keys[-1], model)
    block[found] = _copied(value)
    return None


def _find(block: Mapping[str, Any], key: str, model: type[Section] | None) -> str:
    """The name under which `block` already holds `key`, or `key` itself."""
    if model is None or key in block:
        return key
    known = names(model)
    return next((other for other in block if key in known and known.get(other) == known[key]), key)


def _inner_model(model: type[Section] | None, key: str) -> type[Section] | None:
    if model is None:
        return None
    shape = shapes(model).get(names(model).get(key, key))
    return shape.model if shape is not None and shape.kind == "one" else None


def _is_dotted(key: Any) -> bool:
    return isinstance(key, str) and "." in key and not key.startswith(("_", "//", "#"))


def _copied(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _copied(part) for key, part in value.items()}
    return [_copied(part) for part in value] if isinstance(value, list) else value
