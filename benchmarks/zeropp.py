"""ZeRO++ beside plain stage 3: bytes that cross nodes in a step, and the loss on real text.

Trains the example's GPT on Python's standard library, on ranks that pretend to be two nodes:

    python -m fullspeed.cli.main --num_gpus 4 benchmarks/zeropp.py --steps 200

Volumes are those of ZeRO++ (arXiv:2306.10209, table 1): M is the model in 16 bits; a collective over ranks of both
nodes counts with its whole message, one inside a node not at all.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
from gpt import GPT, GPTConfig
from source_text import Windows, load_source_text

import fullspeed
from fullspeed.comm import CommRecorder, all_reduce, get_rank, get_world_size, observing

SEQUENCE_BYTES = 128
MICRO_BATCH = 4
WIDTH = 224  # half the example's: a quarter of its parameters
SHOWN_STEPS = (1, 25, 50, 100, 150, 200)
WAYS: dict[str, dict[str, Any]] = {
    "stage 3": {},
    "hpZ": {"zero_hpz_partition_size": 2},
    "qwZ": {"zero_quantized_weights": True},
    "qgZ": {"zero_quantized_gradients": True},
    "qgZ + LoCo": {"zero_quantized_gradients": True, "zeropp_loco_param": {"err_beta": 0.8, "reset_T": 1024}},
    "hpZ + qwZ + qgZ": {
        "zero_hpz_partition_size": 2,
        "zero_quantized_weights": True,
        "zero_quantized_gradients": True,
    },
}


def configuration(way: str, ranks_per_node: int) -> dict[str, Any]:
    """Stage 3 in bf16 with one way's settings; every parameter is sharded, so that all of them count."""
    zero = {
        "stage": 3,
        "stage3_param_persistence_threshold": 0,
        "stage3_max_reuse_distance": 0,
        "zero_quantized_block_size": 1024,
        **WAYS[way],
    }
    if "zero_hpz_partition_size" in zero:
        zero["zero_hpz_partition_size"] = ranks_per_node
    return {
        "train_micro_batch_size_per_gpu": MICRO_BATCH,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.95], "weight_decay": 0.1}},
        "zero_optimization": zero,
    }


def crossing_bytes(recorder: CommRecorder, ranks_per_node: int) -> int:
    """Bytes of the messages whose ranks are on more than one node."""
    return sum(
        event.nbytes
        for event in recorder.events
        if event.op in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
        and len({rank // ranks_per_node for rank in event.ranks}) > 1
    )


def train(way: str, steps: int, ranks_per_node: int, data: Windows) -> tuple[float, float, list[float]]:
    """M in bytes, bytes across nodes in one step, and the loss of every step, averaged over ranks."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(width=WIDTH))
    numel = sum(param.numel() for param in model.parameters())
    engine, *_ = fullspeed.initialize(model=model, config=configuration(way, ranks_per_node))
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(1))
    losses, crossing = [], 0
    for step in range(steps):
        first = (step * get_world_size() + get_rank()) * MICRO_BATCH
        chosen = [int(order[index % len(order)]) for index in range(first, first + MICRO_BATCH)]
        tokens, targets = zip(*(data[index] for index in chosen), strict=True)
        recorder = CommRecorder()
        with observing(recorder):
            logits = engine(torch.stack(tokens))
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), torch.stack(targets).flatten())
            engine.backward(loss)
            engine.step()
        if step == 2:  # an order of uses has been learned by then
            crossing = crossing_bytes(recorder, ranks_per_node)
        losses.append(all_reduce(loss.detach().double()).item() / get_world_size())
    engine.destroy()
    return 2.0 * numel, crossing, losses


def main() -> None:
    """Train every way; rank 0 prints a row for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--ranks-per-node", type=int, default=2)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--local_rank", type=int, default=0)
    args = parser.parse_args()
    os.environ["LOCAL_WORLD_SIZE"] = str(args.ranks_per_node)
    fullspeed.init_distributed()
    data = Windows(load_source_text().train, SEQUENCE_BYTES)
    shown = [step for step in SHOWN_STEPS if step <= args.steps]
    if get_rank() == 0:
        heads = " | ".join(f"loss at {step}" for step in shown)
        print(f"| way | across nodes, MB a step | in M | {heads} | mean of last 20 |")
        print("|---|" + "---|" * (len(shown) + 3), flush=True)
    for way in args.ways:
        model_bytes, crossing, losses = train(way, args.steps, args.ranks_per_node, data)
        values = " | ".join(f"{losses[step - 1]:.3f}" for step in shown)
        last = sum(losses[-20:]) / len(losses[-20:])
        if get_rank() == 0:
            row = f"| {way} | {crossing / 1e6:.1f} | {crossing / model_bytes:.2f} | {values} | {last:.3f} |"
            print(row, flush=True)


if __name__ == "__main__":
    main()
