"""How fast are checkpoints saved and loaded, and how long does training stand still?

Ranks hold a model with AdamW's state and save it in turn with FullSpeed (waiting, and in the background), `torch.save`
and `torch.distributed.checkpoint` (waiting, and in the background), beside `dd` on the same disk:

    python benchmarks/checkpoint.py
    python benchmarks/checkpoint.py --numel 4_000_000 --rounds 2  # seconds
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any, NamedTuple

MIB = 2**20
WIDTH = 1024
BYTES_PER_NUMEL = 12  # fp32 value and two moments


class Save(NamedTuple):
    """One save as a rank saw it, in seconds."""

    stall_s: float  # until training could go on
    whole_s: float  # until it was on the disk


def resident(field: str) -> int:
    """Bytes: `VmHWM` at its highest since `reset_peak`, `VmRSS` now."""
    text = pathlib.Path("/proc/self/status").read_text()
    return 1024 * int(re.search(rf"{field}:\s+(\d+)", text)[1])


def build(numel: int) -> tuple[Any, Any]:
    """A stack of square layers with about `numel` elements, and its engine at stage 1 after one step."""
    import torch

    import fullspeed

    torch.manual_seed(0)
    num_layers = max(1, numel // WIDTH**2)
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(num_layers)))
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
    }
    engine, *_ = fullspeed.initialize(model=model, config=config)
    step(engine)
    return model, engine


def step(engine: Any) -> float:
    """One update; returns its seconds."""
    import torch

    begin = time.perf_counter()
    engine.backward(engine(torch.ones(1, WIDTH)).square().mean())
    engine.step()
    return time.perf_counter() - begin


def own_tensors(engine: Any) -> dict[str, Any]:
    """This rank's values and moments, for the savers that know nothing of engines."""
    found = {f"store.{group.index}": group.store for group in engine.runtime.groups}
    for index, state in enumerate(engine.optimizer.state.values()):
        found |= {f"{name}.{index}": state[name] for name in ("exp_avg", "exp_avg_sq")}
    return found


def save_fullspeed(engine: Any, folder: pathlib.Path, *, in_background: bool) -> Save:
    """The engine's own method."""
    begin = time.perf_counter()
    engine.save_checkpoint(folder, "t", in_background=in_background)
    stall_s = time.perf_counter() - begin
    engine.wait_for_checkpoint()
    return Save(stall_s, time.perf_counter() - begin)


def save_torch(engine: Any, folder: pathlib.Path) -> Save:
    """Each rank one file of its own, and the wait until it is on the disk, which `torch.save` leaves out."""
    import torch

    begin = time.perf_counter()
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / f"rank{engine.global_rank}.pt", "wb") as file:
        torch.save({name: tensor.clone() for name, tensor in own_tensors(engine).items()}, file)
        file.flush()
        os.fsync(file.fileno())
    seconds = time.perf_counter() - begin
    return Save(seconds, seconds)


def save_dcp(engine: Any, folder: pathlib.Path, *, in_background: bool) -> Save:
    """`torch.distributed.checkpoint` of the same tensors, one file a rank, synced."""
    import torch.distributed.checkpoint as dcp

    tensors = {f"{engine.global_rank}.{name}": tensor for name, tensor in own_tensors(engine).items()}
    writer = dcp.FileSystemWriter(folder, sync_files=True, overwrite=True)
    begin = time.perf_counter()
    if not in_background:
        dcp.save(tensors, storage_writer=writer)
        seconds = time.perf_counter() - begin
        return Save(seconds, seconds)
    future = dcp.async_save(tensors, storage_writer=writer)
    stall_s = time.perf_counter() - begin
    getattr(future, "upload_completion", future).result()
    return Save(stall_s, time.perf_counter() - begin)


SAVERS: dict[str, Callable[[Any, pathlib.Path], Save]] = {
    "FullSpeed": lambda engine, folder: save_fullspeed(engine, folder, in_background=False),
    "FullSpeed, in the background": lambda engine, folder: save_fullspeed(engine, folder, in_background=True),
    "torch.save + fsync": save_torch,
    "torch.distributed.checkpoint": lambda engine, folder: save_dcp(engine, folder, in_background=False),
    "torch.distributed.checkpoint, async": lambda engine, folder: save_dcp(engine, folder, in_background=True),
}


def run_rank(numel: int, rounds: int, place: pathlib.Path) -> None:
    """Save with everything in turn; rank 0 prints what the slowest rank saw, as JSON."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    _, engine = build(numel)
    rows: dict[str, list[Save]] = {name: [] for name in SAVERS}
    for _ in range(rounds + 1):  # the first round also pays for fresh memory
        for name, saver in SAVERS.items():
            folder = place / re.sub(r"\W+", "-", name)
            dist.barrier()
            saved = saver(engine, folder)
            everyone: list[Any] = [None] * engine.world_size
            dist.all_gather_object(everyone, tuple(saved))
            rows[name].append(Save(*(max(each) for each in zip(*everyone, strict=True))))
            step(engine)
    slowed = steps_beside_a_save(engine, place / "FullSpeed-in-the-background")
    loaded = load(engine, place / "FullSpeed")
    if engine.global_rank == 0:
        nbytes = BYTES_PER_NUMEL * sum(param.numel() for param in engine.module.parameters())
        print(json.dumps({"rows": rows, "nbytes": nbytes, "slowed": slowed, "loaded": loaded}), flush=True)
    dist.barrier()
    engine.destroy()


def steps_beside_a_save(engine: Any, folder: pathlib.Path) -> tuple[float, float]:
    """Median seconds of an update with nothing else, and with a save under way."""
    alone = [step(engine) for _ in range(6)]
    engine.save_checkpoint(folder, "t", in_background=True)
    beside = [step(engine) for _ in range(4)]
    engine.wait_for_checkpoint()
    return statistics.median(alone), statistics.median(beside)


def load(engine: Any, folder: pathlib.Path) -> tuple[float, int, int]:
    """Seconds of a load, bytes by which it raised the peak of resident memory, and bytes of this rank's share."""
    pathlib.Path("/proc/self/clear_refs").write_text("5")
    before, begin = resident("VmRSS"), time.perf_counter()
    engine.load_checkpoint(folder, "t")
    seconds = time.perf_counter() - begin
    share = sum(tensor.nbytes for tensor in own_tensors(engine).values())
    return seconds, resident("VmHWM") - before, share


def dd(folder: pathlib.Path, nbytes: int, *flags: str) -> float:
    """GB/s of one `dd` that writes so many bytes."""
    path = folder / "dd"
    count = max(1, nbytes // (8 * MIB))
    begin = time.perf_counter()
    subprocess.run(
        ["dd", "if=/dev/zero", f"of={path}", "bs=8M", f"count={count}", *flags], check=True, capture_output=True
    )
    seconds = time.perf_counter() - begin
    path.unlink()
    return count * 8 * MIB / 1e9 / seconds


def print_table(found: dict[str, Any], disk: dict[str, float]) -> None:
    """The table, medians without the first round."""
    nbytes = found["nbytes"]
    print(f"{nbytes / 1e6:.0f} MB in all\n")
    print("| saver | stall s | first stall s | until on disk s | GB/s |")
    print("|---|---|---|---|---|")
    for name, rows in found["rows"].items():
        stall_s, whole_s = (statistics.median(row[column] for row in rows[1:]) for column in (0, 1))
        print(f"| {name} | {stall_s:.3f} | {rows[0][0]:.3f} | {whole_s:.2f} | {nbytes / 1e9 / whole_s:.2f} |")
    for name, speed in disk.items():
        print(f"| {name} | | | | {speed:.2f} |")
    sync, background = (found["rows"][name] for name in ("FullSpeed", "FullSpeed, in the background"))
    share = statistics.median(row[0] for row in background[1:]) / statistics.median(row[0] for row in sync[1:])
    alone, beside = found["slowed"]
    seconds, peak, own = found["loaded"]
    print(f"\nA background save stops training for {share:.1%} of the time of one that is waited for.")
    print(f"An update takes {alone:.3f} s, and {beside:.3f} s while a checkpoint is written.")
    print(f"Loading takes {seconds:.2f} s, {nbytes / 1e9 / seconds:.2f} GB/s with the checksums, and raises the peak")
    print(f"of a rank's memory by {peak / MIB:.0f} MiB; its share is {own / MIB:.0f} MiB.")


def main() -> None:
    """Start the ranks, measure the disk, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--numel", type=int, default=100_000_000, help="elements of the model")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", help="on the disk to measure; a temporary one by default")
    parser.add_argument("--place", help="internal: run as a rank")
    parser.add_argument("--local_rank", type=int, default=0)
    args = parser.parse_args()
    if args.place:
        run_rank(args.numel, args.rounds, pathlib.Path(args.place))
        return
    place = pathlib.Path(tempfile.mkdtemp(dir=args.folder))
    try:
        nbytes = BYTES_PER_NUMEL * args.numel
        disk = {
            "dd conv=fdatasync": dd(place, nbytes, "conv=fdatasync"),
            "dd oflag=direct": dd(place, nbytes, "oflag=direct"),
        }
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(args.ranks)]
        command += [__file__, "--place", str(place), "--numel", str(args.numel), "--rounds", str(args.rounds)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment).stdout
        print_table(json.loads(next(line for line in output.splitlines() if line.startswith('{"rows"'))), disk)
    finally:
        shutil.rmtree(place)


if __name__ == "__main__":
    main()
