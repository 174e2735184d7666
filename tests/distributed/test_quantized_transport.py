"""Quantised gathers and reductions: near the exact values, equal on all ranks, and as small as said."""

from __future__ import annotations

import pytest
import torch

from fullspeed.comm import (
    CommRecorder,
    Feedback,
    Hop,
    QuantizedGather,
    QuantizedReduce,
    Transport,
    all_gather_object,
    column_of,
    get_world_group,
    make_transport,
    observing,
    row_of,
)
from fullspeed.comm.shared_transport import SharedMemoryTransport
from fullspeed.comm.transport import NativeTransport, NullTransport, PairwiseTransport
from fullspeed.kernels.format import BlockFormat
from tests.ranks import ranks

CPU = torch.device("cpu")
NUMELS = (1, 15, 16, 50, 256, 1000)  # per shard: neither whole blocks, nor pairs, nor multiples of 8 (C15)


def rows(world_size: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """(world, world * numel): the whole buffer of every rank."""
    generator = torch.Generator().manual_seed(numel)
    return torch.randn(world_size, world_size * numel, generator=generator).to(dtype)


def transports(group) -> list[Transport]:
    return [make_transport(group, CPU), PairwiseTransport(group), NativeTransport(group)]


@ranks(1, 2, 3)
def test_all_to_all(rank, world_size):
    group = get_world_group()
    kinds = [NullTransport()] if world_size == 1 else transports(group)
    assert world_size == 1 or isinstance(kinds[0], SharedMemoryTransport)
    for transport in kinds:
        for is_shared in (True, False):
            send = transport.empty(4 * world_size, torch.float32, CPU) if is_shared else torch.empty(4 * world_size)
            send.copy_(torch.arange(4.0 * world_size) + 100 * rank)
            receive = torch.zeros(4 * world_size)
            recorder = CommRecorder()
            with observing(recorder):
                transport.all_to_all(send, receive).wait()
            send.fill_(-1)  # its values were taken
            expected = [torch.arange(4.0) + 4 * rank + 100 * peer for peer in range(world_size)]
            assert torch.equal(receive, torch.cat(expected))
            if world_size > 1:
                (event,) = recorder.events
                assert event[:3] == ("all_to_all", 4 * world_size, 16 * world_size)
                assert event.ranks == tuple(range(world_size))


@pytest.mark.parametrize("bits", [8, 4])
@ranks(2, 4)
def test_gathered_values_are_near_and_equal_on_all_ranks(rank, world_size, bits):
    form = BlockFormat(bits, 64)
    for inner in transports(get_world_group()):
        gather = QuantizedGather(inner, world_size, form)
        for numel in NUMELS:
            for dtype in (torch.float32, torch.bfloat16):
                whole = rows(world_size, numel, dtype)[0]
                shard = whole[rank * numel : (rank + 1) * numel].clone()
                full = torch.empty_like(whole)
                recorder = CommRecorder()
                with observing(recorder):
                    gather.all_gather(full, shard).wait()
                step = whole.float().abs().max() / form.largest_code
                rounding = whole.float().abs().max() * torch.finfo(dtype).eps
                assert (full.float() - whole.float()).abs().max() <= step / 2 * 1.001 + rounding
                assert numel < 16 or dtype != torch.float32 or not torch.equal(full, whole), "nothing was quantised"
                assert len({row.numpy().tobytes() for row in all_gather_object(full.float())}) == 1
                assert recorder.counts() == {"all_gather": 1}
                assert recorder.nbytes() == {"all_gather": world_size * form.nbytes(numel)}


@ranks(2)
def test_what_cannot_be_quantised_travels_as_it_is(rank, world_size):
    inner = make_transport(get_world_group(), CPU)
    form = BlockFormat(8, 64)
    gather = QuantizedGather(inner, world_size, form)
    reduce = QuantizedReduce(inner, [Hop(make_transport(get_world_group(), CPU), world_size, form)])
    for dtype in (torch.float64, torch.int32):
        full = torch.empty(2 * 33, dtype=dtype)
        gather.all_gather(full, torch.full((33,), 12345 + rank, dtype=dtype)).wait()
        assert full.tolist() == [12345] * 33 + [12346] * 33
        out = torch.empty(33, dtype=dtype)
        reduce.reduce_scatter(torch.full((66,), 12345 + rank, dtype=dtype), out).wait()
        assert out.tolist() == [2 * 12345 + 1] * 33
    whole = torch.full((66,), 0.1)
    reduce.all_reduce(whole).wait()
    assert torch.equal(whole, torch.full((66,), 0.2))


@ranks(2)
def test_a_rank_need_not_wait_for_peers_to_read(rank, world_size):
    """One rank finishes its gathers, 40 of them, before the other has begun to wait for the first."""
    gather = QuantizedGather(make_transport(get_world_group(), CPU), world_size, BlockFormat(8, 64))
    fulls = [torch.zeros(2 * 100) for _ in range(40)]
    pending = []
    for index, full in enumerate(fulls):
        pending.append(gather.all_gather(full, torch.full((100,), float(1 + index + 50 * rank))))
        if rank == 0:
            pending[-1].wait()
            assert pending[-1].poll()
    for transfer in reversed(pending):
        transfer.wait()
    for index, full in enumerate(fulls):
        assert torch.allclose(full[:100], torch.tensor(float(1 + index)))
        assert torch.allclose(full[100:], torch.tensor(float(51 + index)))


def hops_of(world_size: int, inside: int, inner_form: BlockFormat, outer_form: BlockFormat, kind: str) -> list[Hop]:
    make = {"shared": lambda group: make_transport(group, CPU), "pairwise": PairwiseTransport}[kind]
    hops = []
    if inside > 1:
        hops.append(Hop(make(row_of(get_world_group(), inside)), inside, inner_form))
    if inside < world_size:
        hops.append(Hop(make(column_of(get_world_group(), inside)), world_size // inside, outer_form))
    return hops


@pytest.mark.parametrize(("inner_bits", "outer_bits"), [(4, 4), (8, 4), (8, 8)])
@ranks(2, 4)
def test_reduced_values_are_near(rank, world_size, inner_bits, outer_bits):
    """Two hops, or either alone; both transports; the parts of a sum are quantised once, the partial sums once."""
    forms = BlockFormat(inner_bits, 64), BlockFormat(outer_bits, 64)
    for inside in {1, 2, world_size}:
        for kind in ("shared", "pairwise"):
            hops = hops_of(world_size, inside, *forms, kind)
            assert len(hops) == (2 if 1 < inside < world_size else 1)
            reduce = QuantizedReduce(make_transport(get_world_group(), CPU), hops)
            for numel in NUMELS:
                for dtype, out_dtype in ((torch.float32, torch.float32), (torch.bfloat16, torch.float32)):
                    whole = rows(world_size, numel, dtype)
                    exact = whole.double().sum(0)[rank * numel : (rank + 1) * numel]
                    out = torch.empty(numel, dtype=out_dtype)
                    reduce.reduce_scatter(whole[rank].clone(), out).wait()
                    largest = whole.float().abs().max().item()
                    bound = sum(_bound(hop, number, world_size, largest) for number, hop in enumerate(hops))
                    error = (out.double() - exact).abs().max().item()
                    assert error <= bound * 1.01, (inside, kind, numel)
                    assert numel < 16 or error > bound / 1000, "nothing was quantised"


def _bound(hop: Hop, number: int, world_size: int, largest: float) -> float:
    """How far a hop can lead away: half a step for each of all ranks' values, or for each of the sums it adds."""
    if number == 0:
        return world_size * largest / hop.form.largest_code / 2
    inside = world_size // hop.world_size
    return hop.world_size * (inside * largest * (1 + 1 / 7)) / hop.form.largest_code / 2


@ranks(4)
def test_sums_of_whole_codes_are_exact_and_in_their_places(rank, world_size):
    """Multiples of the step survive both hops: any slice that went astray would show."""
    hops = hops_of(4, 2, BlockFormat(8, 16), BlockFormat(8, 16), "shared")
    reduce = QuantizedReduce(make_transport(get_world_group(), CPU), hops)
    whole = torch.arange(4 * 48).float().floor_divide(16).add(1).mul(10**rank)  # block b of rank r: (b + 1) * 10^r
    out = torch.empty(48)
    reduce.reduce_scatter(whole, out).wait()
    blocks = torch.arange(3 * rank, 3 * rank + 3).repeat_interleave(16) + 1
    assert torch.allclose(out, blocks * 1111.0, rtol=1e-5)


@ranks(2, 4)
def test_an_overflow_on_one_rank_reaches_the_owner(rank, world_size):
    hops = hops_of(world_size, 2, BlockFormat(4, 16), BlockFormat(4, 16), "shared")
    reduce = QuantizedReduce(make_transport(get_world_group(), CPU), hops)
    for bad in (float("inf"), float("nan")):
        full = torch.ones(world_size * 64)
        if rank == 1:
            full[(world_size - 1) * 64 + 20] = bad
        out = torch.zeros(64)
        reduce.reduce_scatter(full, out).wait()
        is_owner = rank == world_size - 1
        assert out.isfinite().all() == (not is_owner)
        assert out[:16].isfinite().all()
        assert out[32:].isfinite().all()


@ranks(4)
def test_second_hops_pair_in_the_order_of_the_calls(rank, world_size):
    """Ranks may advance and wait for transfers in any order."""
    hops = hops_of(4, 2, BlockFormat(8, 16), BlockFormat(8, 16), "shared")
    reduce = QuantizedReduce(make_transport(get_world_group(), CPU), hops)
    outs = [torch.zeros(16) for _ in range(6)]
    pending = [reduce.reduce_scatter(torch.full((64,), float(10**index)), out) for index, out in enumerate(outs)]
    order = list(range(6)) if rank % 2 else list(range(5, -1, -1))
    for index in order[:3]:
        pending[index].advance()
    for transfer in pending:
        transfer.advance()
    for transfer in pending:
        transfer.wait()
    for index, out in enumerate(outs):
        assert torch.allclose(out, torch.full((16,), 4.0 * 10**index)), index


@ranks(4)
def test_bytes_between_nodes_are_a_quarter_of_16_bits(rank, world_size):
    """Nodes of two ranks. All of a node's ranks together send, in 4 bits, the gradient once, scales apart."""
    numel, form = 4096, BlockFormat(4, 256)
    hops = hops_of(4, 2, form, form, "shared")
    reduce = QuantizedReduce(make_transport(get_world_group(), CPU), hops)
    recorder = CommRecorder()
    with observing(recorder):
        reduce.reduce_scatter(torch.randn(4 * numel), torch.empty(numel)).wait()
    crossing = [event for event in recorder.events if len({member // 2 for member in event.ranks}) > 1]
    inside = [event for event in recorder.events if event not in crossing]
    assert [event.ranks for event in crossing] == [(rank % 2, rank % 2 + 2)]
    assert [event.ranks for event in inside] == [(rank // 2 * 2, rank // 2 * 2 + 1)]
    scales_nbytes = numel // 256 * 4
    assert inside[0].nbytes == 4 * (numel // 2 + scales_nbytes)
    # Per rank of a node two slices of n values; both ranks of it together all 4 n values, in n / 2 bytes each.
    of_node = 2 * crossing[0].nbytes
    assert of_node - 4 * scales_nbytes == 4 * numel * 2 // 4 == 4 * numel * 4 // 8


@pytest.mark.parametrize("inside", [1, 2, 4])
@ranks(4)
def test_losses_given_back_make_the_average_right(rank, world_size, inside):
    """The same gradients 40 times: what arrives is right on average; without memory it is wrong alike each time."""
    hops = hops_of(world_size, inside, BlockFormat(4, 64), BlockFormat(4, 64), "shared")
    whole = rows(world_size, 50, torch.float32)
    exact = whole.sum(0)[rank * 50 : (rank + 1) * 50]
    errors = []
    for feedback in (None, Feedback(beta=0.8, num_reductions=1000)):
        reduce = QuantizedReduce(make_transport(get_world_group(), CPU), hops, feedback).of_one_buffer()
        total = torch.zeros(50)
        for _ in range(40):
            out = torch.empty(50)
            reduce.reduce_scatter(whole[rank].clone(), out).wait()
            total += out
        errors.append((total / 40 - exact).abs().mean().item())
        assert (reduce.nbytes() > 0) == (feedback is not None)
    assert errors[1] < errors[0] / 3


@ranks(2)
def test_each_buffer_has_its_own_losses_and_forgets_them_in_time(rank, world_size):
    hops = hops_of(2, 2, BlockFormat(4, 16), BlockFormat(4, 16), "shared")
    reduce = QuantizedReduce(make_transport(get_world_group(), CPU), hops, Feedback(beta=0.0, num_reductions=3))
    one, other = reduce.of_one_buffer(), reduce.of_one_buffer()
    values = rows(2, 32, torch.float32)[rank]

    def reduced(by) -> torch.Tensor:
        out = torch.empty(32)
        by.reduce_scatter(values.clone(), out).wait()
        return out

    rounds = [reduced(one) for _ in range(4)]
    assert not torch.equal(rounds[0], rounds[1])
    assert torch.equal(reduced(other), rounds[0])
    assert torch.equal(rounds[3], rounds[0]), "the error was to be forgotten after three reductions"


@ranks(2)
def test_an_overflow_is_not_remembered(rank, world_size):
    hops = hops_of(2, 2, BlockFormat(4, 16), BlockFormat(4, 16), "shared")
    reduce = QuantizedReduce(make_transport(get_world_group(), CPU), hops, Feedback(0.5, 100)).of_one_buffer()
    for value in (float("inf"), float("nan"), 1.0):
        out = torch.empty(32)
        reduce.reduce_scatter(torch.full((64,), value), out).wait()
        assert out.isfinite().all() == (value == 1.0)
    assert torch.allclose(out, torch.full((32,), 2.0))
