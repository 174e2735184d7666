"""What a group's whole values are gathered from: the ranks' shards, or a second copy that is nearer.

hpZ (ZeRO++, arXiv:2306.10209, section 3.2): a gather over all ranks leaves each of them a second, larger shard, cut
over the ranks of a node only; until the values change, further gathers stay inside the node.
"""

from __future__ import annotations

from typing import Protocol

import torch
from typing_extensions import override

from fullspeed.comm import Gather, Pending, Then


class ShardSource(Protocol):
    """Where the whole values of one group come from. All ranks call `all_gather` and `forget` in the same order."""

    def all_gather(self, full: torch.Tensor, shard: torch.Tensor) -> Pending:
        """Fill `full` (N,) with the values of which this rank's resident `shard` (n,) is a part."""

    def forget(self) -> None:
        """The resident values have changed: gather from the shards themselves next time."""

    def nbytes(self) -> int:
        """Bytes held beside the shard."""


class PrimaryShards(ShardSource):
    """The ranks' shards and nothing else."""

    def __init__(self, gather: Gather) -> None:
        self._gather = gather

    @override
    def all_gather(self, full: torch.Tensor, shard: torch.Tensor) -> Pending:
        return self._gather.all_gather(full, shard)

    @override
    def forget(self) -> None:
        """Nothing is kept."""

    @override
    def nbytes(self) -> int:
        return 0


class SecondaryShards(ShardSource):
    """The ranks' shards the first time, then a copy of what came, cut over the `world_size` ranks of a node.

    Whether there is a copy is settled when a gather starts, so it is the same on all ranks, whenever they wait.
    """

    def __init__(self, primary: Gather, node: Gather, rank: int, world_size: int) -> None:
        self._primary, self._node = primary, node
        self._rank, self._world_size = rank, world_size
        self._shard: torch.Tensor | None = None  # (N / world_size,), in the dtype that travels

    @override
    def all_gather(self, full: torch.Tensor, shard: torch.Tensor) -> Pending:
        if self._shard is not None:
            return self._node.all_gather(full, self._shard)
        own = full.view(self._world_size, -1)[self._rank]
        kept = self._shard = self._node.empty(own.numel(), own.dtype, own.device)
        return Then(self._primary.all_gather(full, shard), lambda: kept.copy_(own))

    @override
    def forget(self) -> None:
        self._shard = None

    @override
    def nbytes(self) -> int:
        return 0 if self._shard is None else self._shard.numel() * self._shard.itemsize
