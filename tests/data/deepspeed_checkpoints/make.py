"""Writes the checkpoints of this folder with DeepSpeed itself, and the losses of its next updates.

    torchrun --nproc_per_node N make.py RECIPE ...       (in an environment that has DeepSpeed; CPU and gloo do)

    python -m deepspeed.checkpoint.ds_to_universal --inject_missing_state --num_extract_workers 1 \
        --num_merge_workers 1 --input_folder NAME/global_step2 --output_folder universal_NAME/global_step2

Recipes are named `zSTAGE_DTYPE_wRANKS`. `losses.json` holds, for each, the mean loss over ranks of the updates that
follow the save. Tests build the same model and batches from `recipe.py` and have to arrive at the same numbers.
"""

from __future__ import annotations

import json
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent))

import deepspeed
import recipe
import torch
import torch.distributed as dist

HERE = pathlib.Path(__file__).parent


def main(name: str) -> None:
    """Train, save, train on; rank 0 records the losses."""
    made = recipe.RECIPES[name]
    model = recipe.build(made)
    optimizer = torch.optim.AdamW(recipe.param_groups(model), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.9)
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, lr_scheduler=scheduler, config=recipe.config(made)
    )
    for step in range(2):
        recipe.update(engine, recipe.batches(step, dist.get_world_size())[dist.get_rank()])
    engine.save_checkpoint(str(HERE / name), client_state={"epoch": 3})
    losses = []
    for step in range(2, 4):
        loss = recipe.update(engine, recipe.batches(step, dist.get_world_size())[dist.get_rank()]).double()
        dist.all_reduce(loss)
        losses.append(loss.item() / dist.get_world_size())
    if dist.get_rank() == 0:
        file = HERE / "losses.json"
        known = json.loads(file.read_text()) if file.exists() else {}
        file.write_text(json.dumps({**known, name: losses}, indent=1, sort_keys=True) + "\n")
        for script in (HERE / name).glob("*.py"):
            script.unlink()
    engine.destroy()


if __name__ == "__main__":
    # DeepSpeed refuses fp16 on CPUs without fast fp16; slow is fine here.
    deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: True
    deepspeed.init_distributed(dist_backend="gloo")
    for word in sys.argv[1:]:
        main(word)
