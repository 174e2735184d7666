"""Reading a DeepSpeed checkpoint of any stage: its files become a `MappedState`.

What each kind of file says of the parameters' values:

| written with                  | weights                          | masters, optimizer state                       |
|-------------------------------|----------------------------------|------------------------------------------------|
| nothing sharded               | whole, in the file of weights    | there too, by the optimizer's own numbering    |
| optimizer states sharded      | whole, in the file of weights    | flat groups, cut evenly over ranks             |
| parameters sharded too        | frozen ones: parts in each file  | flat groups, each parameter cut evenly         |
"""

from __future__ import annotations

import math
import pathlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from fullspeed.base.errors import CheckpointError
from fullspeed.checkpoint.deepspeed import model_states
from fullspeed.checkpoint.deepspeed.files import DeepSpeedFiles
from fullspeed.checkpoint.deepspeed.layout import flat_spans, part_spans
from fullspeed.checkpoint.deepspeed.mapped import MappedState, Stored, stored_whole
from fullspeed.checkpoint.deepspeed.optimizer_states import (
    STEP,
    FlatGroup,
    group_tensors,
    hyperparameters,
    loss_scale_of,
    stored_scalar,
)
from fullspeed.checkpoint.manifest import BUFFER, MASTER, OPTIMIZER, PARAM, FileRecord, Manifest, ParamRecord
from fullspeed.checkpoint.saved import COMMON, GroupNames, client_file

UNNAMED_OPTIMIZER = ""
"""In a manifest: there is optimizer state, and nothing says of which class."""


class FoundOptimizer(NamedTuple):
    """What was found of the optimizer."""

    tensors: dict[tuple[str, str], Stored]
    rows: list[dict[str, Any]]  # param groups; none where they were not saved
    loss_scale: dict[str, float | int]
    stage: int


def read_deepspeed(path: pathlib.Path, rank: int, group_names: Sequence[GroupNames] = ()) -> MappedState:
    """Open the checkpoint in a tag's folder for one rank of ours.

    Args:
        path: the tag's folder.
        rank: whose client state is wanted, and whose share of the files `verify` opens.
        group_names: where nothing was sharded, files number the optimizer's parameters and do not name them: then these
            are their names. Without, only weights are found there.

    Raises:
        CheckpointError: a file is missing or damaged, or the checkpoint is not one of data-parallel ranks only.
    """
    files = DeepSpeedFiles(path)
    model = files.model(0)
    if not isinstance(model["module"], Mapping):
        raise CheckpointError(f"{path} holds no weights of a whole module; pipeline checkpoints cannot be read")
    num_ranks = model["dp_world_size"]
    if files.has_optimizer:
        is_sharded = "fp32_flat_groups" in files.optimizer(0)
        optimizer = _read_parted(files, model, num_ranks) if is_sharded else _read_flat(files, model)
    else:
        is_sharded = False
        optimizer = read_whole(model, group_names)
    tensors = model_states.buffers_of(model) | optimizer.tensors
    if is_sharded:
        tensors |= frozen_parts(files, model, num_ranks)
    tensors |= weights(model, tensors)
    return make_state(model, files.model(rank), tensors, optimizer, lambda ws: files.verify(num_ranks, rank, ws))


def make_state(
    model: Mapping[str, Any],
    own_model: Mapping[str, Any],
    tensors: Mapping[tuple[str, str], Stored],
    optimizer: FoundOptimizer,
    check: Callable[[int], None],
) -> MappedState:
    """Put together what was found.

    Args:
        model: the first file of weights.
        own_model: the one whose client state is wanted.
        tensors: all of them.
        optimizer: what was found of the optimizer.
        check: called by `verify`.
    """
    module, aliases = model["module"], model_states.aliases_of(model)
    trained = {fqn for kind, fqn in tensors if kind == MASTER or kind.startswith(OPTIMIZER)}
    names = [fqn for fqn in module if (PARAM, fqn) in tensors]
    common: dict[str, Any] = {
        "extra_state": model_states.extra_states_of(model),
        "param_groups": optimizer.rows,
        "optimizer_values": {},
        "loss_scale": optimizer.loss_scale,
    }
    if model.get("lr_scheduler") is not None:
        common["lr_scheduler"] = model["lr_scheduler"]
    objects = {COMMON: common, client_file(0): {"client_state": model_states.client_state_of(own_model)}}
    manifest = Manifest(
        world_size=model["dp_world_size"],
        stage=optimizer.stage,
        optimizer=UNNAMED_OPTIMIZER if trained or optimizer.rows else None,
        data="",
        params=tuple(
            ParamRecord(fqn, tensors[PARAM, fqn].shape, _dtype_name(module.get(fqn)), fqn in trained, is_saved=True)
            for fqn in names
        ),
        aliases=aliases,
        buffers={fqn: stored.shape for (kind, fqn), stored in tensors.items() if kind == BUFFER},
        counters=model_states.counters_of(model),
        files={name: FileRecord(0, 0) for name in objects},
    )
    return MappedState(manifest, tensors, objects, check)


def _dtype_name(value: torch.Tensor | None) -> str:
    return str(torch.float32 if value is None else value.dtype).removeprefix("torch.")


def weights(model: Mapping[str, Any], found: Mapping[tuple[str, str], Stored]) -> dict[tuple[str, str], Stored]:
    """Resident values: those of the file of weights; where that has placeholders, masters."""
    aliases = model_states.aliases_of(model)
    tensors = {}
    for fqn, value in model["module"].items():
        is_param = isinstance(value, torch.Tensor) and fqn not in model["buffer_names"] and fqn not in aliases
        if not is_param or (PARAM, fqn) in found:
            continue
        master = found.get((MASTER, fqn))
        is_placeholder = master is not None and value.numel() != math.prod(master.shape)
        tensors[PARAM, fqn] = master if master is not None and is_placeholder else _module_entry(model, fqn)
    return tensors


def _module_entry(model: Mapping[str, Any], fqn: str) -> Stored:
    return stored_whole(lambda: model["module"][fqn], model["module"][fqn].shape)


def frozen_parts(files: DeepSpeedFiles, model: Mapping[str, Any], num_ranks: int) -> dict[tuple[str, str], Stored]:
    """Frozen parameters that were sharded: each rank's file has its part of each."""
    found = {}
    for fqn, shape in (model.get("frozen_param_shapes") or {}).items():
        (spans,) = part_spans([math.prod(shape)], num_ranks)

        def fetch(rank: int, fqn: str = fqn) -> torch.Tensor:
            part: torch.Tensor = files.rank_model(rank)["frozen_param_fragments"][fqn]
            return part

        found[PARAM, fqn] = Stored(tuple(shape), spans, fetch)
    return found


# ---------------------------------------------------------------------- optimizer


def shapes_of(model: Mapping[str, Any]) -> list[dict[str, tuple[int, ...]]]:
    """Names and shapes of the parameters in each flat group."""
    return [{fqn: tuple(shape) for fqn, shape in group.items()} for group in model["param_shapes"]]


def rows_of(rows: Sequence[Mapping[str, Any]], shapes: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Hyper-parameters of each param group; a group numbers the flat groups it consists of."""
    return [hyperparameters(row, [fqn for index in row["params"] for fqn in shapes[index]]) for row in rows]


def _read_flat(files: DeepSpeedFiles, model: Mapping[str, Any]) -> FoundOptimizer:
    """Optimizer states are sharded: param groups are flat, and cut evenly."""
    first = files.optimizer(0)
    shapes = shapes_of(model)
    all_gaps = first.get("param_alignment_paddings")
    base = first["base_optimizer_state"]
    rows = base["param_groups"] if isinstance(base, Mapping) else []
    tensors: dict[tuple[str, str], Stored] = {}
    for index, group in enumerate(shapes):
        numels = [math.prod(shape) for shape in group.values()]
        gaps = all_gaps[index] if all_gaps else [0] * len(numels)
        # The padding at the end is cut off; all ranks' shards are as long as the first rank's with its padding.
        shard_numel = first["single_partition_of_fp32_groups"][index].numel() + first["group_paddings"][index]

        def master(rank: int, index: int = index) -> torch.Tensor:
            values: torch.Tensor = files.optimizer(rank)["single_partition_of_fp32_groups"][index]
            return values

        def state(rank: int, index: int = index) -> Mapping[str, Any]:
            base = files.optimizer(rank)["base_optimizer_state"]
            found: Mapping[str, Any] = base["state"].get(index, {}) if isinstance(base, Mapping) else base[index]
            return found

        spans = flat_spans(numels, gaps, shard_numel)
        step = rows[index].get(STEP) if rows else first.get("base_optimizer_state_step")
        tensors |= group_tensors(FlatGroup(group, spans, master, state, step))
    return FoundOptimizer(tensors, rows_of(rows, shapes), loss_scale_of(first), int(first.get("zero_stage", 1)))


def _read_parted(files: DeepSpeedFiles, model: Mapping[str, Any], num_ranks: int) -> FoundOptimizer:
    """Parameters are sharded too: each is cut evenly."""
    first = files.optimizer(0)
    shapes = shapes_of(model)
    rows = first["optimizer_state_dict"]["param_groups"]
    tensors: dict[tuple[str, str], Stored] = {}
    for index, group in enumerate(shapes):

        def master(rank: int, index: int = index) -> torch.Tensor:
            values: torch.Tensor = files.optimizer(rank)["fp32_flat_groups"][index]
            return values

        def state(rank: int, index: int = index) -> Mapping[str, Any]:
            found: Mapping[str, Any] = files.optimizer(rank)["optimizer_state_dict"]["state"].get(index, {})
            return found

        spans = part_spans([math.prod(shape) for shape in group.values()], num_ranks)
        step = next((row.get(STEP) for row in rows if index in row["params"]), None)
        tensors |= group_tensors(FlatGroup(group, spans, master, state, step))
    return FoundOptimizer(tensors, rows_of(rows, shapes), loss_scale_of(first), int(first.get("zero_stage", 1)))


def read_whole(model: Mapping[str, Any], group_names: Sequence[GroupNames]) -> FoundOptimizer:
    """Nothing is sharded: the optimizer's own state dict, which numbers parameters.

    A group that cannot be the engine's gets no names; whoever wants optimizer states then sees that groups differ.
    """
    outer = model["optimizer"]
    if outer is None or not group_names:
        return FoundOptimizer({}, [], {}, 0)
    base = outer.get("optimizer_state_dict", outer)
    tensors: dict[tuple[str, str], Stored] = {}
    rows = []
    fits = len(base["param_groups"]) == len(group_names)
    for index, row in enumerate(base["param_groups"]):
        is_flat = "fp32_groups_flat" in outer
        fqns = (_flat_names if is_flat else _listed_names)(model, index, group_names[index]) if fits else []
        if fqns:
            tensors |= _flat_group(model, index, fqns) if is_flat else _listed_group(model, index, fqns)
        rows.append(hyperparameters(row, [fqn for fqn in fqns if fqn in group_names[index].trainable]))
    return FoundOptimizer(tensors, rows, loss_scale_of(outer), 0)


def _listed_names(model: Mapping[str, Any], index: int, names: GroupNames) -> Sequence[str]:
    """Names for the parameters that a param group numbers: users list frozen ones there, or do not."""
    outer = model["optimizer"]
    count = len(outer.get("optimizer_state_dict", outer)["param_groups"][index]["params"])
    return next((fqns for fqns in names if len(fqns) == count and set(fqns) <= set(model["module"])), [])


def _listed_group(model: Mapping[str, Any], index: int, fqns: Sequence[str]) -> dict[tuple[str, str], Stored]:
    """A param group whose parameters are numbered, each with its own state."""
    outer = model["optimizer"]
    base = outer.get("optimizer_state_dict", outer)
    numbers = base["param_groups"][index]["params"]
    masters = outer["fp32_groups"][index] if "fp32_groups" in outer else [None] * len(fqns)
    tensors: dict[tuple[str, str], Stored] = {}
    for fqn, number, master in zip(fqns, numbers, masters, strict=True):
        tensors |= _param_state(model, fqn, base["state"].get(number, {}), master)
    return tensors


def _flat_names(model: Mapping[str, Any], index: int, names: GroupNames) -> Sequence[str]:
    """Names for the parameters of a param group that is kept flat, if they have as many elements as it."""
    flat = model["optimizer"]["fp32_groups_flat"][index]
    if not set(names.trainable) <= set(model["module"]):
        return []
    numel = sum(model["module"][fqn].numel() for fqn in names.trainable)
    return names.trainable if numel == flat.numel() else []


def _flat_group(model: Mapping[str, Any], index: int, fqns: Sequence[str]) -> dict[tuple[str, str], Stored]:
    """A param group that DeepSpeed's fused optimizers keep flat and whole."""
    outer = model["optimizer"]
    flat = outer["fp32_groups_flat"][index]
    base = outer["optimizer_state_dict"]
    shapes = {fqn: tuple(model["module"][fqn].shape) for fqn in fqns}
    numels = [math.prod(shape) for shape in shapes.values()]
    spans = flat_spans(numels, [0] * len(numels), flat.numel())
    state = base["state"].get(index, {})
    step = base["param_groups"][index].get(STEP)
    return group_tensors(FlatGroup(shapes, spans, lambda _: flat, lambda _: state, step))


def _param_state(
    model: Mapping[str, Any], fqn: str, state: Mapping[str, Any], master: torch.Tensor | None
) -> dict[tuple[str, str], Stored]:
    shape = model["module"][fqn].shape
    found: dict[tuple[str, str], Stored] = {}
    if master is not None:
        found[MASTER, fqn] = stored_whole(lambda: master, shape)
    for name, value in state.items():
        is_per_element = isinstance(value, torch.Tensor) and value.shape == shape and name != STEP
        found[OPTIMIZER + name, fqn] = (
            stored_whole(partial(_same, value), shape) if is_per_element else stored_scalar(value)
        )
    return found


def _same(value: torch.Tensor) -> torch.Tensor:
    return value
