"""Questions about a source file's syntax tree: what it imports, uses, prints and compares."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping

# Lowest first; a package imports only from lines above its own.
LAYERS = (
    {"base"},
    {"config", "accelerator"},
    {"kernels"},
    {"comm"},
    {"precision", "offload", "monitor", "optim", "data", "launcher"},
    {"checkpoint", "activation", "parallel", "compression"},
    {"sharding", "moe"},
    {"engine", "inference"},
    {"hybrid", "planning", "science"},
    # The facades: src/fullspeed/__init__.py, zero.py, checkpointing.py, and layers made of what stands below.
    {"fullspeed", "zero", "checkpointing", "linear"},
    {"compat"},
    {"cli"},
)
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}

# Dotted names that one place owns; the place is a path prefix below src/fullspeed.
OWNERS = {"torch.distributed": "comm/", "os.environ": "base/env.py", "os.getenv": "base/env.py"}

# DeepSpeed keys; outside the config, code asks the config's own objects.
CONFIG_KEYS = {
    "zero_optimization",
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "reduce_bucket_size",
    "offload_optimizer",
    "offload_param",
    "loss_scale_window",
    "stage3_param_persistence_threshold",
}


def imported_modules(tree: ast.AST, modules: Iterable[str] = ()) -> Iterator[str]:
    """Absolute names of what a file imports, wherever the import stands, except for type checking only.

    `from a import b` counts as a.b when that is one of `modules`, else as a.
    """
    known = set(modules)
    for node in _runtime_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in known else node.module


def _runtime_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes but those under `if TYPE_CHECKING:`."""
    yield tree
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING"):
            for other in child.orelse:
                yield from _runtime_nodes(other)
        else:
            yield from _runtime_nodes(child)


def layer_faults(tree: ast.AST, package: str, modules: Iterable[str] = ()) -> list[str]:
    """Imports that go sideways or up. `package` is the file's folder below src/fullspeed, or "fullspeed"."""
    faults = []
    for name in imported_modules(tree, modules):
        parts = name.split(".")
        if parts[0] != "fullspeed":
            continue
        other = parts[1] if len(parts) > 1 else "fullspeed"
        if other != package and LEVEL[other] >= LEVEL[package]:
            faults.append(f"{package} must not import {other}")
    return faults


def owner_faults(tree: ast.AST, path: str) -> list[str]:
    """Uses of a dotted name away from its owner."""
    used = {name for node in ast.walk(tree) for name in _dotted_names(node)}
    return [
        f"{owned} belongs to {owner}"
        for owned, owner in OWNERS.items()
        if not path.startswith(owner) and any(name == owned or name.startswith(owned + ".") for name in used)
    ]


def _dotted_names(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Attribute):
        return [ast.unparse(node)]
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.module:
        return [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return []


def import_style_faults(tree: ast.AST) -> list[str]:
    """Relative and star imports."""
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    faults = [f"line {node.lineno}: absolute imports only" for node in imports if node.level]
    stars = [node for node in imports if any(alias.name == "*" for alias in node.names)]
    return faults + [f"line {node.lineno}: no star imports" for node in stars]


def print_faults(tree: ast.AST) -> list[str]:
    """Uses of `print`."""
    names = (node for node in ast.walk(tree) if isinstance(node, ast.Name))
    return [f"line {node.lineno}: only cli prints" for node in names if node.id == "print"]


def stage_faults(tree: ast.AST) -> list[str]:
    """Comparisons, memberships and matches of something called stage with numbers."""
    faults = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            if any(map(_is_stage, sides)) and any(map(_is_number, sides)):
                faults.append(f"line {node.lineno}: ask the placement, not the stage number")
        elif isinstance(node, ast.Match) and _is_stage(node.subject):
            faults.append(f"line {node.lineno}: ask the placement, not the stage number")
    return faults


def _is_stage(node: ast.AST) -> bool:
    name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
    return name in ("stage", "zero_stage")


def _is_number(node: ast.AST) -> bool:
    if isinstance(node, ast.Constant):
        return isinstance(node.value, int)
    return isinstance(node, (ast.Tuple, ast.List, ast.Set)) and any(map(_is_number, node.elts))


def config_key_faults(tree: ast.AST) -> list[str]:
    """Look-ups by a DeepSpeed key: `d[key]`, `d.get(key)`, `key in d`. Errors may name keys anywhere."""
    keys = (key for node in ast.walk(tree) for key in _lookup_keys(node) if isinstance(key, ast.Constant))
    found = [key for key in keys if isinstance(key.value, str) and key.value in CONFIG_KEYS]
    return [f"line {key.lineno}: {key.value!r} is looked up by config only" for key in found]


def _lookup_keys(node: ast.AST) -> list[ast.expr]:
    if isinstance(node, ast.Subscript):
        return [node.slice]
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return node.args[:1] if node.func.attr in ("get", "pop", "setdefault") else []
    if isinstance(node, ast.Compare) and isinstance(node.ops[0], (ast.In, ast.NotIn)):
        return [node.left]
    return []


def find_cycle(graph: Mapping[str, Iterable[str]]) -> list[str]:
    """Some cycle of a directed graph as a closed list of nodes; empty when there is none."""
    done: set[str] = set()
    path: list[str] = []

    def visit(node: str) -> list[str]:
        if node in path:
            return [*path[path.index(node) :], node]
        if node in done:
            return []
        path.append(node)
        for target in graph.get(node, ()):
            if cycle := visit(target):
                return cycle
        path.pop()
        done.add(node)
        return []

    return next((cycle for node in graph if (cycle := visit(node))), [])
