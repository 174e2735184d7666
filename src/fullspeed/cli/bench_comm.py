"""`fullspeed bench comm`: the speed of collectives over sizes, beside the backend's own calls.

Started by itself it starts its ranks; under `fullspeed run` or torchrun it is one of them.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from fullspeed.accelerator import get_accelerator
from fullspeed.base import env
from fullspeed.base.errors import UsageError
from fullspeed.comm import (
    Pending,
    ReduceOp,
    Transport,
    all_reduce,
    barrier,
    bus_share,
    destroy_process_group,
    get_rank,
    get_world_group,
    get_world_size,
    init_distributed,
    make_transport,
)
from fullspeed.comm.transport import NativeTransport
from fullspeed.launcher.options import parse

MODULE = "fullspeed.cli.bench_comm"
COLUMNS = f"{'operation':<16}{'bytes':>12}{'ours ms':>11}{'torch ms':>11}{'ours GB/s':>12}{'torch GB/s':>12}"


class Sweep(NamedTuple):
    """What is measured."""

    sizes: tuple[int, ...]  # bytes of the whole message
    trials: int
    warmups: int
    dtype: torch.dtype


class Row(NamedTuple):
    """One operation with one size: seconds of the slowest rank, median over trials."""

    op: str
    nbytes: int
    ours_s: float
    torch_s: float
    world_size: int

    def text(self) -> str:
        """The row under COLUMNS; speeds are those of a rank's link."""
        moved = self.nbytes * bus_share(self.op, self.world_size) / 1e9
        speeds = f"{moved / self.ours_s:>12.2f}{moved / self.torch_s:>12.2f}"
        return f"{self.op:<16}{self.nbytes:>12}{self.ours_s * 1e3:>11.3f}{self.torch_s * 1e3:>11.3f}{speeds}"


def run(words: Sequence[str]) -> int:
    """Measure as one of the ranks, or start them; returns the exit code."""
    given = _parse(words)
    if env.get("RANK") is None:
        from fullspeed.launcher.launch import launch

        flags = ["--num_gpus", str(given.ranks), "--log_level", "warning", "--no_local_rank", "--module"]
        exit_code, cause = launch(parse([*flags, MODULE, *words]))
        if cause:
            print(f"\nfullspeed: {cause}", file=sys.stderr)
        return exit_code
    init_distributed(verbose=False)
    if get_rank() == 0:
        print(f"{get_world_size()} ranks on {get_accelerator().device_name()}, {given.dtype}\n{COLUMNS}", flush=True)
    for row in measure(_sweep(given)):
        if get_rank() == 0:
            print(row.text(), flush=True)
    destroy_process_group()
    return 0


def measure(sweep: Sweep) -> Iterator[Row]:
    """Rows, as they are measured. Collective over all ranks."""
    device = torch.device(get_accelerator().current_device_name())
    group = get_world_group()
    world_size = get_world_size(group)
    ours, theirs = make_transport(group, device), NativeTransport(group)
    for nbytes in sweep.sizes:
        numel = max(nbytes // sweep.dtype.itemsize // world_size, 1) * world_size
        for op, call in _calls(numel, world_size, sweep.dtype, device).items():
            ours_s, torch_s = _median_s(call(ours), sweep), _median_s(call(theirs), sweep)
            yield Row(op, numel * sweep.dtype.itemsize, ours_s, torch_s, world_size)


def _calls(
    numel: int, world_size: int, dtype: torch.dtype, device: torch.device
) -> dict[str, Callable[[Transport], Callable[[], Pending]]]:
    """For each operation, what makes a call of it that can be repeated on a transport's own buffers."""

    def buffers(transport: Transport) -> tuple[torch.Tensor, torch.Tensor]:
        full, shard = transport.empty(numel, dtype, device), transport.empty(numel // world_size, dtype, device)
        return full.zero_(), shard.zero_()

    def all_gather(transport: Transport) -> Callable[[], Pending]:
        full, shard = buffers(transport)
        return lambda: transport.all_gather(full, shard)

    def reduce_scatter(transport: Transport) -> Callable[[], Pending]:
        full, shard = buffers(transport)
        return lambda: transport.reduce_scatter(full, shard)

    def reduce_all(transport: Transport) -> Callable[[], Pending]:
        full, _ = buffers(transport)
        return lambda: transport.all_reduce(full)

    def all_to_all(transport: Transport) -> Callable[[], Pending]:
        (send, _), (receive, _) = buffers(transport), buffers(transport)
        return lambda: transport.all_to_all(send, receive)

    return {
        "all_gather": all_gather,
        "reduce_scatter": reduce_scatter,
        "all_reduce": reduce_all,
        "all_to_all": all_to_all,
    }


def _median_s(call: Callable[[], Pending], sweep: Sweep) -> float:
    """Seconds of the slowest rank in the median trial."""
    spent = torch.zeros(sweep.trials, dtype=torch.float64)
    for trial in range(-sweep.warmups, sweep.trials):
        barrier()
        get_accelerator().synchronize()
        began = time.perf_counter()
        call().wait()
        get_accelerator().synchronize()
        if trial >= 0:
            spent[trial] = time.perf_counter() - began
    device = get_accelerator().current_device_name()
    return float(all_reduce(spent.to(device), ReduceOp.MAX).median())


def _parse(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="fullspeed bench", description="Measure this machine.")
    commands = parser.add_subparsers(required=True)
    comm = commands.add_parser("comm", help="collectives over sizes")
    commands.add_parser("io", help="a folder's disk; `fullspeed bench io --help` lists its flags")
    add = comm.add_argument
    add("-r", "--ranks", type=int, default=2, metavar="N", help="ranks to start, if none are yet (2)")
    add("--minsize", type=int, default=10, metavar="B", help="log2 of the bytes of the smallest message (10)")
    add("--maxsize", type=int, default=24, metavar="B", help="log2 of the bytes of the largest message (24)")
    add("--trials", type=int, default=20, metavar="N", help="measured calls (20)")
    add("--warmups", type=int, default=3, metavar="N", help="calls before them (3)")
    add("--dtype", default="float32", choices=("float32", "bfloat16", "float16"), help="elements (float32)")
    given = parser.parse_args(list(words))
    if given.ranks < 1 or given.trials < 1 or given.warmups < 0:
        raise UsageError("--ranks and --trials must be at least 1, --warmups at least 0")
    if not 2 <= given.minsize <= given.maxsize <= 36:
        raise UsageError(f"--minsize {given.minsize}, --maxsize {given.maxsize}: choose 2 <= minsize <= maxsize <= 36")
    return given


def _sweep(given: argparse.Namespace) -> Sweep:
    sizes = tuple(2**power for power in range(given.minsize, given.maxsize + 1, 2))
    return Sweep(sizes, given.trials, given.warmups, getattr(torch, given.dtype))


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
