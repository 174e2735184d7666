"""Checkpoints that DeepSpeed 0.19.8 wrote go on here with the losses it went on with, at any stage and world size."""

from __future__ import annotations

import json
import pathlib
import shutil
from typing import Any, NamedTuple

import pytest
import torch

from fullspeed.base.errors import CheckpointError
from fullspeed.checkpoint.deepspeed import files, unpickle
from fullspeed.checkpoint.deepspeed.layout import part_spans
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


class Case(NamedTuple):
    """A recorded checkpoint, and the stage of ours that goes on from it."""

    name: str
    stage: int
    folder: str


def resume(rank: int, num_ranks: int, cases: list[Case]) -> None:
    for name, stage, folder in cases:
        engine = make(name, stage, num_ranks, checkpoint={"load_universal": "universal" in folder})
        path, client_state = engine.load_checkpoint(str(RECORDED / folder))
        assert path == str(RECORDED / folder / "global_step2")
        assert client_state == {"epoch": 3}
        assert (engine.global_steps, engine.micro_steps, engine.skipped_steps) == (2, 2, 0)
        assert engine.global_samples == 8 * recipe.RECIPES[name].world_size
        assert engine.get_lr() == [pytest.approx(0.0081)] * 2
        losses = go_on(engine, name, rank, num_ranks)
        assert losses == pytest.approx(LOSSES[name], abs=TOLERANCE[recipe.RECIPES[name].dtype]), (name, stage)
        engine.destroy()


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_run_goes_on_where_it_was(num_ranks):
    recorded = [Case(name, made.stage, name) for name, made in recipe.RECIPES.items() if made.world_size == num_ranks]
    assert {case.stage for case in recorded} == ({0, 1, 3} if num_ranks == 1 else {0, 1, 2, 3})
    run_ranks(resume, num_ranks, recorded)


ELSEWHERE = {
    1: [("z3_fp32_w2", 0), ("z2_bf16_w2", 3), ("z2_fp16_w2", 0)],
    2: [("z0_fp32_w1", 3)],
    4: [("z1_fp32_w2", 3), ("z3_fp32_w2", 2), ("z3_bf16_w2", 1), ("z0_bf16_w2", 2)],
}


@pytest.mark.parametrize("num_ranks", ELSEWHERE)
def test_it_goes_on_at_another_stage_with_other_ranks(num_ranks):
    run_ranks(resume, num_ranks, [Case(name, stage, name) for name, stage in ELSEWHERE[num_ranks]])


@pytest.mark.parametrize(("num_ranks", "stage"), [(1, 0), (2, 3)])
def test_universal_checkpoints_are_loaded(num_ranks, stage):
    names = ("z1_fp32_w2", "z3_bf16_w2")
    run_ranks(resume, num_ranks, [Case(name, stage, f"universal_{name}") for name in names])


def refuse(rank: int, num_ranks: int, folder: str) -> None:
    engine = make("z1_fp32_w2", 1, num_ranks)
    before = engine.module_state_dict()
    with pytest.raises(CheckpointError, match="lacks the optimizer states of rank 1 of 2"):
        engine.load_checkpoint(folder)
    other = recipe.build(recipe.RECIPES["z1_fp32_w2"])
    groups = [{"params": [param]} for param in other.parameters() if param.requires_grad]
    grouped = initialize(model=other, optimizer=torch.optim.AdamW(groups), config={"train_batch_size": 2})[0]
    for name in ("z1_fp32_w2", "z0_fp32_w1"):
        with pytest.raises(CheckpointError, match="has 2 param groups, this engine's optimizer 6"):
            grouped.load_checkpoint(str(RECORDED / name))
    after = engine.module_state_dict()
    assert all(torch.equal(before[fqn], after[fqn]) for fqn in before)


def test_what_does_not_fit_is_refused_on_every_rank(tmp_path):
    shutil.copytree(RECORDED / "z1_fp32_w2", tmp_path, dirs_exist_ok=True)
    (tmp_path / "global_step2" / "zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    run_ranks(refuse, 2, str(tmp_path))


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


def rewrite(rank: int, num_ranks: int, names: list[str], folder: str) -> None:
    for name in names:
        made = recipe.RECIPES[name]
        engine = make(name, made.stage, num_ranks, checkpoint={"layout": "deepspeed"})
        engine.load_checkpoint(str(RECORDED / name))
        killed = pathlib.Path(folder, name, ".global_step2.partial")  # of a job with more ranks
        if rank == 0:
            killed.mkdir(parents=True)
            (killed / files.optimizer_file(7, is_bf16=False)).write_text("")
        for _ in range(2):  # the second one takes the place of the first
            assert engine.save_checkpoint(f"{folder}/{name}", client_state={"epoch": 3})
        assert engine.load_checkpoint(f"{folder}/{name}")[1] == {"epoch": 3}
        assert go_on(engine, name, rank, num_ranks) == pytest.approx(LOSSES[name], abs=TOLERANCE[made.dtype])
        engine.destroy()


def without_padding(state: dict[str, Any], shapes: list[dict[str, Any]], rank: int, num_ranks: int) -> None:
    """Zeros in the padding of sharded parameters, where DeepSpeed leaves what memory held."""
    for flat, group in zip(state["fp32_flat_groups"], shapes, strict=True):
        kept = torch.zeros(flat.numel(), dtype=torch.bool)
        for spans in part_spans([shape.numel() for shape in group.values()], num_ranks):
            for span in spans:
                kept[span.offset : span.offset + span.numel] |= span.rank == rank
        assert flat.detach()[kept].numel() < flat.numel() or rank == 0
        flat.detach()[~kept] = 0.0


WRITTEN = {1: ["z0_fp32_w1", "z0_fp16_w1", "z3_fp16_w1"], 2: ["z0_bf16_w2", "z1_fp32_w2", "z3_fp32_w2"]}


@pytest.mark.parametrize("num_ranks", WRITTEN)
def test_what_is_loaded_is_written_again_as_deepspeed_wrote_it(num_ranks, tmp_path):
    run_ranks(rewrite, num_ranks, WRITTEN[num_ranks], str(tmp_path))
    for name in WRITTEN[num_ranks]:
        compare_files(RECORDED / name, tmp_path / name)


def compare_files(recorded: pathlib.Path, written: pathlib.Path) -> None:
    assert sorted(path.name for path in written.iterdir()) == ["global_step2", "latest"]
    recorded, written = recorded / "global_step2", written / "global_step2"
    assert sorted(path.name for path in written.iterdir()) == sorted(path.name for path in recorded.iterdir())
    for path in recorded.iterdir():
        ours, theirs = unpickle.load(written / path.name), unpickle.load(path)
        if theirs.get("param_shapes") and not theirs["frozen_param_shapes"]:
            del ours["frozen_param_shapes"], theirs["frozen_param_shapes"]  # stage 1: DeepSpeed loses them
            del ours["frozen_param_fragments"], theirs["frozen_param_fragments"]
        if "zero_pp_rank_1" in path.name and "shared_params" in theirs:
            del ours["shared_params"], theirs["shared_params"]  # DeepSpeed finds them on rank 0 only
        if "fp32_flat_groups" in theirs.get("optimizer_state_dict", {}):
            rank, num_ranks = int("rank_1_" in path.name), theirs["optimizer_state_dict"]["partition_count"]
            shapes = unpickle.load(recorded / files.sharded_model(rank))["param_shapes"]
            without_padding(theirs["optimizer_state_dict"], shapes, rank, num_ranks)
        same(ours, theirs, path.name)
