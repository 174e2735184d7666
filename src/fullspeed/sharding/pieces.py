"""This rank's pieces of the parameters: what the inner optimizer steps in place of the user's whole ones."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fullspeed.base.layout import Piece
from fullspeed.sharding.group import FlatGroup
from fullspeed.sharding.runtime import ShardingRuntime


@dataclass(frozen=True, eq=False)
class OwnedPiece:
    """One parameter's part in this rank's optimizer."""

    param: nn.Parameter  # the user's
    tensor: nn.Parameter  # what the inner optimizer steps: a view of the group's master values
    group: FlatGroup
    piece: Piece

    def follow(self) -> None:
        """Have `tensor` be where the group's masters are now: they come and go if they wait in a file."""
        self.tensor.data = self.part_of(self.group.master_in_memory)

    def part_of(self, flat: torch.Tensor) -> torch.Tensor:
        """This piece of a flat tensor that is laid out as the group's masters: a view in the shape of `tensor`."""
        start = self.piece.shard_offset
        return flat[start : start + self.piece.numel].view(self.tensor.shape)

    def cut(self, whole: torch.Tensor) -> torch.Tensor:
        """This piece of a tensor of the parameter's shape, in the shape of `tensor`."""
        return whole.reshape(-1)[self.piece.start : self.piece.stop].view(self.tensor.shape)


def own_pieces(runtime: ShardingRuntime, params: Iterable[nn.Parameter]) -> list[OwnedPiece]:
    """This rank's pieces of `params`. None for one that is not trained or not the model's, or lies on other ranks."""
    pieces = {(group.index, piece.slot): piece for group in runtime.trainable for piece in group.optimizer_pieces()}
    owned = []
    for param in params:
        if param not in runtime.slot_of or not runtime.trains(param):
            continue
        group, slot = runtime.slot_of[param]
        piece = pieces.get((group.index, slot))
        if piece is not None:
            owned.append(_own(param, group, piece))
    return owned


def _own(param: nn.Parameter, group: FlatGroup, piece: Piece) -> OwnedPiece:
    """The inner optimizer steps `param` itself where nothing is sharded or rounded."""
    assert group.master is not None
    if not group.placement.optim and group.master.data_ptr() == group.full.data_ptr() and not group.is_transient:
        return OwnedPiece(param, param, group, piece)
    flat = group.master_in_memory[piece.shard_offset : piece.shard_offset + piece.numel]
    shaped = flat if group.placement.optim else flat.view(group.layout.slots[piece.slot].shape)
    return OwnedPiece(param, nn.Parameter(shaped, requires_grad=True), group, piece)


def own_state(state: dict[str, Any], owned: OwnedPiece) -> dict[str, Any]:
    """This rank's part of the state an optimizer already has of a whole parameter."""
    mine = {}
    for key, value in state.items():
        is_per_element = isinstance(value, torch.Tensor) and value.shape == owned.param.shape and key != "step"
        mine[key] = owned.cut(value).to(owned.tensor.dtype, copy=True) if is_per_element else value
    return mine


def sub_groups(owned: Collection[OwnedPiece], groups: Sequence[FlatGroup], max_numel: int) -> list[list[OwnedPiece]]:
    """Pieces in batches of whole groups, each batch at most `max_numel` elements, or one group.

    A group whose masters wait with its resident values is a batch by itself.

    The cut follows the groups, not what this rank owns of them, so every rank makes as many batches.
    """
    by_group: dict[int, list[OwnedPiece]] = {group.index: [] for group in groups}
    for each in owned:
        by_group[each.group.index].append(each)
    batches: list[list[OwnedPiece]] = [[]]
    numel = 0
    for group in groups:
        if numel and (group.master_waits or numel + group.numel > max_numel):
            batches.append([])
            numel = 0
        batches[-1].extend(by_group[group.index])
        numel += max_numel if group.master_waits else group.numel
    return batches
