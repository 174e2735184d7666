"""`fullspeed bench memory`: how fast memory is, over threads; and between host and device, where there is one.

What an optimizer in host memory can reach is `update`: a read and a write of parameters and moments and a read of
gradients, which is what a step of Adam moves.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Sequence

import torch

from fullspeed.accelerator import get_accelerator
from fullspeed.base.errors import UsageError
from fullspeed.kernels.update import Item, Update, update

COLUMNS = f"{'what':<28}{'threads':>8}{'ms':>10}{'GB/s':>9}"
_ADAM = Update("adam", 0.01, True, (0.9, 0.999), 1e-8)


def run(words: Sequence[str]) -> int:
    """Measure, and print rows; returns the exit code."""
    given = _parse(words)
    numel = given.mib << 18
    print(f"fp32 tensors of {given.mib} MiB\n{COLUMNS}", flush=True)
    before = torch.get_num_threads()
    try:
        for threads in given.threads:
            torch.set_num_threads(threads)
            for name, (action, nbytes) in host_actions(numel).items():
                print(row(name, str(threads), measured_s(action, given.trials), nbytes), flush=True)
    finally:
        torch.set_num_threads(before)
    device = torch.device(get_accelerator().current_device_name())
    if device.type != "cpu":
        for name, (action, nbytes) in device_actions(numel, device).items():
            print(row(name, "-", measured_s(action, given.trials), nbytes), flush=True)
    return 0


def row(name: str, threads: str, seconds: float, nbytes: int) -> str:
    """One line under COLUMNS."""
    return f"{name:<28}{threads:>8}{seconds * 1e3:>10.2f}{nbytes / seconds / 1e9:>9.1f}"


def host_actions(numel: int) -> dict[str, tuple[Callable[[], object], int]]:
    """What to time in host memory, each with the bytes it moves."""
    values, grad, first, second = (torch.full((numel,), 1e-3) for _ in range(4))
    item = Item(values, grad, first, second, None, 1.0, 1e-3)
    return {
        "copy": (lambda: values.copy_(grad), 2 * values.nbytes),
        "scale in place": (lambda: first.mul_(1.0), 2 * values.nbytes),
        "update (Adam)": (lambda: update([item], _ADAM), 7 * values.nbytes),
    }


def device_actions(numel: int, device: torch.device) -> dict[str, tuple[Callable[[], object], int]]:
    """Copies between host and device, from ordinary and from page-locked memory."""
    accelerator = get_accelerator()
    there, here = torch.empty(numel, device=device), torch.empty(numel)
    locked = accelerator.pin_memory(torch.empty(numel))

    def copied(target: torch.Tensor, source: torch.Tensor) -> Callable[[], object]:
        def copy() -> None:
            target.copy_(source, non_blocking=True)
            accelerator.synchronize()

        return copy

    return {
        "to device": (copied(there, here), here.nbytes),
        "to device, page-locked": (copied(there, locked), here.nbytes),
        "to host": (copied(here, there), here.nbytes),
        "to host, page-locked": (copied(locked, there), here.nbytes),
    }


def measured_s(action: Callable[[], object], trials: int) -> float:
    """Seconds of the median trial, after one that does not count."""
    action()
    spent = []
    for _ in range(trials):
        began = time.perf_counter()
        action()
        spent.append(time.perf_counter() - began)
    return statistics.median(spent)


def _parse(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="fullspeed bench memory", description="Measure memory.")
    add = parser.add_argument
    cores = os.cpu_count() or 1
    powers = [1 << power for power in range(cores.bit_length()) if 1 << power < cores]
    add("--mib", type=int, default=256, metavar="N", help="size of each tensor, in MiB (256)")
    add("--threads", type=_numbers, default=[*powers, cores], metavar="N,N", help="1,2,4 ... up to all cores")
    add("--trials", type=int, default=5, metavar="N", help="trials of which the median counts (5)")
    given = parser.parse_args(list(words))
    if given.mib < 1 or given.trials < 1 or min(given.threads) < 1:
        raise UsageError("--mib, --threads and --trials must be at least 1")
    return given


def _numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]
