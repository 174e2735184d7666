"""How flat shards travel: one interface, one object per backend, chosen by measurement.

    all_gather(full, shard)      every rank's shard -> full            (before a group computes, after a step)
    reduce_scatter(full)         sum of every rank's full -> shard     (gradients of a sharded state)
    all_reduce(full)             sum of every rank's full -> full      (gradients of whole states)
    all_to_all(send, receive)    slice j of send -> rank j             (parts of a sum that transports make themselves)

All are asynchronous: they return a handle whose `wait` finishes the work. Handles must be waited for, and both
ranks of a pair must start the same transfers of one channel in the same order; transfers of different channels may
interleave in any order.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from typing_extensions import override

from fullspeed.comm.collectives import Group, get_rank, get_world_size, global_ranks
from fullspeed.comm.observe import Finish, emit
from fullspeed.comm.pending import Chained, Done, Finishing, Pending, Then, observed


class Buffers(Protocol):
    """Where buffers come from that are to travel."""

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """An uninitialised 1-D buffer that travels best; any other buffer may be passed as well."""
        return torch.empty(numel, dtype=dtype, device=device)


class Gather(Buffers, Protocol):
    """Makes flat buffers whole. `full` is (world_size * n,), `shard` is (n,), both contiguous."""

    def all_gather(self, full: torch.Tensor, shard: torch.Tensor) -> Pending:
        """Fill `full` with all shards. `shard` may be this rank's slice of `full` itself.

        A `shard` from `empty` keeps its values until every rank is known to have waited; any other is free after
        `wait`. Ranks may wait at different times: no rank waits for a peer that has not.
        """


class Reduce(Buffers, Protocol):
    """Sums flat buffers over ranks. `full` is (world_size * n,), `out` is (n,), both contiguous."""

    def reduce_scatter(self, full: torch.Tensor, out: torch.Tensor) -> Pending:
        """Sum `full` over ranks and put this rank's slice into `out`, whose dtype may be wider; may overwrite `full`.

        `out` may be this rank's slice of `full` itself.
        """

    def all_reduce(self, full: torch.Tensor) -> Pending:
        """Sum `full` over ranks in place."""

    def of_one_buffer(self) -> Reduce:
        """The same, for a buffer that is reduced again and again: may keep something from one time to the next."""
        return self

    def nbytes(self) -> int:
        """Bytes kept from one time to the next."""
        return 0


class Exchange(Buffers, Protocol):
    """Sends every rank its own slice. `send` and `receive` are contiguous, (world_size * m,), of one dtype."""

    def all_to_all(self, send: torch.Tensor, receive: torch.Tensor) -> Pending:
        """Slice j of `send` becomes slice i of rank j's `receive`, i being this rank. One phase."""


class Transport(Gather, Reduce, Exchange, Protocol):
    """Moves flat buffers over one group of ranks."""


class NullTransport(Transport):
    """A group of one rank: nothing travels, shards are the whole."""

    @override
    def all_gather(self, full: torch.Tensor, shard: torch.Tensor) -> Pending:
        if full.data_ptr() != shard.data_ptr():
            full.copy_(shard)
        return Done()

    @override
    def reduce_scatter(self, full: torch.Tensor, out: torch.Tensor) -> Pending:
        if full.data_ptr() != out.data_ptr():
            out.copy_(full)
        return Done()

    @override
    def all_reduce(self, full: torch.Tensor) -> Pending:
        return Done()

    @override
    def all_to_all(self, send: torch.Tensor, receive: torch.Tensor) -> Pending:
        receive.copy_(send)
        return Done()


class NativeTransport(Transport):
    """The backend's own collectives: right for NCCL and its kin, which keep reductions on the device."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._ranks = global_ranks(group)
        # torch 2.13 renames these two and deprecates the old names; 2.11 knows only the old ones.
        self._gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        self._reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

    @override
    def all_gather(self, full: torch.Tensor, shard: torch.Tensor) -> Pending:
        finish = emit_whole("all_gather", full, self._ranks)
        return observed(Finishing([self._gather(full, shard, group=self._group, async_op=True)]), finish)

    @override
    def reduce_scatter(self, full: torch.Tensor, out: torch.Tensor) -> Pending:
        finish = emit_whole("reduce_scatter", full, self._ranks)
        if out.dtype == full.dtype:
            work = self._reduce_scatter(out, full, group=self._group, async_op=True)
            return observed(Finishing([work]), finish)
        narrow = torch.empty(out.numel(), dtype=full.dtype, device=full.device)
        work = self._reduce_scatter(narrow, full, group=self._group, async_op=True)
        return observed(Finishing([work], lambda: _copy(out, narrow)), finish)

    @override
    def all_reduce(self, full: torch.Tensor) -> Pending:
        finish = emit_whole("all_reduce", full, self._ranks)
        return observed(Finishing([dist.all_reduce(full, group=self._group, async_op=True)]), finish)

    @override
    def all_to_all(self, send: torch.Tensor, receive: torch.Tensor) -> Pending:
        finish = emit_whole("all_to_all", send, self._ranks)
        return observed(Finishing([dist.all_to_all_single(receive, send, group=self._group, async_op=True)]), finish)


class PairwiseTransport(Transport):
    """Point-to-point exchange of exactly the bytes a peer needs; sums are made locally, in fp32 at least.

    Measured on gloo (2 ranks, 64 MB fp32, CPU time per rank): reduce-scatter by exchange and local sum 22 ms,
    gloo's all-to-all and sum 30 ms, its all-reduce 39 ms; gather by exchange at a fifth of its all-gather's time.
    Sends are matched by tag, so transfers of different channels never wait for one another, and a 16-bit sum is
    rounded once instead of once per hop.

    Two-rank cost per transfer: each rank sends and receives `n` elements, `n` being the shard.
    """

    # Tags in flight at once on one channel stay far below this; a wrapped tag can only meet a finished
    # transfer.
    _TAGS_PER_CHANNEL = 1 << 16
    _channels = itertools.count(1)

    def __init__(self, group: Group) -> None:
        self._group = group
        self._rank, self._world_size = get_rank(group), get_world_size(group)
        self._peers = [
            (self._rank + hop) % self._world_size for hop in range(1, self._world_size)
        ]  # nearest first: no two ranks start by sending to the same peer
        self._ranks = global_ranks(group)
        # Every rank makes its transports in the same order, so channel numbers agree without a message.
        self._first_tag = next(self._channels) * self._TAGS_PER_CHANNEL
        self._transfers = itertools.count()

    @override
    def all_gather(self, full: torch.Tensor, shard: torch.Tensor) -> Pending:
        finish = emit_whole("all_gather", full, self._ranks)
        slices = with_own(full, shard, self._rank, self._world_size)
        own = slices[self._rank]
        return observed(Finishing(self._exchange(lambda peer: own, lambda peer: slices[peer])), finish)

    @override
    def reduce_scatter(self, full: torch.Tensor, out: torch.Tensor) -> Pending:
        finish = emit_whole("reduce_scatter", full, self._ranks)
        return observed(self._sum_to_owner(full, out), finish)

    @override
    def all_reduce(self, full: torch.Tensor) -> Pending:
        """Sum every slice at its owner, then hand the sums round."""
        finish = emit_whole("all_reduce", full, self._ranks)
        slices = full.view(self._world_size, -1)
        own = slices[self._rank]
        tag = self._next_tag()  # drawn now, so that tags follow the order of calls, not of waits

        def hand_round() -> Pending:
            return Finishing(self._exchange(lambda peer: own, lambda peer: slices[peer], tag))

        return observed(Chained(self._sum_to_owner(full, own), hand_round), finish)

    @override
    def all_to_all(self, send: torch.Tensor, receive: torch.Tensor) -> Pending:
        finish = emit_whole("all_to_all", send, self._ranks)
        to_send, to_receive = send.view(self._world_size, -1), receive.view(self._world_size, -1)
        to_receive[self._rank].copy_(to_send[self._rank])
        works = self._exchange(lambda peer: to_send[peer], lambda peer: to_receive[peer])
        return observed(Finishing(works), finish)

    def _sum_to_owner(self, full: torch.Tensor, out: torch.Tensor) -> Pending:
        slices = full.view(self._world_size, -1)
        received = torch.empty((len(self._peers), slices.shape[1]), dtype=full.dtype, device=full.device)
        row = {peer: index for index, peer in enumerate(self._peers)}
        works = self._exchange(lambda peer: slices[peer], lambda peer: received[row[peer]])
        return Finishing(works, lambda: self._sum(slices[self._rank], received, out))

    def _sum(self, own: torch.Tensor, received: torch.Tensor, out: torch.Tensor) -> None:
        """Ranks are added in rank order, so every world size is repeatable."""
        row = {peer: index for index, peer in enumerate(self._peers)}
        parts = [own if rank == self._rank else received[row[rank]] for rank in range(self._world_size)]
        sum_in_order(parts, out)

    def _next_tag(self) -> int:
        return self._first_tag + next(self._transfers) % self._TAGS_PER_CHANNEL

    def _exchange(
        self,
        to_send: Callable[[int], torch.Tensor],
        to_receive: Callable[[int], torch.Tensor],
        tag: int | None = None,
    ) -> list[dist.Work]:
        tag = self._next_tag() if tag is None else tag
        works = []
        for peer in self._peers:
            work = dist.irecv(to_receive(peer), src=self._ranks[peer], group=self._group, tag=tag)
            assert work is not None
            works.append(work)
        for peer in self._peers:
            work = dist.isend(to_send(peer), dst=self._ranks[peer], group=self._group, tag=tag)
            assert work is not None
            works.append(work)
        return works


class AllReduceTransport(Reduce):
    """A transport whose reduce-scatter is an all-reduce of the whole buffer (`"reduce_scatter": false`)."""

    def __init__(self, inner: Reduce, rank: int, world_size: int) -> None:
        self._inner, self._rank, self._world_size = inner, rank, world_size

    @override
    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return self._inner.empty(numel, dtype, device)

    @override
    def reduce_scatter(self, full: torch.Tensor, out: torch.Tensor) -> Pending:
        pending = self._inner.all_reduce(full)
        own = full.view(self._world_size, -1)[self._rank]
        return Then(pending, lambda: _copy(out, own))

    @override
    def all_reduce(self, full: torch.Tensor) -> Pending:
        return self._inner.all_reduce(full)


def emit_whole(op: str, full: torch.Tensor, ranks: tuple[int, ...]) -> Finish | None:
    """Tell the observers of one transfer of a whole buffer. Returns what `emit` returns."""
    return emit(op, full.numel(), full.itemsize, str(full.dtype), len(ranks), ranks)


def _copy(out: torch.Tensor, source: torch.Tensor) -> None:
    if out.data_ptr() != source.data_ptr():
        out.copy_(source)


def with_own(full: torch.Tensor, shard: torch.Tensor, rank: int, world_size: int) -> torch.Tensor:
    """`full` as (world_size, n) with this rank's shard in its place."""
    slices = full.view(world_size, -1)
    _copy(slices[rank], shard)
    return slices


def sum_in_order(parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    """Out = sum of `parts` in their order, in fp32 at least, rounded once. `out` may be one of the parts."""
    if len(parts) == 2 and out.dtype == parts[0].dtype == torch.float32:
        torch.add(parts[0], parts[1], out=out)
        return
    total = parts[0].to(torch.promote_types(parts[0].dtype, torch.float32), copy=True)
    for part in parts[1:]:
        total.add_(part)
    out.copy_(total)
