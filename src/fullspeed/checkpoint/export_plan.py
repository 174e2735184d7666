"""Which tensors go into which file of plain weights. Integers and names only."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence

from fullspeed.base.errors import UsageError

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def parse_size(size: int | str) -> int:
    """Bytes that a size like "5GB" or "200MiB" says; an integer is bytes.

    Raises:
        UsageError: it says none above zero.

    >>> parse_size("5GB"), parse_size("2MiB")
    (5000000000, 2097152)
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-zA-Z]*)", str(size).strip())
    unit = _UNITS.get(found[2].upper()) if found else None
    nbytes = int(float(found[1]) * unit) if found and unit else 0
    if nbytes <= 0:
        raise UsageError(f"{size!r} is no size of a file; say a number of bytes, or one with a unit: 5GB, 200MiB")
    return nbytes


def plan_shards(sizes: Iterable[tuple[str, int]], max_nbytes: int) -> list[list[str]]:
    """Names of the tensors of each file, in the order given; a file is full before one more would exceed the limit.

    A tensor above the limit gets a file of its own. No tensors: one empty file.

    >>> plan_shards([("a", 3), ("b", 2), ("c", 9), ("d", 1)], 5)
    [['a', 'b'], ['c'], ['d']]
    """
    shards: list[list[str]] = [[]]
    filled = 0
    for name, nbytes in sizes:
        if shards[-1] and filled + nbytes > max_nbytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += nbytes
    return shards


def shard_names(stem: str, suffix: str, count: int) -> list[str]:
    """Names of the files, as Hugging Face models have them.

    >>> shard_names("model", ".safetensors", 2)
    ['model-00001-of-00002.safetensors', 'model-00002-of-00002.safetensors']
    """
    if count == 1:
        return [f"{stem}{suffix}"]
    return [f"{stem}-{number:05d}-of-{count:05d}{suffix}" for number in range(1, count + 1)]


def index_text(files: Sequence[str], shards: Sequence[Sequence[str]], sizes: Mapping[str, int]) -> str:
    """The text of the index file: which tensor is in which file."""
    weight_map = {name: file for file, names in zip(files, shards, strict=True) for name in names}
    index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
    return json.dumps(index, indent=2, sort_keys=True) + "\n"
