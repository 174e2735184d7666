"""Which transports of a model's groups send quantised values, and over which ranks (ZeRO++, arXiv:2306.10209)."""

from __future__ import annotations

import torch

from fullspeed.comm import (
    Feedback,
    Gather,
    Group,
    Hop,
    QuantizedGather,
    QuantizedReduce,
    Reduce,
    column_of,
    get_world_size,
    make_transport,
    ranks_per_node,
    row_of,
)
from fullspeed.config.sharding import ZeroOptimization
from fullspeed.kernels.format import BlockFormat


def quantized_gather(zero: ZeroOptimization, gather: Gather, world_size: int) -> Gather:
    """`gather`, of quantised values where the configuration asks for it (qwZ)."""
    if not zero.zero_quantized_weights or world_size == 1:
        return gather
    form = BlockFormat(zero.zero_quantized_weights_bits, zero.zero_quantized_block_size)
    return QuantizedGather(gather, world_size, form)


def frozen_form(zero: ZeroOptimization) -> BlockFormat | None:
    """As which codes sharded frozen parameters are kept; None where they are kept as they are."""
    if not zero.zero_quantized_nontrainable_weights:
        return None
    return BlockFormat(zero.zero_quantized_weights_bits, zero.zero_quantized_block_size)


def quantized_reduce(zero: ZeroOptimization, reduce: Reduce, group: Group, device: torch.device) -> Reduce:
    """`reduce`, of quantised values where the configuration asks for it (qgZ, LoCo). Collective over `group`.

    One hop inside each node and one between nodes; where either would not leave a rank, only the other. A node is the
    ranks that share a second copy of the parameters, if there is one (hpZ), else those of a host; where hosts differ
    all ranks, as if they shared one.
    """
    world_size = get_world_size(group)
    if not zero.zero_quantized_gradients or world_size == 1:
        return reduce
    form = BlockFormat(zero.zero_quantized_gradients_bits, zero.zero_quantized_block_size)
    inside = zero.zero_hpz_partition_size if zero.zero_hpz_partition_size > 1 else ranks_per_node(group) or world_size
    hops = []
    if inside > 1:
        hops.append(Hop(make_transport(row_of(group, inside), device), inside, form))
    if inside < world_size:
        hops.append(Hop(make_transport(column_of(group, inside), device), world_size // inside, form))
    loco = zero.zeropp_loco_param
    feedback = None if loco is None else Feedback(loco.err_beta, loco.reset_T)
    return QuantizedReduce(reduce, hops, feedback)
