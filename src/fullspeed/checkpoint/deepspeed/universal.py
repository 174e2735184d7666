"""Universal checkpoints: every tensor whole, in a file of its own, beside the files of weights and counters."""

from __future__ import annotations

import math
import pathlib
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from fullspeed.base.errors import CheckpointError
from fullspeed.checkpoint.deepspeed import model_states
from fullspeed.checkpoint.deepspeed.files import UNIVERSAL, UNIVERSAL_OPTIMIZER, DeepSpeedFiles
from fullspeed.checkpoint.deepspeed.mapped import MappedState, Stored, stored_whole
from fullspeed.checkpoint.deepspeed.optimizer_states import STEP, loss_scale_of, stored_scalar
from fullspeed.checkpoint.deepspeed.read import FoundOptimizer, frozen_parts, make_state, rows_of, shapes_of, weights
from fullspeed.checkpoint.deepspeed.unpickle import load
from fullspeed.checkpoint.manifest import MASTER, OPTIMIZER

FP32 = "fp32"
_MERGED = ("sub_param_shape", "param_n_sub_params", "vocab_tensor", "is_expert_param")


def read_universal(path: pathlib.Path, rank: int) -> MappedState:
    """Open the universal checkpoint in a tag's folder for one rank of ours; see `read_deepspeed`.

    Raises:
        CheckpointError: a file is missing or damaged, or parameters were fused, padded or experts.
    """
    files = DeepSpeedFiles(path)
    model = files.model(0)
    folder = path / UNIVERSAL
    state = load(folder / UNIVERSAL_OPTIMIZER)
    rows = state["param_groups"]
    shapes = shapes_of(model)
    tensors: dict[tuple[str, str], Stored] = {}
    for index, group in enumerate(shapes):
        step = _step_of(state, rows, index)
        for fqn, shape in group.items():
            tensors |= _param_tensors(folder / fqn, fqn, shape, step)
    optimizer = FoundOptimizer(tensors, rows_of(rows, shapes), loss_scale_of(state), int(state.get("zero_stage", 1)))
    found = model_states.buffers_of(model) | tensors
    if not _is_whole(model):
        found |= frozen_parts(files, model, model["dp_world_size"])
    found |= weights(model, found)
    return make_state(model, files.model(rank), found, optimizer, lambda size: files.verify(0, rank, size))


def _is_whole(model: Mapping[str, Any]) -> bool:
    """Whether the file of weights holds frozen parameters whole."""
    frozen = model.get("frozen_param_shapes") or {}
    return all(model["module"][fqn].numel() == math.prod(shape) for fqn, shape in frozen.items())


def _step_of(state: Mapping[str, Any], rows: list[dict[str, Any]], index: int) -> Any:
    """Number of updates of a flat group, where parameters have no file of it; None if nowhere."""
    inner = state.get("optimizer_state_dict", {}).get("state", {}).get(index, {})
    in_row = next((row.get(STEP) for row in rows if index in row["params"]), None)
    return inner.get(STEP, in_row)


def _param_tensors(folder: pathlib.Path, fqn: str, shape: tuple[int, ...], step: Any) -> dict[tuple[str, str], Stored]:
    """The files of one parameter."""
    if not (folder / f"{FP32}.pt").exists():
        raise CheckpointError(f"{folder} has no file {FP32}.pt")
    found: dict[tuple[str, str], Stored] = {}
    for file in sorted(folder.glob("*.pt")):
        if file.stem == STEP:
            found[OPTIMIZER + STEP, fqn] = stored_scalar(load(file))
        else:
            kind = MASTER if file.stem == FP32 else OPTIMIZER + file.stem
            found[kind, fqn] = stored_whole(partial(_tensor_of, file), shape)
    if step is not None:
        found.setdefault((OPTIMIZER + STEP, fqn), stored_scalar(step))
    return found


def _tensor_of(file: pathlib.Path) -> torch.Tensor:
    loaded = load(file)
    if isinstance(loaded, Mapping):
        merged = [name for name in _MERGED if loaded.get(name)]
        if merged:
            raise CheckpointError(f"{file} is of a parameter that was split or padded ({', '.join(merged)})")
        loaded = loaded["param"]
    tensor: torch.Tensor = loaded
    return tensor
