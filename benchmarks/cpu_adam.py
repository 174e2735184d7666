"""How fast is an AdamW step in host memory? FullSpeed's, torch's and DeepSpeed's, beside what the memory allows.

Every system steps one tensor; they take turns, one step each a round. The limit is a loop over the same arrays that
reads and writes as much and computes nothing: 28 bytes per parameter. It is compiled here, so a C compiler is needed.

    python benchmarks/cpu_adam.py
    python benchmarks/cpu_adam.py --deepspeed-python ds/bin/python      # compiles for minutes the first time
"""

from __future__ import annotations

import argparse
import ctypes
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

import torch
from torch import nn

Step = Callable[[], float]
"""Does one step, returns its seconds."""

LIMIT = """
#include <stdint.h>
#define LOOP _Pragma("omp parallel for simd") for (int64_t i = 0; i < n; i++)
void fp32(float *restrict p, float *restrict m, float *restrict v, const float *restrict g, int64_t n) {
    LOOP { p[i] += g[i]; m[i] += g[i]; v[i] += g[i]; }
}
void mixed(float *restrict p, float *restrict m, float *restrict v, const int16_t *restrict g, int16_t *restrict c,
           int64_t n) {
    LOOP { float x = g[i]; p[i] += x; m[i] += x; v[i] += x; c[i] = g[i]; }
}
"""
PEER = """
import sys, time, torch
from deepspeed.ops.adam import DeepSpeedCPUAdam
numel, threads = int(sys.argv[1]), int(sys.argv[2])
torch.set_num_threads(threads)
param = torch.nn.Parameter(torch.randn(numel))
param.grad = torch.randn(numel)
optimizer = DeepSpeedCPUAdam([param], lr=1e-3, weight_decay=0.1)
optimizer.step()
print("READY", flush=True)
for _ in sys.stdin:
    began = time.perf_counter()
    optimizer.step()
    print("TIME", time.perf_counter() - began, flush=True)
"""


def timed(step: Callable[[], object]) -> Step:
    """The step with a clock around it."""

    def run() -> float:
        began = time.perf_counter()
        step()
        return time.perf_counter() - began

    return run


def compiled_limit(folder: pathlib.Path) -> ctypes.CDLL:
    """The loops above."""
    source, library = folder / "limit.c", folder / "limit.so"
    source.write_text(LIMIT)
    flags = ["-O3", "-march=native", "-fopenmp", "-fPIC", "-shared"]
    subprocess.run(["cc", *flags, "-o", library, source], check=True)
    return ctypes.CDLL(str(library))


def limits(numel: int, loops: ctypes.CDLL) -> dict[str, Step]:
    """Steps that only move memory."""
    arrays = [torch.randn(numel) for _ in range(4)]
    narrow = [torch.zeros(numel, dtype=torch.int16) for _ in range(2)]
    count = ctypes.c_int64(numel)
    wide = [ctypes.c_void_p(array.data_ptr()) for array in arrays]
    small = [ctypes.c_void_p(array.data_ptr()) for array in narrow]
    return {
        "limit fp32": timed(lambda: (loops.fp32(*wide, count), arrays)),
        "limit mixed": timed(lambda: (loops.mixed(*wide[:3], *small, count), narrow)),
    }


def steps_of_ours(numel: int) -> dict[str, Step]:
    """FullSpeed's steps: fp32, and fp32 masters with bf16 gradients read and bf16 copies written."""
    from fullspeed.optim.cpu import CPUAdam

    plain, master = (nn.Parameter(torch.randn(numel)) for _ in range(2))
    plain.grad = torch.randn(numel)
    fp32, mixed = CPUAdam([plain], weight_decay=0.1), CPUAdam([master], weight_decay=0.1)
    mixed.attach(master, grad=torch.randn(numel).bfloat16(), copy=torch.empty(numel, dtype=torch.bfloat16))
    return {"fullspeed fp32": timed(fp32.step), "fullspeed mixed": timed(mixed.step)}


def steps_of_torch(numel: int) -> dict[str, Step]:
    """Steps of torch's fused AdamW: fp32, and with the casts around it that bf16 needs."""
    plain, master = (nn.Parameter(torch.randn(numel)) for _ in range(2))
    plain.grad, master.grad = torch.randn(numel), torch.empty(numel)
    narrow, copy = torch.randn(numel).bfloat16(), torch.empty(numel, dtype=torch.bfloat16)
    fp32, mixed = (torch.optim.AdamW([param], weight_decay=0.1, fused=True) for param in (plain, master))

    def step_mixed() -> None:
        assert master.grad is not None
        master.grad.copy_(narrow)
        mixed.step()
        copy.copy_(master.detach())

    return {"torch fp32": timed(fp32.step), "torch mixed": timed(step_mixed)}


def step_of_deepspeed(python: str, numel: int, threads: int) -> Step:
    """DeepSpeed's step, in a process of its own."""
    command = [python, "-c", PEER, str(numel), str(threads)]
    peer = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert peer.stdin is not None
    assert peer.stdout is not None
    while "READY" not in (line := peer.stdout.readline()):
        if not line:
            sys.exit("DeepSpeed's process ended before its first step")

    def step() -> float:
        print("go", file=peer.stdin, flush=True)
        while not (line := peer.stdout.readline()).startswith("TIME"):
            pass
        return float(line.split()[1])

    return step


def measure(steps: dict[str, Step], rounds: int) -> dict[str, list[float]]:
    """Seconds of each system in every round, after two that do not count."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for index in range(-2, rounds):
        for name, step in steps.items():
            seconds = step()
            if index >= 0:
                times[name].append(seconds)
    return times


def table(times: dict[str, list[float]], numel: int) -> list[str]:
    """Rows: the least and the median time, and the median over rounds of the ratio to each peer."""
    lines = [
        f"{'system':<18}{'min ms':>9}{'median ms':>11}{'GB/s':>7}{'of the limit':>14}{'x torch':>9}{'x deepspeed':>13}"
    ]
    for name, own in times.items():
        kind = name.split()[1]
        columns = []
        for peer in (f"limit {kind}", f"torch {kind}", "deepspeed fp32"):
            is_alike = peer in times and peer != name and peer.endswith(kind)
            ratio = statistics.median(b / a for a, b in zip(own, times[peer], strict=True)) if is_alike else None
            columns.append("" if ratio is None else f"{ratio:.2f}")
        speed = 28 * numel / min(own) / 1e9
        text = f"{name:<18}{min(own) * 1e3:>9.1f}{statistics.median(own) * 1e3:>11.1f}{speed:>7.1f}"
        lines.append(f"{text}{columns[0]:>14}{columns[1]:>9}{columns[2]:>13}")
    return lines


def main() -> None:
    """Print a table for each number of threads."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numel", type=float, default=1e8, help="parameters (1e8)")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--deepspeed-python", help="the interpreter of an environment with DeepSpeed")
    given = parser.parse_args()
    numel = int(given.numel)
    with tempfile.TemporaryDirectory() as folder:
        loops = compiled_limit(pathlib.Path(folder))
    for threads in given.threads:
        torch.set_num_threads(threads)
        steps = {**limits(numel, loops), **steps_of_ours(numel), **steps_of_torch(numel)}
        if given.deepspeed_python:
            steps["deepspeed fp32"] = step_of_deepspeed(given.deepspeed_python, numel, threads)
        print(f"{numel:,} parameters, {threads} thread(s)")
        print("\n".join(table(measure(steps, given.rounds), numel)), flush=True)


if __name__ == "__main__":
    main()
