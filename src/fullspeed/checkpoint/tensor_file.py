"""Named tensors in one safetensors file, streamed: no second copy in memory, checksum on the way.

8 bytes: length of the header, little endian | header: JSON, padded with spaces | the tensors' bytes, no gaps
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterator, Mapping

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
_HEADER_ALIGNMENT = 8


def dtype_name(tensor: torch.Tensor, what: str) -> str:
    """The tensor's dtype as safetensors spells it. Raises CheckpointError naming `what` for one it does not know."""
    name = _NAMES.get(tensor.dtype)
    if name is None:
        raise CheckpointError(f"{what} has dtype {tensor.dtype}, which a safetensors file cannot hold; cast it first")
    return name


def write_tensors(path: pathlib.Path, tensors: Mapping[str, torch.Tensor]) -> FileRecord:
    """Write tensors of any device and stride to a safetensors file that is on the disk when this returns."""
    return write_file(path, tensor_parts(tensors))


def tensor_parts(tensors: Mapping[str, torch.Tensor]) -> Iterator[bytes | memoryview]:
    """The bytes of a safetensors file, a tensor at a time."""
    # Widest first, so that every tensor starts at a multiple of its element's size.
    keys = sorted(tensors, key=lambda key: -tensors[key].element_size())
    header: dict[str, object] = {}
    offset = 0
    for key in keys:
        tensor = tensors[key]
        end = offset + tensor.numel() * tensor.element_size()
        header[key] = {
            "dtype": dtype_name(tensor, key),
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _HEADER_ALIGNMENT)
    yield len(text).to_bytes(8, "little")
    yield text
    for key in keys:
        if tensors[key].numel():
            yield _bytes_of(tensors[key])


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data
