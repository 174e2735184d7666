"""The transport of ranks that share memory, and the choice of a transport."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial

import torch
from typing_extensions import override

from fullspeed.comm import mismatch
from fullspeed.comm.checked_transport import CheckedTransport
from fullspeed.comm.collectives import Group, get_rank, get_world_size, global_ranks
from fullspeed.comm.pending import Chained, Pending, observed
from fullspeed.comm.shared_memory import SharedArena, can_share, shared_arena
from fullspeed.comm.transport import (
    NativeTransport,
    NullTransport,
    PairwiseTransport,
    Transport,
    emit_whole,
    sum_in_order,
    with_own,
)


class SharedMemoryTransport(Transport):
    """Ranks of one host read each other's buffers where they lie.

    A transfer publishes the place of this rank's buffer; whoever needs a slice of it copies or adds it directly. There
    are no messages: flags in shared memory say what is published and what has been read. Buffers from `empty` are
    shared already, others are copied into shared memory first.

    What must hold: the shard given to `all_gather` keeps its values until every rank is known to have waited for the
    gather (an agreement after it will do); the buffer of a reduction is free again when its `wait` returns.
    """

    _RING = 64  # transfers of one channel that may be under way
    _FIELDS = 3  # published, offset, consumed

    def __init__(self, group: Group, arena: SharedArena) -> None:
        self._arena = arena
        self._rank, self._world_size, self._ranks = get_rank(group), get_world_size(group), global_ranks(group)
        self._peers = [(self._rank + hop) % self._world_size for hop in range(1, self._world_size)]
        self._first_flag = arena.take_flags(self._RING * self._FIELDS)
        self._transfers = itertools.count()

    @override
    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return self._arena.empty(numel, dtype)

    @override
    def all_gather(self, full: torch.Tensor, shard: torch.Tensor) -> Pending:
        finish = emit_whole("all_gather", full, self._ranks)
        slices = with_own(full, shard, self._rank, self._world_size)
        return observed(self._gather(slices, shard), finish)

    @override
    def reduce_scatter(self, full: torch.Tensor, out: torch.Tensor) -> Pending:
        finish = emit_whole("reduce_scatter", full, self._ranks)
        return observed(self._sum_to_owner(full, out), finish)

    @override
    def all_reduce(self, full: torch.Tensor) -> Pending:
        """Sum every slice at its owner, then copy the sums round."""
        finish = emit_whole("all_reduce", full, self._ranks)
        slices = full.view(self._world_size, -1)
        own = slices[self._rank]
        # Drawn now, so that numbers follow the order of calls, not of waits.
        numbers = next(self._transfers), next(self._transfers)
        both = Chained(
            self._sum_to_owner(full, own, numbers[0]), lambda: self._gather(slices, own, numbers[1], is_released=True)
        )
        return observed(both, finish)

    @override
    def all_to_all(self, send: torch.Tensor, receive: torch.Tensor) -> Pending:
        finish = emit_whole("all_to_all", send, self._ranks)
        slices = receive.view(self._world_size, -1)
        number, staged = self._publish(send)
        begin, numel = self._rank * slices.shape[1], slices.shape[1]

        def read() -> None:
            for rank in range(self._world_size):
                slices[rank].copy_(self._published(rank, number, send.numel(), send.dtype)[begin : begin + numel])
            self._raise(number, 2)

        return observed(self._reading(number, read, staged), finish)

    def _gather(
        self, slices: torch.Tensor, shard: torch.Tensor, number: int | None = None, *, is_released: bool = False
    ) -> Pending:
        number, staged = self._publish(shard, number)

        def read() -> None:
            for peer in self._peers:
                slices[peer].copy_(self._published(peer, number, slices.shape[1], slices.dtype))
            self._raise(number, 2)

        # A shard that lies in shared memory is stable; a staged copy, or a slice the caller will overwrite, is not.
        is_released = is_released or staged is not shard
        return self._reading(number, read, staged, is_released=is_released)

    def _sum_to_owner(self, full: torch.Tensor, out: torch.Tensor, number: int | None = None) -> Pending:
        number, staged = self._publish(full, number)
        numel = out.numel()
        begin = self._rank * numel

        def add() -> None:
            parts = [
                staged[begin : begin + numel]
                if rank == self._rank
                else self._published(rank, number, full.numel(), full.dtype)[begin : begin + numel]
                for rank in range(self._world_size)
            ]
            sum_in_order(parts, out)
            self._raise(number, 2)

        return self._reading(number, add, staged)

    def _flag(self, number: int, field: int) -> int:
        return self._first_flag + (number % self._RING) * self._FIELDS + field

    def _raise(self, number: int, field: int) -> None:
        self._arena.flags[self._rank][self._flag(number, field)] = number + 1

    def _publish(self, buffer: torch.Tensor, number: int | None = None) -> tuple[int, torch.Tensor]:
        """Tell the peers where `buffer` lies. Returns the transfer's number and the buffer they will read."""
        number = next(self._transfers) if number is None else number
        offset = self._arena.offset_of(buffer)
        if offset is None:
            shared = self._arena.empty(buffer.numel(), buffer.dtype)
            buffer = shared.copy_(buffer)
            offset = self._arena.offset_of(buffer)
        assert offset is not None
        if number >= self._RING:
            self._wait_consumed(number - self._RING)
        self._arena.flags[self._rank][self._flag(number, 1)] = offset
        self._raise(number, 0)
        return number, buffer

    def _published(self, peer: int, number: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        self._arena.wait_for(peer, self._flag(number, 0), number + 1)
        offset = int(self._arena.flags[peer][self._flag(number, 1)])
        return self._arena.view(peer, offset, numel, dtype)

    def _reading(
        self, number: int, read: Callable[[], None], staged: torch.Tensor, *, is_released: bool = True
    ) -> _Reading:
        release = (partial(self._wait_consumed, number), partial(self._have_raised, number, 2)) if is_released else None
        return _Reading(read, partial(self._have_raised, number, 0), release, staged)

    def _have_raised(self, number: int, field: int) -> bool:
        flag = self._flag(number, field)
        return all(self._arena.flags[peer][flag] > number for peer in self._peers)

    def _wait_consumed(self, number: int) -> None:
        for peer in self._peers:
            self._arena.wait_for(peer, self._flag(number, 2), number + 1)


class _Reading(Pending):
    """Peers' buffers to read, then, where the own buffer is to be reused, peers to have read it."""

    def __init__(
        self,
        read: Callable[[], None],
        is_readable: Callable[[], bool],
        release: tuple[Callable[[], None], Callable[[], bool]] | None,
        keep_alive: torch.Tensor,
    ) -> None:
        self._read: Callable[[], None] | None = read
        self._is_readable = is_readable  # without waiting
        self._release = release  # (wait for it, ask for it)
        self._keep_alive: torch.Tensor | None = keep_alive

    @override
    def advance(self) -> bool:
        if self._read is not None:
            read, self._read = self._read, None
            read()
        return True

    @override
    def poll(self) -> bool:
        if self._read is not None and self._is_readable():
            self.advance()
        return self._read is None and (self._release is None or self._release[1]())

    @override
    def wait(self) -> None:
        self.advance()
        if self._release is not None:
            wait_released, _ = self._release
            wait_released()
            self._release = None
        self._keep_alive = None


def make_transport(group: Group, device: torch.device, *, may_share: bool = True) -> Transport:
    """The measured best transport for this group, in debug mode one that compares first. Collective.

    None for one rank; the backend's own except on gloo; there shared memory on one host, pairwise exchange elsewhere
    and where `may_share` is false.
    """
    if get_world_size(group) == 1:
        return NullTransport()
    fastest = _fastest_transport(group, device, may_share=may_share)
    return CheckedTransport(fastest, group) if mismatch.is_on() else fastest


def _fastest_transport(group: Group, device: torch.device, *, may_share: bool) -> Transport:
    if group._get_backend(device).name() != "gloo":
        return NativeTransport(group)
    if may_share and can_share(group, device):
        return SharedMemoryTransport(group, shared_arena(group))
    return PairwiseTransport(group)
