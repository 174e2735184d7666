"""The functions of `deepspeed.comm`: torch.distributed's, with DeepSpeed's extra keywords, and counted."""

from __future__ import annotations

import torch

from fullspeed.comm import CommRecorder, observing
from fullspeed.comm import torch_names as dist
from tests.ranks import ranks


@ranks(2)
def test_collectives_do_what_torch_does_and_are_counted(rank, world_size):
    recorder = CommRecorder()
    with observing(recorder):
        value = torch.full((4,), float(rank + 1))
        dist.all_reduce(value, op=dist.ReduceOp.SUM, prof=True, log_name="mine", debug="here")
        assert value.tolist() == [3.0] * 4
        whole = torch.empty(4)
        dist.all_gather_into_tensor(whole, torch.full((2,), float(rank)))
        assert whole.tolist() == [0, 0, 1, 1]
        part = torch.empty(2)
        dist.reduce_scatter_tensor(part, torch.arange(4.0))
        assert part.tolist() == [4.0 * rank, 4.0 * rank + 2]
        swapped = torch.empty(2)
        dist.all_to_all_single(swapped, torch.tensor([rank * 2.0, rank * 2.0 + 1]))
        assert swapped.tolist() == [float(rank), rank + 2.0]
    assert recorder.counts() == {"all_reduce": 1, "all_gather": 1, "reduce_scatter": 1, "all_to_all_single": 1}
    assert recorder.nbytes() == {"all_reduce": 16, "all_gather": 16, "reduce_scatter": 16, "all_to_all_single": 8}

    box = [{"rank": rank}]
    dist.broadcast_object_list(box, src=1)
    assert box == [{"rank": 1}]
    everybody = [None] * world_size
    dist.all_gather_object(everybody, rank)
    assert everybody == [0, 1]
    dist.barrier()
    assert (dist.get_rank(), dist.get_world_size(), dist.get_local_rank()) == (rank, 2, rank)


@ranks(2)
def test_messages_go_from_rank_to_rank_without_waiting_where_asked(rank, world_size):
    message = torch.full((3,), float(rank))
    work = dist.isend(message, 1) if rank == 0 else dist.irecv(message, 0)
    work.wait()
    assert message.tolist() == [0.0] * 3
    dist.all_reduce_coalesced([message, message[:1].clone()], async_op=True).wait()
    several = [torch.empty(2), torch.empty(4)]
    dist.all_gather_coalesced(several, [torch.full((1,), float(rank)), torch.full((2,), float(rank))])
    assert [each.tolist() for each in several] == [[0, 1], [0, 0, 1, 1]]


@ranks(2)
def test_groups_have_members_and_can_go(rank, world_size):
    group = dist.new_group([1, 0])
    assert dist.get_all_ranks_from_group(group) == [0, 1]
    assert dist.get_global_rank(group, 1) == 1
    mesh = dist.initialize_mesh_device((2,), ("dp",))
    assert mesh["dp"].size() == 2
    dist.destroy_process_group(group)
    value = torch.ones(1)
    assert dist.all_reduce(value) is None
    assert value.item() == 2
