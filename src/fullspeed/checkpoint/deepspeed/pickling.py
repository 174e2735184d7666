"""Writing the few objects of DeepSpeed's own classes that its readers ask for, without having DeepSpeed.

An object of a stand-in class is pickled under the name of the class it stands for.
"""

from __future__ import annotations

import os
import pathlib
import pickle
from types import SimpleNamespace
from typing import Any

import torch

from fullspeed.checkpoint.deepspeed.unpickle import NAME_OF


class _NamingPickler(pickle._Pickler):  # the Python one: that in C looks every name up
    def save_global(self, obj: Any, name: str | None = None) -> None:
        known = NAME_OF.get(obj) if isinstance(obj, type) else None
        if known is None:
            super().save_global(obj, name)  # type: ignore[misc]
            return
        module, _, qualname = known.rpartition(".")
        self.write(pickle.GLOBAL + f"{module}\n{qualname}\n".encode())  # type: ignore[attr-defined]
        self.memoize(obj)  # type: ignore[attr-defined]


_PICKLE = SimpleNamespace(__name__=__name__, Pickler=_NamingPickler)


def save(path: pathlib.Path, state: Any) -> None:
    """Write `state` to `path` as `torch.save` does, and wait until it is on the disk."""
    with open(path, "wb") as file:
        torch.save(state, file, pickle_module=_PICKLE)
        file.flush()
        os.fsync(file.fileno())
