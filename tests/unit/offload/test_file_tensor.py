"""Tensors in a file behave as tensors in memory."""

from __future__ import annotations

import copy
import io
import pathlib
from collections.abc import Callable, Iterator

import pytest
import torch

from fullspeed.base.errors import StorageError, UsageError
from fullspeed.offload.engine import Settings, make_engine
from fullspeed.offload.file_tensor import FileTensor
from fullspeed.offload.store import FileStore

NUMEL = 5000


@pytest.fixture
def store(tmp_path: pathlib.Path) -> Iterator[FileStore]:
    engine = make_engine(Settings(block_bytes=4096, depth=2))
    made = FileStore(tmp_path / "tensors", engine)
    made.submit_write("values", torch.arange(NUMEL, dtype=torch.float32)).wait()
    yield made
    if made.path.exists():
        made.close()
    engine.close()


def tensor_in(store: FileStore, start: int = 0, shape: tuple[int, ...] = (NUMEL,)) -> FileTensor:
    return FileTensor(store, "values", start, shape)


def test_what_is_computed_with_one_is_an_ordinary_tensor(store: FileStore):
    tensor = tensor_in(store)
    assert (tensor.shape, tensor.dtype, tensor.nbytes) == ((NUMEL,), torch.float32, 4 * NUMEL)
    found = tensor * 2 + torch.ones(NUMEL)
    assert type(found) is torch.Tensor
    assert torch.equal(found, torch.arange(NUMEL) * 2.0 + 1)
    assert float(tensor[7]) == 7.0
    assert tensor.tolist()[:3] == [0.0, 1.0, 2.0]
    assert tensor.numpy().sum() == NUMEL * (NUMEL - 1) / 2


def test_parts_move_nothing_before_they_are_read(store: FileStore):
    part = tensor_in(store)[1000:1006].detach().view(2, 3)
    assert isinstance(part, FileTensor)
    assert (part.start, tuple(part.shape)) == (1000, (2, 3))
    assert torch.equal(part.load(), torch.tensor([[1000.0, 1001, 1002], [1003, 1004, 1005]]))
    assert isinstance(part.reshape(-1)[-2:], FileTensor)
    assert part.reshape(-1)[-2:].tolist() == [1004.0, 1005.0]
    assert part.view(3, -1).shape == (3, 2)
    assert tensor_in(store)[10:3].numel() == 0
    assert torch.equal(tensor_in(store)[::1000], torch.arange(0, NUMEL, 1000).float())


WRITES: list[Callable[[torch.Tensor], object]] = [
    lambda tensor: tensor.copy_(torch.full_like(tensor, 3.0)),
    lambda tensor: tensor.copy_(torch.tensor(2.0)),
    lambda tensor: tensor.zero_(),
    lambda tensor: tensor.mul_(2).add_(1),
    lambda tensor: tensor[2:5].fill_(-1.0),
    lambda tensor: tensor.__setitem__(slice(1, 3), torch.tensor([8.0, 9.0])),
    lambda tensor: torch._foreach_add_([tensor[:2], tensor[4:]], 1.0),
    lambda tensor: torch.add(tensor, 1, out=tensor),
]


@pytest.mark.parametrize("write", WRITES)
def test_writes_reach_the_file_and_nothing_beside_the_part(store: FileStore, write: Callable[[torch.Tensor], object]):
    expected = torch.arange(NUMEL, dtype=torch.float32)
    write(expected[100:110])
    with torch.no_grad():
        write(tensor_in(store)[100:110])
    assert torch.equal(tensor_in(store).load(), expected)


def test_a_write_returns_the_tensor_in_the_file(store: FileStore):
    tensor = tensor_in(store)
    assert tensor.mul_(2) is tensor


def test_copies_and_pickles_are_ordinary(store: FileStore):
    state = {"exp_avg": tensor_in(store)}
    for found in (copy.deepcopy(state), _through_a_file(state)):
        assert type(found["exp_avg"]) is torch.Tensor
        assert torch.equal(found["exp_avg"], torch.arange(NUMEL).float())
    assert "exp_avg" not in repr(state["exp_avg"])
    assert f"shape=({NUMEL},)" in repr(state["exp_avg"])


def _through_a_file(value: object) -> dict[str, torch.Tensor]:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    loaded: dict[str, torch.Tensor] = torch.load(file)
    return loaded


def test_what_cannot_be_read_is_an_error_that_names_the_file(store: FileStore):
    store.path.unlink()
    with pytest.raises(StorageError, match="tensors has vanished"):
        tensor_in(store).sum()


def test_a_change_of_shape_is_refused(store: FileStore):
    with pytest.raises((UsageError, RuntimeError)):
        tensor_in(store).resize_(3)
    with pytest.raises(RuntimeError, match="shape"):
        tensor_in(store).view(7, 7)
