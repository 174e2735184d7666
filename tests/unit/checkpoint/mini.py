"""A checkpoint of one tensor, written without an engine."""

from __future__ import annotations

import itertools
import pathlib

import torch

from fullspeed.checkpoint.durable import write_file
from fullspeed.checkpoint.folder import PendingCheckpoint, write_latest
from fullspeed.checkpoint.manifest import PARAM, Chunk, Manifest, ParamRecord
from fullspeed.checkpoint.objects import pack
from fullspeed.checkpoint.reader import CheckpointReader
from fullspeed.checkpoint.tensor_file import write_tensors

SHAPE = (5, 4)


def values(seed: int) -> torch.Tensor:
    return torch.arange(20, dtype=torch.float32) + 1000 * seed


def save(folder: pathlib.Path, tag: str, seed: int, cuts: tuple[int, ...] = (0, 7, 20), saved_at: float = 0.0) -> None:
    """Write `values(seed)` as parameter "w", one file per stretch between two cuts."""
    pending = PendingCheckpoint.prepare(folder, tag)
    chunks, files = [], {}
    for rank, (start, stop) in enumerate(itertools.pairwise(cuts)):
        name = f"rank_{rank:05d}.safetensors"
        chunk = Chunk("w", PARAM, SHAPE, start, stop, "F32", True, True, rank, name)
        files[name] = write_tensors(pending.data / name, {chunk.key: values(seed)[start:stop]})
        chunks.append(chunk)
    files["common.pt"] = write_file(pending.data / "common.pt", [pack({"seed": seed})])
    params = (ParamRecord("w", SHAPE, "float32", True, True),)
    manifest = Manifest(
        len(chunks), 1, None, pending.data_name, params=params, chunks=tuple(chunks), files=files, saved_at=saved_at
    )
    pending.commit(manifest)
    write_latest(folder, tag)


def load(folder: pathlib.Path, tag: str) -> int:
    """The seed of a checkpoint, all of which is read and compared."""
    reader = CheckpointReader(folder, tag, 0)
    try:
        reader.verify(1)
        seed = int(reader.objects("common.pt")["seed"])
        assert torch.equal(reader.whole(PARAM, "w"), values(seed).view(SHAPE))
    finally:
        reader.close()
    return seed
