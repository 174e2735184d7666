"""What an engine's rank puts into a checkpoint: its share of every tensor, described, and the rest of its state."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from fullspeed.base.layout import Piece, Slot
from fullspeed.checkpoint.manifest import BUFFER, MASTER, OPTIMIZER, PARAM, Chunk, ParamRecord
from fullspeed.checkpoint.saved import GroupNames
from fullspeed.checkpoint.tensor_file import dtype_name
from fullspeed.sharding import placeholder
from fullspeed.sharding.group import FlatGroup
from fullspeed.sharding.optimizer import ShardedOptimizer
from fullspeed.sharding.pieces import OwnedPiece
from fullspeed.sharding.runtime import ShardingRuntime


class NamedState(NamedTuple):
    """What a model consists of, by name."""

    params: dict[str, nn.Parameter]  # by first name; without those that another engine owns
    aliases: dict[str, str]  # further name -> first name, of tied parameters and of buffers of shared modules
    buffers: dict[str, torch.Tensor]  # persistent ones


def named_state(module: nn.Module, runtime: ShardingRuntime | None = None) -> NamedState:
    """The parameters and persistent buffers that this engine saves and loads; without a runtime, all of the module."""
    first: dict[nn.Parameter, str] = {}
    params: dict[str, nn.Parameter] = {}
    aliases: dict[str, str] = {}
    for fqn, param in module.named_parameters(remove_duplicate=False):
        if runtime is not None and param not in runtime.slot_of and placeholder.is_adopted(param):
            continue
        if param in first:
            aliases[fqn] = first[param]
        else:
            first[param], params[fqn] = fqn, param
    buffers: dict[str, torch.Tensor] = {}
    prefixes: dict[nn.Module, str] = {}
    for prefix, inner in module.named_modules(remove_duplicate=False):
        first_prefix = prefixes.setdefault(inner, prefix)
        for name, buffer in inner._buffers.items():
            if buffer is None or name in inner._non_persistent_buffers_set:
                continue
            if first_prefix == prefix:
                buffers[_join(prefix, name)] = buffer
            else:
                aliases[_join(prefix, name)] = _join(first_prefix, name)
    return NamedState(params, aliases, buffers)


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def is_trainable(param: nn.Parameter, runtime: ShardingRuntime) -> bool:
    """Whether the engine trains `param`: decided at initialize, and by `unfreeze`, for those it manages."""
    place = runtime.slot_of.get(param)
    return param.requires_grad if place is None else runtime.trains(param)


def param_records(state: NamedState, runtime: ShardingRuntime, *, exclude_frozen: bool) -> tuple[ParamRecord, ...]:
    """The description of every parameter."""
    records = []
    for fqn, param in state.params.items():
        place = runtime.slot_of.get(param)
        dtype = param.dtype if place is None else place[0].dtypes.storage
        trains = is_trainable(param, runtime)
        name = str(dtype).removeprefix("torch.")
        records.append(ParamRecord(fqn, tuple(param.shape), name, trains, trains or not exclude_frozen))
    return tuple(records)


def buffer_digests(state: NamedState) -> dict[str, bytes]:
    """A checksum of every buffer, to find those in which ranks differ."""
    return {
        fqn: hashlib.sha256(buffer.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data).digest()
        for fqn, buffer in state.buffers.items()
    }


class Collector:
    """Describes one rank's share of the tensors. Copies nothing."""

    def __init__(self, rank: int, file: str) -> None:
        self._rank, self._file = rank, file
        self.tensors: dict[Chunk, torch.Tensor] = {}

    def add_weights(self, runtime: ShardingRuntime, *, exclude_frozen: bool) -> None:
        """Resident values and masters: of each group this rank's share, whether it is all the rank has or not."""
        for group in runtime.groups:
            store = group.store
            for piece in _share(group):
                if exclude_frozen and not group.trained[piece.slot]:
                    continue
                slot = group.layout.slots[piece.slot]
                at = _offset(group, piece, is_sharded=group.placement.params)
                self._add_elements(PARAM, slot, piece.start, store[at : at + piece.numel])
                if has_separate_master(group):
                    assert group.master is not None
                    at = _offset(group, piece, is_sharded=group.placement.optim)
                    self._add_elements(MASTER, slot, piece.start, group.master[at : at + piece.numel])

    def add_unmanaged(self, state: NamedState, runtime: ShardingRuntime, *, exclude_frozen: bool) -> None:
        """Parameters that are the caller's own, whole on every rank: rank 0 saves them."""
        for fqn, param in state.params.items():
            if self._rank or param in runtime.slot_of or (exclude_frozen and not is_trainable(param, runtime)):
                continue
            slot = Slot(fqn, tuple(param.shape), param.numel(), 0)
            self._add_elements(PARAM, slot, 0, param.detach().reshape(-1))

    def add_buffers(self, state: NamedState, differing: set[str]) -> None:
        """Buffers: rank 0 saves all of them, another rank those in which it differs from rank 0."""
        for fqn, buffer in state.buffers.items():
            if not self._rank or fqn in differing:
                self._add(BUFFER, fqn, tuple(buffer.shape), (0, buffer.numel()), buffer.detach(), per_element=False)

    def add_optimizer(self, optimizer: ShardedOptimizer) -> dict[str, dict[str, Any]]:
        """The optimizer's tensors. Returns the entries of its state that are no tensors, by parameter and name."""
        values: dict[str, dict[str, Any]] = {}
        shares = {(group.index, piece.slot): piece for group in optimizer.runtime.trainable for piece in _share(group)}
        for owned in optimizer.owned.values():
            slot = slot_of(owned)
            share = shares.get((owned.group.index, owned.piece.slot))
            for name, value in optimizer.state.get(owned.tensor, {}).items():
                if isinstance(value, torch.Tensor):
                    self._add_entry(OPTIMIZER + name, owned, share, value)
                else:
                    values.setdefault(slot.fqn, {})[name] = value
        return values

    def _add_entry(self, kind: str, owned: OwnedPiece, share: Piece | None, value: torch.Tensor) -> None:
        if share is None:
            return  # whole states or replicas: another rank saves all of this parameter
        slot = slot_of(owned)
        if value.shape == owned.tensor.shape:
            start = share.start - owned.piece.start
            self._add_elements(kind, slot, share.start, value.detach().reshape(-1)[start : start + share.numel])
        elif share.start == owned.piece.start:
            shape = tuple(value.shape)
            self._add(kind, slot.fqn, shape, (0, value.numel()), value.detach(), per_element=False)

    def _add_elements(self, kind: str, slot: Slot, start: int, flat: torch.Tensor) -> None:
        self._add(kind, slot.fqn, slot.shape, (start, start + flat.numel()), flat, per_element=True)

    def _add(
        self,
        kind: str,
        fqn: str,
        shape: tuple[int, ...],
        span: tuple[int, int],
        tensor: torch.Tensor,
        *,
        per_element: bool,
    ) -> None:
        dtype = dtype_name(tensor, f"{kind} of {fqn}")
        on_host = tensor.device.type == "cpu"
        chunk = Chunk(fqn, kind, shape, *span, dtype, per_element, on_host, self._rank, self._file)
        self.tensors[chunk] = tensor


def slot_of(owned: OwnedPiece) -> Slot:
    """Name and shape of the parameter a piece belongs to."""
    return owned.group.layout.slots[owned.piece.slot]


def has_separate_master(group: FlatGroup) -> bool:
    """Whether the group's masters are other tensors than its resident values."""
    return group.has_separate_master


def optimizer_groups(optimizer: ShardedOptimizer) -> list[dict[str, Any]]:
    """The hyper-parameters of every param group, with the names of its trainable parameters under "fqns"."""
    return [
        {**{name: value for name, value in group.items() if name != "params"}, "fqns": fqns}
        for group, fqns in zip(optimizer.param_groups, group_names(optimizer), strict=True)
    ]


def group_names(optimizer: ShardedOptimizer) -> list[list[str]]:
    """Names of the trainable parameters in every param group."""
    runtime = optimizer.runtime
    return [
        [runtime.name_of(param) for param in params if param in runtime.slot_of and is_trainable(param, runtime)]
        for params in optimizer.bit16_groups
    ]


def all_group_names(optimizer: ShardedOptimizer) -> list[GroupNames]:
    """The same, with those of frozen parameters."""
    runtime = optimizer.runtime
    whole = [
        [runtime.name_of(param) for param in params if param in runtime.slot_of] for params in optimizer.bit16_groups
    ]
    return [GroupNames(names, trained) for names, trained in zip(whole, group_names(optimizer), strict=True)]


def extra_states(module: nn.Module) -> dict[str, Any]:
    """What modules that define `get_extra_state` return, by module name."""
    return dict(_extra_states(module))


def _extra_states(module: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, inner in module.named_modules():
        if type(inner).get_extra_state is not nn.Module.get_extra_state:
            yield name, inner.get_extra_state()


def _share(group: FlatGroup) -> list[Piece]:
    """What this rank saves of a group: its replica's part of its shard, so that nothing is saved twice."""
    links, (start, stop) = group.links, group.layout.shard_range(group.links.rank)
    low, high = (start + (stop - start) * part // links.num_replicas for part in (links.replica, links.replica + 1))
    return group.layout.pieces_between(low, high)


def _offset(group: FlatGroup, piece: Piece, *, is_sharded: bool) -> int:
    """Where a piece of this rank's shard begins: in a tensor that is the shard, or in one that is whole."""
    begin, _ = group.layout.shard_range(group.links.rank) if is_sharded else (0, group.numel)
    return group.layout.slots[piece.slot].offset + piece.start - begin
