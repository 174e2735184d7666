"""Resident values that wait in a file, and the few buffers of host memory through which they come and go.

Values are *awake* while somebody reads or writes them in their buffer, and asleep otherwise. A buffer holds values that
are awake, that were read ahead of their use, or that are being written; what is not awake gives its buffer up as soon
as another group needs one. So no rank ever waits for a peer in order to get a buffer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from typing_extensions import override

from fullspeed.base.errors import StorageError, UsageError
from fullspeed.comm import MessageGather, Pending
from fullspeed.offload.buffers import BufferPool
from fullspeed.offload.disk import Disk
from fullspeed.offload.file_tensor import FileTensor
from fullspeed.offload.files import Handle
from fullspeed.sharding.links import GroupLinks
from fullspeed.sharding.resident import Resident


class ValueFiles:
    """Where the resident values of one model's groups wait on this rank.

    A transfer that fails is noted, not raised: peers may be waiting for what this rank does next. The ranks tell one
    another in the next round of their gathers, or at the end of what they do together, and then all of them raise.

    Attributes:
        pool: the buffers.
        messages: sends values of a buffer that is free again before peers have read them.
        paths: the file of every rank that trains the model.
        first_rank: the first of this rank's shard group among those.
        failure: the first transfer that failed and that the ranks have not raised yet.
    """

    def __init__(self, disk: Disk, pool: BufferPool, links: GroupLinks, paths: Sequence[str]) -> None:
        self._disk = disk
        self.store = disk.store("parameters")
        self.pool = pool
        self.messages = MessageGather(links.gather)
        self.paths = list(paths)
        self.first_rank = links.replica * links.world_size
        self.failure: StorageError | None = None
        self._holders: list[FileResident] = []  # of buffers, in the order in which they got them

    @property
    def has_free_buffer(self) -> bool:
        """Whether values can be read ahead without taking a buffer from others."""
        return self.pool.num_in_use < self.pool.num_buffers

    def acquire(self, holder: FileResident) -> torch.Tensor:
        """A buffer for a group's values, taken from sleeping ones if none is free: written ones first, oldest first."""
        while not self.has_free_buffer:
            asleep = [other for other in self._holders if not other.is_awake]
            if not asleep:
                raise UsageError(
                    f"all {self.pool.num_buffers} buffers hold values in use; make offload_param.buffer_count larger"
                )
            next((other for other in asleep if other.is_being_written), asleep[-1]).sleep()
        self._holders.append(holder)
        return self.pool.acquire(holder.numel, holder.dtype)

    def release(self, holder: FileResident, buffer: torch.Tensor) -> None:
        """Give a buffer back."""
        self._holders.remove(holder)
        self.pool.release(buffer)

    def flush(self) -> None:
        """Wait for what is under way, and let go of what was read ahead."""
        for holder in list(self._holders):
            holder.sleep()

    def note(self, failure: StorageError) -> None:
        """Remember that a transfer failed."""
        self.failure = self.failure or failure

    def raise_failures(self, ranks: Sequence[int]) -> None:
        """Raise what was noted on `ranks`, if there are any. Every rank calls it with the same ranks."""
        if not ranks:
            return
        own = self.failure
        self.flush()
        self.failure = None  # and with it what failed since: it is told
        named = ", ".join(f"rank {rank} ({self.paths[rank]})" for rank in ranks)
        here = "its own error says why" if own is None else str(own)
        raise StorageError(f"parameters that wait in a file could not be moved on {named}: {here}") from own

    def close(self) -> None:
        """Wait for what is under way and remove the file. May be repeated."""
        self.flush()
        self._disk.close()


class FileResident(Resident):
    """Values (n,) of a sharded group that wait in a file."""

    def __init__(self, name: str, values: torch.Tensor, files: ValueFiles, links: GroupLinks) -> None:
        """Write `values` to the file, under a name of their own."""
        self._name, self._files, self._links = name, files, links
        self.numel, self.dtype = values.numel(), values.dtype
        self._buffer: torch.Tensor | None = None
        self._handle: Handle | None = None  # of the transfer under way
        self._num_users = 0
        self._is_changed = False
        self.is_being_written = False
        self.refresh(values)

    # ------------------------------------------------------------ awake, asleep

    @property
    def is_awake(self) -> bool:
        """Whether somebody uses the values in their buffer."""
        return self._num_users > 0

    @property
    @override
    def waits(self) -> bool:
        return True

    @override
    def begin_wake(self) -> None:
        if self._files.has_free_buffer:
            self._begin_read()

    @override
    def finish_read(self) -> None:
        self._begin_read()
        self._wait()

    @override
    def wake(self) -> torch.Tensor:
        self.finish_read()
        self._num_users += 1
        return self._values_awake()

    @override
    def begin_sleep(self, *, changed: bool) -> None:
        self._num_users -= 1
        self._is_changed = self._is_changed or changed
        if self._num_users:
            return
        if self._is_changed:
            self._is_changed = False
            self._submit(is_write=True)
        else:
            self.sleep()

    @override
    def sleep(self) -> None:
        if self._buffer is not None and not self._num_users:
            self._wait()
            buffer, self._buffer = self._buffer, None
            self._files.release(self, buffer)

    def _begin_read(self) -> None:
        if self._buffer is None:
            self._buffer = self._files.acquire(self)
            self._submit(is_write=False)

    def _submit(self, *, is_write: bool) -> None:
        buffer, store = self._values_awake(), self._files.store
        self.is_being_written = is_write
        try:
            self._handle = (store.submit_write if is_write else store.submit_read)(self._name, buffer)
        except StorageError as error:
            self._fail(error)

    def _wait(self) -> None:
        handle, self._handle = self._handle, None
        if handle is None:
            return
        try:
            handle.wait()
        except StorageError as error:
            self._fail(error)
        self.is_being_written = False

    def _fail(self, error: StorageError) -> None:
        """Nobody may mistake what is in the buffer for values: NaN where the dtype has it."""
        self._files.note(error)
        if not self.is_being_written:
            buffer = self._values_awake()
            buffer.fill_(torch.nan if buffer.is_floating_point() else 0)
        self.is_being_written = False

    def _values_awake(self) -> torch.Tensor:
        assert self._buffer is not None
        return self._buffer

    # ------------------------------------------------------------------- values

    @property
    @override
    def values(self) -> torch.Tensor:
        """A tensor that reads them when they are needed. Not while they are awake: what changes there is not seen."""
        self.sleep()
        return FileTensor(self._files.store, self._name, 0, (self.numel,))

    @contextmanager
    @override
    def editing(self) -> Iterator[torch.Tensor]:
        values = self.wake()
        try:
            yield values
        finally:
            self.begin_sleep(changed=True)
            self.sleep()

    @override
    def refresh(self, master: torch.Tensor) -> None:
        if self._buffer is None:
            self._buffer = self._files.acquire(self)  # nothing to read: all of it is written
        self._wait()
        self._values_awake().copy_(master)
        self._num_users += 1
        self.begin_sleep(changed=True)

    @override
    def part(self, start: int, numel: int) -> torch.Tensor:
        return torch.empty(numel, dtype=self.dtype, device="meta")

    @override
    def all_gather(self, full: torch.Tensor, *, exact: bool) -> Pending:
        own = full.view(self._links.world_size, -1)[self._links.rank]
        own.copy_(self.wake())
        self.begin_sleep(changed=False)  # from here on the values travel out of `full`
        if exact or self._links.unshard is self._links.gather:
            return self._files.messages.all_gather(full, own)
        return self._links.unshard.all_gather(full, own.clone())

    @override
    def forget_copies(self) -> None:
        """There are none."""

    @override
    def copies_nbytes(self) -> int:
        return 0

    @override
    def nbytes(self) -> int:
        return 0

    @override
    def disk_nbytes(self) -> int:
        return self.numel * self.dtype.itemsize
