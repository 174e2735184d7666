"""`fullspeed bench io`: how fast a folder's disk reads and writes, over engines, request sizes and depths."""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import torch

from fullspeed.base.errors import UsageError
from fullspeed.offload.buffers import aligned_empty
from fullspeed.offload.engine import ENGINES, EngineName, Settings, make_engine, obstacle
from fullspeed.offload.files import File

COLUMNS = f"{'engine':<10}{'block KiB':>10}{'depth':>7}{'read GB/s':>11}{'write GB/s':>12}"


class Row(NamedTuple):
    """One setting and the speeds it reached, medians over trials; None for a direction that was left out."""

    settings: Settings
    read_gb_per_s: float | None
    write_gb_per_s: float | None

    def text(self) -> str:
        """The row under COLUMNS."""
        block_bytes, depth, engine = self.settings
        read, write = ("-" if speed is None else f"{speed:.2f}" for speed in self[1:])
        return f"{engine:<10}{block_bytes >> 10:>10}{depth:>7}{read:>11}{write:>12}"

    @property
    def seconds_per_gb(self) -> float:
        """Of reading and writing one: what an offloaded optimizer does with its states."""
        return sum(1 / speed for speed in self[1:] if speed is not None)


def run(words: Sequence[str]) -> int:
    """Measure, and print rows and the best `aio` block; returns the exit code."""
    given = _parse(words)
    print(f"{given.mib} MiB in {given.folder}\n{COLUMNS}", flush=True)
    rows = []
    for settings in _sweep(given):
        rows.append(measure(given.folder, given.mib << 20, settings, given.trials, given.only))
        print(rows[-1].text(), flush=True)
    best = min(rows, key=lambda row: row.seconds_per_gb)
    print(f"\nbest: engine {best.settings.engine}\n{json.dumps(aio_block(best.settings), indent=2)}")
    return 0


def aio_block(settings: Settings) -> dict[str, dict[str, int]]:
    """The configuration's section that asks for these settings."""
    return {
        "aio": {"block_size": settings.block_bytes, "queue_depth": settings.depth, "intra_op_parallelism": 1},
    }


def measure(
    folder: pathlib.Path, nbytes: int, settings: Settings, trials: int, only: Literal["read", "write"] | None = None
) -> Row:
    """Write and read a file of the folder that is removed afterwards."""
    memory = aligned_empty(nbytes, torch.uint8).fill_(1)
    engine = make_engine(settings)
    try:
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            file = File(pathlib.Path(scratch, "bytes"), engine, is_writable=True)
            file.reserve(nbytes)
            # Written in any case: reading what only is reserved costs the disk nothing.
            write_s = _median_s(lambda: file.submit(memory, 0, is_write=True).wait(), file, trials)
            read_s = _median_s(lambda: file.submit(memory, 0, is_write=False).wait(), file, trials)
            file.close()
    finally:
        engine.close()
    return Row(
        settings,
        None if only == "write" else nbytes / read_s / 1e9,
        None if only == "read" else nbytes / write_s / 1e9,
    )


def _median_s(transfer: Callable[[], None], file: File, trials: int) -> float:
    """Seconds of the median trial, on the disk and from it: the page cache is emptied of the file before each."""
    spent = []
    for _ in range(trials):
        os.fdatasync(file.descriptor)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        began = time.perf_counter()
        transfer()
        if not file.is_direct:
            os.fdatasync(file.descriptor)
        spent.append(time.perf_counter() - began)
    return statistics.median(spent)


def _sweep(given: argparse.Namespace) -> list[Settings]:
    engines: list[EngineName] = [name for name in ENGINES if not obstacle(name)]
    if given.engine:
        engines = [given.engine]
    return [
        Settings(block_kib << 10, depth, engine)
        for engine in engines
        for block_kib in given.block_kib
        for depth in given.depth
    ]


def _parse(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="fullspeed bench io", description="Measure a folder's disk.")
    add = parser.add_argument
    add("folder", type=pathlib.Path, nargs="?", default=pathlib.Path("."), help="where to write (here)")
    add("--mib", type=int, default=400, metavar="N", help="bytes of the file, in MiB (400)")
    add("--block-kib", type=_numbers, default=[256, 1024, 8192], metavar="N,N", help="request sizes (256,1024,8192)")
    add("--depth", type=_numbers, default=[1, 4, 16], metavar="N,N", help="requests under way at once (1,4,16)")
    add("--engine", choices=ENGINES, help="only this one (all that work here)")
    add("--only", choices=("read", "write"), help="report and choose by one direction (both)")
    add("--trials", type=int, default=3, metavar="N", help="transfers of which the median counts (3)")
    given = parser.parse_args(list(words))
    if not given.folder.is_dir():
        raise UsageError(f"{given.folder} is no folder; name one on the disk to be measured")
    if given.mib < 1 or given.trials < 1 or min(given.depth) < 1 or any(kib % 4 or kib < 4 for kib in given.block_kib):
        raise UsageError("--mib, --depth and --trials must be at least 1, --block-kib multiples of 4")
    return given


def _numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]
