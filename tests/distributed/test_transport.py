"""Every transport moves and sums flat buffers as its interface says, on any number of ranks and in any dtype."""

from __future__ import annotations

import gc
import subprocess

import pytest
import torch

from fullspeed.base.errors import CommError
from fullspeed.comm import (
    Agreement,
    AllReduceTransport,
    CommRecorder,
    Transport,
    barrier,
    get_world_group,
    make_transport,
    observing,
)
from fullspeed.comm.shared_memory import shared_arena
from fullspeed.comm.shared_transport import SharedMemoryTransport
from fullspeed.comm.transport import NativeTransport, NullTransport, PairwiseTransport
from tests.ranks import ranks

NUMEL = 40  # per shard
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def rows(world_size: int, dtype: torch.dtype) -> torch.Tensor:
    """(world, world * NUMEL): the whole buffer of every rank."""
    generator = torch.Generator().manual_seed(3)
    return torch.randn(world_size, world_size * NUMEL, generator=generator).to(dtype)


def transports(world_size: int) -> list[Transport]:
    chosen = make_transport(get_world_group(), torch.device("cpu"))
    assert isinstance(chosen, NullTransport if world_size == 1 else SharedMemoryTransport)
    native = [] if world_size == 1 else [NativeTransport(get_world_group()), PairwiseTransport(get_world_group())]
    return [chosen, *native]


@ranks(1, 2, 3, 4)
def test_gather(rank: int, world_size: int) -> None:
    for transport in transports(world_size):
        for dtype in FLOATS:
            whole = rows(world_size, dtype)
            own = slice(rank * NUMEL, (rank + 1) * NUMEL)
            full = torch.zeros(world_size * NUMEL, dtype=dtype)
            shard = whole[0][own].clone()
            transport.all_gather(full, shard).wait()
            assert torch.equal(full, whole[0])
            in_place = torch.zeros_like(full)
            in_place[own] = shard
            transport.all_gather(in_place, in_place[own]).wait()
            assert torch.equal(in_place, whole[0])


@ranks(1, 2, 3, 4)
def test_reduce(rank: int, world_size: int) -> None:
    made = transports(world_size)
    for transport in (*made, AllReduceTransport(made[0], rank, world_size)):
        for dtype in FLOATS:
            whole = rows(world_size, dtype)
            exact = whole.double().sum(0)
            own = slice(rank * NUMEL, (rank + 1) * NUMEL)
            # One rounding where we sum ourselves, one a hop where the backend does.
            tolerance = 4 * torch.finfo(dtype).eps * world_size
            for out_dtype in (dtype, torch.promote_types(dtype, torch.float32)):
                out = torch.zeros(NUMEL, dtype=out_dtype)
                transport.reduce_scatter(whole[rank].clone(), out).wait()
                assert torch.allclose(out.double(), exact[own], rtol=tolerance, atol=tolerance)
            into_itself = whole[rank].clone()
            transport.reduce_scatter(into_itself, into_itself[own]).wait()
            assert torch.allclose(into_itself[own].double(), exact[own], rtol=tolerance, atol=tolerance)

            summed = whole[rank].clone()
            pending = transport.all_reduce(summed)
            pending.advance()
            pending.wait()
            assert torch.allclose(summed.double(), exact, rtol=tolerance, atol=tolerance)


@ranks(4)
def test_sixteen_bit_sums_are_rounded_once(rank: int, world_size: int) -> None:
    whole = rows(world_size, torch.bfloat16)
    out = torch.empty(NUMEL, dtype=torch.bfloat16)
    make_transport(get_world_group(), torch.device("cpu")).reduce_scatter(whole[rank].clone(), out).wait()
    own = slice(rank * NUMEL, (rank + 1) * NUMEL)
    assert torch.equal(out, whole.float().sum(0).bfloat16()[own])


@ranks(2, 4)
def test_transfers_of_two_channels_may_interleave_differently(rank: int, world_size: int) -> None:
    device = torch.device("cpu")
    first, second = make_transport(get_world_group(), device), make_transport(get_world_group(), device)
    shards = torch.arange(float(NUMEL)) + 100 * rank
    expected = torch.cat([torch.arange(float(NUMEL)) + 100 * other for other in range(world_size)])
    a, b = torch.zeros(world_size * NUMEL), torch.zeros(world_size * NUMEL)
    order = [(first, a, 1.0), (second, b, 2.0)]
    pending = []
    for transport, full, factor in order if rank % 2 else reversed(order):
        shard = transport.empty(NUMEL, torch.float32, device).copy_(shards * factor)
        pending.append(transport.all_gather(full, shard))
    for transfer in reversed(pending):
        transfer.wait()
    assert torch.equal(a, expected)
    assert torch.equal(b, expected * 2)


@ranks(2)
def test_many_in_flight_and_every_event_seen(rank: int, world_size: int) -> None:
    transport = make_transport(get_world_group(), torch.device("cpu"))
    recorder = CommRecorder()
    fulls = [torch.zeros(2 * NUMEL) for _ in range(50)]
    with observing(recorder):
        pending = [
            transport.all_gather(full, torch.full((NUMEL,), float(index + rank))) for index, full in enumerate(fulls)
        ]
        for transfer in pending:
            transfer.wait()
    for index, full in enumerate(fulls):
        assert full[0] == index
        assert full[-1] == index + 1
    assert recorder.counts() == {"all_gather": 50}
    assert recorder.nbytes() == {"all_gather": 50 * 2 * NUMEL * 4}


@ranks(2)
def test_more_sums_than_a_channel_holds_advance_before_any_is_waited_for(rank: int, world_size: int) -> None:
    """As in the backward of a deep model: a sum that is polled makes way, or the channel would be full for ever."""
    transport = make_transport(get_world_group(), torch.device("cpu"))
    buffers = [torch.full((2 * NUMEL,), float(index + rank)) for index in range(80)]
    started, advanced = [], []
    for buffer in buffers:
        started.append(transport.all_reduce(buffer))
        if len(started) > 16:
            advanced.append(started.pop(0))
            advanced[-1].advance()
        advanced = [transfer for transfer in advanced if not transfer.poll()]
    for transfer in (*advanced, *started):
        transfer.advance()
    for transfer in (*advanced, *started):
        transfer.wait()
    for index, buffer in enumerate(buffers):
        assert buffer.eq(2 * index + 1).all()


@ranks(2)
def test_shared_buffers_are_seen_by_peers_and_used_again(rank: int, world_size: int) -> None:
    arena = shared_arena(get_world_group())
    assert shared_arena(get_world_group()) is arena
    buffer = arena.empty(1000, torch.float32).fill_(rank + 1)
    offset = arena.offset_of(buffer)
    assert offset is not None
    assert arena.offset_of(buffer[10:]) == offset + 40
    assert arena.offset_of(torch.ones(3)) is None
    barrier()
    assert arena.view(1 - rank, offset, 1000, torch.float32).eq(2 - rank).all()
    barrier()
    part = buffer[5:]
    del buffer
    gc.collect()
    assert arena.offset_of(arena.empty(1000, torch.float32)) != offset, "a view keeps its buffer"
    del part
    gc.collect()
    assert arena.offset_of(arena.empty(1000, torch.float32)) in (offset, offset + 4096)


@ranks(2)
def test_waiting_for_a_dead_rank_ends_soon(rank: int, world_size: int) -> None:
    arena = shared_arena(get_world_group())
    gone = subprocess.Popen(["true"])
    gone.wait()
    arena.pids[1 - rank] = gone.pid
    with pytest.raises(CommError, match=rf"rank {1 - rank} .* died"):
        arena.wait_for(1 - rank, arena.take_flags(1), 1)


@ranks(3)
def test_posts_are_read_late_and_in_order(rank: int, world_size: int) -> None:
    agreement = Agreement(get_world_group())
    for turn in range(20):
        posted = agreement.post([turn, rank])
        if rank == turn % 3:
            sum(range(10_000))
        assert posted.rows() == [[turn, other] for other in range(world_size)]
        assert posted.poll()
    assert agreement.exchange(list(range(10)))[2] == list(range(10)), "long vectors take another way"
    assert agreement.maximum(torch.tensor([rank, -rank])).tolist() == [2, 0]
