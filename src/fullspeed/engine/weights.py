"""`zero.load_weights`: plain weights into a model whose parameters are sharded, or have no memory yet."""

from __future__ import annotations

import pathlib
from collections.abc import Iterable, Mapping
from typing import NamedTuple, Protocol

import torch
from torch import nn

from fullspeed.accelerator import get_accelerator
from fullspeed.base.errors import CheckpointError
from fullspeed.checkpoint.model_files import ModelFiles, has_model_files
from fullspeed.checkpoint.open import find_checkpoint, is_checkpoint
from fullspeed.checkpoint.saved_weights import CheckpointWeights
from fullspeed.comm import Group, get_rank, get_world_group, get_world_size, init_distributed
from fullspeed.comm.rendezvous import rendezvous, together
from fullspeed.engine import restore
from fullspeed.engine.collect import NamedState, named_state
from fullspeed.engine.engine import Engine
from fullspeed.sharding import placeholder
from fullspeed.sharding.group import FlatGroup
from fullspeed.sharding.holder import ShardHolder
from fullspeed.sharding.owner import RuntimeOwner
from fullspeed.sharding.runtime import ShardingRuntime

Source = str | pathlib.Path | Iterable[str | pathlib.Path] | Mapping[str, torch.Tensor]


class LoadedWeights(NamedTuple):
    """Names that did not meet."""

    missing: list[str]  # the model has them, the source does not; they keep their values
    unexpected: list[str]  # the source has them, the model does not


@torch.no_grad()
def load_weights(
    model: nn.Module, source: Source, *, strict: bool = True, data_parallel_group: Group | None = None
) -> LoadedWeights:
    """Read plain weights into `model`, each rank only what it keeps: its shards of sharded parameters.

    The model may be an engine's (`engine.module`), built under `zero.Init`, built on the meta device (its parameters
    become sharded as under `zero.Init`), or ordinary. Collective: every rank passes the same source. Masters of 16-bit
    training take the values as they are in the source.

    Args:
        model: the module to fill; parameters keep their identity.
        source: a folder with safetensors or `pytorch_model.bin` files, an index, weight files, or a state dict; or a
            directory that was given to `save_checkpoint` (its latest one), or one checkpoint's own folder.
        strict: names must agree exactly. Tied parameters may be given under any of their names.
        data_parallel_group: the ranks that share parameters that were on the meta device; all by default.

    Returns:
        What was missing and unexpected; both empty when `strict`.

    Raises:
        CheckpointError: on every rank, when files cannot be read, shapes differ, or, if `strict`, names do.
    """
    init_distributed()
    model = getattr(model, "module", model) if isinstance(model, Engine) else model
    group = data_parallel_group or get_world_group()
    rendezvous("load_weights", group)
    state = named_state(model)
    found: list[_Weights] = []
    together(lambda: found.append(_Weights(_open(source, group), state, strict=strict)), CheckpointError, group)
    weights = found[0]
    _shard_meta(model, group)
    for flat in _groups_to_write(state):
        restore.write_group(flat, weights)
    for fqn, param in state.params.items():
        values = None if placeholder.is_adopted(param) else weights.param(fqn, 0, param.numel())
        if values is not None:
            param.copy_(values.view(param.shape))
    for fqn, buffer in state.buffers.items():
        values = weights.param(fqn, 0, buffer.numel())
        if values is not None:
            buffer.copy_(values.view(buffer.shape))
    for runtime in _runtimes_of(state):
        runtime.check_files()
    return weights.unmet


class _Tensors(Protocol):
    """Tensors by name."""

    shapes: dict[str, tuple[int, ...]]

    def elements(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Elements [start, stop) of a flattened tensor."""


class _Given:
    """Those of a state dict."""

    def __init__(self, state_dict: Mapping[str, torch.Tensor]) -> None:
        self._tensors = {name: value for name, value in state_dict.items() if isinstance(value, torch.Tensor)}
        self.shapes = {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}

    def elements(self, name: str, start: int, stop: int) -> torch.Tensor:
        """See `_Tensors`."""
        return self._tensors[name].detach().reshape(-1)[start:stop]


def _open(source: Source, group: Group) -> _Tensors:
    if isinstance(source, Mapping):
        return _Given(source)
    if isinstance(source, str | pathlib.Path) and is_checkpoint(source) and not has_model_files(pathlib.Path(source)):
        state = find_checkpoint(source, rank=get_rank(group))
        state.verify(get_world_size(group))
        return CheckpointWeights(state)
    return ModelFiles(source)


class _Weights:
    """The source, checked against the model's names and shapes; see `restore.WeightSource`."""

    def __init__(self, source: _Tensors, state: NamedState, *, strict: bool) -> None:
        self._source, shapes = source, source.shapes
        self._name_of = {fqn: fqn for fqn in shapes}  # the model's name -> the source's
        for alias, fqn in state.aliases.items():
            if fqn not in shapes and alias in shapes:
                self._name_of[fqn] = alias
        wanted = {fqn: tuple(tensor.shape) for fqn, tensor in (*state.params.items(), *state.buffers.items())}
        given = {fqn: shapes[name] for fqn, name in self._name_of.items() if fqn not in state.aliases}
        restore.check_shapes(given, wanted, {}, "the source of weights", strict=strict)
        self._check_meta(state)
        self.unmet = LoadedWeights(
            missing=[fqn for fqn in wanted if fqn not in given],
            unexpected=[fqn for fqn in given if fqn not in wanted],
        )

    def _check_meta(self, state: NamedState) -> None:
        lost = [fqn for fqn, buffer in state.buffers.items() if buffer.is_meta]
        if lost:
            raise CheckpointError(
                f"buffers {', '.join(lost)} are on the meta device, where they have lost the values their modules gave "
                f"them; build the model with zero.Init, or give them memory and values first"
            )

    def param(self, fqn: str, start: int, stop: int) -> torch.Tensor | None:
        """Elements of a flattened tensor; None when the source does not have it."""
        name = self._name_of.get(fqn)
        if name is None:
            return None
        return self._source.elements(name, start, stop)

    master = param


def _shard_meta(model: nn.Module, group: Group) -> None:
    """Give parameters on the meta device shards, zeros at first."""
    holder = None
    for prefix, module in model.named_modules():
        bare = [(name, param) for name, param in module.named_parameters(prefix, recurse=False) if param.is_meta]
        if bare and holder is None:
            holder = ShardHolder(group, torch.device(get_accelerator().current_device_name()))
        if bare:
            assert holder is not None
            holder.add(bare)


def _runtimes_of(state: NamedState) -> list[ShardingRuntime]:
    """The runtimes that some of the model's parameters are run by, in the order of the parameters."""
    owners = (placeholder.owner_of(param) for param in state.params.values())
    return list(dict.fromkeys(owner.runtime for owner in owners if isinstance(owner, RuntimeOwner)))


def _groups_to_write(state: NamedState) -> list[FlatGroup]:
    """The flat groups of the model's parameters, known by the model's names. Collective for an engine's."""
    for runtime in _runtimes_of(state):
        restore.prepare_for_writing(runtime)
    groups: dict[FlatGroup, None] = {}
    for fqn, param in state.params.items():
        owner = placeholder.owner_of(param)
        if owner is None:
            continue
        group, slot = owner.place_of(param)
        if isinstance(owner, ShardHolder):
            group.rename(slot, fqn)  # a module under construction did not know what it would be called
        groups[group] = None
    return list(groups)
