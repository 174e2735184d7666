"""Writes docs/compat-names.md from the table of names: `python -m fullspeed.compat.docs`."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator

from fullspeed.compat.names import ALIASES, MODULES, REMEDIES, VERSION, Name, Ours, Waiting

PATH = pathlib.Path(__file__).parents[3] / "docs" / "compat-names.md"


def render() -> str:
    """The page: every module, the names that work and the names that wait for a feature."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    names = [target for module in MODULES.values() for target in module.values()]
    num_ours = sum(isinstance(target, Ours) for target in names)
    yield "# Names of the module `deepspeed`"
    yield ""
    yield "Made by `python -m fullspeed.compat.docs` from `compat/names.py`; do not edit."
    yield ""
    yield f"Names are DeepSpeed {VERSION}'s, with those that it dropped lately. {num_ours} work, in {len(MODULES)}"
    yield f"modules; {len(names) - num_ours} can be imported and raise `UsageError` when they are used: they wait for a"
    yield "feature. `docs/coming-from-deepspeed.md` says how the module gets its name."
    yield ""
    yield "| module | works | waits |"
    yield "|---|---|---|"
    for module, entries in sorted(MODULES.items()):
        if entries:
            yield f"| `{module}` | {_joined(entries, Ours)} | {_joined(entries, Waiting)} |"
    yield ""
    yield "The same module under a second name: " + ", ".join(f"`{alias}`" for alias in sorted(ALIASES)) + "."
    yield ""
    yield "| feature waited for | meanwhile |"
    yield "|---|---|"
    for feature, remedy in sorted(REMEDIES.items()):
        yield f"| {feature} | {remedy} |"


def _joined(entries: object, kind: type[Name]) -> str:
    assert isinstance(entries, dict)
    return " ".join(f"`{name}`" for name, target in sorted(entries.items()) if isinstance(target, kind))


if __name__ == "__main__":
    PATH.write_text(render())
