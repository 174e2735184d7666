"""Reading a checkpoint: check it, then fetch any elements of any tensor, whoever wrote them.

Files are opened when first needed and read only where asked, so a rank's memory grows by what it keeps.
"""

from __future__ import annotations

import pathlib
from typing import Any

import torch

from fullspeed.base.errors import CheckpointError
from fullspeed.checkpoint.durable import checksum
from fullspeed.checkpoint.folder import MANIFEST, available_tags
from fullspeed.checkpoint.inventory import advice
from fullspeed.checkpoint.manifest import OPTIMIZER, Chunk, Manifest
from fullspeed.checkpoint.objects import unpack
from fullspeed.checkpoint.tensor_file import TensorFile


class CheckpointReader:
    """One checkpoint, open for reading by one rank.

    Where several ranks saved the same elements, a rank gets its own, else those of the lowest rank.
    """

    def __init__(self, folder: pathlib.Path, tag: str, rank: int) -> None:
        self._rank = rank
        self._files: dict[str, TensorFile] = {}
        self._folder, self._tag = folder, tag
        path = folder / tag / MANIFEST
        try:
            text = path.read_bytes().decode(errors="replace")
        except FileNotFoundError:
            tags = ", ".join(available_tags(folder)) if folder.is_dir() else ""
            where = f"{folder} has {tags or 'no checkpoint'}"
            raise CheckpointError(f"there is no checkpoint {tag!r}: {path} does not exist; {where}") from None
        try:
            self.manifest = Manifest.from_json(text, str(path))
        except CheckpointError as error:
            raise CheckpointError(f"{error}; {advice(folder, tag)}") from error
        self._data = folder / tag / self.manifest.data
        self._chunks: dict[tuple[str, str], list[Chunk]] = {}
        self._kinds: dict[str, dict[str, None]] = {}  # of each name, in order
        for chunk in self.manifest.chunks:
            self._kinds.setdefault(chunk.fqn, {})[chunk.kind] = None
            self._chunks.setdefault((chunk.kind, chunk.fqn), []).append(chunk)
        for chunks in self._chunks.values():
            chunks.sort(key=lambda chunk: (chunk.rank != rank, chunk.rank, chunk.start))

    def close(self) -> None:
        """Close the files."""
        self._files.clear()

    def verify(self, world_size: int) -> None:
        """Check the size of every file, and the bytes of this rank's share of the files.

        Raises:
            CheckpointError: a file is missing, torn or changed; names it.
        """
        for index, (name, record) in enumerate(sorted(self.manifest.files.items())):
            path = self._data / name
            if not path.exists():
                raise CheckpointError(f"{path} is missing from checkpoint {self._tag!r}; {self._advice()}")
            nbytes = path.stat().st_size
            if nbytes != record.nbytes:
                raise CheckpointError(
                    f"{path} is torn: it has {nbytes} bytes and was written with {record.nbytes}; {self._advice()}"
                )
            if index % world_size == self._rank and checksum(path) != record.crc32:
                raise CheckpointError(
                    f"{path} is corrupted: its checksum is not the one it was written with; {self._advice()}"
                )

    def resolve(self, fqn: str) -> str:
        """The name a parameter was saved under: its own, or the first name of the one it was tied to."""
        return self.manifest.aliases.get(fqn, fqn)

    def has(self, kind: str, fqn: str) -> bool:
        """Whether anything of this kind was saved."""
        return (kind, self.resolve(fqn)) in self._chunks

    def optimizer_kinds(self, fqn: str) -> list[str]:
        """Kinds of optimizer state saved for a parameter."""
        return [kind for kind in self._kinds.get(self.resolve(fqn), ()) if kind.startswith(OPTIMIZER)]

    def describe(self, kind: str, fqn: str) -> Chunk:
        """The chunk that this rank reads first."""
        return self._chunks[kind, self.resolve(fqn)][0]

    def whole(self, kind: str, fqn: str) -> torch.Tensor:
        """A whole tensor, on the CPU, in its logical shape."""
        chunk = self.describe(kind, fqn)
        numel = 1
        for side in chunk.shape:
            numel *= side
        return self.elements(kind, fqn, 0, numel).view(chunk.shape)

    def elements(self, kind: str, fqn: str, start: int, stop: int) -> torch.Tensor:
        """Elements [start, stop) of a flattened tensor, on the CPU.

        Raises:
            CheckpointError: they were not all saved.
        """
        found: torch.Tensor | None = None
        missing = [(start, stop)]
        for chunk in self._chunks.get((kind, self.resolve(fqn)), []):
            if missing == [(chunk.start, chunk.stop)] == [(start, stop)]:
                return self._part(chunk, start, stop)
            left: list[tuple[int, int]] = []
            for low, high in missing:
                first, last = max(low, chunk.start), min(high, chunk.stop)
                if first >= last:
                    left.append((low, high))
                    continue
                part = self._part(chunk, first, last)
                if found is None:
                    found = torch.empty(stop - start, dtype=part.dtype)
                found[first - start : last - start] = part
                left += [gap for gap in ((low, first), (last, high)) if gap[0] < gap[1]]
            missing = left
            if not missing:
                break
        if missing and start < stop:
            raise CheckpointError(
                f"checkpoint {self._tag!r} holds no {kind} of {fqn} for elements {missing[0][0]} to {missing[0][1]}"
            )
        return torch.empty(0) if found is None else found

    def objects(self, name: str) -> dict[str, Any]:
        """The state in one file that is not tensors."""
        return unpack(self._data / name)

    def _advice(self) -> str:
        return advice(self._folder, self._tag)

    def _part(self, chunk: Chunk, start: int, stop: int) -> torch.Tensor:
        path = self._data / chunk.file
        try:
            if chunk.file not in self._files:
                self._files[chunk.file] = TensorFile(path)
            return self._files[chunk.file].elements(chunk.key, start - chunk.start, stop - chunk.start)
        except (CheckpointError, OSError, KeyError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}; {self._advice()}") from error
