"""Writes docs/config.md and docs/config.schema.json from the models, or checks that they are current."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fullspeed.config.hints import walk
from fullspeed.config.optimizer import NATIVE
from fullspeed.config.root import THIRD_PARTY, Config
from fullspeed.config.scheduler import NATIVE_SCHEDULERS
from fullspeed.config.section import AUTO, Section, own_auto
from fullspeed.config.supported import MISSING, UNBUILT_OPTIMIZERS
from fullspeed.config.validate import RULES

DOCS = Path(__file__).parents[3] / "docs"
COMMAND = "python -m fullspeed.config.docs"


class Difference(NamedTuple):
    """A default that is not DeepSpeed's."""

    key: str
    deepspeed: str
    ours: str
    why: str


DEFAULT_DIFFERENCES = (
    Difference("gradient_clipping", "1.0", "0.0", "Clipping changes numbers; nobody should get it unasked."),
    Difference(
        "zero_optimization.overlap_comm",
        "on at stage 3, off below",
        "on at every stage",
        "Reduction during backward gives the same numbers sooner.",
    ),
    Difference(
        "optimizer.params.adam_w_mode of `adam`",
        "true",
        "false",
        "Adam is Adam; AdamW has a name of its own.",
    ),
    Difference(
        "torch_autocast.dtype",
        "none, though bf16 is documented",
        "bf16",
        "The documented default, and the one that needs no loss scale.",
    ),
    Difference(
        "steps_per_print",
        "never, though 10 is documented",
        "never",
        "A library does not print unless it is asked to.",
    ),
    Difference(
        "unknown keys",
        "ignored at the top level and in some sections",
        "an error everywhere",
        "A typo must not train with a default.",
    ),
)

READING = f"""\
# Configuration

Written by `{COMMAND}`; change the models in `src/fullspeed/config`, not this file.

`load_config(source, overrides=None)` takes a dict, the path of a JSON file, JSON text, or URL-safe base64
of it.

- Files and texts may have comments (`//`, `#`, `/* */`) and trailing commas. A key given twice is an
  error.
- Unknown, misplaced, mistyped and out-of-range keys are errors; all of them are reported at once. Keys
  that begin with `_`, `//` or `#`, and `$schema`, `comment` and `comments`, are the user's notes.
- A dotted key such as `"zero_optimization.stage": 3` sets that key of the block; so do the keys of
  `overrides`, whose nested blocks are merged.
- Whole numbers may be written as floats (`5e7`). Numbers in quotes and 0/1 for booleans are refused.
- `"auto"` means the default inside sections. The batch keys and other single top-level keys, and the
  parameters of optimizer and scheduler, stay open until an integration fills them in;
  `unresolved_auto(config)` lists them.
- Dtypes may be spelled `fp16`, `float16`, `half`, `torch.float16`, and so on; they read as `fp32`,
  `fp16`, `bf16`.
- An offload block whose device is `none` is the same as no block.
- {" and ".join(f"`{key}`" for key in THIRD_PARTY)} at the top level belong to other libraries and are
  left alone.

The batch keys satisfy `train_batch_size = train_micro_batch_size_per_gpu * gradient_accumulation_steps *
ranks`, and those left out follow from the others. Training needs them; loading and building parameters do
not.
"""


def markdown() -> str:
    """The text of docs/config.md."""
    parts = [READING, _differences(), *_sections(), *_params(), _rules(), _missing()]
    return "\n".join(part.rstrip("\n") + "\n" for part in parts)


def schema() -> dict[str, Any]:
    """The JSON schema of a configuration file, with every name and form the loader accepts."""
    made = Config.model_json_schema()
    properties = made["properties"]
    zero = properties["zero_optimization"]
    zero["anyOf"] = [*zero["anyOf"], {"type": "boolean"}]
    properties.update({key: {"description": "Another library's; left alone."} for key in THIRD_PARTY})
    properties["$schema"] = {"type": "string"}
    made["patternProperties"]["^[A-Za-z0-9_]+\\."] = {"description": "A dotted key: sets a key of a block."}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **made,
        "title": "FullSpeed configuration",
    }


def _differences() -> str:
    rows = [(f"`{key}`" if "." in key or "_" in key else key, *rest) for key, *rest in DEFAULT_DIFFERENCES]
    return "## Defaults that differ from DeepSpeed's\n\n" + _table(("key", "DeepSpeed", "FullSpeed", "why"), rows)


def _sections() -> Iterator[str]:
    seen: dict[type[Section], str] = {}
    for path, model in walk(Config, ""):
        title = f"`{path}`" if path else "Top level"
        if model in seen:
            yield f"## {title}\n\nAs `{seen[model]}`.\n"
            continue
        seen[model] = path
        yield f"## {title}\n\n{_summary(model)}\n\n{_keys(model)}"


def _params() -> Iterator[str]:
    named = [("optimizer", NATIVE), ("scheduler", NATIVE_SCHEDULERS)]
    for block, table in named:
        models: dict[type[Section], list[str]] = {}
        for name, model in table.items():
            if model.model_fields:
                models.setdefault(model, []).append(name)
        for model, kinds in models.items():
            yield f"## `{block}.params` of {', '.join(f'`{kind}`' for kind in kinds)}\n\n{_keys(model)}"


def _rules() -> str:
    rows = [(f"`{rule.keys[0]}`", f"{rule.rule}; {rule.fix}") for rule in RULES]
    return "## Combinations that are refused\n\n" + _table(("key", "rule"), rows)


def _missing() -> str:
    rows = [(f"`{missing.path}`", missing.fix) for missing in MISSING if missing.path != "optimizer.name"]
    rows.append(("`optimizer.type`", "not built: " + ", ".join(UNBUILT_OPTIMIZERS)))
    text = "These keys are read and checked; a configuration that asks for what they do is an error."
    return f"## Not available in this version\n\n{text}\n\n" + _table(("key", "remedy"), rows)


def _summary(model: type[Section]) -> str:
    return (model.__doc__ or "").strip().splitlines()[0]


def _keys(model: type[Section]) -> str:
    made = model.model_json_schema()
    rows = []
    for key, field in model.model_fields.items():
        spec = made["properties"][key]
        default = "required" if field.is_required() else _value(spec.get("default"), spec)
        rows.append((f"`{key}`", default, _type(spec, key in own_auto(model)), field.description or ""))
    others = {**model.aliases, **model.deprecated}
    text = _table(("key", "default", "type", "meaning"), rows)
    if others:
        text += "\nOther names: " + ", ".join(f"`{old}` for `{new}`" for old, new in others.items()) + ".\n"
    return text


def _value(default: Any, spec: Mapping[str, Any]) -> str:
    is_block = any("$ref" in part for part in _branches(spec))
    if default is None:
        return "" if is_block else "unset"
    return f"`{json.dumps(default)}`"


def _branches(spec: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    if "anyOf" not in spec:
        return [spec]
    return [branch for part in spec["anyOf"] for branch in _branches(part)]


def _type(spec: Mapping[str, Any], keeps_auto: bool) -> str:
    """The type in words, from the JSON schema of a key."""
    found: list[str] = []
    for branch in _branches(spec):
        is_filler = branch.get("const") == AUTO or branch.get("type") == "null"
        if not is_filler:
            found.append(_one_type(branch))
    if keeps_auto:
        found.append('"auto"')
    return " or ".join(dict.fromkeys(text for text in found if text)) or "any"


def _one_type(spec: Mapping[str, Any]) -> str:
    if "enum" in spec or "const" in spec:
        return ", ".join(json.dumps(choice) for choice in spec.get("enum", [spec.get("const")]))
    if "$ref" in spec:
        return "block"
    if spec.get("type") == "array":
        items = spec.get("items") or {}
        return f"list of {_type(items, False)}" if items else "list"
    words = {
        "integer": "integer",
        "number": "number",
        "boolean": "boolean",
        "string": "text",
        "object": "block",
    }
    limits = {"exclusiveMinimum": ">", "minimum": ">=", "maximum": "<="}
    bounds = [f"{sign} {spec[name]:g}" for name, sign in limits.items() if name in spec]
    return " ".join([words.get(str(spec.get("type")), ""), ", ".join(bounds)]).strip()


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return ""
    lines = [head, ["---"] * len(head), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    """Write both files, or with `--check` exit 1 when one of them is not current."""
    parser = argparse.ArgumentParser(prog=COMMAND, description=main.__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when a file is not current")
    parser.add_argument("--into", type=Path, default=DOCS, help="directory of the files")
    chosen = parser.parse_args(arguments)
    texts = {"config.md": markdown(), "config.schema.json": json.dumps(schema(), indent=1) + "\n"}
    for name, made in texts.items():
        path = chosen.into / name
        if not chosen.check:
            path.write_text(made, encoding="utf-8")
        elif not path.is_file() or path.read_text(encoding="utf-8") != made:
            sys.exit(f"docs/{name} is not current; run {COMMAND}")


if __name__ == "__main__":
    main()
