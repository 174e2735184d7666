"""From a dict, a file or a text to a `Config`, with every fault of the input in one error."""

from __future__ import annotations

import base64
import binascii
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from fullspeed.base.errors import ConfigError, ConfigFault
from fullspeed.base.log import warn_once
from fullspeed.config import overrides as dotted
from fullspeed.config import text
from fullspeed.config.canonical import canonical
from fullspeed.config.faults import locations, translate
from fullspeed.config.root import Config
from fullspeed.config.section import Notes
from fullspeed.config.supported import unsupported
from fullspeed.config.validate import cross_faults

FORMS = "a dict, the path of a JSON file, or JSON text (plain or URL-safe base64)"


def load_config(
    source: Mapping[str, Any] | str | Path | Config,
    overrides: Mapping[str, Any] | None = None,
    *,
    check_supported: bool = True,
) -> Config:
    """Read, check and freeze a configuration.

    Args:
        source: a mapping, the path of a JSON file (comments and trailing commas allowed), JSON text, or
            URL-safe base64 of it. It is not changed.
        overrides: values that replace those of `source`; keys may be dotted, nested blocks are merged.
        check_supported: whether a feature this version lacks is a fault. Tools that only read may say False.

    Returns:
        The immutable configuration. Keys left at "auto" are listed by `unresolved_auto`.

    Raises:
        ConfigError: everything that is wrong, each fault with its full path, value, rule and remedy.
    """
    if isinstance(source, Config):
        source = source.model_dump(exclude_unset=True)
    notes = Notes([], [], [])
    plain, inner = dotted.split_dotted(read(source))
    notes.faults.extend(dotted.apply(plain, {**inner, **(overrides or {})}, Config))
    raw = canonical(Config, plain, "", notes)
    config, skipped = _build(raw, notes.faults)
    notes.faults.extend(cross_faults(config, skipped | {fault.path for fault in notes.faults}))
    if check_supported:
        notes.faults.extend(unsupported(config))
    if notes.faults:
        raise ConfigError(notes.faults)
    for warning in [*notes.warnings, *_warnings(config)]:
        warn_once(warning)
    return config.with_unresolved(notes.unresolved)


def read(source: Mapping[str, Any] | str | Path) -> Mapping[str, Any]:
    """The nested dicts that `source` stands for. Raises ConfigError when it is none of the accepted forms."""
    if isinstance(source, Mapping):
        return source
    if not isinstance(source, str | Path):
        raise ConfigError(f"the configuration is of type {type(source).__name__}; it must be {FORMS}")
    if os.path.isfile(source):
        return _read_file(Path(source))
    if isinstance(source, str) and source.lstrip().startswith("{"):
        return text.parse(source, "the configuration text")
    decoded = _decode(source) if isinstance(source, str) else None
    if decoded is None:
        raise ConfigError(f"no file {str(source)[:200]!r}; the configuration must be {FORMS}")
    return text.parse(decoded, "the base64 configuration")


def _read_file(path: Path) -> Mapping[str, Any]:
    try:
        content = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the configuration file {path}: {error}") from error
    return text.parse(content, str(path))


def _decode(source: str) -> str | None:
    """The JSON text in URL-safe base64, with or without padding; None when it is no such thing."""
    try:
        padded = source.strip().rstrip("=") + "=" * (-len(source.strip().rstrip("=")) % 4)
        decoded = base64.b64decode(padded, altchars=b"-_", validate=True).decode()
    except (binascii.Error, ValueError):
        return None
    return decoded if decoded.lstrip().startswith(("{", "/", "#")) else None


def _build(raw: dict[str, Any], faults: list[ConfigFault]) -> tuple[Config, set[str]]:
    """The configuration without the values that are wrong, and the paths of those values.

    Leaving them out lets the rules between sections speak about the rest in the same error.
    """
    skipped: set[str] = set()
    while True:
        try:
            return Config.model_validate(raw), skipped
        except ValidationError as error:
            faults.extend(fault for fault in translate(error, raw) if fault.path not in skipped)
            skipped.update(_remove(raw, keys) for keys in locations(error, raw))


def _remove(raw: dict[str, Any], keys: tuple[str | int, ...]) -> str:
    """Take out the value at `keys`; for an item of a list or a missing key, its whole top-level section.

    Returns the path of what was taken out.
    """
    block: Any = raw
    for key in keys[:-1]:
        block = block[key] if isinstance(block, dict) and key in block else None
    if isinstance(block, dict) and keys and keys[-1] in block:
        del block[keys[-1]]
        return ".".join(map(str, keys))
    raw.pop(str(keys[0]), None)
    return str(keys[0])


def _warnings(config: Config) -> list[str]:
    size = config.vocabulary_size
    if size is None or size % 8 == 0:
        return []
    return [f"vocabulary_size is {size}: a multiple of 8 makes better use of matrix units"]
