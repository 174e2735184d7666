"""Steps beside training, ZenFlow and speculative ones, against plain steps: losses on real text, and time.

Trains the example's GPT on Python's standard library, every way from the same weights on the same batches:

    python -m fullspeed.cli.main --num_gpus 2 benchmarks/overlapped_step.py --steps 200

The first table has mean losses of 20 steps each. The second says how long forward and backward, and the step, took (the
median of all steps but the first 20); where a step is hidden, its time is in neither or in the former.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
from gpt import GPT, GPTConfig
from source_text import Windows, load_source_text
from torch import Tensor

import fullspeed
from fullspeed.comm import all_reduce, get_rank, get_world_size

SEQUENCE_BYTES = 128
MICRO_BATCH = 4
WIDTH = 224  # half the example's: a quarter of its parameters
BLOCK = 20  # steps whose losses are averaged, and steps left out of times
ZENFLOW = {"select_strategy": "step", "select_interval": 50, "update_interval": 4, "topk_ratio": 0.1}
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "zenflow": {"zenflow": ZENFLOW},
    "zenflow, overlapped": {"zenflow": {**ZENFLOW, "overlap_step": True}},
    "zenflow, auto interval": {"zenflow": {**ZENFLOW, "update_interval": "auto", "overlap_step": True}},
    "super_offload": {"offload_optimizer": {"device": "cpu", "super_offload": True}},
}


class Run(NamedTuple):
    """What one way gave: for every step the loss averaged over ranks, and seconds."""

    losses: list[float]
    compute_s: list[float]  # forward and backward
    step_s: list[float]
    kept: str  # how many guesses or background updates were taken over, and how many were not


def configuration(way: str, stage: int, clip: float) -> dict[str, Any]:
    """bf16 with fp32 masters, Adam in one pass over memory."""
    return {
        "train_micro_batch_size_per_gpu": MICRO_BATCH,
        "gradient_clipping": clip,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.95], "weight_decay": 0.1}},
        "zero_optimization": {"stage": stage, **WAYS[way]},
    }


def batches(data: Windows, steps: int) -> Iterator[tuple[Tensor, Tensor]]:
    """This rank's micro-batches: bytes and the bytes that follow them, (B, S) each."""
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(1))
    for step in range(steps):
        first = (step * get_world_size() + get_rank()) * MICRO_BATCH
        chosen = [int(order[index % len(order)]) for index in range(first, first + MICRO_BATCH)]
        tokens, targets = zip(*(data[index] for index in chosen), strict=True)
        yield torch.stack(tokens), torch.stack(targets)


def train(config: dict[str, Any], steps: int, data: Windows) -> Run:
    """Train one way."""
    torch.manual_seed(0)
    engine, optimizer, *_ = fullspeed.initialize(model=GPT(GPTConfig(width=WIDTH)), config=config)
    run = Run([], [], [], "")
    for tokens, targets in batches(data, steps):
        started = time.perf_counter()
        logits = engine(tokens)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
        engine.backward(loss)
        computed = time.perf_counter()
        engine.step()
        run.compute_s.append(computed - started)
        run.step_s.append(time.perf_counter() - computed)
        run.losses.append(all_reduce(loss.detach().double()).item() / get_world_size())
    stepper = vars(optimizer.stepper)
    kept = f"{stepper['num_taken']} / {stepper['num_redone']}" if "num_taken" in stepper else ""
    engine.destroy()
    return run._replace(kept=kept)


def main() -> None:
    """Train every way; rank 0 prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--stage", type=int, default=2, choices=(1, 2, 3))
    parser.add_argument("--clip", type=float, default=0.0, help="largest gradient norm; 0 is no limit")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--local_rank", type=int, default=0)
    args = parser.parse_args()
    fullspeed.init_distributed()
    data = Windows(load_source_text().train, SEQUENCE_BYTES)
    runs = {}
    for way in args.ways:
        runs[way] = train(configuration(way, args.stage, args.clip), args.steps, data)
    if get_rank() == 0:
        print_losses(runs)
        print_times(runs)


def print_losses(runs: dict[str, Run]) -> None:
    """A row for each block of steps, a column for each way."""
    print(f"| steps | {' | '.join(runs)} |\n|---|{'---|' * len(runs)}")
    num_steps = len(next(iter(runs.values())).losses)
    for first in range(0, num_steps, BLOCK):
        last = min(first + BLOCK, num_steps)
        means = (statistics.fmean(run.losses[first:last]) for run in runs.values())
        print(f"| {first + 1} to {last} | {' | '.join(f'{mean:.4f}' for mean in means)} |")


def print_times(runs: dict[str, Run]) -> None:
    """A row for each way."""
    heads = ("way", "forward and backward, ms", "step, ms", "step's share", "taken over / done again")
    print(f"\n| {' | '.join(heads)} |\n|{'---|' * len(heads)}")
    for way, run in runs.items():
        compute_s, step_s = (statistics.median(times[BLOCK:] or times) for times in (run.compute_s, run.step_s))
        share = f"{step_s / (compute_s + step_s):.1%}"
        print(f"| {way} | {compute_s * 1e3:.1f} | {step_s * 1e3:.1f} | {share} | {run.kept} |")


if __name__ == "__main__":
    main()
