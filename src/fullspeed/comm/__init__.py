"""The only room that talks to torch.distributed."""

from fullspeed.comm.agreement import Agreement, Posted
from fullspeed.comm.collectives import (
    Group,
    ReduceOp,
    agree,
    all_gather,
    all_gather_object,
    all_reduce,
    barrier,
    broadcast,
    broadcast_object,
    get_global_rank,
    get_group_rank,
    get_rank,
    get_world_group,
    get_world_size,
    new_group,
)
from fullspeed.comm.hierarchy import HierarchicalGather, MessageGather, ReplicatedReduce
from fullspeed.comm.init import destroy_process_group, init_distributed, is_initialized
from fullspeed.comm.mesh import column_of, ranks_per_node, row_of
from fullspeed.comm.observe import CommEvent, CommRecorder, observing
from fullspeed.comm.pending import Pending, Then
from fullspeed.comm.quantized import CodesGather, Feedback, Hop, QuantizedGather, QuantizedReduce
from fullspeed.comm.shared_memory import trim_shared_memory
from fullspeed.comm.shared_transport import make_transport
from fullspeed.comm.traffic import (
    CommsLogger,
    bus_share,
    comms_logger,
    configure,
    get_comm_operation_count,
    get_logged_comm_ops,
    has_comm_data,
    log_summary,
    reset_log,
)
from fullspeed.comm.transport import AllReduceTransport, Gather, Reduce, Transport

__all__ = [
    "Agreement",
    "AllReduceTransport",
    "CodesGather",
    "CommEvent",
    "CommRecorder",
    "CommsLogger",
    "Feedback",
    "Gather",
    "Group",
    "HierarchicalGather",
    "Hop",
    "MessageGather",
    "Pending",
    "Posted",
    "QuantizedGather",
    "QuantizedReduce",
    "Reduce",
    "ReduceOp",
    "ReplicatedReduce",
    "Then",
    "Transport",
    "agree",
    "all_gather",
    "all_gather_object",
    "all_reduce",
    "barrier",
    "broadcast",
    "broadcast_object",
    "bus_share",
    "column_of",
    "comms_logger",
    "configure",
    "destroy_process_group",
    "get_comm_operation_count",
    "get_global_rank",
    "get_group_rank",
    "get_logged_comm_ops",
    "get_rank",
    "get_world_group",
    "get_world_size",
    "has_comm_data",
    "init_distributed",
    "is_initialized",
    "log_summary",
    "make_transport",
    "new_group",
    "observing",
    "ranks_per_node",
    "reset_log",
    "row_of",
    "trim_shared_memory",
]
