"""Whole checkpoints into another layout, outside of training: ours, DeepSpeed's, universal ones.

`checkpoint_dir` is what was given to `save_checkpoint`, or, without a tag, the folder of one checkpoint. All that
training needs is carried over, as far as the layout written can hold it.
"""

from __future__ import annotations

import dataclasses
import math
import pathlib
import shutil
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from fullspeed.base.errors import CheckpointError
from fullspeed.checkpoint.deepspeed.files import LATEST_UNIVERSAL, UNIVERSAL, is_deepspeed, is_universal
from fullspeed.checkpoint.deepspeed.pickling import save
from fullspeed.checkpoint.deepspeed.universal import FP32
from fullspeed.checkpoint.deepspeed.write import DeepSpeedWriter, Target
from fullspeed.checkpoint.durable import replace_file, replace_folder, sync_folder, write_file
from fullspeed.checkpoint.folder import PendingCheckpoint, check_tag, partial_folder, write_latest
from fullspeed.checkpoint.manifest import BUFFER, MASTER, OPTIMIZER, PARAM, Chunk, FileRecord
from fullspeed.checkpoint.objects import pack
from fullspeed.checkpoint.open import find_checkpoint
from fullspeed.checkpoint.saved import COMMON, SavedState, client_file
from fullspeed.checkpoint.tensor_file import dtype_name, write_tensors

Folder = str | pathlib.Path
_FILE_NBYTES = 2**30  # tensors in one file of ours, and in memory


def convert_to_universal(checkpoint_dir: Folder, output_dir: Folder, tag: str | None = None) -> pathlib.Path:
    """Write a universal checkpoint into `output_dir`, and its name into `latest_universal` beside that folder.

    One tensor is in memory at a time, besides the 16-bit weights of the file that DeepSpeed wants beside them.

    Returns:
        The folder.

    Raises:
        CheckpointError: there is no checkpoint, it cannot be read, or it has no optimizer state.
    """
    state = find_checkpoint(checkpoint_dir, tag)
    _require_optimizer(state, checkpoint_dir)
    final = pathlib.Path(output_dir).absolute()
    path = _fresh(final)
    for record in state.manifest.params:
        if not record.is_trainable:
            continue
        folder = path / UNIVERSAL / record.fqn
        folder.mkdir(parents=True, exist_ok=True)
        master = MASTER if state.has(MASTER, record.fqn) else PARAM
        save(folder / f"{FP32}.pt", {"param": state.whole(master, record.fqn).float(), "cat_dim": 0})
        for kind in state.optimizer_kinds(record.fqn):
            value = state.whole(kind, record.fqn)
            held = {"param": value, "cat_dim": 0} if state.describe(kind, record.fqn).per_element else value
            save(folder / f"{kind.removeprefix(OPTIMIZER)}.pt", held)
        sync_folder(folder)
    target = Target(state.manifest.stage, 1, shards_params=False, shards_optimizer=True, config={})
    DeepSpeedWriter(state, target).write_shared(path)
    replace_folder(path, final)
    replace_file(final.parent / LATEST_UNIVERSAL, [final.name.encode()])
    return final


def convert_to_deepspeed(
    checkpoint_dir: Folder, output_dir: Folder, target: Target, tag: str | None = None
) -> pathlib.Path:
    """Write a checkpoint as DeepSpeed would have written it on `target.world_size` ranks, one rank after another.

    It lies in `output_dir` under its tag, and `latest` names it.

    Returns:
        The tag's folder.

    Raises:
        CheckpointError: there is no checkpoint, or it cannot be read.
    """
    state = find_checkpoint(checkpoint_dir, tag)
    name = tag or _step_tag(state)
    final = pathlib.Path(output_dir) / check_tag(name)
    path = _fresh(final)
    writer = DeepSpeedWriter(state, target)
    for rank in range(target.world_size):
        writer.write(path, rank)
    replace_folder(path, final)
    write_latest(final.parent, name)
    return final


def convert_to_fullspeed(checkpoint_dir: Folder, output_dir: Folder, tag: str | None = None) -> pathlib.Path:
    """Write a checkpoint in our own layout; it lies in `output_dir` under its tag, and `latest` names it.

    Where DeepSpeed sharded nothing, its files do not name the optimizer's parameters: then only weights are carried
    over. `engine.load_checkpoint` knows the names and reads such a checkpoint whole.

    Returns:
        The tag's folder.

    Raises:
        CheckpointError: there is no checkpoint, or it cannot be read.
    """
    state = find_checkpoint(checkpoint_dir, tag)
    folder, name = pathlib.Path(output_dir), tag or _step_tag(state)
    pending = PendingCheckpoint.prepare(folder, check_tag(name))
    chunks: list[Chunk] = []
    files: dict[str, FileRecord] = {}
    for batch in _batches(state):
        file = f"rank_00000_{len(files):05d}.safetensors"
        placed = {chunk._replace(file=file): tensor for chunk, tensor in batch.items()}
        files[file] = write_tensors(pending.data / file, {chunk.key: tensor for chunk, tensor in placed.items()})
        chunks += placed
    for file in (COMMON, client_file(0)):
        files[file] = write_file(pending.data / file, [pack(state.objects(file))])
    pending.commit(dataclasses.replace(state.manifest, data=pending.data_name, chunks=tuple(chunks), files=files))
    write_latest(folder, name)
    return pending.final


def _fresh(final: pathlib.Path) -> pathlib.Path:
    """An empty folder in which what becomes `final` is put together. Raises CheckpointError before others' files go."""
    if final.exists() and any(final.iterdir()) and not (is_universal(final) or is_deepspeed(final)):
        raise CheckpointError(
            f"{final} exists and is no checkpoint in this layout; choose another folder, or remove it"
        )
    path = partial_folder(final.parent, final.name)
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    return path


def _batches(state: SavedState) -> Iterator[Mapping[Chunk, torch.Tensor]]:
    """Every tensor, whole, in batches that fit one file."""
    batch: dict[Chunk, torch.Tensor] = {}
    nbytes = 0
    for kind, fqn, dtype in _kinds(state):
        tensor = state.whole(kind, fqn)
        tensor = tensor if dtype is None else tensor.to(dtype)
        if batch and nbytes + tensor.nbytes > _FILE_NBYTES:
            yield batch
            batch, nbytes = {}, 0
        known = state.describe(kind, fqn)
        numel = math.prod(known.shape)
        chunk = Chunk(
            fqn, kind, known.shape, 0, numel, dtype_name(tensor, fqn), known.per_element, known.on_host, 0, ""
        )
        batch[chunk] = tensor
        nbytes += tensor.nbytes
    yield batch


def _kinds(state: SavedState) -> Iterator[tuple[str, str, torch.dtype | None]]:
    """Kind and name of every tensor our layout has, and the dtype it has there if not the one it was saved in."""
    for record in state.manifest.params:
        if record.is_saved:
            yield PARAM, record.fqn, getattr(torch, record.dtype)
        if state.has(MASTER, record.fqn) and record.dtype != "float32":
            yield MASTER, record.fqn, None
        for kind in state.optimizer_kinds(record.fqn):
            yield kind, record.fqn, None
    for fqn in state.manifest.buffers:
        yield BUFFER, fqn, None


def _step_tag(state: SavedState) -> str:
    return f"global_step{state.manifest.counters['global_steps']}"


def _require_optimizer(state: SavedState, checkpoint_dir: Any) -> None:
    if state.manifest.optimizer is None:
        raise CheckpointError(f"the checkpoint in {checkpoint_dir} has no optimizer state to write")
