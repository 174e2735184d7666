"""A rank's place on a disk: the folder its tensors wait in, and the engine that moves them."""

from __future__ import annotations

import fcntl
import os
import pathlib
import shutil
import socket
import tempfile
import weakref

from fullspeed.base.errors import StorageError
from fullspeed.comm import Group
from fullspeed.comm.rendezvous import together
from fullspeed.config.checkpoint import Aio
from fullspeed.offload.buffers import ALIGNMENT_BYTES
from fullspeed.offload.engine import Engine, Settings, make_engine
from fullspeed.offload.files import fail
from fullspeed.offload.store import FileStore

_PREFIX = "fullspeed-"
_LOCK = "lock"
_MAX_DEPTH = 64  # requests under way at once; more only take memory


class Disk:
    """A folder of one process below a folder that jobs share. Nothing is left of it after `close` or the process's end.

    A process that is killed cannot remove its files: the next one that begins there does. Which folders are in use is
    seen by a lock that ends with its process.

    Attributes:
        folder: this process's own.
    """

    def __init__(self, shared_folder: pathlib.Path, settings: Settings) -> None:
        """Make the folder. Raises StorageError, naming it, where that cannot be done."""
        try:
            shared_folder.mkdir(parents=True, exist_ok=True)
            _remove_abandoned(shared_folder)
            self.folder = pathlib.Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{socket.gethostname()}-", dir=shared_folder))
            lock = _lock(self.folder)
        except OSError as error:
            fail("make a folder in", shared_folder, error.errno or 0)
        self._engine = make_engine(settings)
        self._stores: dict[str, FileStore] = {}
        self._end = weakref.finalize(self, _end, self._stores, self._engine, self.folder, lock, os.getpid())

    def store(self, name: str) -> FileStore:
        """The file of that name, made at the first call."""
        if name not in self._stores:
            self._stores[name] = FileStore(self.folder / name, self._engine)
        return self._stores[name]

    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(store.nbytes for store in self._stores.values())

    def close(self) -> None:
        """Wait for what is under way and remove the folder. May be repeated."""
        self._end()


def settings_of(aio: Aio) -> Settings:
    """How the `aio` section wants transfers cut."""
    block_bytes = max(ALIGNMENT_BYTES, aio.block_size // ALIGNMENT_BYTES * ALIGNMENT_BYTES)
    return Settings(block_bytes, min(aio.queue_depth * aio.intra_op_parallelism, _MAX_DEPTH))


def open_disk(shared_folder: str, aio: Aio, group: Group) -> tuple[Disk, list[str]]:
    """This rank's disk, and the folders of all ranks. Collective.

    Raises:
        StorageError: on every rank, when one cannot have its folder.
    """
    made: list[Disk] = []

    def make() -> str:
        made.append(Disk(pathlib.Path(shared_folder), settings_of(aio)))
        return str(made[0].folder)

    folders = together(make, StorageError, group)
    return made[0], folders


def _lock(folder: pathlib.Path) -> int:
    """Lock a folder from the moment that others see the lock; returns the descriptor that holds it."""
    unseen = folder / f"{_LOCK}.new"
    descriptor = os.open(unseen, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    unseen.rename(folder / _LOCK)
    return descriptor


def _end(stores: dict[str, FileStore], engine: Engine, folder: pathlib.Path, lock: int, owner: int) -> None:
    if os.getpid() != owner:
        return  # a fork of it, a worker of a data loader for example, ends
    for store in stores.values():
        try:
            store.close()
        except StorageError:
            continue  # what waited there is of no use any more
    engine.close()
    shutil.rmtree(folder, ignore_errors=True)
    os.close(lock)


def _remove_abandoned(shared_folder: pathlib.Path) -> None:
    """Remove what processes that were killed left there. Folders without a lock are being made, or somebody else's."""
    for folder in shared_folder.glob(f"{_PREFIX}*"):
        try:
            lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        except OSError:
            continue  # in use
        finally:
            os.close(lock)
