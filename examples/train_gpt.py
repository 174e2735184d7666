"""Train a GPT of 10 million parameters on Python's standard library, sharded over two ranks with ZeRO-3.

    fullspeed --num_gpus 2 examples/train_gpt.py
    torchrun --nproc-per-node 2 examples/train_gpt.py

The run shows what a training needs: progress, validation against a baseline, checkpoints, a resumed copy that
agrees, and a sample.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gpt import GPT, GPTConfig
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from source_text import Windows, bigram_loss, load_source_text, spread_windows
from torch import Tensor

import fullspeed

HERE = Path(__file__).parent
SEQUENCE_BYTES = 128
VALIDATION_WINDOWS = 128
VALIDATION_BATCH = 8
LOG_EVERY_STEPS = 50


def parse_arguments() -> argparse.Namespace:
    """The command line, with the library's own arguments beside ours."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400, help="optimizer steps in the whole run")
    parser.add_argument("--data-dir", type=Path, help="train on the *.py files here instead of the standard library")
    parser.add_argument("--output-dir", type=Path, default=Path("build/gpt"), help="where checkpoints go")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint in --output-dir")
    parser.add_argument("--sample-bytes", type=int, default=160, help="length of the text written at the end")
    parser.add_argument("--local_rank", type=int, default=-1, help="set by launchers; the environment says the same")
    parser = fullspeed.add_config_arguments(parser)
    return parser.parse_args()


def load_config(options: argparse.Namespace) -> dict[str, Any]:
    """The JSON config, with the schedule stretched to --steps."""
    config: dict[str, Any] = json.loads(Path(options.deepspeed_config or HERE / "ds_config.json").read_text())
    schedule = config["scheduler"]["params"]
    schedule["total_num_steps"] = options.steps
    schedule["warmup_num_steps"] = max(1, min(schedule["warmup_num_steps"], options.steps // 4))
    return config


def build_engine(config: dict[str, Any], data: Windows, seed: int) -> tuple[Any, Any]:
    """A new model in a new engine, and the loader of this rank's micro-batches."""
    torch.manual_seed(seed)
    model = GPT(GPTConfig())
    engine, _, loader, _ = fullspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config, training_data=data
    )
    return engine, loader


def mean_over_ranks(value: Tensor) -> float:
    """The average of a scalar that each rank holds."""
    total = value.detach().double()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


@torch.no_grad()
def validate(engine: Any, tokens: Tensor, targets: Tensor) -> float:
    """Nats per byte over the windows (count, S), each rank computing its share."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    engine.eval()
    losses = [
        engine(token_batch.to(engine.device), target_batch.to(engine.device))
        for token_batch, target_batch in zip(
            tokens[rank::world_size].split(VALIDATION_BATCH),
            targets[rank::world_size].split(VALIDATION_BATCH),
            strict=True,
        )
    ]
    engine.train()
    return mean_over_ranks(torch.stack(losses).mean())


@torch.no_grad()
def generate(engine: Any, prompt: bytes, num_bytes: int, temperature: float = 0.7) -> bytes:
    """Continue `prompt`. Every rank must call this: a sharded model computes only with all of them."""
    generator = torch.Generator().manual_seed(0)  # the same draws on every rank
    engine.eval()
    text = list(prompt)
    for _ in range(num_bytes):
        context = torch.tensor([text[-SEQUENCE_BYTES:]], device=engine.device)
        scores = engine(context)[0, -1].float().cpu()
        text.append(int(torch.multinomial((scores / temperature).softmax(0), 1, generator=generator)))
    engine.train()
    return bytes(text)


def endless(loader: Iterable[Any]) -> Iterator[Any]:
    """The loader's micro-batches, from the start again after the last."""
    while True:
        yield from loader


def make_progress(console: Console) -> Progress:
    """A bar with the numbers one looks at while a model learns."""
    numbers = "loss {task.fields[loss]:.3f}  lr {task.fields[lr]:.1e}  norm {task.fields[norm]:.2f}"
    speed = "{task.fields[speed]:.0f} bytes/s  holds {task.fields[held_mb]:.0f} MB a rank"
    columns = (TextColumn("{task.description}"), BarColumn(20), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, TextColumn(numbers), TextColumn(speed), console=console)


def held_mb(engine: Any) -> float:
    """Megabytes of parameters, gradients and optimizer state that this rank keeps between steps."""
    held = engine.memory_bytes()
    return float(sum(held[kind] for kind in ("params", "grads", "master", "optimizer"))) / 1e6


def train(engine: Any, loader: Any, first_step: int, options: argparse.Namespace, console: Console) -> None:
    """Train from `first_step` to --steps, saving half-way and at the end. Only rank 0 draws the bar."""
    halfway = max(1, options.steps // 2)
    micro_batches = islice(endless(loader), first_step, None)  # skip what an earlier run has trained on
    is_rank_0 = dist.get_rank() == 0
    progress = make_progress(console)
    smooth_loss, last = math.nan, time.perf_counter()
    with progress if is_rank_0 else nullcontext():
        bar = progress.add_task(
            "training",
            total=options.steps,
            completed=first_step,
            loss=math.nan,
            lr=0,
            norm=0,
            speed=0,
            held_mb=0,
        )
        for step in range(first_step + 1, options.steps + 1):
            tokens, targets = (part.to(engine.device) for part in next(micro_batches))
            loss = engine(tokens, targets)
            engine.backward(loss)
            engine.step()

            now, latest_loss = time.perf_counter(), loss.item()
            smooth_loss = latest_loss if math.isnan(smooth_loss) else 0.95 * smooth_loss + 0.05 * latest_loss
            progress.update(
                bar,
                completed=step,
                loss=smooth_loss,
                lr=engine.get_lr()[0],
                norm=float(engine.get_global_grad_norm()),
                speed=dist.get_world_size() * tokens.numel() / (now - last),
                held_mb=held_mb(engine),
            )
            last = now
            if not console.is_terminal and step % LOG_EVERY_STEPS == 0:  # a log file shows no moving bar
                console.print(f"step {step}, loss {smooth_loss:.3f}")
            if step in (halfway, options.steps):
                engine.save_checkpoint(str(options.output_dir), tag=f"step{step}", client_state={"step": step})
                console.print(f"saved {options.output_dir / f'step{step}'}, loss {smooth_loss:.3f}")
                last = time.perf_counter()


def in_bits(nats: float) -> str:
    """A loss in both units."""
    return f"{nats:.4f} nats = {nats / math.log(2):.3f} bits per byte"


def main() -> None:
    """The whole run: data, training, validation, a resumed copy, a sample."""
    options = parse_arguments()
    started = time.perf_counter()
    fullspeed.init_distributed()
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // dist.get_world_size()))
    console = Console(quiet=dist.get_rank() != 0, width=None if Console().is_terminal else 140)

    text = load_source_text(options.data_dir)
    tokens, targets = spread_windows(text.validation, SEQUENCE_BYTES, VALIDATION_WINDOWS)
    data, config = Windows(text.train, SEQUENCE_BYTES), load_config(options)
    console.print(f"{text.train.numel():,} bytes to train on, {text.validation.numel():,} held out")

    engine, loader = build_engine(config, data, seed=0)
    first_step = 0
    if options.resume:
        path, state = engine.load_checkpoint(str(options.output_dir))
        if path is None:
            raise SystemExit(f"{options.output_dir} has no checkpoint; leave out --resume")
        first_step = state["step"]
        console.print(f"resumed from {path} at step {first_step}")
    num_params = sum(param.numel() for param in GPT(GPTConfig()).parameters())
    console.print(f"{num_params:,} parameters on {dist.get_world_size()} ranks")
    train(engine, loader, first_step, options, console)

    loss, baseline = validate(engine, tokens, targets), bigram_loss(text.train, tokens, targets)
    console.print(f"validation: {in_bits(loss)}\n    bigram: {in_bits(baseline)}")
    console.print("the model is better" if loss < baseline else "the bigram is better: train for more steps")
    account = ", ".join(f"{kind} {count / 1e6:.1f} MB" for kind, count in engine.memory_bytes().items())
    console.print(f"rank 0 held: {account}")
    engine.destroy()

    engine, _ = build_engine(config, data, seed=1)  # other weights, so that what agrees came from the checkpoint
    path, _ = engine.load_checkpoint(str(options.output_dir))
    again = validate(engine, tokens, targets)
    console.print(f"a new engine that loads {path}: {in_bits(again)}, {abs(again - loss):.1e} apart")
    if abs(again - loss) > 1e-6:
        raise SystemExit("the resumed engine is not the engine that was saved")

    sample = generate(engine, b"def ", options.sample_bytes)
    console.rule("a sample")
    console.print(sample.decode(errors="replace"), markup=False, highlight=False)
    console.rule(f"{time.perf_counter() - started:.0f} s in all")
    engine.destroy()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
