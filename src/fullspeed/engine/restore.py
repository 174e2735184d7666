"""Putting saved state into a running engine: weights, masters, optimizer state."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import nn

from fullspeed.base.errors import CheckpointError, UsageError
from fullspeed.base.log import log_dist
from fullspeed.checkpoint.manifest import BUFFER, MASTER, OPTIMIZER, PARAM, Manifest
from fullspeed.checkpoint.saved import SavedState
from fullspeed.engine.collect import NamedState, group_names, has_separate_master, slot_of
from fullspeed.sharding.group import FlatGroup
from fullspeed.sharding.optimizer import ShardedOptimizer
from fullspeed.sharding.pieces import OwnedPiece
from fullspeed.sharding.runtime import ShardingRuntime


class WeightSource(Protocol):
    """Where values of parameters come from, elements [start, stop) of the flattened parameter at a time.

    None means that the source has nothing for the parameter, which then keeps its values.
    """

    def param(self, fqn: str, start: int, stop: int) -> torch.Tensor | None:
        """The resident value."""

    def master(self, fqn: str, start: int, stop: int) -> torch.Tensor | None:
        """The most exact value there is."""


class SavedWeights:
    """The weights of a checkpoint.

    Args:
        reader: the checkpoint.
        use_masters: take masters from saved masters, where there are any, and not from the resident values.
    """

    def __init__(self, reader: SavedState, *, use_masters: bool) -> None:
        self._reader, self._use_masters = reader, use_masters

    def param(self, fqn: str, start: int, stop: int) -> torch.Tensor | None:
        """The resident value, as stored or given."""
        return self._reader.elements(PARAM, fqn, start, stop) if self._reader.has(PARAM, fqn) else None

    def master(self, fqn: str, start: int, stop: int) -> torch.Tensor | None:
        """The saved master, or the resident value."""
        if self._use_masters and self._reader.has(MASTER, fqn):
            return self._reader.elements(MASTER, fqn, start, stop)
        return self.param(fqn, start, stop)


class GivenWeights:
    """The weights of a state dict of whole tensors."""

    def __init__(self, state_dict: Mapping[str, Any]) -> None:
        self._state_dict = state_dict

    def param(self, fqn: str, start: int, stop: int) -> torch.Tensor | None:
        """The resident value, as stored or given."""
        tensor = self._state_dict.get(fqn)
        return None if tensor is None else tensor.detach().reshape(-1)[start:stop]

    def master(self, fqn: str, start: int, stop: int) -> torch.Tensor | None:
        """The saved master, or the resident value."""
        return self.param(fqn, start, stop)


# ------------------------------------------------------------------------ weights


def prepare_for_writing(runtime: ShardingRuntime) -> None:
    """Forget gradients and copies, so that the resident values are the only ones, and nobody reads them. Collective."""
    runtime.sync()
    runtime.clear_grads()
    runtime.gatherer.free_idle()
    for group in runtime.groups:
        group.forget_copies()
    busy = next((group for group in runtime.groups if group.is_transient and group.is_whole), None)
    if busy is not None:
        raise UsageError(f"weights cannot be loaded while a forward computes with {busy.fqns[0]}; load between steps")


@torch.no_grad()
def write_weights(runtime: ShardingRuntime, state: NamedState, source: WeightSource) -> None:
    """Give every parameter the source's values: resident ones, masters, and those the caller keeps."""
    for group in runtime.groups:
        write_group(group, source)
    for fqn, param in state.params.items():
        if param not in runtime.slot_of:
            values = source.param(fqn, 0, param.numel())
            if values is not None:
                param.copy_(values.view(param.shape))


@torch.no_grad()
def write_group(group: FlatGroup, source: WeightSource) -> None:
    """Give a group's parameters the source's values: resident ones and masters."""
    _write_resident(group, source)
    if has_separate_master(group):
        _write_masters(group, source)
    for param in group.params:
        torch.autograd.graph.increment_version(param)
    group.note_versions()


@torch.no_grad()
def write_masters(runtime: ShardingRuntime, source: WeightSource) -> None:
    """Give masters that are tensors of their own the source's values."""
    for group in runtime.groups:
        if has_separate_master(group):
            _write_masters(group, source)


def _write_resident(group: FlatGroup, source: WeightSource) -> None:
    """Whole resident values are written whole on every rank: that takes no communication."""
    is_master = group.master is not None and not has_separate_master(group)
    fetch = source.master if is_master else source.param
    layout = group.layout
    pieces = layout.pieces(group.links.rank) if group.placement.params else layout.pieces_between(0, group.numel)
    with group.resident.editing() as store:
        for piece in pieces:
            values = fetch(layout.slots[piece.slot].fqn, piece.start, piece.stop)
            if values is not None:
                store[piece.shard_offset : piece.shard_offset + piece.numel].copy_(values)


def _write_masters(group: FlatGroup, source: WeightSource) -> None:
    assert group.master is not None
    for piece in group.optimizer_pieces():
        values = source.master(group.layout.slots[piece.slot].fqn, piece.start, piece.stop)
        if values is not None:
            group.master[piece.shard_offset : piece.shard_offset + piece.numel].copy_(values)


def adopt_whole_params(runtime: ShardingRuntime) -> None:
    """Take over what somebody wrote into parameters that are all whole now, and free the whole copies."""
    for group in runtime.groups:
        for slot in range(len(group.params)):
            group.take_over(slot)
        group.reshard()


@torch.no_grad()
def write_buffers(state: NamedState, reader: SavedState) -> None:
    """Give every saved buffer its saved value."""
    for fqn, buffer in state.buffers.items():
        if reader.has(BUFFER, fqn):
            buffer.copy_(reader.whole(BUFFER, fqn))


def write_extra_states(module: nn.Module, saved: Mapping[str, Any]) -> None:
    """Hand every module the extra state it saved."""
    for name, inner in module.named_modules():
        if name in saved:
            inner.set_extra_state(saved[name])


def saved_state_dict(reader: SavedState) -> dict[str, torch.Tensor]:
    """The saved weights and buffers, whole, under all their names."""
    manifest = reader.manifest
    found = {
        record.fqn: reader.elements(PARAM, record.fqn, 0, math.prod(record.shape)).view(record.shape)
        for record in manifest.params
        if record.is_saved
    }
    found |= {fqn: reader.whole(BUFFER, fqn) for fqn in manifest.buffers}
    found |= {alias: found[fqn] for alias, fqn in manifest.aliases.items() if fqn in found}
    return found


# ---------------------------------------------------------------------------- fit


def check_names(manifest: Manifest, state: NamedState, tag: str, *, strict: bool) -> None:
    """Compare the checkpoint's parameters and buffers with the model's.

    Raises:
        CheckpointError: a shape differs; or, when `strict`, a name is on one side only. Lists all of them.
    """
    saved: dict[str, tuple[int, ...]] = {record.fqn: record.shape for record in manifest.params if record.is_saved}
    saved |= manifest.buffers
    wanted = {fqn: tuple(tensor.shape) for fqn, tensor in (*state.params.items(), *state.buffers.items())}
    check_shapes(saved, wanted, manifest.aliases, f"checkpoint {tag!r}", strict=strict)


def check_shapes(
    saved: Mapping[str, tuple[int, ...]],
    wanted: Mapping[str, tuple[int, ...]],
    aliases: Mapping[str, str],
    what: str,
    *,
    strict: bool,
) -> None:
    """Compare names and shapes of what is there with what the model wants; see `check_names`."""
    used = {fqn if fqn in saved else aliases.get(fqn, fqn): shape for fqn, shape in wanted.items()}
    missing = [fqn for fqn in used if fqn not in saved]
    unexpected = [fqn for fqn in saved if fqn not in used]
    faults = [
        f"{fqn} has shape {saved[fqn]} there and {shape} in the model"
        for fqn, shape in used.items()
        if fqn in saved and saved[fqn] != shape
    ]
    if strict and missing:
        faults.append(f"missing there: {', '.join(missing)}")
    if strict and unexpected:
        faults.append(f"unexpected there: {', '.join(unexpected)}")
    if faults:
        fix = "; load_module_strict=False takes over what both have" if strict and (missing or unexpected) else ""
        raise CheckpointError(f"{what} does not fit the model: {'; '.join(faults)}{fix}")


def check_optimizer(manifest: Manifest, common: Mapping[str, Any], optimizer: ShardedOptimizer, tag: str) -> None:
    """Compare the checkpoint's optimizer with the engine's. Raises CheckpointError saying where they differ."""
    instead = "pass load_optimizer_states=False to load everything else"
    mine, saved = type(optimizer.optimizer).__name__, manifest.optimizer
    if saved is None:
        raise CheckpointError(f"checkpoint {tag!r} was saved without an optimizer, this engine has {mine}; {instead}")
    if saved and saved != mine:
        raise CheckpointError(f"checkpoint {tag!r} holds the state of {saved}, this engine has {mine}; {instead}")
    rows, names = common["param_groups"], group_names(optimizer)
    if len(rows) != len(names):
        raise CheckpointError(
            f"checkpoint {tag!r} has {len(rows)} param groups, this engine's optimizer {len(names)}; {instead}"
        )
    for index, (row, wanted) in enumerate(zip(rows, names, strict=True)):
        differing = set(row["fqns"]) ^ {manifest.aliases.get(fqn, fqn) for fqn in wanted}
        if differing:
            raise CheckpointError(
                f"param group {index} of checkpoint {tag!r} and of this engine differ in "
                f"{', '.join(sorted(differing))}; build the optimizer with the same groups, or {instead}"
            )


# ---------------------------------------------------------------------- optimizer


def write_optimizer(
    optimizer: ShardedOptimizer,
    reader: SavedState,
    common: Mapping[str, Any],
) -> None:
    """Restore state, hyper-parameters and loss scale.

    Args:
        optimizer: the engine's.
        reader: the checkpoint.
        common: what rank 0 saved for all, see `Checkpointing`.
    """
    for owned in optimizer.owned.values():
        entries = {
            kind.removeprefix(OPTIMIZER): _entry(reader, kind, owned)
            for kind in reader.optimizer_kinds(slot_of(owned).fqn)
        }
        entries.update(common["optimizer_values"].get(reader.resolve(slot_of(owned).fqn), {}))
        optimizer.state.pop(owned.tensor, None)
        if entries:
            optimizer.state[owned.tensor] = entries
            optimizer.keep_state(owned)
    for group, row in zip(optimizer.param_groups, common["param_groups"], strict=True):
        for name, value in row.items():
            if name == "fqns":
                continue
            if isinstance(value, torch.Tensor) and isinstance(group.get(name), torch.Tensor):
                group[name].copy_(value)  # a captured graph, or a scheduler, may hold this tensor
            else:
                group[name] = value
    optimizer.stepper.load_state_dict(common.get("stepper", {}))
    if set(optimizer.loss_scaler.state_dict()) <= set(common["loss_scale"]):
        optimizer.loss_scaler.load_state_dict(common["loss_scale"])
    else:
        log_dist("the checkpoint has no adaptive loss scale; this engine's starts afresh", level=logging.WARNING)


def _entry(reader: SavedState, kind: str, owned: OwnedPiece) -> torch.Tensor:
    """One tensor of a piece's state, where it was before: with the values, or in host memory as step counts are."""
    fqn, piece = slot_of(owned).fqn, owned.piece
    chunk = reader.describe(kind, fqn)
    if not chunk.per_element:
        value = reader.whole(kind, fqn)
        return value if chunk.on_host else value.to(owned.tensor.device)
    flat = reader.elements(kind, fqn, piece.start, piece.stop)
    return flat.to(owned.tensor.device).view(owned.tensor.shape)
