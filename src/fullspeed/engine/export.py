"""`zero.save_weights`: plain weights out of a running engine, as Hugging Face models have them."""

from __future__ import annotations

import pathlib
from collections import Counter
from collections.abc import Callable, Iterator

import torch
from torch import nn

from fullspeed.base.errors import CheckpointError, UsageError
from fullspeed.checkpoint.export import Format, WeightSpec, WeightWriter
from fullspeed.comm import get_rank
from fullspeed.comm.rendezvous import rendezvous, together
from fullspeed.engine.collect import NamedState, is_trainable, named_state
from fullspeed.engine.engine import Engine
from fullspeed.sharding import placeholder
from fullspeed.sharding.group import FlatGroup
from fullspeed.sharding.runtime import ShardingRuntime
from fullspeed.sharding.state_files import read_together

Rename = Callable[[str], str | None]


@torch.no_grad()
def save_weights(
    engine: Engine,
    folder: str | pathlib.Path,
    *,
    dtype: torch.dtype | None = None,
    max_shard_size: int | str = "5GB",
    file_format: Format = "safetensors",
    trainable_only: bool = False,
    rename: Rename | None = None,
) -> list[pathlib.Path]:
    """Write the module's parameters and persistent buffers as files that `from_pretrained` loads.

    Collective: every rank calls it; rank 0 writes. Training goes on where it was, also inside an accumulation. Memory:
    one file on rank 0, one group of parameters on the others. Tied parameters are written once, under their first name.

    Args:
        engine: the one that trains the module.
        folder: made if missing. Files of an earlier export are replaced, each as a whole.
        dtype: of floating-point values; None leaves each as it is stored. For another dtype than the stored one,
            trained parameters are taken from their masters.
        max_shard_size: bytes in a file, as a number or like "5GB".
        file_format: "safetensors", or "pickled" for `pytorch_model.bin`.
        trainable_only: leave out frozen parameters and buffers, which of a LoRA model leaves the adapters.
        rename: gives each parameter's and buffer's name in the files; None leaves it out.

    Returns:
        The files.

    Raises:
        CheckpointError: on every rank, when rank 0 could not write, `rename` gives a name twice, or a parameter is
            another engine's.
    """
    group = engine.data_parallel_group
    rendezvous("save_weights", group)
    export = _Export(engine, dtype, trainable_only, rename)
    is_writer = get_rank(group) == 0
    writers: list[WeightWriter] = []

    def begin() -> None:
        export.check()
        if is_writer:
            writers.append(WeightWriter(folder, export.specs(), max_shard_size, file_format))

    together(begin, CheckpointError, group)
    engine.runtime.meet()
    failure: OSError | None = None
    for name, values in export.values(wanted=is_writer):
        if failure is None and writers:
            try:
                writers[0].add(name, values)
            except OSError as error:  # the other ranks are in the middle of their gathers
                failure = error
    engine.runtime.check_files()

    def end() -> list[pathlib.Path]:
        if failure is not None:
            raise failure
        return writers[0].finish() if writers else []

    return together(end, CheckpointError, group)[0]


class _Export:
    """What is written, in the order in which groups are gathered."""

    def __init__(self, engine: Engine, dtype: torch.dtype | None, trainable_only: bool, rename: Rename | None) -> None:
        self._dtype = dtype
        self._runtime: ShardingRuntime = engine.runtime
        self._state: NamedState = named_state(engine.module, engine.runtime)
        self._names: dict[str, str] = {}  # name in the module -> name in the files
        params = self._state.params.items()
        chosen = [fqn for fqn, param in params if not trainable_only or is_trainable(param, self._runtime)]
        for fqn in chosen if trainable_only else [*chosen, *self._state.buffers]:
            name = fqn if rename is None else rename(fqn)
            if name is not None:
                self._names[fqn] = name

    def check(self) -> None:
        """Raise UsageError when two names are the same, or a parameter's values are not this engine's."""
        twice = [name for name, count in Counter(self._names.values()).items() if count > 1]
        if twice:
            raise UsageError(f"rename gives several parameters the name {', '.join(twice)}")
        foreign = [
            fqn
            for fqn, param in self._state.params.items()
            if fqn in self._names and param not in self._runtime.slot_of and placeholder.is_sharded(param)
        ]
        if foreign:
            raise UsageError(f"parameters {', '.join(foreign)} belong to another engine; export that one's")

    def specs(self) -> Iterator[WeightSpec]:
        """What `values` gives, without values."""
        for group in self._runtime.groups:
            for param, fqn in self._wanted(group):
                yield WeightSpec(self._names[fqn], tuple(param.shape), self._dtype_of(group.dtypes.storage))
        for fqn, tensor in self._unmanaged():
            yield WeightSpec(self._names[fqn], tuple(tensor.shape), self._dtype_of(tensor.dtype))

    def values(self, *, wanted: bool) -> Iterator[tuple[str, torch.Tensor]]:
        """Names and values; a rank that does not want them only helps to gather. Collective."""
        for group in self._runtime.groups:
            params = self._wanted(group)
            if not params:
                continue
            whole = _whole_values(group, exact=self._dtype_of(group.dtypes.storage) != group.dtypes.storage)
            for param, fqn in params if wanted else ():
                slot = group.layout.slots[self._runtime.slot_of[param][1]]
                yield self._names[fqn], whole[slot.offset : slot.end].view(slot.shape).to("cpu", copy=True)
        for fqn, tensor in self._unmanaged():
            yield self._names[fqn], tensor.detach()

    def _wanted(self, group: FlatGroup) -> list[tuple[nn.Parameter, str]]:
        named = ((param, self._runtime.name_of(param)) for param in group.params)
        return [(param, fqn) for param, fqn in named if fqn in self._names]

    def _unmanaged(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Parameters that are the caller's own, and buffers."""
        for fqn, param in self._state.params.items():
            if fqn in self._names and param not in self._runtime.slot_of:
                yield fqn, param
        for fqn, buffer in self._state.buffers.items():
            if fqn in self._names:
                yield fqn, buffer

    def _dtype_of(self, stored: torch.dtype) -> torch.dtype:
        return stored if self._dtype is None or not stored.is_floating_point else self._dtype


def _whole_values(group: FlatGroup, *, exact: bool) -> torch.Tensor:
    """A group's flat values, whole: resident ones, or the masters behind them. Collective where they are sharded."""
    if exact and group.has_separate_master:
        assert group.master is not None
        own = read_together(group.master, group.links.dp_group)
        if not group.placement.optim:
            return own
        whole = torch.empty(group.numel, dtype=own.dtype, device=group.device)
        group.links.gather.all_gather(whole, own).wait()
        return whole
    return group.whole_resident()
