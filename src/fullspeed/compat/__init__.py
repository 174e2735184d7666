"""The drop-in module named `deepspeed`: Accelerate, Transformers and others import FullSpeed without a change.

Three ways to the same few files: `activate()` in a program, `fullspeed run --as-deepspeed`, or the distribution in
the folder `compat` of the project. In each a folder that holds a package `deepspeed`, with the metadata of a
distribution of that name, stands on Python's path: so imports, `importlib.util.find_spec` and
`importlib.metadata.version` see what they would see of any package.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import pathlib
import sys

from fullspeed.base import env
from fullspeed.base.errors import UsageError

FOLDER = pathlib.Path(__file__).parent / "dropin"

__all__ = ["FOLDER", "activate", "activate_children"]


def activate(*, over_installed: bool = False) -> None:
    """From now on `import deepspeed` gives FullSpeed, in this process.

    Call it before importing libraries that look for DeepSpeed, such as transformers and accelerate: some look once.

    Args:
        over_installed: stand in for an installed DeepSpeed, too.

    Raises:
        UsageError: another `deepspeed` is imported already; or one is installed, and `over_installed` is false.
    """
    imported = sys.modules.get("deepspeed")
    if imported is not None and not _is_ours(getattr(imported, "__file__", None)):
        raise UsageError("another deepspeed is imported already; call fullspeed.compat.activate() before that")
    spec = importlib.util.find_spec("deepspeed") if imported is None else imported.__spec__
    origin = None if spec is None else spec.origin  # None, too, of a mere folder of that name
    if _is_ours(origin):
        return
    if origin is not None and not over_installed:
        raise UsageError(
            f"another deepspeed is installed at {origin}; uninstall it, or pass over_installed=True to use FullSpeed "
            f"in its place"
        )
    sys.path.insert(0, str(FOLDER))
    importlib.invalidate_caches()


def activate_children() -> None:
    """In Python processes that this one starts from now on, `import deepspeed` gives FullSpeed."""
    paths = (env.get("PYTHONPATH") or "").split(os.pathsep)
    if str(FOLDER) not in paths:
        env.export({"PYTHONPATH": os.pathsep.join([str(FOLDER), *filter(None, paths)])})


def _is_ours(origin: str | None) -> bool:
    """Whether a file is the `deepspeed/__init__.py` of ours, be it in the folder or installed from the wheel."""
    return origin is not None and "fullspeed.compat.modules" in pathlib.Path(origin).read_text()
