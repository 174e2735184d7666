"""The codebase's shape, checked: packages import downwards, one owner per concern, blocks of README and docs run."""

from __future__ import annotations

import ast
import doctest
import functools
import importlib
import pathlib
import re
import subprocess
import sys

import pytest

from tests.architecture import checks

ROOT = pathlib.Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "fullspeed"
FILES = sorted(PACKAGE.rglob("*.py"))
MAX_IMPORT_S = 0.5


def here(path: pathlib.Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def module_name(path: pathlib.Path) -> str:
    parts = ("fullspeed", *path.relative_to(PACKAGE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in FILES}


@functools.cache
def tree_of(path: pathlib.Path) -> ast.Module:
    return ast.parse(path.read_text())


every_file = pytest.mark.parametrize("path", FILES, ids=here)


@every_file
def test_imports_go_down(path):
    package = here(path).split("/")[0] if "/" in here(path) else "fullspeed"
    assert package in checks.LEVEL, f"{package} has no layer yet: give it one in checks.py and in the docs"
    assert checks.layer_faults(tree_of(path), package, MODULES) == []


@every_file
def test_owners(path):
    assert checks.owner_faults(tree_of(path), here(path)) == []
    assert checks.import_style_faults(tree_of(path)) == []
    if not here(path).startswith("cli/"):
        assert checks.print_faults(tree_of(path)) == []
    if not here(path).startswith("config/") and here(path) != "sharding/placement.py":
        assert checks.stage_faults(tree_of(path)) == []
    if not here(path).startswith(("config/", "compat/")):
        assert checks.config_key_faults(tree_of(path)) == []


@every_file
def test_file_says_what_it_is_for(path):
    assert ast.get_docstring(tree_of(path))


def test_no_import_cycles():
    graph = {
        name: sorted({target for target in checks.imported_modules(tree_of(path), MODULES) if target in MODULES})
        for name, path in MODULES.items()
    }
    assert any(graph.values())
    assert checks.find_cycle(graph) == []


def python_blocks(page: pathlib.Path) -> list[str]:
    """What stands in a page's `python` fences; fragments that do not run are fenced as `py`."""
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.M | re.S)


PAGES = [page for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))) if python_blocks(page)]


def test_pages_have_blocks_that_run():
    assert {"README.md", "zero.md"} <= {page.name for page in PAGES}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_blocks_of_a_page_run_one_after_another(page, tmp_path):
    script = "\n".join(python_blocks(page))
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, f"python blocks of {page.name}:\n{script}\n{done.stderr}"


def test_examples_in_docstrings_run():
    with_examples = [name for name, path in MODULES.items() if ">>> " in path.read_text()]
    for name in with_examples:
        outcome = doctest.testmod(importlib.import_module(name))
        assert outcome.attempted > 0, name
        assert outcome.failed == 0, name


def test_importing_fullspeed_costs_little_beyond_torch():
    # Processor time, because a busy machine stretches the wall's.
    code = "import torch, time; a = time.process_time(); import fullspeed; print(time.process_time() - a)"
    runs = (subprocess.run([sys.executable, "-c", code], capture_output=True, check=True) for _ in range(3))
    assert min(float(run.stdout) for run in runs) < MAX_IMPORT_S


# --- the checks themselves find what they are for


def parse(source: str) -> ast.Module:
    return ast.parse(source)


@pytest.mark.parametrize(
    ("source", "package", "is_fine"),
    [
        ("from fullspeed.base import env", "config", True),
        ("from fullspeed.comm.init import x", "comm", True),
        ("def f():\n    import fullspeed.engine", "comm", False),
        ("from fullspeed import engine", "comm", False),
        ("from fullspeed import base", "comm", True),
        ("from fullspeed import initialize", "engine", False),
        ("import fullspeed", "engine", False),
        ("from fullspeed import __version__", "cli", True),
        ("from fullspeed.cli import main", "fullspeed", False),
        ("from fullspeed.accelerator import x", "config", False),
        ("import typing\nif typing.TYPE_CHECKING:\n    from fullspeed.engine import x", "comm", True),
    ],
)
def test_layer_check(source, package, is_fine):
    modules = ["fullspeed.base", "fullspeed.engine"]
    assert (checks.layer_faults(parse(source), package, modules) == []) == is_fine


@pytest.mark.parametrize(
    "source",
    [
        "import torch.distributed as dist",
        "from torch import distributed",
        "from torch.distributed.tensor import DTensor",
        "import torch\ntorch.distributed.barrier()",
        "import os\nos.environ['A']",
        "from os import environ",
        "import os\nx = os.getenv('A')",
    ],
)
def test_owner_check(source):
    assert checks.owner_faults(parse(source), "engine/engine.py")
    assert not checks.owner_faults(parse("import os\nos.environ['A']"), "base/env.py")
    assert not checks.owner_faults(parse("x.torch_distributed = 'torch.distributed'"), "engine/engine.py")


@pytest.mark.parametrize(
    ("check", "bad", "good"),
    [
        (checks.import_style_faults, "from . import x", "import x"),
        (checks.import_style_faults, "from x import *", "from x import y"),
        (checks.print_faults, "print(1)", "printer(1)"),
        (checks.print_faults, "f = print", "x.print(1)"),
        (checks.stage_faults, "if config.zero.stage == 3: pass", "if config.zero.stage == other: pass"),
        (checks.stage_faults, "x = stage in (1, 2)", "x = stages in (1, 2)"),
        (checks.stage_faults, "x = 0 < zero_stage", "x = 0 < step"),
        (checks.stage_faults, "match stage:\n    case 1: pass", "match step:\n    case 1: pass"),
        (checks.config_key_faults, "x = d['zero_optimization']", "x = fault('zero_optimization', 1)"),
        (checks.config_key_faults, "x = d.get('gradient_clipping', 0)", "x = d.get('lr', 0)"),
        (checks.config_key_faults, "x = 'train_batch_size' in d", "x = 'lr' in d"),
    ],
)
def test_other_checks(check, bad, good):
    assert check(parse(bad))
    assert not check(parse(good))


def test_cycle_check():
    assert checks.find_cycle({"a": ["b"], "b": ["c"], "c": []}) == []
    assert checks.find_cycle({"a": ["b", "d"], "b": ["c"], "c": ["b"]}) == ["b", "c", "b"]
    assert checks.find_cycle({"a": ["a"]}) == ["a", "a"]
