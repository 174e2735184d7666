"""Writing plain weights as Hugging Face models have them, a file at a time: memory for one file is enough.

safetensors       model.safetensors, or model-0000X-of-0000N.safetensors and model.safetensors.index.json
pickled           pytorch_model.bin, or pytorch_model-0000X-of-0000N.bin and pytorch_model.bin.index.json
"""

from __future__ import annotations

import os
import pathlib
import re
from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple

import torch

from fullspeed.checkpoint.durable import replace_file, sync_folder, write_file
from fullspeed.checkpoint.export_plan import index_text, parse_size, plan_shards, shard_names
from fullspeed.checkpoint.tensor_file import tensor_parts

Format = Literal["safetensors", "pickled"]
_STEMS: dict[Format, tuple[str, str]] = {
    "safetensors": ("model", ".safetensors"),
    "pickled": ("pytorch_model", ".bin"),
}
_PARTIAL = ".partial"
_METADATA = {"format": "pt"}  # transformers asks for it


class WeightSpec(NamedTuple):
    """A tensor that will be written."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class WeightWriter:
    """Takes the tensors in the order they were announced, and writes each file when its last one has come.

    All get their names at the end, and the index comes last: until then an earlier export in the folder is whole. A
    crash between the names leaves no index rather than one of files that do not belong together. What an earlier
    export leaves besides is removed.

    Args:
        folder: made if missing.
        specs: every tensor, in the order of `add`.
        max_shard_size: bytes of tensors in a file; "5GB" for example.
        file_format: which kind of files.
    """

    def __init__(
        self,
        folder: str | pathlib.Path,
        specs: Iterable[WeightSpec],
        max_shard_size: int | str = "5GB",
        file_format: Format = "safetensors",
    ) -> None:
        self._folder, self._format = pathlib.Path(folder), file_format
        self._specs = {spec.name: spec for spec in specs}
        sizes = [(spec.name, spec.nbytes) for spec in self._specs.values()]
        self._shards = plan_shards(sizes, parse_size(max_shard_size))
        self._stem, self._suffix = _STEMS[file_format]
        self._files = shard_names(self._stem, self._suffix, len(self._shards))
        self._number = 0  # of the file being filled
        self._tensors: dict[str, torch.Tensor] = {}
        self._folder.mkdir(parents=True, exist_ok=True)

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Take the next tensor; it is cast to the dtype announced."""
        spec = self._specs[name]
        assert tuple(tensor.shape) == spec.shape, f"{name} was announced with another shape"
        self._tensors[name] = tensor.detach().to("cpu", spec.dtype)
        wanted = self._shards[self._number]
        assert name == wanted[len(self._tensors) - 1], f"{name} comes out of turn"
        if len(self._tensors) == len(wanted):
            self._write_file()

    def finish(self) -> list[pathlib.Path]:
        """Write the index, if there are several files, and remove what an earlier export left. Returns the files."""
        if self._number < len(self._files):  # of an export without tensors
            self._write_file()
        assert self._number == len(self._files), "not every announced tensor has come"
        index = self._folder / f"{self._stem}{self._suffix}.index.json"
        if len(self._files) > 1:
            sizes = {name: spec.nbytes for name, spec in self._specs.items()}
            index.unlink(missing_ok=True)
            self._name_files()
            replace_file(index, [index_text(self._files, self._shards, sizes).encode()])
        else:
            self._name_files()
            index.unlink(missing_ok=True)
        ours = re.compile(rf"\.?{self._stem}(-\d{{5}}-of-\d{{5}})?{re.escape(self._suffix)}({re.escape(_PARTIAL)})?")
        for path in self._folder.iterdir():
            if ours.fullmatch(path.name) and path.name not in self._files:
                path.unlink()
        sync_folder(self._folder)
        return [self._folder / name for name in self._files]

    def _name_files(self) -> None:
        for name in self._files:
            os.replace(self._folder / f".{name}{_PARTIAL}", self._folder / name)
        sync_folder(self._folder)

    def _write_file(self) -> None:
        path = self._folder / f".{self._files[self._number]}{_PARTIAL}"
        if self._format == "safetensors":
            write_file(path, tensor_parts(self._tensors, _METADATA))
        else:
            _write_pickled(path, self._tensors)
        self._tensors = {}
        self._number += 1


def save_pickled(path: pathlib.Path, state_dict: Mapping[str, object]) -> None:
    """Put what `torch.save` writes in the place of `path`, whole or not at all."""
    fresh = path.with_name(f".{path.name}{_PARTIAL}")
    try:
        _write_pickled(fresh, state_dict)
        os.replace(fresh, path)
    except OSError:
        fresh.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def _write_pickled(path: pathlib.Path, state_dict: Mapping[str, object]) -> None:
    with open(path, "wb") as file:
        torch.save(dict(state_dict), file)
        file.flush()
        os.fsync(file.fileno())
