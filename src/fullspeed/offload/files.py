"""One open file whose bytes bypass the page cache where that is possible."""

from __future__ import annotations

import errno
import os
import pathlib
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor

from fullspeed.base.errors import StorageError
from fullspeed.offload.buffers import ALIGNMENT_BYTES, aligned_empty, bytes_of
from fullspeed.offload.engine import FILE_ENDED, Engine

_FIXES = {
    errno.ENOSPC: "free space there, or choose another folder",
    errno.EDQUOT: "the quota is used up: free space there, or choose another folder",
    errno.EACCES: "choose a folder that this user may write to",
    errno.EROFS: "choose a folder that can be written to",
    errno.ENOENT: "it was removed, or its folder never made",
}


def fail(what: str, path: pathlib.Path, number: int) -> NoReturn:
    """Raise StorageError for an errno, with a remedy where there is one."""
    fix = f"; {_FIXES[number]}" if number in _FIXES else ""
    raise StorageError(f"cannot {what} {path}: {os.strerror(number)}{fix}")


class Handle:
    """A transfer under way. It keeps the tensor alive until `wait` has returned."""

    def __init__(self, file: File, tensor: Tensor, offset: int, parts: list[int], *, is_write: bool) -> None:
        self._file = file
        self._tensor: Tensor | None = tensor
        self._offset = offset
        self._parts = parts
        self._is_write = is_write

    @property
    def is_waited_for(self) -> bool:
        """Whether `wait` has been called."""
        return self._tensor is None

    def wait(self) -> None:
        """Wait until the bytes have moved. Raises StorageError if they have not, and in vain a second time."""
        if self._tensor is None:
            return
        results = [self._file.engine.wait(part) for part in self._parts]
        nbytes, self._tensor = self._tensor.nbytes, None
        failed = next((result for result in results if result), 0)
        verb = "write" if self._is_write else "read"
        size = os.stat(self._file.descriptor).st_size
        # A direct read of a file that ends between two sectors may also be refused as misaligned.
        if failed == FILE_ENDED or (failed and not self._is_write and size < self._offset + nbytes):
            raise StorageError(
                f"cannot read {nbytes} bytes at {self._offset} of {self._file.path}: it ends before, at {size}; it was "
                f"cut short, or never written that far"
            )
        if failed:
            fail(f"{verb} {nbytes} bytes at {self._offset} of", self._file.path, failed)


class _Part(NamedTuple):
    descriptor: int
    begin: int
    end: int


class File:
    """A file open for transfers.

    Whole aligned blocks go past the page cache (O_DIRECT), whose copy would take memory and a core's time; the last few
    bytes, and tensors at odd addresses, go through it. The kernel keeps both views of a file the same.

    Attributes:
        is_direct: whether the file system lets transfers bypass the page cache; found out by trying.
    """

    def __init__(self, path: pathlib.Path, engine: Engine, *, is_writable: bool, is_fresh: bool = False) -> None:
        self.path = path
        self.engine = engine
        flags = (os.O_RDWR | os.O_CREAT if is_writable else os.O_RDONLY) | (os.O_TRUNC if is_fresh else 0)
        try:
            self.descriptor = os.open(path, flags | os.O_CLOEXEC, 0o600)
        except OSError as error:
            fail("open", path, error.errno or errno.EIO)
        self._direct = _open_direct(path, flags & ~(os.O_CREAT | os.O_TRUNC))
        self.is_direct = self._direct is not None

    def reserve(self, nbytes: int) -> None:
        """Have the disk set `nbytes` aside, so that there is space for them and writes need not look for it."""
        try:
            os.posix_fallocate(self.descriptor, 0, nbytes)
        except OSError as error:
            fail(f"reserve {nbytes} bytes for", self.path, error.errno or errno.EIO)

    def submit(self, tensor: Tensor, offset: int, *, is_write: bool) -> Handle:
        """Start moving a contiguous CPU tensor to or from bytes `offset` and on; leave it alone until waited for."""
        memory = bytes_of(tensor)
        parts = [
            self.engine.submit(part.descriptor, memory[part.begin : part.end], offset + part.begin, is_write=is_write)
            for part in self._cut(memory, offset)
        ]
        return Handle(self, tensor, offset, parts, is_write=is_write)

    def _cut(self, memory: Tensor, offset: int) -> list[_Part]:
        nbytes = memory.numel()
        is_aligned = memory.data_ptr() % ALIGNMENT_BYTES == 0 and offset % ALIGNMENT_BYTES == 0
        whole = nbytes - nbytes % ALIGNMENT_BYTES if is_aligned and self._direct is not None else 0
        parts = [_Part(self._direct, 0, whole)] if whole and self._direct is not None else []
        return [*parts, _Part(self.descriptor, whole, nbytes)] if whole < nbytes else parts

    def close(self) -> None:
        """Close the file; nothing may be under way."""
        os.close(self.descriptor)
        if self._direct is not None:
            os.close(self._direct)


def _open_direct(path: pathlib.Path, flags: int) -> int | None:
    """A descriptor whose transfers bypass the page cache, or None where the system or the file system has none."""
    if not hasattr(os, "O_DIRECT"):
        return None
    try:
        descriptor = os.open(path, flags | os.O_DIRECT | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        # Some file systems accept the flag and refuse the transfers.
        os.preadv(descriptor, [bytes_of(aligned_empty(ALIGNMENT_BYTES, torch.uint8)).numpy().data], 0)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor
