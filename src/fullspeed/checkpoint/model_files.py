"""Files of plain weights, as Hugging Face models have them: any slice of any tensor, without reading the rest."""

from __future__ import annotations

import json
import pathlib
import pickle
from collections.abc import Iterable, Mapping
from typing import Protocol

import torch

from fullspeed.base.errors import CheckpointError
from fullspeed.checkpoint.tensor_file import TensorFile

_NAMES = ("model.safetensors.index.json", "model.safetensors", "pytorch_model.bin.index.json", "pytorch_model.bin")


class _File(Protocol):
    """One open file of named tensors."""

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every tensor."""

    def elements(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Elements [start, stop) of a flattened tensor, 1-D."""


class ModelFiles:
    """The tensors of a model folder, an index file, or weight files; safetensors, or pickled state dicts.

    Args:
        source: a folder (looked through for the usual names), an `*.index.json`, or one or more weight files.

    Raises:
        CheckpointError: nothing to read there, a file is damaged, or the index names a file that is missing.
    """

    def __init__(self, source: str | pathlib.Path | Iterable[str | pathlib.Path]) -> None:
        files = [_open(path) for path in _weight_files(source)]
        self._file_of = {name: file for file in files for name in file.shapes()}
        self.shapes: dict[str, tuple[int, ...]] = {
            name: tuple(shape) for file in files for name, shape in file.shapes().items()
        }

    def elements(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Elements [start, stop) of the flattened tensor `name`, 1-D, on the CPU; only their pages are read."""
        return self._file_of[name].elements(name, start, stop)


def has_model_files(folder: pathlib.Path) -> bool:
    """Whether `ModelFiles` finds anything in a folder."""
    return any((folder / name).exists() for name in _NAMES)


def _weight_files(source: str | pathlib.Path | Iterable[str | pathlib.Path]) -> list[pathlib.Path]:
    if not isinstance(source, str | pathlib.Path):
        return [file for each in source for file in _weight_files(each)]
    path = pathlib.Path(source)
    if path.is_dir():
        found = next((path / name for name in _NAMES if (path / name).exists()), None)
        if found is None:
            raise CheckpointError(f"folder {path} holds no weights; looked for {', '.join(_NAMES)}")
        path = found
    if not path.exists():
        raise CheckpointError(f"there is no file {path}")
    if not path.name.endswith(".index.json"):
        return [path]
    names = sorted(set(json.loads(path.read_text())["weight_map"].values()))
    missing = [name for name in names if not (path.parent / name).exists()]
    if missing:
        raise CheckpointError(f"{path} names {', '.join(missing)}, missing in its folder")
    return [path.parent / name for name in names]


def _open(path: pathlib.Path) -> _File:
    try:
        return TensorFile(path) if path.suffix == ".safetensors" else _Pickled(path)
    except (OSError, EOFError, RuntimeError, pickle.UnpicklingError) as error:
        raise CheckpointError(f"{path} cannot be read as a file of weights: {error}") from error


class _Pickled(_File):
    """A state dict written by `torch.save`: mapped, so that only what is used is read. Unpickles tensors only."""

    def __init__(self, path: pathlib.Path) -> None:
        loaded = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        self._tensors = {name: value for name, value in loaded.items() if isinstance(value, torch.Tensor)}

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}

    def elements(self, name: str, start: int, stop: int) -> torch.Tensor:
        return self._tensors[name].reshape(-1)[start:stop]
