"""How a group's buffers travel: over which ranks it is sharded and replicated, and by which transports.

The data-parallel ranks form a grid (MiCS, arXiv:2205.00119; also known as hybrid sharding). A row of consecutive ranks,
the *shard group*, holds one copy of what is sharded; the ranks of a column hold the same shard, one replica each.
Plain ZeRO is one row of all ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fullspeed.base.errors import ConfigError, ConfigFault
from fullspeed.comm import (
    AllReduceTransport,
    Gather,
    Group,
    HierarchicalGather,
    Reduce,
    ReplicatedReduce,
    column_of,
    get_rank,
    get_world_size,
    make_transport,
    ranks_per_node,
    row_of,
)
from fullspeed.config.sharding import ZeroOptimization
from fullspeed.kernels.format import BlockFormat
from fullspeed.sharding.quantized import frozen_form, quantized_gather, quantized_reduce
from fullspeed.sharding.secondary import PrimaryShards, SecondaryShards, ShardSource


@dataclass(frozen=True)
class Node:
    """The ranks that share a second copy of the parameters (hpZ), and how it travels among them."""

    gather: Gather
    rank: int
    world_size: int


@dataclass(frozen=True)
class GroupLinks:
    """Ranks and transports of one model's groups.

    Gathers and reductions have a channel each, so neither waits for the other.

    Attributes:
        dp_group: all ranks that train the model, each on its own data.
        shard_group: those of them that hold one copy of what is sharded together with this one.
        rank: this rank's number in `shard_group`: which shard it holds.
        world_size: number of shards.
        replica: number of this shard group; each holds a whole copy.
        num_replicas: number of shard groups.
        gather: makes sharded tensors whole in `shard_group`, exactly.
        unshard: makes parameters whole to compute with; may be less exact, where the user asked for it.
        reduce: sums over `dp_group`; a reduce-scatter leaves this rank its shard.
        node: where a second copy of the parameters is kept; None when there is none.
        frozen_form: as which codes frozen parameters are kept where they are sharded; None: as they are.
    """

    dp_group: Group
    shard_group: Group
    rank: int
    world_size: int
    replica: int
    num_replicas: int
    gather: Gather
    unshard: Gather
    reduce: Reduce
    node: Node | None
    frozen_form: BlockFormat | None = None

    @property
    def num_ranks(self) -> int:
        """Ranks of `dp_group`."""
        return self.world_size * self.num_replicas

    def shard_source(self, gather: Gather) -> ShardSource:
        """What one group's whole values are gathered from; `gather` reads the shards."""
        if self.node is None:
            return PrimaryShards(gather)
        return SecondaryShards(gather, self.node.gather, self.node.rank, self.node.world_size)


def make_links(zero: ZeroOptimization, dp_group: Group, device: torch.device) -> GroupLinks:
    """The links that the configuration asks for. Collective over `dp_group`; see `config.check_ranks` for what holds.

    Raises:
        ConfigError: a hierarchical gather over nodes that the shard groups do not fill evenly.
    """
    num_ranks = get_world_size(dp_group)
    world_size = zero.mics_shard_size if zero.mics_shard_size > 0 else num_ranks
    shard_group = row_of(dp_group, world_size)
    rank = get_rank(shard_group)
    gather = _make_gather(zero, shard_group, device)
    return GroupLinks(
        dp_group=dp_group,
        shard_group=shard_group,
        rank=rank,
        world_size=world_size,
        replica=get_rank(dp_group) // world_size,
        num_replicas=num_ranks // world_size,
        gather=gather,
        unshard=quantized_gather(zero, gather, world_size),
        reduce=_make_reduce(zero, dp_group, shard_group, device),
        node=_make_node(zero.zero_hpz_partition_size, shard_group, device),
        frozen_form=frozen_form(zero),
    )


def _make_gather(zero: ZeroOptimization, shard_group: Group, device: torch.device) -> Gather:
    world_size = get_world_size(shard_group)
    node_size = ranks_per_node(shard_group) if zero.mics_hierarchical_params_gather else world_size
    if node_size is None:
        rule = "a hierarchical gather needs as many ranks of a shard group on each of its nodes"
        fix = "use a multiple of the ranks of a node, or gather without hierarchy"
        raise ConfigError([ConfigFault("zero_optimization.mics_shard_size", world_size, rule, fix)])
    if node_size == world_size:
        return make_transport(shard_group, device)
    return HierarchicalGather(
        inside=make_transport(row_of(shard_group, node_size), device),
        between=make_transport(column_of(shard_group, node_size), device),
        num_nodes=world_size // node_size,
    )


def _make_reduce(zero: ZeroOptimization, dp_group: Group, shard_group: Group, device: torch.device) -> Reduce:
    world_size, num_ranks = get_world_size(shard_group), get_world_size(dp_group)
    reduce: Reduce = make_transport(shard_group, device)
    if not zero.reduce_scatter:
        reduce = AllReduceTransport(reduce, get_rank(shard_group), world_size)
    reduce = quantized_reduce(zero, reduce, shard_group, device)
    if world_size == num_ranks:
        return reduce
    column = make_transport(column_of(dp_group, world_size), device)
    return ReplicatedReduce(reduce, column, num_ranks // world_size)


def _make_node(size: int, shard_group: Group, device: torch.device) -> Node | None:
    if size in (1, get_world_size(shard_group)):
        return None  # the shards themselves are that copy already
    group = row_of(shard_group, size)
    return Node(make_transport(group, device), get_rank(group), size)
