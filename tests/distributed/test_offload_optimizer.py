"""Masters and optimizer states that wait in files (`offload_optimizer` to nvme): the same numbers, from less memory."""

import pathlib
import resource
from typing import Any

import pytest
import torch
from torch import nn

from fullspeed import zero
from fullspeed.base.errors import CheckpointError, ConfigError, StorageError, UsageError
from fullspeed.comm import barrier
from fullspeed.engine.initialize import initialize
from fullspeed.offload.file_tensor import FileTensor
from fullspeed.sharding import state_files
from tests.models import deep_mlp, stack
from tests.parity.beside import adamw, sgd, square, vectors, zero_config
from tests.ranks import ranks, run_ranks


@pytest.fixture(autouse=True)
def small_groups_wait_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """States of tiny models would stay in memory."""
    monkeypatch.setattr(state_files, "_MIN_NUMEL", 0)


def config(
    folder: Any, stage: int, *, precision: str = "fp32", accum: int = 1, params: bool = False, **offload: Any
) -> dict[str, Any]:
    """Everything waits in a file; without a folder, nothing."""
    made = zero_config(stage, accum=accum, clip=0.05, sub_group_size=300)
    if folder is not None:
        block = {"device": "nvme", "nvme_path": str(folder), "buffer_count": 3, **offload}
        made["zero_optimization"]["offload_optimizer"] = block
        if params:
            block = {"device": "nvme", "nvme_path": str(folder), "max_in_cpu": 0, "buffer_count": 2}
            made["zero_optimization"]["offload_param"] = block
    if precision != "fp32":
        made[precision] = {"enabled": True}
    return made


def make(folder: Any, stage: int, model: nn.Module | None = None, optimizer: Any = adamw, **settings: Any) -> Any:
    state_files._MIN_NUMEL = 0  # ranks that are started anew
    model = stack() if model is None else model
    return initialize(model=model, optimizer=optimizer, config=config(folder, stage, **settings))[0]


def updates(engine: Any, rank: int, world_size: int, steps: range) -> list[float]:
    """Losses of updates."""
    losses = []
    for step in steps:
        for micro in range(engine.gradient_accumulation_steps()):
            loss = square(engine, vectors(world_size, step, micro)[rank])
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    return losses


def whole(engine: Any) -> dict[str, torch.Tensor]:
    """Masters and states of all parameters."""
    found = {}
    for name, param in engine.module.named_parameters():
        found[f"{name} master"] = zero.safe_get_full_fp32_param(param)
        for key in ("exp_avg", "exp_avg_sq"):
            found[f"{name} {key}"] = zero.safe_get_full_optimizer_state(param, key)
    return {name: value for name, value in found.items() if value is not None}


def assert_equal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    assert first.keys() == second.keys()
    for name in first:
        assert torch.equal(first[name], second[name]), name


def states_in_memory(engine: Any) -> list[str]:
    """Names of per-element states that do not wait."""
    return [
        key
        for owned in engine.optimizer.owned.values()
        for key, value in engine.optimizer.state[owned.tensor].items()
        if isinstance(value, torch.Tensor) and value.shape == owned.tensor.shape and not isinstance(value, FileTensor)
    ]


# ---------------------------------------------------------------------- training


@ranks(1, 2)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_same_numbers_as_in_memory(rank: int, world_size: int, precision: str, tmp_path: pathlib.Path) -> None:
    for stage in (1, 2, 3):
        plain = make(None, stage, stack(rank), precision=precision, accum=2)
        expected = updates(plain, rank, world_size, range(3))
        assert len(states_in_memory(plain)) > 6
        for is_ahead, params in ((False, False), (True, False), (True, True)):
            if params and stage < 3:
                continue
            engine = make(
                tmp_path, stage, stack(rank), precision=precision, accum=2, params=params,
                pipeline_read=is_ahead, pipeline_write=is_ahead,
            )  # fmt: skip
            assert updates(engine, rank, world_size, range(3)) == expected
            assert states_in_memory(engine) == []
            assert_equal(whole(engine), whole(plain))
            held = engine.memory_bytes()
            assert held["master"] == 0
            assert held["optimizer"] < 4 * len(engine.optimizer.owned) + 1  # step counts
            numel = sum(group.master.numel() for group in engine.runtime.groups)
            assert held["disk"] >= 4 * numel * (3 if precision == "bf16" else 2)
            assert engine.runtime.state_files.spent.moved_bytes >= 2 * 8 * numel
            engine.destroy()
    assert list(tmp_path.iterdir()) == []


def radam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.RAdam(params, lr=1e-2)


def adagrad(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(params, lr=1e-2, initial_accumulator_value=0.5)


def two_groups(params: Any) -> torch.optim.Optimizer:
    params = list(params)
    return torch.optim.AdamW([{"params": params[::2], "lr": 1e-2}, {"params": params[1::2], "lr": 1e-3}], amsgrad=True)


@ranks(2)
@pytest.mark.parametrize("optimizer", [sgd, radam, adagrad, two_groups])
def test_any_optimizer_that_works_element_by_element(
    rank: int, world_size: int, optimizer: Any, tmp_path: pathlib.Path
) -> None:
    plain = make(None, 2, stack(rank), optimizer)
    engine = make(tmp_path, 2, stack(rank), optimizer, pipeline_read=True)
    assert updates(engine, rank, world_size, range(4)) == updates(plain, rank, world_size, range(4))
    assert states_in_memory(engine) == []
    assert engine.runtime.state_files.nbytes() > 0


def test_an_optimizer_of_whole_parameters_is_refused(tmp_path: pathlib.Path) -> None:
    settings = config(tmp_path, 2) | {"optimizer": {"type": "Muon", "params": {"lr": 0.1}}}
    with pytest.raises(UsageError, match=r"Muon.* works on whole parameters, whose states cannot wait in files"):
        initialize(model=stack(), config=settings)


class OddSizes(nn.Module):
    """Groups of 1, 3, 1023 and 1025 elements."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList(torch.linspace(-1, 1, numel) for numel in (1, 3, 1023, 1025))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([(part * x.sum()).sum() for part in self.parts])


@ranks(2)
def test_parameters_of_odd_sizes(rank: int, world_size: int, tmp_path: pathlib.Path) -> None:  # J1
    plain, engine = make(None, 1, OddSizes()), make(tmp_path, 1, OddSizes())
    assert updates(engine, rank, world_size, range(3)) == updates(plain, rank, world_size, range(3))
    assert_equal(whole(engine), whole(plain))


@ranks(2)
def test_parameters_without_gradients_get_no_state(rank: int, world_size: int, tmp_path: pathlib.Path) -> None:
    model = stack(rank)
    model.inner.weight.requires_grad_(False)
    engine = make(tmp_path, 2, model)
    engine.backward(model.outer.bias.sum())
    engine.step()
    assert zero.safe_get_full_optimizer_state(model.outer.bias, "exp_avg") is not None
    stepped = {engine.runtime.name_of(param) for param, owned in engine.optimizer.owned.items()
               if engine.optimizer.state.get(owned.tensor)}  # fmt: skip
    assert stepped <= {"outer.bias"}
    updates(engine, rank, world_size, range(2))
    assert states_in_memory(engine) == []


@ranks(2)
def test_an_overflow_changes_nothing_in_the_file(rank: int, world_size: int, tmp_path: pathlib.Path) -> None:
    engine = make(tmp_path, 2, stack(rank), precision="fp16")
    updates(engine, rank, world_size, range(1))
    while engine.optimizer.overflow:
        updates(engine, rank, world_size, range(1))
    before = whole(engine)
    engine.backward(square(engine, vectors(world_size, 1, 0)[rank]) * float("inf"))
    engine.step()
    assert engine.optimizer.overflow
    assert_equal(whole(engine), before)


@ranks(4)
def test_a_rank_that_owns_nothing_of_a_group(rank: int, world_size: int, tmp_path: pathlib.Path) -> None:
    """Every group is a batch by itself, so some ranks have batches of nothing."""
    state_files._MIN_NUMEL = 0
    engines = []
    for folder in (None, tmp_path):
        made = config(folder, 2, precision="bf16")
        made["zero_optimization"]["sub_group_size"] = 1
        engines.append(initialize(model=deep_mlp(rank), optimizer=adamw, config=made)[0])
    plain, engine = engines
    owners = {owned.group for owned in engine.optimizer.owned.values()}
    assert rank < 2 or len(owners) < len(engine.runtime.groups)
    assert updates(engine, rank, world_size, range(2)) == updates(plain, rank, world_size, range(2))
    assert_equal(whole(engine), whole(plain))


# -------------------------------------------------------------- what stays in memory


@ranks(2)
def test_small_groups_stay_in_memory_and_are_stepped(rank: int, world_size: int, tmp_path: pathlib.Path) -> None:  # J3
    plain = make(None, 2, stack(rank))
    numels = sorted(group.master.numel() for group in plain.runtime.groups)
    state_files._MIN_NUMEL = numels[-1]
    engine = initialize(model=stack(rank), optimizer=adamw, config=config(tmp_path, 2))[0]
    assert updates(engine, rank, world_size, range(3)) == updates(plain, rank, world_size, range(3))
    assert_equal(whole(engine), whole(plain))
    assert 0 < len(states_in_memory(engine)) < len(states_in_memory(plain))
    state_files._MIN_NUMEL = 1 << 16
    engine = initialize(model=stack(rank), optimizer=adamw, config=config(tmp_path, 2))[0]
    assert engine.runtime.state_files is None


def test_ratio_is_the_share_that_waits(tmp_path: pathlib.Path) -> None:
    engine = make(tmp_path, 3, ratio=0.5)
    numels = [group.master.numel() for group in engine.runtime.groups]
    waiting = sum(numels[index] for index in engine.runtime.state_files.waiting)
    assert 0.4 * sum(numels) < waiting < 0.8 * sum(numels)
    updates(engine, 0, 1, range(2))
    assert states_in_memory(engine)
    assert 0 not in engine.runtime.state_files.waiting


def test_disks_are_for_sharded_states(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ConfigError, match="offload_optimizer"):
        make(tmp_path, 0)
    with pytest.raises(ConfigError, match="nvme_path"):
        make(tmp_path, 2, nvme_path=None)


# ------------------------------------------------------------------ reads and writes


@ranks(2)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_accessors_reach_the_file(rank: int, world_size: int, precision: str, tmp_path: pathlib.Path) -> None:
    results = []
    for folder in (None, tmp_path):
        engine = make(folder, 3, stack(rank), precision=precision)
        weight, bias = engine.module.inner.weight, engine.module.outer.bias
        updates(engine, rank, world_size, range(1))
        zero.safe_set_full_fp32_param(weight, torch.full(weight.shape, 0.25))
        zero.safe_set_full_optimizer_state(bias, torch.arange(3.0), "exp_avg")
        for param in (weight, bias):
            local = zero.safe_get_local_optimizer_state(param, "exp_avg_sq")
            if local is not None:
                zero.safe_set_local_optimizer_state(param, local * 3, "exp_avg_sq")
                zero.safe_set_local_fp32_param(param, zero.safe_get_local_fp32_param(param) + 1)
        with zero.GatheredParameters([engine.module.blocks[0].up.weight], modifier_rank=0):
            if rank == 0:
                engine.module.blocks[0].up.weight.data.fill_(0.5)
        losses = updates(engine, rank, world_size, range(1, 3))
        steps = {float(state["step"]) for state in engine.optimizer.state.values()}
        assert steps == {3.0}
        results.append((losses, whole(engine)))
    assert results[0][0] == results[1][0]
    assert_equal(results[0][1], results[1][1])


@ranks(2)
def test_a_state_dict_holds_values_and_can_be_loaded(rank: int, world_size: int, tmp_path: pathlib.Path) -> None:
    engine = make(tmp_path, 2, stack(rank), precision="bf16")
    updates(engine, rank, world_size, range(2))
    path = tmp_path.parent / f"{tmp_path.name}-{rank}.pt"
    torch.save(engine.optimizer.state_dict(), path)
    before = whole(engine)
    updates(engine, rank, world_size, range(2, 3))
    saved = torch.load(path)
    assert all(
        type(value) is torch.Tensor for state in saved["optimizer"]["state"].values() for value in state.values()
    )
    engine.optimizer.load_state_dict(saved)
    assert states_in_memory(engine) == []
    after = whole(engine)
    moments = [name for name in before if "exp_avg" in name]
    assert moments
    assert all(torch.equal(before[name], after[name]) for name in moments)


def _save(rank: int, world_size: int, folder: str, files: str | None, precision: str) -> Any:
    engine = make(files, 2, stack(rank), precision=precision)
    updates(engine, rank, world_size, range(2))
    engine.save_checkpoint(folder, "front")
    engine.save_checkpoint(folder, "back", in_background=True)
    state = whole(engine)
    losses = updates(engine, rank, world_size, range(2, 4))
    engine.destroy()
    return state, losses


def _load(rank: int, world_size: int, folder: str, files: str | None, precision: str, tag: str, stage: int) -> Any:
    engine = make(files, stage, stack(rank), precision=precision, pipeline_read=True)
    assert engine.load_checkpoint(folder, tag)[0] is not None
    state = whole(engine)
    if files is not None:
        assert states_in_memory(engine) == []
    losses = updates(engine, rank, world_size, range(2, 4))
    engine.destroy()
    return state, losses


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_checkpoints_go_from_files_to_memory_and_back(tmp_path: pathlib.Path, precision: str) -> None:
    files, folder = str(tmp_path / "files"), tmp_path / "checkpoints"
    saved = run_ranks(_save, 2, str(folder / "a"), files, precision)[0]
    assert_equal(saved[0], run_ranks(_save, 2, str(folder / "b"), None, precision)[0][0])
    ways = ((2, "a", files, "front", 3), (1, "a", None, "back", 1), (2, "b", files, "back", 2))
    for world_size, source, into, tag, stage in ways:
        found = run_ranks(_load, world_size, str(folder / source), into, precision, tag, stage)[0]
        assert_equal(saved[0], found[0])
        if world_size == 2:
            assert found[1] == pytest.approx(saved[1], rel=1e-6 if precision == "fp32" else 2e-2)
    assert list((tmp_path / "files").iterdir()) == []


# ------------------------------------------------------------------------- failures


@ranks(2)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_lost_file_of_one_rank_is_an_error_on_both(
    rank: int, world_size: int, precision: str, tmp_path: pathlib.Path
) -> None:
    engine = make(tmp_path / "files", 2, stack(rank), precision=precision, pipeline_write=True)
    updates(engine, rank, world_size, range(2))
    engine.save_checkpoint(str(tmp_path / "saved"))
    kept = whole(engine)
    if rank == 1:
        engine.runtime.state_files.store.path.unlink()
    with pytest.raises(
        StorageError, match=r"optimizer has vanished" if rank == 1 else "rank 1: .*optimizer has vanish"
    ):
        updates(engine, rank, world_size, range(2, 3))
    assert engine.runtime.state_files._pool.num_in_use == 0
    engine.destroy()
    again = make(tmp_path / "files", 2, stack(rank), precision=precision)
    again.load_checkpoint(str(tmp_path / "saved"))
    assert_equal(whole(again), kept)
    again.destroy()
    assert list((tmp_path / "files").iterdir()) == []


def _of_rank_1(engine: Any) -> nn.Parameter:
    """A parameter that lies in the second rank's shard."""
    weight: nn.Parameter = engine.module.blocks[0].down.weight
    return weight


def _gather_and_edit(engine: Any) -> None:
    with zero.GatheredParameters(_of_rank_1(engine), modifier_rank=0):
        _of_rank_1(engine).data.add_(1)


USES: dict[str, Any] = {
    "full master": lambda engine: zero.safe_get_full_fp32_param(_of_rank_1(engine)),
    "full state": lambda engine: zero.safe_get_full_optimizer_state(_of_rank_1(engine), "exp_avg"),
    "set": lambda engine: zero.safe_set_full_fp32_param(_of_rank_1(engine), torch.ones(6, 12)),
    "gather and edit": _gather_and_edit,
    "export": lambda engine: zero.save_weights(engine, engine.config["folder"], dtype=torch.float32),
}


@ranks(2)
def test_a_lost_file_is_an_error_on_both_wherever_it_is_used(
    rank: int, world_size: int, tmp_path: pathlib.Path
) -> None:
    """No rank is left in a collective that the other does not come to."""
    engine = make(tmp_path / "files", 2, stack(rank), precision="bf16")
    engine.config["folder"] = str(tmp_path / "weights")
    updates(engine, rank, world_size, range(1))
    path = engine.runtime.state_files.store.path
    if rank == 1:
        path.rename(path.with_name("elsewhere"))
    for use in USES.values():
        barrier()
        with pytest.raises((StorageError, CheckpointError), match="optimizer has vanished"):
            use(engine)
    if rank == 1:
        path.with_name("elsewhere").rename(path)
    assert zero.safe_get_full_fp32_param(_of_rank_1(engine)) is not None
    engine.destroy()


def limit_files(nbytes: int) -> None:
    """The process cannot make files larger than that: as a full disk."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


@ranks(2)
def test_a_disk_that_is_full_in_the_first_step(rank: int, world_size: int, tmp_path: pathlib.Path) -> None:
    """Where states are made. The model's checkpoint is not harmed; the torn engine steps no more."""
    engine = make(tmp_path / "files", 2, stack(rank), precision="bf16", pipeline_read=True, pipeline_write=True)
    engine.save_checkpoint(str(tmp_path / "saved"))
    kept = whole(engine)
    if rank == 1:
        limit_files(engine.runtime.state_files.nbytes())
    with pytest.raises(StorageError, match=r"cannot (reserve|write)"):
        updates(engine, rank, world_size, range(1))
    limit_files(resource.RLIM_INFINITY)
    assert engine.runtime.state_files._pool.num_in_use == 0
    with pytest.raises(StorageError, match="build a new engine and load the last checkpoint"):
        updates(engine, rank, world_size, range(1))
    engine.destroy()
    again, plain = make(tmp_path / "files", 2, stack(rank), precision="bf16"), make(None, 2, stack(0), precision="bf16")
    again.load_checkpoint(str(tmp_path / "saved"))
    assert_equal(whole(again), kept)
    assert updates(again, rank, world_size, range(2)) == updates(plain, rank, world_size, range(2))


@ranks(2)
def test_a_rank_without_its_folder_ends_all(rank: int, world_size: int, tmp_path: pathlib.Path) -> None:
    taken = tmp_path / "file"
    taken.touch()
    with pytest.raises(StorageError, match=r"file"):
        make(tmp_path / "good" if rank == 0 else taken, 2, stack(rank))
