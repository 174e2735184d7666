"""Named tensors in one safetensors file, streamed: no second copy in memory, checksum on the way.

8 bytes: length of the header, little endian | header: JSON, padded with spaces | the tensors' bytes, no gaps
"""

from __future__ import annotations

import json
import math
import os
import pathlib
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch

from fullspeed.base.errors import CheckpointError
from fullspeed.checkpoint.durable import write_file
from fullspeed.checkpoint.manifest import FileRecord

_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8", torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.complex64: "C64",
}  # fmt: skip
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
_HEADER_ALIGNMENT = 8


def dtype_name(tensor: torch.Tensor, what: str) -> str:
    """The tensor's dtype as safetensors spells it. Raises CheckpointError naming `what` for one it does not know."""
    name = _NAMES.get(tensor.dtype)
    if name is None:
        raise CheckpointError(f"{what} has dtype {tensor.dtype}, which a safetensors file cannot hold; cast it first")
    return name


class FilePlan(NamedTuple):
    """The bytes of a safetensors file, before they are written."""

    head: bytes  # everything in front of the tensors
    tensors: list[torch.Tensor]  # in the order in which they follow, without gaps
    nbytes: int  # of the whole file


def plan_file(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None) -> FilePlan:
    """Lay out a file for tensors of any device and stride; `metadata` goes into its header."""
    # Widest first, so that every tensor starts at a multiple of its element's size.
    keys = sorted(tensors, key=lambda key: -tensors[key].element_size())
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for key in keys:
        tensor = tensors[key]
        end = offset + tensor.nbytes
        header[key] = {
            "dtype": dtype_name(tensor, key),
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _HEADER_ALIGNMENT)
    head = len(text).to_bytes(8, "little") + text
    return FilePlan(head, [tensors[key] for key in keys], len(head) + offset)


def write_tensors(path: pathlib.Path, tensors: Mapping[str, torch.Tensor]) -> FileRecord:
    """Write tensors of any device and stride to a safetensors file that is on the disk when this returns."""
    return write_file(path, tensor_parts(tensors))


def tensor_parts(
    tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None
) -> Iterator[bytes | memoryview]:
    """The bytes of a safetensors file, a tensor at a time; `metadata` goes into its header."""
    plan = plan_file(tensors, metadata)
    yield plan.head
    yield from (bytes_of(tensor) for tensor in plan.tensors if tensor.numel())


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's elements as 1-D uint8 in host memory: its own memory where that is contiguous and on the host."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The same as bytes."""
    return flat_bytes(tensor).numpy().data


class TensorEntry(NamedTuple):
    """Where one tensor lies in a file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int  # bytes from the beginning of the file


class TensorFile:
    """A safetensors file, open for reading any stretch of any tensor.

    Read by position, not mapped: a mapped page counts as this process's memory for as long as the file is open.

    Raises:
        CheckpointError: the file is cut short, its header damaged, or a dtype unknown.
    """

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path
        self._file = path.open("rb")
        size = os.fstat(self._file.fileno()).st_size
        length = int.from_bytes(self._file.read(8), "little")
        if not 0 < length <= size - 8:
            raise CheckpointError(f"{path} is no safetensors file, or is cut short: {size} bytes")
        try:
            header = json.loads(self._file.read(length))
            self.entries = {name: _entry(8 + length, row) for name, row in header.items() if name != "__metadata__"}
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"the header of {path} is damaged: {error!r}") from error
        for name, entry in self.entries.items():
            if entry.offset + math.prod(entry.shape) * entry.dtype.itemsize > size:
                raise CheckpointError(f"{path} is cut short: {size} bytes end before {name} does")

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every tensor."""
        return {name: entry.shape for name, entry in self.entries.items()}

    def elements(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Elements [start, stop) of a flattened tensor, 1-D, on the CPU."""
        entry = self.entries[name]
        out = torch.empty(stop - start, dtype=entry.dtype)
        into, done = out.view(torch.uint8).numpy().data, 0
        while done < len(into):
            count = os.preadv(self._file.fileno(), [into[done:]], entry.offset + start * entry.dtype.itemsize + done)
            if not count:
                raise CheckpointError(f"{self.path} became shorter while {name} was read from it")
            done += count
        return out


def _entry(data_begin: int, row: Mapping[str, object]) -> TensorEntry:
    shape, offsets = row["shape"], row["data_offsets"]
    assert isinstance(shape, list)
    assert isinstance(offsets, list)
    return TensorEntry(_DTYPES[str(row["dtype"])], tuple(shape), data_begin + int(offsets[0]))
