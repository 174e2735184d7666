"""`zero.load_weights`: plain weights into a model whose parameters are sharded, or have no memory yet."""

from __future__ import annotations

import pathlib
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from torch import nn

from fullspeed.accelerator import get_accelerator
from fullspeed.base.errors import CheckpointError
from fullspeed.checkpoint.model_files import ModelFiles
from fullspeed.comm import Group, get_world_group, init_distributed
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
        source: a folder with safetensors or `pytorch_model.bin` files, an index, weight files, or a state dict.
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
    together(lambda: found.append(_Weights(source, state, strict=strict)), CheckpointError, group)
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


class _Weights:
    """The source, checked against the model's names and shapes; see `restore.WeightSource`."""

    def __init__(self, source: Source, state: NamedState, *, strict: bool) -> None:
        self._files: ModelFiles | None = None
        self._given: Mapping[str, torch.Tensor] = {}
        if isinstance(source, Mapping):
            self._given = source
            shapes = {name: tuple(value.shape) for name, value in source.items() if isinstance(value, torch.Tensor)}
        else:
            self._files = ModelFiles(source)
            shapes = self._files.shapes
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
        if self._files is not None:
            return self._files.elements(name, start, stop)
        return self._given[name].detach().reshape(-1)[start:stop]

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
