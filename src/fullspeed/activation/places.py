"""Where the inputs of a checkpointed call wait for its recompute: on the device, in one buffer, on the host, in shards.

A place takes a tensor and gives a `Ticket`; the ticket fetches the values, and letting go of it frees the place.
Places compose: `Sharded` cuts a tensor and puts its shard into another place.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple, Protocol

import torch

from fullspeed.activation.host_pool import HostPool
from fullspeed.base.errors import UsageError
from fullspeed.comm import Group, all_gather, get_rank, get_world_size


class Ticket:
    """A tensor in its place."""

    __slots__ = ("_fetch", "_free")

    def __init__(self, fetch: Callable[[], torch.Tensor], free: Callable[[], None]) -> None:
        self._fetch, self._free = fetch, free

    def fetch(self) -> torch.Tensor:
        """The values, in the shape and on the device they came from; may be called again."""
        return self._fetch()

    def __del__(self) -> None:
        """Free the place."""
        self._free()


class HeldBytes(NamedTuple):
    """What a place holds now."""

    device: int
    host: int


class Place(Protocol):
    """Keeps inputs of checkpointed calls."""

    def put(self, tensor: torch.Tensor, position: int) -> Ticket:
        """Take a copy of `tensor`, the call's input number `position`."""

    def held_bytes(self) -> HeldBytes:
        """Bytes of the tensors that wait here, on this rank."""


class OnDevice:
    """Copies where the tensors came from."""

    def __init__(self) -> None:
        self._bytes = 0

    def put(self, tensor: torch.Tensor, position: int) -> Ticket:
        """Copy, so that the memory around a shard can be freed."""
        copy = tensor.clone()
        self._bytes += copy.nbytes
        return Ticket(lambda: copy, partial(self._forget, copy.nbytes))

    def held_bytes(self) -> HeldBytes:
        """All on the device."""
        return HeldBytes(self._bytes, 0)

    def _forget(self, nbytes: int) -> None:
        self._bytes -= nbytes


class OnHost:
    """Copies in buffers of a host pool; on a CPU-only machine, too, where that frees nothing."""

    def __init__(self, pool: HostPool) -> None:
        self._pool = pool

    def put(self, tensor: torch.Tensor, position: int) -> Ticket:
        """Queue the copy on the current stream, as `fetch` will be: so the one sees what the other wrote."""
        buffer = self._pool.take(tensor.nbytes)
        values = buffer.view(tensor.dtype).view(tensor.shape)
        values.copy_(tensor, non_blocking=True)
        # A new tensor even on a CPU: the buffer is written again while what was fetched may live on.
        fetch = partial(torch.Tensor.to, values, tensor.device, non_blocking=True, copy=True)
        return Ticket(fetch, partial(self._pool.give_back, buffer))

    def held_bytes(self) -> HeldBytes:
        """All on the host."""
        return HeldBytes(0, self._pool.used_bytes)


class Contiguous:
    """One buffer for all inputs of a kind, allocated at first use and used again in every iteration.

    It has a row for each of `num_checkpoints` calls, so inputs that come and go do not fragment memory.
    """

    def __init__(self, num_checkpoints: int, *, on_host: bool, pin: bool) -> None:
        self._num_checkpoints = num_checkpoints
        self._on_host, self._pin = on_host, pin
        self._buffers: dict[tuple[int, int, torch.dtype, torch.device], _Rows] = {}
        self._bytes = 0

    def put(self, tensor: torch.Tensor, position: int) -> Ticket:
        """Copy into a free row. Raises UsageError when more calls wait for their backward than there are rows."""
        key = (position, tensor.numel(), tensor.dtype, tensor.device)
        if key not in self._buffers:
            # Inputs of another size than before: sequences of a new length. The old length's buffers may go.
            self._buffers = {other: rows for other, rows in self._buffers.items() if rows.num_used}
            self._buffers[key] = _Rows(self._new_buffer(tensor))
        rows = self._buffers[key]
        index = rows.take()
        if index is None:
            raise UsageError(
                f"activation_checkpointing.number_checkpoints is {self._num_checkpoints}: that many checkpointed calls "
                f"wait for their backward already, and another saves an input of shape {tuple(tensor.shape)}; raise it "
                f"to the number of checkpointed calls between a forward and its backward"
            )
        row = rows.buffer[index]
        row.copy_(tensor.reshape(-1), non_blocking=True)
        self._bytes += tensor.nbytes
        fetch = partial(_fetch_row, row.view(tensor.shape), tensor.device)
        return Ticket(fetch, partial(self._give_back, rows, index, tensor.nbytes))

    def held_bytes(self) -> HeldBytes:
        """The rows in use."""
        return HeldBytes(0, self._bytes) if self._on_host else HeldBytes(self._bytes, 0)

    def allocated_bytes(self) -> int:
        """All rows, in use or not."""
        return sum(rows.buffer.nbytes for rows in self._buffers.values())

    def _new_buffer(self, tensor: torch.Tensor) -> torch.Tensor:
        shape = (self._num_checkpoints, tensor.numel())
        if self._on_host:
            return torch.empty(shape, dtype=tensor.dtype, pin_memory=self._pin)
        return torch.empty(shape, dtype=tensor.dtype, device=tensor.device)

    def _give_back(self, rows: _Rows, index: int, nbytes: int) -> None:
        rows.free.append(index)
        self._bytes -= nbytes


class _Rows:
    """A buffer (num_checkpoints, numel) and its free rows."""

    def __init__(self, buffer: torch.Tensor) -> None:
        self.buffer = buffer
        self.free = list(reversed(range(len(buffer))))

    @property
    def num_used(self) -> int:
        return len(self.buffer) - len(self.free)

    def take(self) -> int | None:
        """The index of a free row, None when there is none."""
        return self.free.pop() if self.free else None


def _fetch_row(row: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The row itself where it lies on the device: it is free again only when its backward is over."""
    return row.to(device, non_blocking=True)


class Sharded:
    """A shard of each tensor, in another place; the group's ranks gather it for the recompute.

    The ranks must save equal tensors, as those of tensor parallelism do between their layers, and recompute in one
    order. Communication: one all-gather for each fetch.
    """

    def __init__(self, group: Group | None, place: Place) -> None:
        self._group, self._place = group, place
        self._rank, self._world_size = get_rank(group), get_world_size(group)

    def put(self, tensor: torch.Tensor, position: int) -> Ticket:
        """Keep this rank's shard, (n,) with n the padded number of elements over the ranks."""
        numel = -(-tensor.numel() // self._world_size)
        flat = tensor.reshape(-1)
        shard = flat[self._rank * numel : (self._rank + 1) * numel]
        if shard.numel() < numel:
            shard = torch.cat([shard, shard.new_zeros(numel - shard.numel())])
        inner = self._place.put(shard, position)
        return Ticket(partial(self._gather, inner, tensor.shape), lambda: None)

    def held_bytes(self) -> HeldBytes:
        """Of the shards."""
        return self._place.held_bytes()

    def _gather(self, inner: Ticket, shape: torch.Size) -> torch.Tensor:
        shard = inner.fetch()
        full = shard.new_empty(self._world_size * shard.numel())
        return all_gather(full, shard, self._group)[: shape.numel()].view(shape)
