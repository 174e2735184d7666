"""Recorded DeepSpeed checkpoints, converted without a process group; DeepSpeed's own converter agrees."""

from __future__ import annotations

import datetime
import logging
import math
import pathlib

import pytest
import torch

from fullspeed.base.errors import CheckpointError
from fullspeed.checkpoint.convert import (
    get_fp32_state_dict_from_zero_checkpoint,
    get_model_state_file,
    get_optim_files,
    load_state_dict_from_zero_checkpoint,
)
from fullspeed.checkpoint.deepspeed import unpickle
from fullspeed.checkpoint.deepspeed.files import optimizer_file
from fullspeed.checkpoint.deepspeed.pickling import save
from fullspeed.checkpoint.deepspeed.read import read_whole
from fullspeed.checkpoint.manifest import BUFFER, MASTER, OPTIMIZER, PARAM
from fullspeed.checkpoint.model_files import ModelFiles
from fullspeed.checkpoint.open import find_checkpoint
from fullspeed.checkpoint.saved import GroupNames
from fullspeed.cli.main import main
from tests.data.deepspeed_checkpoints import recipe
from tests.logs import LogLines

RECORDED = pathlib.Path(recipe.__file__).parent
SHARDED = [name for name, made in recipe.RECIPES.items() if made.stage]
CONVERTED = ("z1_fp32_w2", "z3_bf16_w2")  # those DeepSpeed made universal checkpoints of
TRAINED = ("inner.weight", "inner.bias", "first.weight", "first.bias", "outer.weight", "outer.bias")


def theirs(name: str, fqn: str, entry: str) -> torch.Tensor:
    """What DeepSpeed's converter found."""
    loaded = torch.load(RECORDED / f"universal_{name}" / "global_step2" / "zero" / fqn / f"{entry}.pt")
    tensor = loaded["param"] if isinstance(loaded, dict) else loaded
    return tensor.detach().view(recipe.build(recipe.RECIPES[name]).get_parameter(fqn).shape)  # stage 3: flat


@pytest.mark.parametrize("name", CONVERTED)
def test_weights_and_moments_are_those_deepspeed_finds(name):
    state = find_checkpoint(RECORDED / name)
    for fqn in TRAINED:
        assert torch.equal(state.whole(MASTER, fqn), theirs(name, fqn, "fp32"))
        for entry in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(state.whole(OPTIMIZER + entry, fqn), theirs(name, fqn, entry))
        assert state.whole(f"{OPTIMIZER}step", fqn) == 2
    universal = find_checkpoint(RECORDED / f"universal_{name}")
    assert_same_state(state, universal)


def assert_same_state(one, other) -> None:
    """All tensors, names and counters are the same."""
    assert one.manifest.params == other.manifest.params
    assert one.manifest.aliases == other.manifest.aliases == {"second.weight": "first.weight"}
    assert one.manifest.counters == other.manifest.counters
    for record in one.manifest.params:
        kinds = one.optimizer_kinds(record.fqn)
        assert kinds or not record.is_trainable
        assert sorted(kinds) == sorted(other.optimizer_kinds(record.fqn))
        for kind in (PARAM, *kinds, *([MASTER] if record.is_trainable and record.dtype != "float32" else [])):
            dtype = getattr(torch, record.dtype) if kind == PARAM else torch.float32
            pair = [state.whole(kind, record.fqn).to(dtype) for state in (one, other)]
            assert torch.equal(*pair), (kind, record.fqn)
    assert torch.equal(one.whole(BUFFER, "scale"), other.whole(BUFFER, "scale"))
    common = [state.objects("common.pt") for state in (one, other)]
    assert common[0] == common[1]
    assert one.objects("client_00000.pt") == other.objects("client_00000.pt") == {"client_state": {"epoch": 3}}


@pytest.mark.parametrize("name", SHARDED)
def test_any_elements_are_read(name):
    state = find_checkpoint(RECORDED / name)
    whole = state.whole(MASTER, "first.weight").reshape(-1)
    for start in range(0, 49, 5):
        for stop in range(start, 50, 3):
            assert torch.equal(state.elements(MASTER, "first.weight", start, stop), whole[start:stop])


@pytest.mark.parametrize("name", recipe.RECIPES)
def test_fp32_state_dicts_load_into_the_model(name):
    found = get_fp32_state_dict_from_zero_checkpoint(RECORDED / name)
    model = recipe.build(recipe.RECIPES[name], seed=5)
    frozen = model.frozen.weight.clone()
    assert set(found) == set(model.state_dict())
    assert {tensor.dtype for tensor in found.values()} == {torch.float32}
    load_state_dict_from_zero_checkpoint(model, RECORDED / name)
    assert all(torch.equal(value, found[fqn]) for fqn, value in model.state_dict().items())
    assert not torch.equal(model.frozen.weight, frozen)
    lazy = get_fp32_state_dict_from_zero_checkpoint(RECORDED / name, "global_step2", lazy_mode=True)
    assert torch.equal(lazy["second.weight"].contiguous(), found["first.weight"])
    if name != "z0_bf16_w2":  # its masters have no names; other runs with the same batches come close
        pairs = {"z0_fp16_w1": "z0_fp16_w1"}
        peer = pairs.get(name, "z3_fp16_w1" if recipe.RECIPES[name].world_size == 1 else "z3_fp32_w2")
        other = get_fp32_state_dict_from_zero_checkpoint(RECORDED / peer)
        assert all(torch.allclose(found[fqn], other[fqn], atol=2e-3) for fqn in found)


def test_frozen_parameters_can_be_left_out():
    found = get_fp32_state_dict_from_zero_checkpoint(RECORDED / "z3_bf16_w2", exclude_frozen_parameters=True)
    assert set(found) == {*TRAINED, "second.weight", "scale"}


# ------------------------------------------------------------------------ commands


def run(*words: object) -> None:
    assert main(["convert", *map(str, words)]) == 0


@pytest.mark.parametrize("name", ["z1_fp32_w2", "z3_bf16_w2"])
def test_every_layout_leads_to_every_other(name, tmp_path, capsys):
    state = find_checkpoint(RECORDED / name)
    run("from-deepspeed", RECORDED / name, tmp_path / "own")
    assert (tmp_path / "own" / "global_step2" / "manifest.json").exists()
    assert_same_state(state, find_checkpoint(tmp_path / "own"))
    run("to-universal", tmp_path / "own", tmp_path / "uni" / "global_step2")
    assert (tmp_path / "uni" / "latest_universal").read_text() == "global_step2"
    assert_same_state(state, find_checkpoint(tmp_path / "uni"))
    for fqn in TRAINED:
        written = torch.load(tmp_path / "uni" / "global_step2" / "zero" / fqn / "exp_avg.pt")
        assert torch.equal(written["param"], theirs(name, fqn, "exp_avg"))
    for stage, num_ranks in ((0, 1), (1, 3), (3, 5)):
        folder = tmp_path / f"ds{stage}"
        run("to-deepspeed", tmp_path / "uni", folder, "--stage", stage, "--ranks", num_ranks)
        files = list((folder / "global_step2").glob("*_optim_states.pt"))
        assert len(files) == (num_ranks if stage else 0)
        if stage:
            assert_same_state(state, find_checkpoint(folder))
            assert get_optim_files(folder / "global_step2") == [
                str(folder / "global_step2" / optimizer_file(rank, is_bf16="bf16" in name)) for rank in range(num_ranks)
            ]
        assert pathlib.Path(get_model_state_file(folder / "global_step2", stage)).exists()
    assert "global_step2" in capsys.readouterr().out


def test_weights_are_written_in_files_of_limited_size(tmp_path, capsys):
    expected = get_fp32_state_dict_from_zero_checkpoint(RECORDED / "z3_bf16_w2")
    run("to-fp32", RECORDED / "z3_bf16_w2", tmp_path, "--max_shard_size", 400)
    assert len(list(tmp_path.glob("pytorch_model-*.bin"))) > 2
    read = ModelFiles(tmp_path)
    assert read.shapes == {fqn: tuple(tensor.shape) for fqn, tensor in expected.items()}
    assert all(
        torch.equal(read.elements(fqn, 0, math.prod(shape)), expected[fqn].reshape(-1))
        for fqn, shape in read.shapes.items()
    )
    run("to-safetensors", RECORDED / "z3_bf16_w2", tmp_path / "st")
    stored = ModelFiles(tmp_path / "st")
    assert set(stored.shapes) == set(expected) - {"second.weight"}
    assert stored.elements("first.weight", 0, 49).dtype == torch.bfloat16
    assert torch.equal(stored.elements("first.weight", 0, 49), expected["first.weight"].bfloat16().reshape(-1))
    run("to-torch", RECORDED / "z3_bf16_w2", tmp_path / "pt", "--dtype", "fp16")
    assert torch.load(tmp_path / "pt" / "pytorch_model.bin")["second.weight"].dtype == torch.float16
    capsys.readouterr()


# ---------------------------------------------------------------------------- trust


def test_nothing_but_known_classes_is_unpickled(tmp_path, monkeypatch):
    path = tmp_path / "global_step1" / "mp_rank_00_model_states.pt"
    path.parent.mkdir()
    torch.save({"module": {}, "when": datetime.timedelta(seconds=5)}, path)
    with pytest.raises(
        CheckpointError, match=r"mp_rank_00_model_states\.pt is damaged, or holds objects .*FULLSPEED_TRUST"
    ):
        find_checkpoint(path.parent)
    monkeypatch.setenv(unpickle.TRUST_VARIABLE, "1")
    logged = LogLines()
    logging.getLogger("fullspeed").addHandler(logged)
    try:
        assert unpickle.load(path)["when"] == datetime.timedelta(seconds=5)
    finally:
        logging.getLogger("fullspeed").removeHandler(logged)
    assert any("may run any code" in line for line in logged.lines)


def test_objects_of_their_classes_are_inert_and_written_again(tmp_path):
    made = {
        "scale": unpickle.LossScaler.of(cur_scale=4.0, dynamic=False),
        "stage": unpickle.Number(2),
        "t": torch.ones(3),
    }
    save(tmp_path / "x.pt", made)
    names = torch.serialization.get_unsafe_globals_in_checkpoint(tmp_path / "x.pt")
    assert sorted(names) == [unpickle.NAME_OF[unpickle.LossScaler], unpickle.NAME_OF[unpickle.Number]]
    read = unpickle.load(tmp_path / "x.pt")
    assert vars(read["scale"]) == {"cur_scale": 4.0, "dynamic": False}
    assert (read["stage"], type(read["stage"])) == (2, unpickle.Number)
    assert torch.equal(read["t"], made["t"])


@pytest.mark.parametrize("name", ["zero_pp_rank_0_mp_rank_01_optim_states.pt", "layer_00-model_states.pt"])
def test_other_ranks_than_data_parallel_ones_are_refused(tmp_path, name):
    torch.save({"module": {}}, tmp_path / "mp_rank_00_model_states.pt")
    (tmp_path / name).touch()
    with pytest.raises(CheckpointError, match="only data-parallel ones can be read"):
        find_checkpoint(tmp_path)


def test_a_torn_file_is_named(tmp_path):
    path = tmp_path / "mp_rank_00_model_states.pt"
    whole = (RECORDED / "z1_fp32_w2" / "global_step2" / path.name).read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match=r"mp_rank_00_model_states\.pt"):
        find_checkpoint(tmp_path)


def test_fused_optimizers_flat_groups_are_read():
    """DeepSpeed's fused optimizers keep fp16 groups flat, and count steps with the hyper-parameters."""
    recorded = torch.load(RECORDED / "z0_fp16_w1" / "global_step2" / "mp_rank_00_model_states.pt")
    optimizer = recorded["optimizer"]
    base = optimizer["optimizer_state_dict"]
    masters = optimizer.pop("fp32_groups")
    optimizer["fp32_groups_flat"] = [torch.cat([part.reshape(-1) for part in group]) for group in masters]
    moments = [base["state"][number]["exp_avg"] for number in base["param_groups"][1]["params"]]
    base["state"] = {1: {"exp_avg": torch.cat([moment.reshape(-1) for moment in moments])}}
    base["param_groups"] = [{"lr": 0.5, "step": 7, "params": [number]} for number in range(2)]
    names = [fqn for fqn in TRAINED if "weight" in fqn], [fqn for fqn in TRAINED if "bias" in fqn]
    found = read_whole(recorded, [GroupNames(group, group) for group in names])
    for fqns, values in zip(names, masters, strict=True):
        assert all(torch.equal(elements(found, MASTER, fqn), value) for fqn, value in zip(fqns, values, strict=True))
    for fqn, moment in zip(names[1], moments, strict=True):
        assert torch.equal(elements(found, f"{OPTIMIZER}exp_avg", fqn), moment)
    assert elements(found, f"{OPTIMIZER}step", "inner.weight") == 7
    assert found.rows == [{"lr": 0.5, "fqns": list(group)} for group in names]


def elements(found, kind: str, fqn: str) -> torch.Tensor:
    stored = found.tensors[kind, fqn]
    flat = stored.fetch(0).reshape(-1)
    parts = [flat[span.offset : span.offset + span.numel] for span in stored.spans]
    return torch.cat(parts).view(stored.shape)
