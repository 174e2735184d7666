"""Checkpoints that DeepSpeed 0.19.8 wrote go on here with the losses it went on with, at any stage and world size."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest
import torch

from fullspeed import zero
from fullspeed.base.errors import CheckpointError
from fullspeed.comm import all_reduce
from fullspeed.engine.initialize import initialize
from tests.data.deepspeed_checkpoints import recipe
from tests.ranks import ranks, run_ranks

RECORDED = pathlib.Path(recipe.__file__).parent
LOSSES = json.loads((RECORDED / "losses.json").read_text())
TOLERANCE = {"fp32": 1e-6, "bf16": 4e-3, "fp16": 1e-3}  # 16-bit: DeepSpeed computes in it, we compute in fp32 on CPUs


def make(name: str, stage: int, num_ranks: int, *, seed: int = 9, **sections: Any) -> Any:
    """An engine with other weights than the recorded ones."""
    made = recipe.RECIPES[name]
    model = recipe.build(made, seed)
    optimizer = torch.optim.AdamW(recipe.param_groups(model), lr=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.9)
    config = recipe.config(made._replace(stage=stage, zero={}, world_size=num_ranks)) | sections
    config["train_micro_batch_size_per_gpu"] = 4 * made.world_size // num_ranks
    return initialize(model=model, optimizer=optimizer, lr_scheduler=scheduler, config=config)[0]


def go_on(engine: Any, name: str, rank: int, num_ranks: int) -> list[float]:
    """The two updates after the save, of the same global batches."""
    recorded_ranks = recipe.RECIPES[name].world_size
    losses = []
    for step in range(2, 4):
        x = recipe.batches(step, recorded_ranks).reshape(num_ranks, -1, 5)[rank]
        loss = recipe.update(engine, x).double()
        losses.append(all_reduce(loss).item() / num_ranks)
    return losses


def resume(rank: int, num_ranks: int, name: str, stage: int, folder: str) -> None:
    engine = make(name, stage, num_ranks, checkpoint={"load_universal": "universal" in folder})
    path, client_state = engine.load_checkpoint(str(RECORDED / folder))
    assert path == str(RECORDED / folder / "global_step2")
    assert client_state == {"epoch": 3}
    assert (engine.global_steps, engine.micro_steps, engine.skipped_steps) == (2, 2, 0)
    assert engine.global_samples == 8 * recipe.RECIPES[name].world_size
    assert engine.get_lr() == [pytest.approx(0.0081)] * 2
    losses = go_on(engine, name, rank, num_ranks)
    assert losses == pytest.approx(LOSSES[name], abs=TOLERANCE[recipe.RECIPES[name].dtype])


@pytest.mark.parametrize("name", recipe.RECIPES)
def test_a_run_goes_on_where_it_was(name):
    made = recipe.RECIPES[name]
    run_ranks(resume, made.world_size, name, made.stage, name)


@pytest.mark.parametrize(
    ("name", "stage", "num_ranks"),
    [
        ("z1_fp32_w2", 3, 4), ("z3_fp32_w2", 0, 1), ("z3_fp32_w2", 2, 4), ("z2_bf16_w2", 3, 1),
        ("z3_bf16_w2", 1, 4), ("z0_fp32_w1", 3, 2), ("z0_bf16_w2", 2, 4), ("z2_fp16_w2", 0, 1),
    ],
)  # fmt: skip
def test_it_goes_on_at_another_stage_with_other_ranks(name, stage, num_ranks):
    run_ranks(resume, num_ranks, name, stage, name)


@pytest.mark.parametrize("name", ["z1_fp32_w2", "z3_bf16_w2"])
def test_universal_checkpoints_are_loaded(name):
    for stage, num_ranks in ((0, 1), (3, 2)):
        run_ranks(resume, num_ranks, name, stage, f"universal_{name}")
