"""Named tensors in one file."""

from __future__ import annotations

import pathlib
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from fullspeed.base.errors import StorageError, UsageError
from fullspeed.base.layout import round_up
from fullspeed.offload.buffers import ALIGNMENT_BYTES
from fullspeed.offload.engine import Engine
from fullspeed.offload.files import File, Handle


class Slot(NamedTuple):
    """Where a tensor lies."""

    offset: int  # bytes from the beginning of the file; a multiple of ALIGNMENT_BYTES
    shape: torch.Size
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return self.shape.numel() * self.dtype.itemsize


class FileStore:
    """Tensors that wait in a file, each under a name. What is written once keeps its place, shape and dtype.

    The file is this store's own: an existing one is emptied, and `close` removes it.

    Attributes:
        path: the file.
        nbytes: bytes of the file's slots, padding included.
    """

    def __init__(self, path: pathlib.Path, engine: Engine) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StorageError(f"cannot make folder {path.parent}: {error.strerror}; choose another") from error
        self.path = path
        self._file = File(path, engine, is_writable=True, is_fresh=True)
        self._slots: dict[str, Slot] = {}
        self._under_way: dict[str, Handle] = {}
        self.nbytes = 0

    @property
    def is_direct(self) -> bool:
        """Whether transfers bypass the page cache."""
        return self._file.is_direct

    def names(self) -> list[str]:
        """Names in the order they were first written."""
        return list(self._slots)

    def slot(self, name: str) -> Slot:
        """Where and what a tensor is. Raises UsageError for a name never written."""
        if name not in self._slots:
            raise UsageError(f"{self.path} has no tensor {name!r}; write it first")
        return self._slots[name]

    def reserve(self, tensors: Iterable[tuple[str, torch.Size, torch.dtype]]) -> None:
        """Give several tensors their places at once, and have the disk set the space aside."""
        for name, shape, dtype in tensors:
            if name in self._slots:
                raise UsageError(f"{self.path} has a tensor {name!r} already")
            slot = Slot(self.nbytes, torch.Size(shape), dtype)
            self._slots[name] = slot
            self.nbytes += round_up(slot.nbytes, ALIGNMENT_BYTES)
        if self.nbytes:
            self._file.reserve(self.nbytes)

    def submit_write(self, name: str, tensor: Tensor, start: int | None = None) -> Handle:
        """Start writing a tensor under a name, or elements of one from `start` on.

        The tensor may not change until the handle has been waited for.
        """
        if name not in self._slots:
            self.reserve([(name, tensor.shape, tensor.dtype)])
        return self._submit(name, tensor, start, is_write=True)

    def submit_read(self, name: str, into: Tensor, start: int | None = None) -> Handle:
        """Start reading a tensor, or its elements from `start` on; `into` has them once the handle is waited for."""
        return self._submit(name, into, start, is_write=False)

    def _submit(self, name: str, tensor: Tensor, start: int | None, *, is_write: bool) -> Handle:
        slot = self.slot(name)
        room = slot.shape.numel() - (start or 0)
        fits = tensor.numel() == room if start is None else start >= 0 and tensor.numel() <= room
        if tensor.dtype != slot.dtype or not fits:
            part = "" if start is None else f" from element {start} on"
            raise UsageError(
                f"{name} in {self.path} is {slot.dtype} of shape {tuple(slot.shape)}, "
                f"not {tensor.dtype} of shape {tuple(tensor.shape)}{part}"
            )
        self._check_there()
        earlier = self._under_way.get(name)
        if earlier is not None and not earlier.is_waited_for:
            raise UsageError(f"{name} in {self.path} is being moved; wait for that first")
        handle = self._file.submit(tensor, slot.offset + (start or 0) * slot.dtype.itemsize, is_write=is_write)
        self._under_way[name] = handle
        return handle

    def _check_there(self) -> None:
        """A file that was removed would go on taking bytes that nobody can account for."""
        if not self.path.exists():
            raise StorageError(f"{self.path} has vanished while tensors were waiting in it; leave that folder alone")

    def close(self) -> None:
        """Wait for what is under way, and remove the file."""
        for handle in self._under_way.values():
            handle.wait()
        self._file.close()
        self.path.unlink(missing_ok=True)
