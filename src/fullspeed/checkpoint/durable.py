"""Writing files so that they are on the disk, complete, when the call returns."""

from __future__ import annotations

import os
import pathlib
import zlib
from collections.abc import Iterable

from fullspeed.checkpoint.manifest import FileRecord

_READ_BYTES = 8 << 20


def write_file(path: pathlib.Path, parts: Iterable[bytes | memoryview]) -> FileRecord:
    """Write `parts` to `path` and wait until they are on the disk; returns size and checksum of what was written."""
    nbytes, crc = 0, 0
    with open(path, "wb") as file:
        for part in parts:
            file.write(part)
            nbytes += len(part)
            crc = zlib.crc32(part, crc)
        file.flush()
        os.fsync(file.fileno())
    return FileRecord(nbytes, crc)


def replace_file(path: pathlib.Path, parts: Iterable[bytes | memoryview]) -> None:
    """Put a new file in the place of `path`: a reader, or a crash, meets the old one or the new one, whole."""
    fresh = path.with_name(f".{path.name}.partial")
    try:
        write_file(fresh, parts)
        os.replace(fresh, path)
    except OSError:
        fresh.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(path: pathlib.Path) -> None:
    """Wait until the names in a folder are on the disk."""
    if os.name == "nt":
        return  # folders cannot be opened there; NTFS journals names itself
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def checksum(path: pathlib.Path) -> int:
    """CRC-32 of a file's bytes."""
    crc = 0
    with open(path, "rb") as file:
        while part := file.read(_READ_BYTES):
            crc = zlib.crc32(part, crc)
    return crc
