"""DeepSpeed's interface to asynchronous files, over `File`: a path and a tensor for each call."""

from __future__ import annotations

import os
import pathlib

from torch import Tensor

from fullspeed.base.errors import StorageError
from fullspeed.offload.buffers import aligned_empty
from fullspeed.offload.engine import Settings, make_engine
from fullspeed.offload.files import File, Handle


class AioHandle:
    """Reads and writes whole tensors from and to files. Calls without `async` return when the bytes have moved.

    Blocks under way at once are `queue_depth` times `intra_op_parallelism`, at most 32. `single_submit` and
    `overlap_events` are about Linux's older interface; requests always go in batches that overlap.
    """

    def __init__(
        self,
        block_size: int = 1 << 20,
        queue_depth: int = 128,
        single_submit: bool = False,
        overlap_events: bool = False,
        intra_op_parallelism: int = 1,
    ) -> None:
        self._arguments = (block_size, queue_depth, single_submit, overlap_events, intra_op_parallelism)
        # A thread more than requests that a disk serves at once only takes memory.
        depth = min(queue_depth * intra_op_parallelism, 32)
        self._engine = make_engine(Settings(block_bytes=block_size, depth=depth))
        self._waiting: list[tuple[File, Handle]] = []
        self._locked: dict[int, Tensor] = {}

    def get_block_size(self) -> int:
        """Bytes a request moves."""
        return self._arguments[0]

    def get_queue_depth(self) -> int:
        """As given."""
        return self._arguments[1]

    def get_single_submit(self) -> bool:
        """As given."""
        return self._arguments[2]

    def get_overlap_events(self) -> bool:
        """As given."""
        return self._arguments[3]

    def get_intra_op_parallelism(self) -> int:
        """As given."""
        return self._arguments[4]

    def async_pread(self, buffer: Tensor, filename: str, file_offset: int = 0) -> int:
        """Start reading a tensor's bytes; `wait` finishes it. Returns 0."""
        path = pathlib.Path(filename)
        _check_size(path, buffer, file_offset)
        return self._start(File(path, self._engine, is_writable=False), buffer, file_offset, is_write=False)

    def async_pwrite(self, buffer: Tensor, filename: str, file_offset: int = 0) -> int:
        """Start writing a tensor's bytes, making the file if there is none. Returns 0."""
        file = File(pathlib.Path(filename), self._engine, is_writable=True)
        return self._start(file, buffer, file_offset, is_write=True)

    def _start(self, file: File, buffer: Tensor, offset: int, *, is_write: bool) -> int:
        self._waiting.append((file, file.submit(buffer, offset, is_write=is_write)))
        return 0

    def wait(self) -> int:
        """Wait for all that was started; returns how many transfers that were. Raises StorageError if one failed."""
        waiting, self._waiting = self._waiting, []
        failure: StorageError | None = None
        for file, handle in waiting:
            try:
                handle.wait()
            except StorageError as error:
                failure = failure or error
            file.close()
        if failure:
            raise failure
        return len(waiting)

    def sync_pread(self, buffer: Tensor, filename: str, file_offset: int = 0) -> int:
        """Read a tensor's bytes. Returns 1, the transfers completed, with those that were under way."""
        self.async_pread(buffer, filename, file_offset)
        return self.wait()

    def sync_pwrite(self, buffer: Tensor, filename: str, file_offset: int = 0) -> int:
        """Write a tensor's bytes."""
        self.async_pwrite(buffer, filename, file_offset)
        return self.wait()

    def pread(self, buffer: Tensor, filename: str, validate: bool, async_op: bool, file_offset: int = 0) -> int:
        """Either of the reads; `validate` is always done: a file too short is an error."""
        del validate
        return (self.async_pread if async_op else self.sync_pread)(buffer, filename, file_offset)

    def pwrite(self, buffer: Tensor, filename: str, validate: bool, async_op: bool, file_offset: int = 0) -> int:
        """Either of the writes; `validate` as for `pread`."""
        del validate
        return (self.async_pwrite if async_op else self.sync_pwrite)(buffer, filename, file_offset)

    def read(self, buffer: Tensor, filename: str, validate: bool = False, file_offset: int = 0) -> int:
        """As `sync_pread`."""
        return self.pread(buffer, filename, validate, False, file_offset)

    def write(self, buffer: Tensor, filename: str, validate: bool = False, file_offset: int = 0) -> int:
        """As `sync_pwrite`."""
        return self.pwrite(buffer, filename, validate, False, file_offset)

    def new_cpu_locked_tensor(self, num_elem: int, example_tensor: Tensor) -> Tensor:
        """A page-aligned tensor (num_elem,) of the example's dtype: it moves without a copy."""
        made = aligned_empty(num_elem, example_tensor.dtype)
        self._locked[made.data_ptr()] = made
        return made

    def free_cpu_locked_tensor(self, tensor: Tensor) -> bool:
        """Forget such a tensor; returns whether it was one."""
        return self._locked.pop(tensor.data_ptr(), None) is not None


def _check_size(path: pathlib.Path, buffer: Tensor, offset: int) -> None:
    try:
        size = os.stat(path).st_size
    except OSError as error:
        raise StorageError(f"cannot read {path}: {error.strerror}") from error
    if size - offset < buffer.nbytes:
        shape, dtype = tuple(buffer.shape), buffer.dtype
        raise StorageError(
            f"{path} has {size} bytes, {size - offset} from {offset} on; a tensor of shape {shape} and {dtype} needs "
            f"{buffer.nbytes}: it holds another tensor, or was cut short"
        )
