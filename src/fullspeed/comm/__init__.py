"""The only room that talks to torch.distributed."""

from fullspeed.comm.agreement import Agreement, Posted
from fullspeed.comm.collectives import (
    Group,
    ReduceOp,
    agree,
    all_gather_object,
    all_reduce,
    barrier,
    broadcast,
    broadcast_object,
    get_global_rank,
    get_rank,
    get_world_group,
    get_world_size,
    new_group,
)
from fullspeed.comm.init import destroy_process_group, init_distributed, is_initialized
from fullspeed.comm.observe import CommEvent, CommRecorder, observing
from fullspeed.comm.shared_transport import make_transport
from fullspeed.comm.transport import AllReduceTransport, Pending, Transport

__all__ = [
    "Agreement",
    "AllReduceTransport",
    "CommEvent",
    "CommRecorder",
    "Group",
    "Pending",
    "Posted",
    "ReduceOp",
    "Transport",
    "agree",
    "all_gather_object",
    "all_reduce",
    "barrier",
    "broadcast",
    "broadcast_object",
    "destroy_process_group",
    "get_global_rank",
    "get_rank",
    "get_world_group",
    "get_world_size",
    "init_distributed",
    "is_initialized",
    "make_transport",
    "new_group",
    "observing",
]
