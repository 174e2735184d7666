"""Our streamed files are safetensors files."""

from __future__ import annotations

import zlib

import pytest
import torch
from safetensors.torch import load_file

from fullspeed.base.errors import CheckpointError
from fullspeed.checkpoint.tensor_file import write_tensors

TENSORS = {
    "f64": torch.randn(3, dtype=torch.float64),
    "f32": torch.randn(2, 3),
    "bf16": torch.randn(5).bfloat16(),
    "f16": torch.randn(5).half(),
    "i64": torch.arange(4),
    "u8": torch.arange(3, dtype=torch.uint8),
    "bool": torch.tensor([True, False, True]),
    "f8": torch.randn(3).to(torch.float8_e4m3fn),
    "scalar": torch.tensor(2.5),
    "empty": torch.empty(0, 4),
    "strided": torch.arange(12.0).view(3, 4).t(),
    "view": torch.arange(100.0)[7:9],
    "grad": torch.randn(2, requires_grad=True),
}


def test_round_trip_through_the_library(tmp_path):
    path = tmp_path / "t.safetensors"
    record = write_tensors(path, TENSORS)
    data = path.read_bytes()
    assert (record.nbytes, record.crc32) == (len(data), zlib.crc32(data))
    loaded = load_file(path)
    assert set(loaded) == set(TENSORS)
    for name, tensor in TENSORS.items():
        assert loaded[name].dtype == tensor.dtype
        assert loaded[name].shape == tensor.shape
        assert torch.equal(loaded[name].view(torch.uint8) if name == "f8" else loaded[name],
                           tensor.view(torch.uint8) if name == "f8" else tensor)  # fmt: skip


def test_no_tensors_at_all(tmp_path):
    write_tensors(tmp_path / "t.safetensors", {})
    assert load_file(tmp_path / "t.safetensors") == {}


def test_a_dtype_the_format_lacks_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"weird has dtype torch\.complex128"):
        write_tensors(tmp_path / "t", {"weird": torch.zeros(2, dtype=torch.complex128)})
