"""Checkpoints that DeepSpeed 0.19.8 wrote go on here with the losses it went on with, at any stage and world size."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest
import torch

from fullspeed.checkpoint.deepspeed import unpickle
from fullspeed.comm import all_reduce
from fullspeed.engine.initialize import initialize
from tests.data.deepspeed_checkpoints import recipe
from tests.ranks import run_ranks

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


# -------------------------------------------------------------------------- writing


def same(ours: Any, theirs: Any, where: str = "") -> None:
    """Compare two files entry by entry, tensors bit by bit; what the user's configuration was is left out."""
    if isinstance(theirs, dict):
        assert set(ours) == set(theirs), where
        for key in set(theirs) - {"ds_config"}:
            same(ours[key], theirs[key], f"{where}.{key}")
    elif isinstance(theirs, (list, tuple)):
        assert len(ours) == len(theirs), where
        for index, pair in enumerate(zip(ours, theirs, strict=True)):
            same(*pair, f"{where}[{index}]")
    elif isinstance(theirs, torch.Tensor):
        assert ours.dtype == theirs.dtype, where
        assert torch.equal(ours, theirs), where
    elif isinstance(theirs, unpickle.Record):
        assert type(ours) is type(theirs), where
        same(vars(ours), vars(theirs), where)
    else:
        assert ours == theirs, where


def rewrite(rank: int, num_ranks: int, name: str, folder: str) -> None:
    made = recipe.RECIPES[name]
    engine = make(name, made.stage, num_ranks, checkpoint={"layout": "deepspeed"})
    engine.load_checkpoint(str(RECORDED / name))
    assert engine.save_checkpoint(folder, client_state={"epoch": 3})
    assert engine.load_checkpoint(folder)[1] == {"epoch": 3}
    assert go_on(engine, name, rank, num_ranks) == pytest.approx(LOSSES[name], abs=TOLERANCE[made.dtype])


@pytest.mark.parametrize("name", ["z0_fp32_w1", "z0_fp16_w1", "z1_fp32_w2", "z2_fp16_w2", "z3_fp32_w2", "z3_fp16_w1"])
def test_what_is_loaded_is_written_again_as_deepspeed_wrote_it(name, tmp_path):
    run_ranks(rewrite, recipe.RECIPES[name].world_size, name, str(tmp_path))
    recorded = RECORDED / name / "global_step2"
    written = tmp_path / "global_step2"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["global_step2", "latest"]
    assert sorted(path.name for path in written.iterdir()) == sorted(path.name for path in recorded.iterdir())
    for path in recorded.iterdir():
        ours, theirs = unpickle.load(written / path.name), unpickle.load(path)
        if theirs.get("param_shapes") and not theirs["frozen_param_shapes"]:
            del ours["frozen_param_shapes"], theirs["frozen_param_shapes"]  # stage 1: DeepSpeed loses them
            del ours["frozen_param_fragments"], theirs["frozen_param_fragments"]
        if "zero_pp_rank_1" in path.name and "shared_params" in theirs:
            del ours["shared_params"], theirs["shared_params"]  # DeepSpeed finds them on rank 0 only
        same(ours, theirs, path.name)
