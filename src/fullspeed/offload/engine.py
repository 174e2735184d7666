"""What moves bytes between memory and open files in the background, in three ways that do the same.

| name | how | needs |
|---|---|---|
| threads | native threads, one blocking system call each | the native library |
| io_uring | one native thread that keeps requests with the kernel | the same, and a kernel that permits it |
| python | Python threads, one blocking system call each | POSIX |

Native threads do not wait for the interpreter's lock between blocks, which Python threads do while the model computes.
"""

from __future__ import annotations

import ctypes
import errno
import os
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Literal, NamedTuple, Protocol

from torch import Tensor

from fullspeed.base.errors import StorageError
from fullspeed.kernels import native

FILE_ENDED = -1
"""The result of a read that met the end of the file; other results are 0 or an errno."""
EngineName = Literal["threads", "io_uring", "python"]
ENGINES: tuple[EngineName, ...] = ("threads", "io_uring", "python")


class Settings(NamedTuple):
    """How transfers are cut up.

    Attributes:
        block_bytes: most bytes that one request moves; a multiple of 4096.
        depth: requests under way at once.
        engine: None for the first that works here.
    """

    block_bytes: int = 1 << 20
    depth: int = 8
    engine: EngineName | None = None


class Engine(Protocol):
    """Moves bytes. The descriptor must live until the transfer has been waited for."""

    name: EngineName

    def submit(self, descriptor: int, memory: Tensor, offset: int, *, is_write: bool) -> int:
        """Start moving all of `memory` (nbytes,) uint8 from or to a place in a file; returns a ticket."""
        ...

    def wait(self, ticket: int) -> int:
        """Wait for a transfer, once. Returns 0, an errno, or FILE_ENDED."""
        ...

    def close(self) -> None:
        """Wait for what is under way and free everything."""
        ...


class NativeEngine:
    """The engines of the native library."""

    def __init__(self, name: Literal["threads", "io_uring"], settings: Settings) -> None:
        self.name: EngineName = name
        self._handle: int | None = None
        self._functions = native.require().functions
        self._memory: dict[int, Tensor] = {}  # of transfers under way: nobody may free it
        error = ctypes.c_int32()
        number = ("threads", "io_uring").index(name)
        self._handle = self._functions.fs_io_create(number, settings.depth, settings.block_bytes, error)
        if not self._handle:
            raise StorageError(f"engine {name} cannot be had here: {os.strerror(error.value)}; choose another")

    def submit(self, descriptor: int, memory: Tensor, offset: int, *, is_write: bool) -> int:
        """See `Engine`."""
        address, nbytes = memory.data_ptr(), memory.numel()
        ticket = int(self._functions.fs_io_submit(self._handle, is_write, descriptor, address, nbytes, offset))
        self._memory[ticket] = memory
        return ticket

    def wait(self, ticket: int) -> int:
        """See `Engine`."""
        result = int(self._functions.fs_io_wait(self._handle, ticket))
        del self._memory[ticket]
        return result

    def close(self) -> None:
        """See `Engine`."""
        handle, self._handle = self._handle, None
        if handle:
            self._functions.fs_io_destroy(handle)

    def __del__(self) -> None:
        self.close()


class PythonEngine:
    """The engine for machines without the native library."""

    def __init__(self, settings: Settings) -> None:
        self.name: EngineName = "python"
        self._block_bytes = settings.block_bytes
        self._pool = ThreadPoolExecutor(settings.depth, thread_name_prefix="fullspeed-io")
        self._transfers: dict[int, list[Future[int]]] = {}
        self._num_submitted = 0

    def submit(self, descriptor: int, memory: Tensor, offset: int, *, is_write: bool) -> int:
        """See `Engine`."""
        data = memory.numpy().data
        starts = range(0, len(data), self._block_bytes)
        self._num_submitted += 1
        self._transfers[self._num_submitted] = [
            self._pool.submit(_move, descriptor, data[start : start + self._block_bytes], offset + start, is_write)
            for start in starts
        ]
        return self._num_submitted

    def wait(self, ticket: int) -> int:
        """See `Engine`."""
        results = [block.result() for block in self._transfers.pop(ticket)]
        return next((result for result in results if result), 0)

    def close(self) -> None:
        """See `Engine`."""
        self._pool.shutdown()


def _move(descriptor: int, data: memoryview, offset: int, is_write: bool) -> int:
    call = os.pwritev if is_write else os.preadv
    done = 0
    while done < len(data):
        try:
            count = call(descriptor, [data[done:]], offset + done)
        except OSError as error:
            return error.errno or errno.EIO
        if not count:
            return errno.ENOSPC if is_write else FILE_ENDED
        done += count
    return 0


def obstacle(name: EngineName) -> str:
    """Why an engine cannot be had here; "" where it can."""
    if name == "python":
        return "" if hasattr(os, "preadv") else "this system lacks preadv"
    found = native.load()
    if isinstance(found, str):
        return f"the native library {found}"
    if not hasattr(found.functions, "fs_io_create"):
        return "the native library moves files on Linux only"
    try:
        NativeEngine(name, Settings(depth=1)).close()
    except StorageError as error:
        return str(error)
    return ""


def make_engine(settings: Settings | None = None) -> Engine:
    """The engine asked for, or the first that works here. Raises StorageError where it cannot be had."""
    settings = settings or Settings()
    name = settings.engine if settings.engine is not None else _first_available()
    why = obstacle(name)
    if why:
        raise StorageError(f"engine {name}: {why}")
    return PythonEngine(settings) if name == "python" else NativeEngine(name, settings)


def _first_available() -> EngineName:
    for name in ENGINES:
        if not obstacle(name):
            return name
    return ENGINES[-1]
