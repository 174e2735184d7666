"""Raw configuration into canonical form: one name per key, "auto" resolved, unknown keys reported."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fullspeed.base.errors import ConfigFault
from fullspeed.config.hints import unknown_key
from fullspeed.config.section import AUTO, Notes, Section, names, own_auto, shapes

COMMENT_MARKS = ("_", "//", "#")
COMMENT_KEYS = ("$schema", "comment", "comments")


def is_comment(key: Any) -> bool:
    """Whether a key is a note by the user, such as `_comment` or a key switched off by an underscore."""
    return isinstance(key, str) and (key.startswith(COMMENT_MARKS) or key in COMMENT_KEYS)


def join(path: str, key: object) -> str:
    """The dotted path of `key` in the block at `path`; the root's path is empty."""
    return f"{path}.{key}" if path else str(key)


def canonical(model: type[Section], raw: Mapping[str, Any], path: str, notes: Notes) -> dict[str, Any]:
    """The block at `path` with canonical keys only.

    Keys that `model` does not know, and keys given twice under different names, are reported in `notes` and
    left out. Values are not checked here.
    """
    block: dict[str, Any] = {}
    written: dict[str, str] = {}
    raw = model.rewrite(raw, path, notes)
    known = names(model)
    for key, value in raw.items():
        if is_comment(key):
            continue
        name = known.get(key)
        if key in model.refused:
            notes.faults.append(ConfigFault(join(path, key), value, model.refused[key]))
        elif name is None and model.model_config.get("extra") == "allow":
            _put(block, model, key, value, path, notes)
        elif name is None:
            notes.faults.append(unknown_key(model, path, key, value))
        elif name in written:
            rule = f"is another name of {written[name]}, which is given too"
            notes.faults.append(ConfigFault(join(path, key), value, rule, "keep one of them"))
        else:
            written[name] = key
            if key in model.deprecated:
                notes.warnings.append(f"{join(path, key)} is an old name; use {join(path, name)}")
            _put(block, model, name, value, path, notes)
    return _nested(block, model, path, notes)


def _put(block: dict[str, Any], model: type[Section], name: str, value: Any, path: str, notes: Notes) -> None:
    """Take a value over; what becomes of "auto" is for the section to say."""
    is_auto = isinstance(value, str) and value == AUTO
    if is_auto and model.auto_means == "default" and name not in own_auto(model):
        return
    if is_auto and model.auto_means != "default":
        notes.unresolved.append(join(path, name))
    if not is_auto or model.auto_means != "unset":
        block[name] = value


def _nested(block: dict[str, Any], model: type[Section], path: str, notes: Notes) -> dict[str, Any]:
    """The same for the blocks inside the block."""
    inner = {key: shape for key, shape in shapes(model).items() if key in block}
    for key, shape in inner.items():
        value, where = block[key], join(path, key)
        if value is None:
            del block[key]
        elif shape.kind == "one":
            _replace(block, key, _one(shape.model, value, where, notes))
        elif shape.kind == "map" and isinstance(value, Mapping):
            made = {name: _one(shape.model, part, join(where, name), notes) for name, part in value.items()}
            block[key] = {name: part for name, part in made.items() if part is not None}
        elif shape.kind == "many" and isinstance(value, list | tuple):
            parts = [_one(shape.model, part, join(where, index), notes) for index, part in enumerate(value)]
            block[key] = [part for part in parts if part is not None]
    for key, chosen in model.chosen(block).items():
        if key in block:
            where = join(path, key)
            _replace(block, key, {} if block[key] is None else _one(chosen, block[key], where, notes))
    return block


def _one(model: type[Section], value: Any, path: str, notes: Notes) -> dict[str, Any] | None:
    if isinstance(value, model):
        return value.model_dump(exclude_unset=True)
    if isinstance(value, Mapping):
        return canonical(model, value, path, notes)
    keys = ", ".join(list(model.model_fields)[:3])
    notes.faults.append(
        ConfigFault(path, value, "must be a block in braces", f"with keys such as {keys}" if keys else "")
    )
    return None


def _replace(block: dict[str, Any], key: str, value: dict[str, Any] | None) -> None:
    if value is None:
        del block[key]
    else:
        block[key] = value
