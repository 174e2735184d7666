"""Checkpoints into other files, outside of training: weights in full precision, plain weights, universal checkpoints.

All functions read our checkpoints and DeepSpeed's alike, one tensor at a time, and need no process group.
`checkpoint_dir` is what was given to `save_checkpoint`, or, without a tag, the folder of one checkpoint.
"""

from __future__ import annotations

import math
import pathlib
import re
from typing import Any, NamedTuple

import torch
from torch import nn

from fullspeed.base.errors import CheckpointError
from fullspeed.checkpoint.export import WeightSpec, WeightWriter
from fullspeed.checkpoint.manifest import BUFFER, MASTER, PARAM
from fullspeed.checkpoint.open import find_checkpoint
from fullspeed.checkpoint.saved import SavedState


class LazyTensor(NamedTuple):
    """A tensor that is read from its checkpoint when `contiguous` asks for it."""

    state: SavedState
    kind: str
    fqn: str
    shape: torch.Size
    dtype: torch.dtype

    def contiguous(self) -> torch.Tensor:
        """The tensor itself, on the CPU; read anew by every call."""
        return self.state.whole(self.kind, self.fqn).to(self.dtype)


def saved_weights(
    state: SavedState, dtype: torch.dtype | None = torch.float32, *, exclude_frozen_parameters: bool = False
) -> dict[str, LazyTensor]:
    """The weights and buffers of a checkpoint, by first name; parameters first, as their model has them.

    Args:
        state: the checkpoint.
        dtype: of floating-point values; None leaves each as it was stored. Masters are read wherever they are wider.
        exclude_frozen_parameters: leave out parameters that were not trained.
    """
    found = {}
    for record in state.manifest.params:
        if not record.is_saved or (exclude_frozen_parameters and not record.is_trainable):
            continue
        stored: torch.dtype = getattr(torch, record.dtype)
        wanted = dtype if dtype is not None and stored.is_floating_point else stored
        use_master = state.has(MASTER, record.fqn) and wanted != stored
        kind = MASTER if use_master else PARAM
        found[record.fqn] = LazyTensor(state, kind, record.fqn, torch.Size(record.shape), wanted)
    for fqn, shape in state.manifest.buffers.items():
        stored = state.elements(BUFFER, fqn, 0, min(1, math.prod(shape))).dtype
        wanted = dtype if dtype is not None and stored.is_floating_point else stored
        found[fqn] = LazyTensor(state, BUFFER, fqn, torch.Size(shape), wanted)
    return found


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | pathlib.Path,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
    lazy_mode: bool = False,
) -> dict[str, Any]:
    """The whole state dict in fp32, on the CPU, tied parameters under each of their names.

    Args:
        checkpoint_dir: see the module.
        tag: which checkpoint; by default the one named in `latest`.
        exclude_frozen_parameters: leave out parameters that were not trained.
        lazy_mode: give `LazyTensor`s in place of tensors; call `contiguous` of each to read it.

    Raises:
        CheckpointError: there is none, or it cannot be read.
    """
    state = find_checkpoint(checkpoint_dir, tag)
    lazy = saved_weights(state, exclude_frozen_parameters=exclude_frozen_parameters)
    found: dict[str, Any] = dict(lazy) if lazy_mode else {name: each.contiguous() for name, each in lazy.items()}
    for alias, fqn in state.manifest.aliases.items():
        if fqn in found:
            found[alias] = found[fqn]
    return found


def load_state_dict_from_zero_checkpoint(
    model: nn.Module, checkpoint_dir: str | pathlib.Path, tag: str | None = None
) -> nn.Module:
    """Load the fp32 weights of a checkpoint into an ordinary model, which moves to the CPU; returns it.

    Raises:
        CheckpointError: there is no checkpoint, or a shape differs.
    """
    model = model.cpu()
    try:
        model.load_state_dict(get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag), strict=False)
    except RuntimeError as error:
        raise CheckpointError(f"the checkpoint in {checkpoint_dir} does not fit the model: {error}") from error
    return model


def convert_zero_checkpoint_to_state_dict(
    checkpoint_dir: str | pathlib.Path,
    output_dir: str | pathlib.Path,
    max_shard_size: int | str | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
    dtype: torch.dtype | None = None,
) -> list[pathlib.Path]:
    """Write the weights of a checkpoint as plain files; memory: one of them.

    Args:
        checkpoint_dir: see the module.
        output_dir: made if missing.
        max_shard_size: bytes in a file, as a number or like "5GB"; None puts all into one file.
        safe_serialization: safetensors files (tied parameters under their first name only, as `from_pretrained` wants
            it), else pickled ones (under all names).
        tag: which checkpoint; by default the one named in `latest`.
        exclude_frozen_parameters: leave out parameters that were not trained.
        dtype: of floating-point values; None leaves each as it was stored.

    Returns:
        The files.

    Raises:
        CheckpointError: there is no checkpoint, or it cannot be read.
    """
    state = find_checkpoint(checkpoint_dir, tag)
    lazy = saved_weights(state, dtype, exclude_frozen_parameters=exclude_frozen_parameters)
    if not safe_serialization:
        lazy |= {alias: lazy[fqn] for alias, fqn in state.manifest.aliases.items() if fqn in lazy}
    writer = WeightWriter(
        output_dir,
        [WeightSpec(name, tuple(each.shape), each.dtype) for name, each in lazy.items()],
        2**62 if max_shard_size is None else max_shard_size,
        "safetensors" if safe_serialization else "pickled",
    )
    for name, each in lazy.items():
        writer.add(name, each.contiguous())
    return writer.finish()


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str | pathlib.Path,
    output_dir: str | pathlib.Path,
    max_shard_size: int | str | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> list[pathlib.Path]:
    """`convert_zero_checkpoint_to_state_dict` in fp32: of trained parameters the masters."""
    return convert_zero_checkpoint_to_state_dict(
        checkpoint_dir, output_dir, max_shard_size, safe_serialization, tag, exclude_frozen_parameters, torch.float32
    )


def get_optim_files(checkpoint_dir: str | pathlib.Path) -> list[str]:
    """DeepSpeed's files of optimizer states in one checkpoint's folder, in the order of ranks.

    Raises:
        FileNotFoundError: there are none; our own layout has none either.
    """
    paths = sorted(
        pathlib.Path(checkpoint_dir).glob("*_optim_states.pt"),
        key=lambda path: [int(number) for number in re.findall(r"\d+", path.name)],
    )
    if not paths:
        raise FileNotFoundError(f"{checkpoint_dir} has no files *_optim_states.pt; it is not in DeepSpeed's layout")
    return [str(path) for path in paths]


def get_model_state_file(checkpoint_dir: str | pathlib.Path, zero_stage: int) -> str:
    """DeepSpeed's first file of weights in one checkpoint's folder; its name tells the stage, which is not needed.

    Raises:
        FileNotFoundError: there is none.
    """
    del zero_stage
    for name in ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt"):
        path = pathlib.Path(checkpoint_dir) / name
        if path.exists():
            return str(path)
    raise FileNotFoundError(f"{checkpoint_dir} has no file *_model_states.pt; it is not in DeepSpeed's layout")
