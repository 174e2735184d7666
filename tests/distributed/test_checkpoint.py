"""Checkpoints: a resumed run is the run that never stopped; faults are named on every rank and leave nothing behind."""

from __future__ import annotations

import errno
import itertools
import json
import os
import pathlib
import random
import signal
import time
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from fullspeed import zero
from fullspeed.accelerator import get_accelerator
from fullspeed.base.errors import CheckpointError, CommError
from fullspeed.checkpoint import durable, writing
from fullspeed.comm.rendezvous import together
from fullspeed.engine.engine import Engine
from fullspeed.engine.initialize import initialize
from tests.models import mlp
from tests.parity.beside import adamw, sgd, zero_config
from tests.ranks import RankError, ranks, run_ranks

STAGES = (0, 1, 2, 3)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def with_buffers(seed: int = 0) -> nn.Module:
    """BatchNorm's running values differ between ranks; sizes divide by nothing."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Tanh(), nn.Linear(7, 3))


def make(
    stage: int, precision: str = "fp32", seed: int = 0, *, accum: int = 1, optimizer: Any = adamw, model: Any = mlp,
    zero: dict[str, Any] | None = None, **sections: Any,
) -> Engine:  # fmt: skip
    zero = {"stage3_gather_16bit_weights_on_model_save": True, **(zero or {})}
    config = zero_config(stage, accum=accum, clip=0.1, **zero) | sections
    if precision != "fp32":
        config[precision] = {"enabled": True, **({"initial_scale_power": 8} if precision == "fp16" else {})}
    return initialize(model=model(seed), config=config, optimizer=optimizer)[0]


def train(engine: Engine, first: int, last: int, micro_steps: int | None = None) -> list[float]:
    """Losses of the micro-batches of steps [first, last)."""
    losses = []
    rank, world_size = engine.global_rank, engine.world_size
    for step in range(first, last):
        for micro in range(micro_steps or engine.gradient_accumulation_steps()):
            generator = torch.Generator().manual_seed(1000 * step + micro)
            x = torch.randn(world_size, 4, 5, generator=generator)[rank].to(engine.get_data_types()[0])
            loss = (engine(x).float() - 0.5).square().mean()
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    return losses


def weights(engine: Engine) -> dict[str, torch.Tensor]:
    return engine.module_state_dict()


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return list(one) == list(other) and all(torch.equal(one[name], other[name]) for name in one)


def masters(engine: Engine) -> list[torch.Tensor]:
    return [group.master.clone() for group in engine.runtime.trainable]


def files(folder: str | pathlib.Path) -> list[str]:
    return sorted(path.name for path in pathlib.Path(folder).iterdir())


# ------------------------------------------------------------------------- resume


def check_resume(folder: str, stage: int, precision: str, optimizer: Any, accum: int) -> None:
    """Cases H3 and H4: 2 steps, save, load into an engine with other weights, 2 steps = 4 steps, to the last bit."""
    schedule = {"type": "WarmupLR", "params": {"warmup_num_steps": 6, "warmup_max_lr": 0.02}}
    build = {"accum": accum, "optimizer": optimizer, "model": with_buffers, "scheduler": schedule}
    whole = make(stage, precision, seed=0, **build)
    train(whole, 0, 2)
    whole.save_checkpoint(folder, client_state={"epoch": 1})
    expected = train(whole, 2, 4)
    resumed = make(stage, precision, seed=7, **build)
    train(resumed, 0, 1)
    assert resumed.load_checkpoint(folder) == (str(pathlib.Path(folder) / "global_step2"), {"epoch": 1})
    assert (resumed.global_steps, resumed.micro_steps) == (2, 2 * accum)
    assert train(resumed, 2, 4) == expected
    assert same(weights(whole), weights(resumed))
    assert all(map(torch.equal, masters(whole), masters(resumed)))
    assert whole.get_lr() == resumed.get_lr()
    assert whole.global_samples == resumed.global_samples
    assert whole.optimizer.loss_scaler.state_dict() == resumed.optimizer.loss_scaler.state_dict()
    steps = [[float(state["step"]) for state in each.optimizer.state.values() if "step" in state]
             for each in (whole, resumed)]  # fmt: skip
    assert steps[0] == steps[1]
    if optimizer is adamw:
        assert set(steps[1]) <= {4.0}
    if stage in (0, 1, 2) and precision == "fp32":
        assert all(group.full.data_ptr() == group.store.data_ptr() for group in resumed.runtime.groups)


@pytest.mark.parametrize("stage", STAGES)
@ranks(1, 2)
def test_resumed_equals_uninterrupted(rank, world_size, stage, tmp_path):
    for precision in DTYPES:
        check_resume(str(tmp_path / precision), stage, precision, adamw, accum=2)
    check_resume(str(tmp_path / "sgd"), stage, "fp32", sgd, accum=1)


@pytest.mark.parametrize("stage", [1, 3])
@ranks(4)
def test_resumed_equals_uninterrupted_on_four_ranks(rank, world_size, stage, tmp_path):
    check_resume(str(tmp_path), stage, "bf16", sgd, accum=2)


@ranks(2)
def test_a_skipped_step_is_remembered(rank, world_size, tmp_path):
    """The loss scale and its counters go on after fp16 overflows."""
    first = make(2, "fp16")
    train(first, 0, 1)
    first.optimizer.loss_scaler.update(True)
    first.optimizer.loss_scaler.update(True)
    first.skipped_steps = 2
    first.save_checkpoint(tmp_path)
    second = make(2, "fp16", seed=3)
    second.load_checkpoint(tmp_path)
    assert second.optimizer.loss_scale == first.optimizer.loss_scale < 2.0**8
    assert second.skipped_steps == 2


@ranks(2)
def test_loading_forgets_an_unfinished_accumulation(rank, world_size, tmp_path):
    for stage in STAGES:
        folder = str(tmp_path / str(stage))
        engine = make(stage, accum=3)
        train(engine, 0, 1)
        train(engine, 1, 2, micro_steps=1)
        engine.save_checkpoint(folder)
        assert engine.micro_steps == 4
        other = make(stage, seed=5, accum=3)
        train(other, 0, 1, micro_steps=2)
        other.load_checkpoint(folder)
        assert other.micro_steps == 3
        again = make(stage, seed=6, accum=3)
        again.load_checkpoint(folder)
        assert train(other, 1, 3) == train(again, 1, 3)
        assert other.global_steps == 3


@ranks(2)
def test_saving_does_not_disturb_an_accumulation(rank, world_size, tmp_path):
    """Case H8, for save_checkpoint as well."""
    for stage in STAGES:
        plain, saving = make(stage, accum=2), make(stage, accum=2)
        train(plain, 0, 1, micro_steps=1)
        train(saving, 0, 1, micro_steps=1)
        saving.save_checkpoint(tmp_path / str(stage))
        assert saving.save_16bit_model(tmp_path / str(stage))
        saving.module_state_dict()
        assert train(plain, 0, 2, micro_steps=1) == train(saving, 0, 2, micro_steps=1)
        assert same(weights(plain), weights(saving))


@ranks(2)
def test_generators_go_on_where_they_were(rank, world_size, tmp_path):
    def draw() -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    engine = make(1)
    random.seed(rank)
    np.random.seed(rank)
    torch.manual_seed(rank)
    engine.save_checkpoint(tmp_path)
    drawn = draw()
    other = make(1)
    other.load_checkpoint(tmp_path)
    assert draw() == drawn
    engine.load_checkpoint(tmp_path, load_module_only=True)
    assert draw() != drawn


# ------------------------------------------------------------------------ weights


def frozen_first(seed: int) -> nn.Module:
    model = mlp(seed)
    next(model.parameters()).requires_grad_(False)
    return model


@ranks(2)
def test_frozen_weights_are_loaded_too(rank, world_size, tmp_path):
    """Case D1."""
    for stage in STAGES:
        folder = tmp_path / str(stage)
        engine = make(stage, model=frozen_first)
        train(engine, 0, 2)
        engine.save_checkpoint(folder)
        other = make(stage, seed=9, model=frozen_first)
        assert not same(weights(engine), weights(other))
        other.load_checkpoint(folder)
        assert same(weights(engine), weights(other))
        assert train(engine, 2, 3) == train(other, 2, 3)
        engine.save_checkpoint(folder, tag="slim", exclude_frozen_parameters=True)
        with pytest.raises(CheckpointError, match=r"missing there: 0\.weight"):
            other.load_checkpoint(folder, tag="slim")
        kept = make(stage, seed=9, model=frozen_first)
        before = weights(kept)["0.weight"]
        kept.load_checkpoint(folder, tag="slim", load_module_strict=False)
        assert torch.equal(weights(kept)["0.weight"], before)
        assert torch.equal(weights(kept)["2.weight"], weights(engine)["2.weight"])


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 5)
        self.free = nn.Linear(5, 5)
        self.last = nn.Linear(5, 5)
        self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.free(self.first(x)).tanh())


def tied(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return Tied()


@ranks(2)
def test_tied_weights_are_saved_once_and_found_by_both_names(rank, world_size, tmp_path):
    for stage in STAGES:
        folder = tmp_path / str(stage)
        engine, other = make(stage, model=tied), make(stage, seed=4, model=tied)
        train(engine, 0, 1)
        engine.save_checkpoint(folder)
        manifest = json.loads((folder / "global_step1" / "manifest.json").read_text())
        assert manifest["aliases"] == {"last.weight": "first.weight"}
        other.load_checkpoint(folder)
        found = weights(other)
        assert same(weights(engine), found)
        assert found["last.weight"] is found["first.weight"]
        assert other.module.last.weight is other.module.first.weight
        assert train(engine, 1, 2) == train(other, 1, 2)


@ranks(2)
def test_the_manifest_describes_every_element(rank, world_size, tmp_path):
    """Chunks of a parameter cover it once, whatever the stage: the next release cuts them anew."""
    for stage in STAGES:
        engine = make(stage, "bf16")
        train(engine, 0, 1)
        engine.save_checkpoint(tmp_path, tag=stage)
        manifest = json.loads((tmp_path / str(stage) / "manifest.json").read_text())
        covered: dict[tuple[str, str], list[tuple[int, int]]] = {}
        for chunk in manifest["chunks"]:
            if chunk["per_element"]:
                covered.setdefault((chunk["kind"], chunk["fqn"]), []).append((chunk["start"], chunk["stop"]))
        for record in manifest["params"]:
            numel = int(np.prod(record["shape"]))
            for kind in ("param", "master", "optimizer/exp_avg", "optimizer/exp_avg_sq"):
                spans = sorted(covered.pop((kind, record["fqn"])))
                assert spans[0][0] == 0
                assert spans[-1][1] == numel
                assert all(left[1] == right[0] for left, right in itertools.pairwise(spans))
        assert not covered


@ranks(2)
def test_weights_alone(rank, world_size, tmp_path):
    """load_module_only and load_optimizer_states=False; masters from saved masters, or from the stored values."""
    for stage in STAGES:
        folder = tmp_path / str(stage)
        engine = make(stage, "bf16")
        train(engine, 0, 3)
        engine.save_checkpoint(folder, client_state={"a": 1})
        only = make(stage, "bf16", seed=2)
        assert only.load_checkpoint(folder, load_module_only=True)[1] == {"a": 1}
        assert same(weights(engine), weights(only))
        assert all(map(torch.equal, masters(engine), masters(only)))
        assert (only.global_steps, len(only.optimizer.state)) == (0, 0)
        without = make(stage, "bf16", seed=2)
        without.load_checkpoint(folder, load_optimizer_states=False)
        assert (without.global_steps, len(without.optimizer.state)) == (3, 0)
        assert all(map(torch.equal, masters(engine), masters(without)))
        rounded = make(stage, "bf16", seed=2, zero={"load_from_fp32_weights": False})
        rounded.load_checkpoint(folder, load_module_only=True)
        assert same(weights(engine), weights(rounded))
        assert all(torch.equal(master, master.bfloat16().float()) for master in masters(rounded))
        assert not all(map(torch.equal, masters(engine), masters(rounded)))


@ranks(2)
def test_an_engine_without_an_optimizer_loads_a_training_checkpoint(rank, world_size, tmp_path):
    """Case H16."""
    for stage in (0, 3):
        engine = make(stage, "bf16")
        train(engine, 0, 1)
        engine.save_checkpoint(tmp_path / str(stage))
        judge = make(stage, "bf16", seed=8, optimizer=None)
        assert judge.optimizer is None
        judge.load_checkpoint(tmp_path / str(stage))
        assert same(weights(engine), weights(judge))
        x = torch.ones(2, 5)
        assert torch.equal(engine.eval()(x.bfloat16()), judge.eval()(x.bfloat16()))


@ranks(2)
def test_a_model_that_does_not_fit_is_described(rank, world_size, tmp_path):
    engine = make(3)
    engine.save_checkpoint(tmp_path, tag="t")
    other = make(3, model=lambda seed: nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Tanh(), nn.Linear(7, 3)))
    before = weights(other)
    with pytest.raises(
        CheckpointError, match=r"missing there: 3\.weight, 3\.bias; unexpected there: 2\.weight, 2\.bias"
    ):
        other.load_checkpoint(tmp_path)
    assert same(before, weights(other))
    other.load_checkpoint(tmp_path, load_module_strict=False, load_optimizer_states=False)
    assert torch.equal(weights(other)["0.weight"], weights(engine)["0.weight"])
    assert torch.equal(weights(other)["3.weight"], before["3.weight"])
    wide = make(3, model=lambda seed: nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)))
    with pytest.raises(CheckpointError, match=r"0\.weight has shape \(7, 5\) there and \(8, 5\) in the model"):
        wide.load_checkpoint(tmp_path, load_module_strict=False)
    with pytest.raises(CheckpointError, match="holds the state of AdamW, this engine has SGD"):
        make(3, optimizer=sgd).load_checkpoint(tmp_path)


# ------------------------------------------------------------ state dicts and export


@ranks(2)
def test_state_dicts_are_whole_and_load_back(rank, world_size, tmp_path):
    for stage in STAGES:
        for precision in ("fp32", "bf16"):
            engine = make(stage, precision, model=with_buffers)
            expected = {name: tensor.to(DTYPES[precision]) if "weight" in name or "bias" in name else tensor
                        for name, tensor in with_buffers(0).state_dict().items()}  # fmt: skip
            assert same(weights(engine), expected)
            other = make(stage, precision, seed=3, model=with_buffers)
            train(other, 0, 1)
            other.load_module_state_dict({"module": expected})
            assert same(weights(other), expected)
            fresh = make(stage, precision, seed=3, model=with_buffers)
            fresh.load_module_state_dict(expected)
            assert all(map(torch.equal, masters(other), masters(fresh)))
            with pytest.raises(CheckpointError, match=r"missing there: 0\.weight"):
                fresh.load_module_state_dict({name: expected[name] for name in list(expected)[1:]})
            prefixed = engine.module_state_dict(destination={"x": 1}, prefix="m.")
            assert list(prefixed) == ["x", *(f"m.{name}" for name in expected)]


@ranks(2)
def test_the_callers_own_function_may_load(rank, world_size, tmp_path):
    def load(src: dict[str, torch.Tensor], dst: nn.Module) -> None:
        dst.load_state_dict({name: tensor.float() * 2 for name, tensor in src.items()})

    for stage in STAGES:
        for precision in ("fp32", "bf16"):
            engine = make(stage, precision)
            engine.save_checkpoint(tmp_path, tag=f"{stage}{precision}")
            other = make(stage, precision, seed=5)
            other.load_checkpoint(tmp_path, f"{stage}{precision}", load_module_only=True, custom_load_fn=load)
            doubled = {name: tensor * 2 for name, tensor in weights(engine).items()}
            assert same(weights(other), doubled)
            other = make(stage, precision, seed=5)
            other.load_module_state_dict(weights(engine), custom_load_fn=load)
            assert same(weights(other), doubled)
            train(other, 0, 1)


@ranks(2)
def test_the_model_file(rank, world_size, tmp_path):
    for stage in STAGES:
        engine = make(stage, "fp16", model=tied)
        train(engine, 0, 1)
        expected = weights(engine)
        assert engine.save_16bit_model(tmp_path, f"m{stage}.bin") is True
        assert engine.save_fp16_model(tmp_path, f"m{stage}.safetensors") is True
        assert same(torch.load(tmp_path / f"m{stage}.bin", weights_only=True), expected)
        loaded = load_file(tmp_path / f"m{stage}.safetensors")
        assert same({name: loaded[name] for name in expected}, expected)
        assert not [name for name in files(tmp_path) if "partial" in name]
        whole = engine._zero3_consolidated_16bit_state_dict()
        assert (whole is None) == (rank > 0)
    engine = make(3, zero={"stage3_gather_16bit_weights_on_model_save": False})
    assert engine.save_16bit_model(tmp_path, "none.bin") is False
    assert "none.bin" not in files(tmp_path)
    with pytest.raises(ValueError, match="stage3_gather_16bit_weights_on_model_save is false"):
        engine._zero3_consolidated_16bit_state_dict()


# --------------------------------------------------------------------- tags, client


@ranks(2)
def test_client_state_comes_back_to_the_rank_that_gave_it(rank, world_size, tmp_path):
    engine = make(1)
    state = {"epoch": 3, "rank": rank, "t": torch.arange(3), "nested": {"l": [1, (2, None)]}}
    assert engine.save_checkpoint(tmp_path, "own", client_state=state) is True
    _, loaded = engine.load_checkpoint(tmp_path, "own")
    assert torch.equal(loaded.pop("t"), state.pop("t"))
    assert loaded == state
    engine.save_checkpoint(tmp_path, "common", client_state={"epoch": 4})
    assert engine.load_checkpoint(tmp_path, "common")[1] == {"epoch": 4}
    assert "client_00001.pt" in files(tmp_path / "own" / "data-0")
    assert "client_00001.pt" not in files(tmp_path / "common" / "data-0")
    engine.save_checkpoint(tmp_path, "none")
    assert engine.load_checkpoint(tmp_path, "none")[1] == {}


@ranks(2)
def test_client_state_that_could_not_be_loaded_is_refused_when_saving(rank, world_size, tmp_path):
    engine = make(1)
    state = {"fine": 1, "history": [np.zeros(2)] if rank else [0]}
    with pytest.raises(CheckpointError, match=r"rank 1: client_state\['history'\]\[0\] is a numpy.ndarray"):
        engine.save_checkpoint(tmp_path, "t", client_state=state)
    assert files(tmp_path) == []


@ranks(2)
def test_without_latest_nothing_is_loaded(rank, world_size, tmp_path):
    engine = make(2)
    before = weights(engine)
    assert engine.load_checkpoint(tmp_path) == (None, None)
    assert engine.load_checkpoint(tmp_path / "nowhere") == (None, None)
    engine.save_checkpoint(tmp_path, "a", save_latest=False)
    assert files(tmp_path) == ["a"]
    assert engine.load_checkpoint(tmp_path) == (None, None)
    assert same(before, weights(engine))
    with pytest.raises(CheckpointError, match=r"no checkpoint 'b'.*has a"):
        engine.load_checkpoint(tmp_path, "b")


@ranks(2)
def test_tags(rank, world_size, tmp_path):
    engine = make(0)
    engine.save_checkpoint(tmp_path)
    engine.save_checkpoint(tmp_path, 17)
    assert files(tmp_path) == ["17", "global_step0", "latest"]
    assert (tmp_path / "latest").read_text() == "17"
    assert engine.load_checkpoint(tmp_path, 17)[0] == str(tmp_path / "17")
    for bad in ("", "a/b", ".."):
        with pytest.raises(CheckpointError, match="checkpoint tag"):
            engine.save_checkpoint(tmp_path, bad)
        with pytest.raises(CheckpointError, match="checkpoint tag"):
            engine.load_checkpoint(tmp_path, bad)
    with pytest.raises(CheckpointError, match="different checkpoint tags: rank 0: '17', rank 1: 'global_step0'"):
        engine.load_checkpoint(tmp_path, "global_step0" if rank else 17)


@ranks(2)
def test_ranks_that_disagree_about_the_tag(rank, world_size, tmp_path):
    for rule in ("Ignore", "Warn"):
        make(0, checkpoint={"tag_validation": rule}).save_checkpoint(tmp_path / rule, f"tag{rank}")
        assert files(tmp_path / rule) == ["latest", "tag0"]
    with pytest.raises(CheckpointError, match="different checkpoint tags: rank 0: 'tag0', rank 1: 'tag1'"):
        make(0, checkpoint={"tag_validation": "fail"}).save_checkpoint(tmp_path / "Fail", f"tag{rank}")
    assert not (tmp_path / "Fail").exists()
    with pytest.raises(CheckpointError, match="ranks pass different directories"):
        make(0).save_checkpoint(tmp_path / str(rank), "t")


@ranks(2)
def test_optimizers_that_need_whole_parameters_resume_too(rank, world_size, tmp_path):
    for stage in (0, 2, 3):
        for name in ("Lamb", "Muon", "Lion"):
            folder, section = tmp_path / f"{name}{stage}", {"type": name, "params": {"lr": 0.01}}
            engine, other = (make_named(stage, section, seed) for seed in (0, 5))
            train(engine, 0, 2)
            engine.save_checkpoint(folder)
            other.load_checkpoint(folder)
            assert train(engine, 2, 4) == train(other, 2, 4)
            assert same(weights(engine), weights(other))


def make_named(stage: int, section: dict[str, Any], seed: int) -> Engine:
    config = zero_config(stage) | {"optimizer": section}
    return initialize(model=mlp(seed), config=config)[0]


class Counting(nn.Linear):
    """Has state that is neither a parameter nor a buffer."""

    num_calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        return super().forward(x)

    def get_extra_state(self) -> dict[str, int]:
        return {"num_calls": self.num_calls}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.num_calls = state["num_calls"]


@ranks(2)
def test_torch_schedules_and_extra_state_are_saved(rank, world_size, tmp_path):
    def build(seed: int) -> Engine:
        torch.manual_seed(seed)
        model = nn.Sequential(Counting(5, 7), nn.Tanh(), nn.Linear(7, 3))
        schedule = lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (1 + n))  # noqa: E731
        return initialize(model=model, config=zero_config(3), optimizer=adamw, lr_scheduler=schedule)[0]

    engine, other = build(0), build(1)
    train(engine, 0, 3)
    engine.save_checkpoint(tmp_path)
    other.load_checkpoint(tmp_path)
    assert other.module[0].num_calls == 3
    assert other.get_lr() == engine.get_lr() == [1e-2 * (1 / 4)]
    assert train(engine, 3, 5) == train(other, 3, 5)
    assert other.get_lr() == engine.get_lr() == [1e-2 * (1 / 6)]
    other.load_checkpoint(tmp_path, load_lr_scheduler_states=False, load_optimizer_states=False)
    assert other.get_lr() == [1e-2 * (1 / 6)]


@ranks(2)
def test_two_engines_save_their_own_parts_of_one_model(rank, world_size, tmp_path):
    def build(seed: int) -> tuple[Engine, Engine]:
        model = mlp(seed)
        return tuple(
            initialize(model=model, config=zero_config(2), optimizer=adamw(model[index].parameters()))[0]
            for index in (0, 2)
        )

    first, second = build(0), build(6)
    for engine, name in zip(first, ("lower", "upper"), strict=True):
        engine.save_checkpoint(tmp_path, name)
    for engine, name in zip(second, ("lower", "upper"), strict=True):
        engine.load_checkpoint(tmp_path, name)
    for one, other in zip(first, second, strict=True):
        assert same(weights(one), weights(other))


# ------------------------------------------------------------------------- faults


@ranks(2)
def test_a_rank_that_does_not_save_is_named_soon(rank, world_size, tmp_path):
    """Case H6, and afterwards everybody can go on."""
    engine = make(3)
    train(engine, 0, 1)
    os.environ["FULLSPEED_RENDEZVOUS_TIMEOUT"] = "1"
    if rank == 0:
        begin = time.monotonic()
        with pytest.raises(CommError, match="save_checkpoint on rank 0: rank 1 has not called it within 1 s"):
            engine.save_checkpoint(tmp_path)
        assert time.monotonic() - begin < 5
    os.environ["FULLSPEED_RENDEZVOUS_TIMEOUT"] = "20"
    train(engine, 1, 2)
    engine.save_checkpoint(tmp_path)
    engine.save_checkpoint(tmp_path)
    assert files(tmp_path) == ["global_step2", "latest"]


@ranks(4)
def test_all_missing_ranks_are_named_on_those_that_came(rank, world_size, tmp_path):
    engine = make(0)
    os.environ["FULLSPEED_RENDEZVOUS_TIMEOUT"] = "1"
    if rank in (0, 2):
        with pytest.raises(CommError, match=f"load_checkpoint on rank {rank}: ranks 1, 3 have not called it"):
            engine.load_checkpoint(tmp_path)


@ranks(2)
def test_a_full_disk_on_one_rank_fails_all_and_leaves_nothing(rank, world_size, tmp_path):
    engine = make(1)
    train(engine, 0, 1)
    engine.save_checkpoint(tmp_path, "good")
    good = weights(engine)
    train(engine, 1, 2)
    real = writing.write_file

    def full(path: pathlib.Path, parts: Any) -> Any:
        if path.suffix != ".safetensors":
            return real(path, parts)
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    for culprit in range(world_size):
        for tag in ("bad", "good"):
            if rank == culprit:
                writing.write_file = full
            with pytest.raises(
                CheckpointError, match=rf"rank {culprit}: OSError: .*No space left on device.*rank_0000{culprit}"
            ):
                engine.save_checkpoint(tmp_path, tag)
            writing.write_file = real
            together(lambda: None, CheckpointError)
            assert files(tmp_path) == ["good", "latest"]
            assert files(tmp_path / "good") == ["data-0", "manifest.json"]
    engine.load_checkpoint(tmp_path)
    assert same(weights(engine), good)
    engine.save_checkpoint(tmp_path, "better")
    assert files(tmp_path) == ["better", "good", "latest"]


@ranks(2)
def test_a_failing_commit_keeps_the_old_checkpoint(rank, world_size, tmp_path):
    engine = make(0)
    engine.save_checkpoint(tmp_path, "t")
    old = weights(engine)
    train(engine, 0, 1)
    real = os.replace

    def refuse(source: Any, target: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(target))

    if rank == 0:
        os.replace = refuse
    with pytest.raises(CheckpointError, match=r"rank 0: PermissionError: .*Permission denied"):
        engine.save_checkpoint(tmp_path, "t")
    os.replace = real
    engine.load_checkpoint(tmp_path, "t")
    assert same(weights(engine), old)


@ranks(2)
def test_a_failing_export_fails_all(rank, world_size, tmp_path):
    engine = make(3)
    (tmp_path / "occupied").write_text("")
    for name in ("m.bin", "m.safetensors"):
        with pytest.raises(CheckpointError, match=r"rank 0: .*occupied"):
            engine.save_16bit_model(tmp_path / "occupied" / "inner", name)


class NoSpace:
    """A file system that is full after the file's header."""

    def __init__(self) -> None:
        self.num_writes = 0

    def __call__(self, file: Any, data: memoryview) -> None:
        self.num_writes += 1
        if self.num_writes > 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        file.write(data)


@ranks(2)
def test_an_export_that_fails_in_the_middle_still_gathers_with_the_others(rank, world_size, tmp_path):
    engine = make(3, zero={"stage3_param_persistence_threshold": 0})
    assert engine.save_16bit_model(tmp_path, "m.safetensors")
    old = load_file(tmp_path / "m.safetensors")
    train(engine, 0, 1)
    real, full = durable._write_all, NoSpace()
    durable._write_all = full
    with pytest.raises(CheckpointError, match=r"rank 0: OSError: .*No space left on device"):
        engine.save_16bit_model(tmp_path, "m.safetensors")
    durable._write_all = real
    assert full.num_writes == (2 if rank == 0 else 0)
    assert same(load_file(tmp_path / "m.safetensors"), old)
    assert files(tmp_path) == ["m.safetensors"]
    train(engine, 1, 2)


@ranks(2)
def test_a_streamed_model_file_holds_one_group_in_memory(rank, world_size, tmp_path):
    def build(seed: int) -> nn.Module:
        model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(48)))
        model.register_buffer("count", torch.tensor(3))  # wider than the weights: its place in the file is first
        return model

    engine = make(3, "bf16", model=build)
    expected = weights(engine)
    whole_bytes = sum(tensor.nbytes for tensor in expected.values())
    largest = max(2 * group.numel for group in engine.runtime.groups)
    assert largest < whole_bytes / 4
    engine.save_16bit_model(tmp_path, "warm.safetensors")
    cpu = get_accelerator()
    cpu.reset_peak_memory_stats()
    before = cpu.memory_allocated()
    engine.save_16bit_model(tmp_path, "m.safetensors")
    raised = cpu.max_memory_allocated() - before
    assert raised < whole_bytes / 4, (raised, largest, whole_bytes)
    assert same({**load_file(tmp_path / "m.safetensors")}, expected)


@ranks(2)
def test_a_damaged_file_is_named_on_every_rank_and_nothing_changes(rank, world_size, tmp_path):
    engine = make(3)
    train(engine, 0, 1)
    engine.save_checkpoint(tmp_path, "t")
    train(engine, 1, 2)
    before, steps = weights(engine), engine.global_steps
    for name in ("rank_00001.safetensors", "rank_00000.pt", "common.pt"):
        path = tmp_path / "t" / "data-0" / name
        data = path.read_bytes()
        for damaged, words in ((data[:-1], "is torn"), (data[:-9] + b"?" + data[-8:], "is corrupted")):
            together(lambda path=path, damaged=damaged: rank or path.write_bytes(damaged), CheckpointError)
            with pytest.raises(CheckpointError, match=f"{name} {words}"):
                engine.load_checkpoint(tmp_path)
            assert same(before, weights(engine))
            assert engine.global_steps == steps
        together(lambda path=path, data=data: rank or path.write_bytes(data), CheckpointError)
    engine.load_checkpoint(tmp_path)
    assert engine.global_steps == 1


def save_then_die(rank: int, world_size: int, folder: str, culprit: int, moment: int) -> None:
    engine = make(2)
    engine.save_checkpoint(folder, "first", client_state={"n": 1})
    train(engine, 0, 1)
    if rank == culprit:
        real, left = durable.os.fsync, [moment]

        def fsync(descriptor: int) -> None:
            if not left[0]:
                os.kill(os.getpid(), signal.SIGKILL)
            left[0] -= 1
            real(descriptor)

        durable.os.fsync = fsync
    engine.save_checkpoint(folder, "second", client_state={"n": 2})


def load_latest(rank: int, world_size: int, folder: str) -> tuple[str, int]:
    engine = make(2, seed=4)
    path, client_state = engine.load_checkpoint(folder)
    fresh = make(2)
    if client_state["n"] == 2:
        train(fresh, 0, 1)
    assert same(weights(engine), weights(fresh))
    return pathlib.Path(path).name, client_state["n"]


@pytest.mark.parametrize(("culprit", "moment"), [(0, 0), (1, 2), (0, 5), (0, 8)])
def test_a_rank_killed_while_saving_leaves_the_previous_checkpoint(tmp_path, culprit, moment):
    with pytest.raises(RankError, match=r"SIGKILL|a rank ended while the others waited"):
        run_ranks(save_then_die, 2, str(tmp_path), culprit, moment)
    assert run_ranks(load_latest, 2, str(tmp_path)) == [("first", 1)] * 2


# --------------------------------------------------------------------- other worlds


def save_at(rank: int, world_size: int, folder: str, stage: int) -> dict[str, torch.Tensor]:
    engine = make(stage, "bf16")
    train(engine, 0, 1)
    engine.save_checkpoint(folder)
    return weights(engine)


def load_at(rank: int, world_size: int, folder: str, stage: int) -> dict[str, torch.Tensor]:
    engine = make(stage, "bf16", seed=6)
    engine.load_checkpoint(folder, load_optimizer_states=False)
    train(engine, 1, 2)
    engine.load_checkpoint(folder, load_module_only=True)
    return weights(engine)


def test_weights_fit_everywhere(tmp_path):
    saved = run_ranks(save_at, 2, str(tmp_path), 3)[0]
    for world_size, stage in ((1, 3), (2, 1), (4, 0), (4, 3)):
        for loaded in run_ranks(load_at, world_size, str(tmp_path), stage):
            assert same(saved, loaded)


def save_wide(rank: int, num_ranks: int, folder: str) -> None:
    engine = make(3, model=wide, optimizer=torch.optim.Adam)
    engine.backward(engine(torch.ones(1, 1024)).sum())
    engine.step()
    engine.save_checkpoint(folder)


def load_wide(rank: int, num_ranks: int, folder: str) -> tuple[int, int]:
    """By how many bytes building and loading raised the peak, and how many the engine keeps."""
    cpu = get_accelerator()
    make(3, seed=1).destroy()  # what is imported and allocated once
    cpu.reset_peak_memory_stats()
    before = cpu.memory_allocated()
    with zero.Init():
        model = wide(1)
    engine = make(3, model=lambda seed: model, optimizer=torch.optim.Adam)
    engine.load_checkpoint(folder)
    assert engine.global_steps == 1
    return cpu.max_memory_allocated() - before, sum(engine.memory_bytes().values())


def wide(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(12)))


def test_loading_into_a_model_built_under_zero_init_takes_about_a_ranks_share(tmp_path):
    run_ranks(save_wide, 2, str(tmp_path))
    whole = 12 * 12 * 1024**2  # values and two moments
    for raised, kept in run_ranks(load_wide, 4, str(tmp_path)):
        assert kept > whole / 4
        assert raised < whole / 2, (raised, kept)
