"""How fast do tensors go to disk and back? FullSpeed's engines beside fio, torch.save and torch.load.

All transfer the same number of bytes on the same disk, take turns, and bypass the page cache; torch's go through it, so
their writes end with fdatasync and their reads begin without cached pages. fio is measured where it is installed.

    python benchmarks/io.py --folder /mnt/nvme
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator

import torch

from fullspeed.offload.buffers import aligned_empty
from fullspeed.offload.engine import ENGINES, Settings, make_engine, obstacle
from fullspeed.offload.files import File

BLOCK_BYTES, DEPTH = 4 << 20, 8
Transfer = Callable[[], float]
"""Moves all bytes, returns GB/s."""


def main() -> None:
    """Print a table for each size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=pathlib.Path, default=pathlib.Path())
    parser.add_argument("--mib", type=int, nargs="+", default=[16, 128, 1024])
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    if not shutil.which("fio"):
        print("fio is not installed: its rows are left out")
    for mib in given.mib:
        with tempfile.TemporaryDirectory(dir=given.folder) as folder:
            transfers = dict(systems(pathlib.Path(folder), mib << 20))
            found = in_turns(transfers, given.rounds)
        print(f"{mib} MiB, blocks of {BLOCK_BYTES >> 20} MiB, {DEPTH} under way")
        print(f"{'system':<20}{'write GB/s':>11}{'read GB/s':>11}{'write vs fio':>14}{'read vs fio':>13}")
        for name, rounds in found.items():
            print(row(name, rounds, found.get("fio io_uring")), flush=True)


def in_turns(transfers: dict[str, tuple[Transfer, Transfer]], rounds: int) -> dict[str, list[tuple[float, float]]]:
    """GB/s of writing and reading, of every system in every round."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in transfers}
    for _ in range(rounds):
        for name, (write, read) in transfers.items():
            found[name].append((write(), read()))
    return found


def row(name: str, rounds: list[tuple[float, float]], peer: list[tuple[float, float]] | None) -> str:
    """Medians, and the median over rounds of the ratio to fio."""
    text = f"{name:<20}" + "".join(f"{statistics.median(column):>11.2f}" for column in zip(*rounds, strict=True))
    if peer is None:
        return text
    for width, column in ((14, 0), (13, 1)):
        text += f"{statistics.median(a[column] / b[column] for a, b in zip(rounds, peer, strict=True)):>{width}.2f}"
    return text


def systems(folder: pathlib.Path, nbytes: int) -> Iterator[tuple[str, tuple[Transfer, Transfer]]]:
    """Each system's write and read."""
    for name in ENGINES:
        if not obstacle(name):
            yield f"fullspeed {name}", ours(folder, nbytes, Settings(BLOCK_BYTES, DEPTH, name))
    if shutil.which("fio"):
        for engine in ("io_uring", "psync"):
            yield f"fio {engine}", (fio(folder, nbytes, engine, "write"), fio(folder, nbytes, engine, "read"))
    yield "torch save, load", by_torch(folder / "tensor.pt", nbytes)


def ours(folder: pathlib.Path, nbytes: int, settings: Settings) -> tuple[Transfer, Transfer]:
    """Through one engine."""
    memory = aligned_empty(nbytes, torch.uint8).fill_(1)
    file = File(folder / str(settings.engine), make_engine(settings), is_writable=True)
    file.reserve(nbytes)

    def transfer(is_write: bool) -> float:
        began = time.perf_counter()
        file.submit(memory, 0, is_write=is_write).wait()
        return nbytes / (time.perf_counter() - began) / 1e9

    return lambda: transfer(True), lambda: transfer(False)


def fio(folder: pathlib.Path, nbytes: int, engine: str, direction: str) -> Transfer:
    """One pass, as fio itself measures it; psync waits for each call, so it gets a thread for each block under way."""
    jobs = DEPTH if engine == "psync" and nbytes // BLOCK_BYTES >= DEPTH else 1
    share = nbytes // jobs
    command = [
        "fio", "--name=x", f"--filename={folder / 'fio'}", f"--rw={direction}", f"--ioengine={engine}", "--direct=1",
        f"--bs={min(BLOCK_BYTES, share)}", f"--iodepth={DEPTH if jobs == 1 else 1}", f"--size={share}",
        f"--numjobs={jobs}", "--thread", f"--offset_increment={share}", f"--filesize={nbytes}", "--group_reporting",
        "--output-format=json",
    ]  # fmt: skip

    def run() -> float:
        said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        result = json.loads(said[said.index("{") :])  # notes may come first
        return float(result["jobs"][0][direction]["bw_bytes"]) / 1e9

    return run


def by_torch(path: pathlib.Path, nbytes: int) -> tuple[Transfer, Transfer]:
    """Calls of torch.save and torch.load, of and from the disk."""
    tensor = torch.ones(nbytes, dtype=torch.uint8)

    def write() -> float:
        began = time.perf_counter()
        with path.open("wb") as file:
            torch.save(tensor, file)
            file.flush()
            os.fdatasync(file.fileno())
        return nbytes / (time.perf_counter() - began) / 1e9

    def read() -> float:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        began = time.perf_counter()
        torch.load(path)
        return nbytes / (time.perf_counter() - began) / 1e9

    return write, read


if __name__ == "__main__":
    main()
