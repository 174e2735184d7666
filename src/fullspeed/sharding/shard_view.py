"""The sharding runtime as an optimizer sees it that needs whole parameters (LAMB's norms, Muon's matrices)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from fullspeed.comm import ReduceOp, all_reduce
from fullspeed.optim.shards import gather_by_sum
from fullspeed.sharding.runtime import ShardingRuntime

if TYPE_CHECKING:
    from fullspeed.sharding.pieces import OwnedPiece


class RuntimeShards:
    """`fullspeed.optim.shards.ShardView` over a runtime's groups."""

    def __init__(
        self,
        runtime: ShardingRuntime,
        whole_params: Sequence[Sequence[nn.Parameter]],
        piece_of: Mapping[nn.Parameter, OwnedPiece],
    ) -> None:
        self._runtime = runtime
        self._params = [param for group in whole_params for param in group]
        self._index = {
            id(piece_of[param].tensor): index for index, param in enumerate(self._params) if param in piece_of
        }
        self._piece_of = piece_of
        self._shard_group = runtime.links.shard_group
        self._is_sharded = any(group.placement.optim for group in runtime.trainable)

    @property
    def device(self) -> torch.device:
        """Device of the shards."""
        return self._runtime.device

    def num_params(self) -> int:
        """Number of whole parameters in the optimizer's groups."""
        return len(self._params)

    def param_index(self, piece: Tensor) -> int:
        """Index of the parameter a piece belongs to."""
        return self._index[id(piece)]

    def full_shape(self, index: int) -> torch.Size:
        """Shape of the whole parameter."""
        return self._params[index].shape

    def slice_of(self, index: int) -> tuple[int, int]:
        """(start, stop) of this rank's piece in the flattened parameter; (0, 0) when it has none."""
        owned = self._piece_of.get(self._params[index])
        return (owned.piece.start, owned.piece.stop) if owned else (0, 0)

    def all_reduce_sum(self, vector: Tensor) -> None:
        """Sum a vector over ranks in place, where ranks hold different pieces."""
        if self._is_sharded:
            all_reduce(vector, ReduceOp.SUM, self._shard_group)

    def gather_whole(self, pieces: Mapping[int, Tensor], indices: Sequence[int]) -> Mapping[int, Tensor]:
        """Whole flattened tensors from every rank's slices. Collective."""
        if not self._is_sharded:
            return pieces
        return gather_by_sum(self, pieces, indices)
