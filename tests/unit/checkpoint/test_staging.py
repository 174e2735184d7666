"""The staged bytes are those of the file, and the memory is used again."""

from __future__ import annotations

import torch

from fullspeed.checkpoint.staging import StagingBuffer
from fullspeed.checkpoint.tensor_file import tensor_parts


def test_the_bytes_are_those_of_the_file(tmp_path):
    square = torch.randn(6, 6)
    tensors = {
        "half": square.bfloat16(),
        "strided": square.t(),
        "scalar": torch.tensor(3.0, dtype=torch.float64),
        "empty": torch.empty(0),
        "flags": torch.tensor([True, False, True]),
    }
    staged = StagingBuffer(torch.device("cpu")).fill(tensors)
    assert bytes(staged) == b"".join(tensor_parts(tensors))
    before = bytes(staged)
    square.zero_()
    assert bytes(staged) == before


def test_memory_grows_only():
    buffer = StagingBuffer(torch.device("cpu"))
    assert buffer.nbytes == 0
    buffer.fill({"a": torch.ones(1000)})
    held = buffer.nbytes
    assert held >= 4000
    staged = buffer.fill({"a": torch.ones(10)})
    assert (buffer.nbytes, len(staged) < 200) == (held, True)
    buffer.fill({"a": torch.ones(5000)})
    assert buffer.nbytes >= 20000
