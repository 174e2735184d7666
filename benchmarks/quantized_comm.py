"""What do quantised messages cost and save? Error, bytes and time of the kernels that qwZ and qgZ send through.

The values are normal, as weights and gradients nearly are, so the error depends on the block: the larger it is, the
larger its largest value. Times are medians per value, beside a plain copy of the same values. On a CPU it is CPU time,
which other work on the machine disturbs less.

    python benchmarks/quantized_comm.py
    python benchmarks/quantized_comm.py --device cuda --numel 1e8
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch

from fullspeed.kernels.format import BlockFormat
from fullspeed.kernels.quantize import dequantize, dequantize_sum, quantize
from fullspeed.kernels.registry import choices

NUM_SUMMED = 4  # messages that `dequantize_sum` adds up
FORMS = [BlockFormat(bits, block) for bits in (8, 4) for block in (64, 256, 2048)]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def nanoseconds_per_value(work: Callable[[], None], numel: int, rounds: int, device: torch.device) -> float:
    """Median over rounds, after one that does not count."""
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    times = []
    for _ in range(rounds + 1):
        _synchronize(device)
        begin = clock()
        work()
        _synchronize(device)
        times.append(clock() - begin)
    return statistics.median(times[1:]) / numel * 1e9


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def measure(form: BlockFormat, values: torch.Tensor, rounds: int) -> list[str]:
    """One row of the table."""
    numel, device = len(values), values.device
    messages = torch.empty((NUM_SUMMED, 1, form.nbytes(numel)), dtype=torch.uint8, device=device)
    out = torch.empty((1, numel), dtype=values.dtype, device=device)
    source = values.view(1, 1, -1)
    to_message = nanoseconds_per_value(lambda: quantize(source, messages[:1], form), numel, rounds, device)
    for message in messages[1:]:
        message.copy_(messages[0])
    summing = nanoseconds_per_value(lambda: dequantize_sum(messages, out, form), numel, rounds, device)
    back = nanoseconds_per_value(lambda: dequantize(messages[0], out, form), numel, rounds, device)
    error = (out[0].float() - values.float()).square().mean().sqrt() / values.float().square().mean().sqrt()
    nbytes = messages.shape[2] / numel
    return [
        f"{form.bits} bits, {form.block}",
        f"{nbytes:.3f}",
        f"{values.itemsize / nbytes:.2f}x",
        f"{error.item():.2%}",
        f"{to_message:.2f}",
        f"{back:.2f}",
        f"{summing:.2f}",
    ]


def main() -> None:
    """Print a table for each dtype."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numel", type=float, default=4e6, help="values per message")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    if device.type == "cpu":
        torch.set_num_threads(1)
    print(", ".join(f"{choice.op}: {choice.implementation}" for choice in choices(device)), f"on {device}")
    for name, dtype in DTYPES.items():
        values = torch.randn(int(arguments.numel), device=device).to(dtype)
        copy = partial(torch.empty_like(values).copy_, values)
        copying = nanoseconds_per_value(copy, len(values), arguments.rounds, device)
        print(f"\n{name}: a copy takes {copying:.2f} ns a value\n")
        print("| format, block | bytes a value | smaller by | rms error | quantize ns | dequantize ns | sum of 4 ns |")
        print("|---|--:|--:|--:|--:|--:|--:|")
        for form in FORMS:
            print(f"| {' | '.join(measure(form, values, arguments.rounds))} |")


if __name__ == "__main__":
    main()
