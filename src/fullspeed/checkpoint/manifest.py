"""What a checkpoint contains, in integers and names: `manifest.json`. No tensors.

Every saved tensor is cut into chunks: elements [start, stop) of one flattened tensor with a name, a logical
shape and a kind. Nothing says how many ranks there were or which stage ran, except for two numbers a reader
may check: a chunk can be found, and cut again, from its own description.

| kind            | of                      | what it is                                                            |
|-----------------|-------------------------|-----------------------------------------------------------------------|
| param           | every saved parameter   | the value as stored (16-bit in bf16 and fp16 training)                |
| master          | trainable parameters    | the fp32 value the optimizer updates, where `param` is narrower       |
| optimizer/NAME  | trainable parameters    | entry NAME of the optimizer's state, `exp_avg` or `step` for example  |
| buffer          | persistent buffers      | the value; a rank whose value differs from rank 0's adds its own      |
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from fullspeed.base.errors import CheckpointError

FORMAT = "fullspeed-checkpoint"
VERSION = 1

PARAM = "param"
MASTER = "master"
BUFFER = "buffer"
OPTIMIZER = "optimizer/"  # prefix of the kinds of optimizer state


class Chunk(NamedTuple):
    """Some elements of one saved tensor, and where they are."""

    fqn: str  # of the parameter or buffer
    kind: str
    shape: tuple[int, ...]  # of the whole tensor
    start: int  # first element, counted in the flattened whole tensor
    stop: int  # one past the last
    dtype: str  # as safetensors spells it
    per_element: bool  # one value per element of the parameter; False for a step count, say
    on_host: bool  # was in host memory when saved
    rank: int  # who wrote it
    file: str  # name in the data folder

    @property
    def key(self) -> str:
        """Name of the tensor in its file."""
        return f"{self.kind}:{self.fqn}[{self.start}:{self.stop}]"


class ParamRecord(NamedTuple):
    """One parameter of the model."""

    fqn: str
    shape: tuple[int, ...]
    dtype: str
    is_trainable: bool
    is_saved: bool  # False for frozen parameters the caller excluded


class FileRecord(NamedTuple):
    """What a complete file looks like."""

    nbytes: int
    crc32: int


@dataclass(frozen=True)
class Manifest:
    """The description of one checkpoint.

    Attributes:
        world_size: ranks that shared the parameters.
        stage: ZeRO stage they were sharded with.
        optimizer: class name of the optimizer; None without one.
        data: folder of the files, beside the manifest.
        params: every parameter, by its first name.
        aliases: further name -> first name, of tied parameters.
        buffers: persistent buffers and their shapes.
        counters: steps, samples and the like.
        chunks: every saved tensor.
        files: name -> size and checksum.
        saved_at: seconds since 1970, by rank 0's clock.
        in_rotation: whether it was made the latest one; only such checkpoints make room for newer ones.
    """

    world_size: int
    stage: int
    optimizer: str | None
    data: str
    params: tuple[ParamRecord, ...] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)
    buffers: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    counters: Mapping[str, int] = field(default_factory=dict)
    chunks: tuple[Chunk, ...] = ()
    files: Mapping[str, FileRecord] = field(default_factory=dict)
    saved_at: float = 0.0
    in_rotation: bool = True

    def to_json(self) -> str:
        """The text of `manifest.json`."""
        body = {
            "world_size": self.world_size,
            "stage": self.stage,
            "optimizer": self.optimizer,
            "data": self.data,
            "params": [param._asdict() for param in self.params],
            "aliases": dict(self.aliases),
            "buffers": {fqn: list(shape) for fqn, shape in self.buffers.items()},
            "counters": dict(self.counters),
            "chunks": [chunk._asdict() for chunk in self.chunks],
            "files": {name: record._asdict() for name, record in self.files.items()},
            "saved_at": self.saved_at,
            "in_rotation": self.in_rotation,
        }
        head = {"format": FORMAT, "version": VERSION, "crc32": _checksum(body)}
        return json.dumps({**head, **body}, indent=1)  # no newline at the end: every byte matters

    @classmethod
    def from_json(cls, text: str, where: str) -> Manifest:
        """Parse the text of a manifest.

        Raises:
            CheckpointError: it is no manifest, or not what was written; `where` names the file.
        """
        body = _parse(text, where)
        try:
            return cls(
                world_size=body["world_size"],
                stage=body["stage"],
                optimizer=body["optimizer"],
                data=body["data"],
                params=tuple(ParamRecord(**{**row, "shape": tuple(row["shape"])}) for row in body["params"]),
                aliases=body["aliases"],
                buffers={fqn: tuple(shape) for fqn, shape in body["buffers"].items()},
                counters=body["counters"],
                chunks=tuple(Chunk(**{**row, "shape": tuple(row["shape"])}) for row in body["chunks"]),
                files={name: FileRecord(**row) for name, row in body["files"].items()},
                saved_at=body["saved_at"],
                in_rotation=body["in_rotation"],
            )
        except (KeyError, TypeError) as error:
            raise CheckpointError(f"{where} lacks or misuses an entry: {error}") from error


def _parse(text: str, where: str) -> dict[str, Any]:
    try:
        whole = json.loads(text)
    except ValueError as error:
        raise CheckpointError(f"{where} is torn or was edited: {error}") from error
    if not isinstance(whole, dict) or whole.get("format") != FORMAT:
        raise CheckpointError(f"{where} is not the manifest of a FullSpeed checkpoint")
    if whole["version"] != VERSION:
        raise CheckpointError(
            f"{where} has format version {whole['version']}, this release reads version {VERSION}; load it "
            f"with the release that wrote it"
        )
    body = {name: value for name, value in whole.items() if name not in ("format", "version", "crc32")}
    if whole.get("crc32") != _checksum(body):
        raise CheckpointError(f"{where} does not match its own checksum: it is torn or was edited")
    return body


def _checksum(body: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(body, sort_keys=True, separators=(",", ":")).encode())
