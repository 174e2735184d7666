"""Serves the table of `names` as importable modules, each name resolved at its first use."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from fullspeed.compat.names import ALIASES, MODULES, Ours
from fullspeed.compat.waiting import make_stand_in


class _TableFinder(MetaPathFinder, Loader):
    """Finds and makes the submodules of `deepspeed`."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The module of that name, if the table has it below `deepspeed`."""
        is_served = fullname != "deepspeed" and (fullname in MODULES or fullname in ALIASES)
        return ModuleSpec(fullname, self, is_package=True) if is_served else None

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """For an alias the module it stands for, so that both names see the same changes."""
        original = ALIASES.get(spec.name)
        return None if original is None else importlib.import_module(original)

    def exec_module(self, module: ModuleType) -> None:
        """Give a new module its names."""
        if module.__name__ in MODULES:
            furnish(module)


def serve(root: ModuleType) -> None:
    """Make `root`, the module named `deepspeed` that is being imported, and its submodules those of the table."""
    if not any(isinstance(finder, _TableFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _TableFinder())
    furnish(root)


def furnish(module: ModuleType) -> None:
    """Give `module` the names of the table under its own name, and its submodules as attributes."""
    own = module.__name__
    names = MODULES[own]
    inner = {full.rpartition(".")[2] for full in (*MODULES, *ALIASES) if full.rpartition(".")[0] == own}

    def resolve(name: str) -> Any:
        if name in names:
            value = _object_for(own, name)
        elif name in inner:
            value = importlib.import_module(f"{own}.{name}")
        else:
            raise AttributeError(f"module {own!r} has no attribute {name!r}")
        setattr(module, name, value)
        return value

    public = sorted(name for name in names if not name.startswith("_"))
    module.__dict__.update(__getattr__=resolve, __dir__=lambda: sorted({*names, *inner}), __all__=public)
    module.__doc__ = f"FullSpeed under the names of {own}."


def _object_for(module: str, name: str) -> Any:
    target = MODULES[module][name]
    if isinstance(target, Ours):
        return getattr(importlib.import_module(target.module), target.attribute)
    return make_stand_in(module, name, target.feature)
