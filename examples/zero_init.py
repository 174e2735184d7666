"""Build, load, train, edit and save a model that no rank ever holds whole.

    fullspeed --num_gpus 2 examples/zero_init.py
    torchrun --nproc-per-node 2 examples/zero_init.py

The GPT of `gpt.py` is built under `zero.Init`, takes its weights from a safetensors file, recomputes its blocks'
activations, and trains a few steps in bf16 with ZeRO-3. What each rank holds is printed beside the formula.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gpt import GPT, Block, GPTConfig
from safetensors.torch import load_file, save_model
from source_text import Windows, load_source_text

import fullspeed
from fullspeed import zero
from fullspeed.checkpointing import checkpoint_modules

SEQUENCE_BYTES = 64
EDITED_BYTE = 0  # occurs in no source text, so training never needs its embedding
CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_clipping": 1.0,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-4}},
    "zero_optimization": {
        "stage": 3,
        "stage3_param_persistence_threshold": 0,  # shard small parameters too, so that the formula is exact
        "stage3_max_reuse_distance": 0,  # a model this small would otherwise stay whole from forward to backward
        "stage3_prefetch_bucket_size": 2_000_000,  # less than a block: gather one ahead
        "stage3_gather_16bit_weights_on_model_save": True,
    },
}


def say(text: str) -> None:
    """Print on rank 0."""
    if dist.get_rank() == 0:
        print(text, flush=True)


def write_pretrained(path: Path) -> None:
    """Plain weights in a file, as somebody else's training would have left them."""
    torch.manual_seed(1)
    path.parent.mkdir(parents=True, exist_ok=True)
    save_model(GPT(GPTConfig()), str(path))


def build_and_load(weights: Path) -> GPT:
    """A model of which this rank holds its shards only, with the values of a file."""
    with zero.Init():
        model = GPT(GPTConfig())
    loaded = zero.load_weights(model, weights)  # each rank reads its own part of the file
    assert loaded.missing == loaded.unexpected == []
    held, total = sum(param.partition_numel() for param in model.parameters()), num_params(model)
    say(f"built: {total:,} parameters, this rank holds {held:,} = {held / total:.3f} of them")
    return model


def num_params(model: torch.nn.Module) -> int:
    """Elements of all parameters; sharded ones know their shape."""
    return sum(param.numel() for param in model.parameters())


def train(engine: Any, loader: Iterable[Any], steps: int) -> dict[str, int]:
    """Train, and return what this rank held between the last backward and its step."""
    held: dict[str, int] = {}
    for step, (tokens, targets) in enumerate(islice(loader, steps), 1):
        loss = engine(tokens.to(engine.device), targets.to(engine.device))
        engine.backward(loss)
        held = engine.memory_bytes()
        engine.step()
        say(f"step {step}: loss {loss.item():.3f}")
    return held


def show_memory(held: dict[str, int], total: int) -> None:
    """What rank 0 held, beside the formula."""
    formula = zero.model_state_bytes(total, dist.get_world_size(), stage=3)._asdict()
    say("held between backward and step, MB a rank:")
    for kind, expected in formula.items():
        say(f"  {kind:9} {held[kind] / 1e6:6.2f}   formula {expected / 1e6:6.2f}")
    say(f"and whole values of the groups in use, at their peak {held['peak_live'] / 1e6:.2f}")


def edit(engine: Any) -> None:
    """Silence one byte's embedding: rank 0's edit reaches the shards and the fp32 masters of every rank."""
    weight = engine.module.embedding.weight
    with zero.GatheredParameters(weight, modifier_rank=0):
        if dist.get_rank() == 0:
            weight.data[EDITED_BYTE].zero_()
    master = zero.safe_get_full_fp32_param(weight)
    assert master is not None
    say(f"edited: the largest element of the row is {master[EDITED_BYTE].abs().max():.1f} in the master")


def save_and_read(engine: Any, folder: Path) -> None:
    """Write plain weights; anything that reads safetensors can have them. No shards, no FullSpeed needed."""
    engine.save_16bit_model(str(folder), "model.safetensors")
    if dist.get_rank() == 0:
        plain = GPT(GPTConfig())
        plain.load_state_dict(load_file(folder / "model.safetensors"))
        assert not plain.embedding.weight[EDITED_BYTE].any()
        say(f"saved: {folder / 'model.safetensors'} loads into an ordinary model")


def main() -> None:
    """The whole run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=4, help="optimizer steps")
    parser.add_argument("--output-dir", type=Path, default=Path("build/zero_init"), help="where weights go")
    parser.add_argument("--local_rank", type=int, default=-1, help="set by launchers; the environment says the same")
    options = parser.parse_args()
    fullspeed.init_distributed()

    pretrained = options.output_dir / "pretrained" / "model.safetensors"
    if dist.get_rank() == 0:
        write_pretrained(pretrained)
    dist.barrier()
    model = build_and_load(pretrained)
    checkpoint_modules(model, Block)
    data = Windows(load_source_text().train, SEQUENCE_BYTES)
    engine, _, loader, _ = fullspeed.initialize(model=model, config=CONFIG, training_data=data)
    held = train(engine, loader, options.steps)
    show_memory(held, num_params(engine.module))
    edit(engine)
    save_and_read(engine, options.output_dir / "trained")
    engine.destroy()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
