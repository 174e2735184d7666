"""What an optimizer that needs whole parameters may ask of the runtime that sharded them.

Elementwise optimizers (Adam, Lion, SGD...) never ask: a shard steps like any tensor. LAMB needs the norm of
each whole parameter, Muon each whole matrix. The words used here:

- piece: this rank's 1-D slice of one flattened parameter; the `nn.Parameter` that the optimizer's groups hold
- index: the number of the whole parameter, 0 .. num_params - 1, the same on all ranks
- ranks: those that share the parameters; collectives run over them
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor


class ShardView(Protocol):
    """The map from pieces to whole parameters, and two collectives over them.

    What must hold:

    - A rank has at most one piece of a parameter, and none when it owns no element of it.
    - The pieces of one parameter get their gradients for the same `step()` call on all ranks. Different calls
      may step different parameters (sub-groups), and in one call a rank may have no gradient at all.
    - All ranks call `step()` equally often, also one without any piece. Each call then makes the same
      collectives in the same order on all ranks: LAMB one `all_reduce_sum`; Muon one `all_reduce_sum`, then
      `gather_whole` once per batch of matrices.
    """

    @property
    def device(self) -> torch.device:
        """Where tensors given to the collectives live, also on a rank without pieces."""
        ...

    def num_params(self) -> int:
        """Number of whole parameters of the optimizer, over all its groups."""
        ...

    def param_index(self, piece: Tensor) -> int:
        """Index of the parameter `piece` (the very object in the optimizer's groups) belongs to."""
        ...

    def full_shape(self, index: int) -> torch.Size:
        """Shape of the whole parameter."""
        ...

    def slice_of(self, index: int) -> tuple[int, int]:
        """(start, stop) of this rank's piece in the flattened parameter; start == stop when it has none."""
        ...

    def all_reduce_sum(self, vector: Tensor) -> None:
        """Sum a 1-D fp32 or fp64 `vector` over the ranks, in place; the result is equal on all of them."""
        ...

    def gather_whole(self, pieces: Mapping[int, Tensor], indices: Sequence[int]) -> Mapping[int, Tensor]:
        """Assemble flattened whole tensors from slices. A collective; all ranks give the same `indices`.

        pieces: index -> this rank's slice, 1-D fp32 of the length of `slice_of(index)`; only indices it has a
        piece of.
        Returns index -> (numel,) fp32 at least for the keys of `pieces`; a rank without a piece need not get
        the whole.
        """
        ...


@runtime_checkable
class ShardAware(Protocol):
    """An optimizer that is not elementwise but right on shards, once `bind_shards` told it what it holds."""

    def bind_shards(self, shards: ShardView) -> None:
        """From now on the parameters in the groups are pieces `shards` knows. Called once, before `step`."""
        ...


class WholeParams:
    """The `ShardView` of an unsharded optimizer: each parameter is its own piece, collectives do nothing."""

    def __init__(self, param_groups: Sequence[Mapping[str, Any]]) -> None:
        self._params: list[Tensor] = [param for group in param_groups for param in group["params"]]
        self._index = {id(param): index for index, param in enumerate(self._params)}

    @property
    def device(self) -> torch.device:
        """Device of the first parameter."""
        return self._params[0].device if self._params else torch.device("cpu")

    def num_params(self) -> int:
        """Number of parameters in all groups."""
        return len(self._params)

    def param_index(self, piece: Tensor) -> int:
        """Position of the parameter over all groups."""
        return self._index[id(piece)]

    def full_shape(self, index: int) -> torch.Size:
        """The parameter's own shape."""
        return self._params[index].shape

    def slice_of(self, index: int) -> tuple[int, int]:
        """All of it."""
        return 0, self._params[index].numel()

    def all_reduce_sum(self, vector: Tensor) -> None:
        """Nothing to add."""

    def gather_whole(self, pieces: Mapping[int, Tensor], indices: Sequence[int]) -> Mapping[int, Tensor]:
        """The pieces, which are whole already."""
        return pieces


def gather_by_sum(shards: ShardView, pieces: Mapping[int, Tensor], indices: Sequence[int]) -> dict[int, Tensor]:
    """A `gather_whole` made of `all_reduce_sum`: every rank adds its slices to zeros. Returns every index.

    Right for any cut of the parameters; a runtime with contiguous shards can do it with less traffic by
    all-gather.
    """
    numels = [shards.full_shape(index).numel() for index in indices]
    flat = torch.zeros(sum(numels), dtype=torch.float32, device=shards.device)
    whole = dict(zip(indices, torch.split(flat, numels), strict=True))
    for index, piece in pieces.items():
        start, stop = shards.slice_of(index)
        whole[index][start:stop].copy_(piece)
    shards.all_reduce_sum(flat)
    return whole
