"""`offload_states` and `reload_states`: room between steps, and the same numbers afterwards."""

import pathlib
from typing import Any

import pytest
import torch

from fullspeed import zero
from fullspeed.base.errors import StorageError, UsageError
from fullspeed.comm import barrier
from fullspeed.engine.initialize import initialize
from fullspeed.offload import store
from fullspeed.sharding.offloaded_states import OffloadState
from tests.models import stack
from tests.parity.beside import adamw, square, vectors, zero_config
from tests.ranks import ranks


def make(folder: pathlib.Path | None, rank: int, stage: int, precision: str = "fp32", optimizer: Any = adamw) -> Any:
    """States stay in memory; with a folder, there is a disk that they can go to."""
    made = zero_config(stage, clip=0.05)
    if folder is not None and stage:
        made["zero_optimization"]["offload_optimizer"] = {"device": "cpu", "nvme_path": str(folder)}
    if precision != "fp32":
        made[precision] = {"enabled": True}
    return initialize(model=stack(rank), optimizer=optimizer, config=made)[0]


def update(engine: Any, rank: int, world_size: int, step: int) -> float:
    loss = square(engine, vectors(world_size, step, 0)[rank])
    engine.backward(loss)
    engine.step()
    return loss.item()


def held(engine: Any) -> dict[str, int]:
    """Bytes of what may move; others depend on what slower ranks have read."""
    found = engine.memory_bytes()
    return {name: found[name] for name in ("params", "master", "optimizer", "disk", "buffers")}


def masters(engine: Any) -> list[torch.Tensor]:
    return [zero.safe_get_full_fp32_param(param) for param in engine.module.parameters()]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@ranks(2)
def test_j8_states_go_to_disk_and_come_back(rank: int, world_size: int, precision: str, tmp_path: pathlib.Path) -> None:
    """At stages 1 to 3; meanwhile they can be read, saved and evaluated with, and the memory is free."""
    for stage in (1, 2, 3):
        plain, engine = make(None, rank, stage, precision), make(tmp_path / "disk", rank, stage, precision)
        for step in range(4):
            assert update(engine, rank, world_size, step) == update(plain, rank, world_size, step)
            before = held(engine)
            moved = engine.offload_states(include=["optim_states", OffloadState.hp_params], device="nvme")
            after = held(engine)
            assert moved["optim_states"] == before["optimizer"] - after["optimizer"] > 0
            assert moved["hp_params"] == before["master"] - after["master"]
            assert (moved["hp_params"] > 0) == (precision == "bf16")
            assert after["disk"] >= sum(moved.values())
            assert after["master"] == 0
            if step == 1:
                assert all(map(torch.equal, masters(engine), masters(plain)))
                engine.save_checkpoint(str(tmp_path / f"saved{stage}"))
            with torch.no_grad():
                x = vectors(world_size, step, 1)[rank]
                assert torch.equal(engine(x), plain(x))
            engine.reload_states()
            assert held(engine) == before
        engine.load_checkpoint(str(tmp_path / f"saved{stage}"))
        again = make(None, rank, stage, precision)
        again.load_checkpoint(str(tmp_path / f"saved{stage}"))
        assert update(engine, rank, world_size, 2) == update(again, rank, world_size, 2)
        assert all(map(torch.equal, masters(engine), masters(again)))
        engine.offload_states(device="nvme")
        engine.destroy()
        barrier()
    assert list((tmp_path / "disk").iterdir()) == []


@ranks(1)
def test_offloaded_states_are_named_by_what_needs_them(rank: int, world_size: int, tmp_path: pathlib.Path) -> None:
    engine = make(tmp_path, rank, 2)
    x = vectors(1, 0, 0)[0]
    loss = square(engine, x)
    engine.offload_states(include=["optim_states"])
    for use in (
        lambda: engine(x),
        lambda: engine.backward(loss),
        lambda: loss.backward(),
        lambda: engine.step(),
        lambda: engine.optimizer.step(),
    ):
        with pytest.raises(UsageError, match=r"optim_states are offloaded; call engine.reload_states\(\) first"):
            use()
    with torch.no_grad():
        engine(x)
    engine.offload_states(include=["lp_params"])
    with torch.no_grad(), pytest.raises(UsageError, match="lp_params, optim_states are offloaded"):
        engine(x)
    engine.reload_states()
    engine.reload_states()
    update(engine, rank, 1, 0)
    assert engine.global_steps == 1
    assert not any(engine.offload_states().values())  # in host memory already


@ranks(1)
def test_j7_what_cannot_be_offloaded_is_said(rank: int, world_size: int, tmp_path: pathlib.Path) -> None:
    engine = make(None, rank, 0)
    with pytest.raises(UsageError, match=r"set nvme_path in zero_optimization.offload_optimizer"):
        engine.offload_states(device="nvme")
    with pytest.raises(UsageError, match=r"no weights to offload; choose of .*lp_params"):
        engine.offload_states(include=["weights"])
    with pytest.raises(UsageError, match=r"'cuda:1' is not possible"):
        engine.offload_states(device=torch.device("cuda:1"))
    update(engine, rank, 1, 0)
    made = zero_config(2, offload_optimizer={"device": "cpu", "nvme_path": str(tmp_path), "super_offload": True})
    engine = initialize(model=stack(), optimizer=adamw, config=made)[0]
    with pytest.raises(UsageError, match="does not go with zenflow and super_offload"):
        engine.offload_states(device="nvme")
    engine = make(None, rank, 2, optimizer=None)
    with pytest.raises(UsageError, match="offload_states needs an optimizer"):
        engine.offload_states()
    with torch.no_grad():
        engine(vectors(1, 0, 0)[0])


@ranks(2)
def test_j9_compiled_modules(rank: int, world_size: int, tmp_path: pathlib.Path) -> None:
    plain, engine = make(None, rank, 3, "bf16"), make(tmp_path, rank, 3, "bf16")
    plain.compile(backend="eager")
    engine.compile(backend="eager")
    for step in range(3):
        assert update(engine, rank, world_size, step) == update(plain, rank, world_size, step)
        engine.offload_states(device="nvme")
        engine.reload_states(non_blocking=True)


@ranks(2)
def test_a_full_disk_of_one_rank_leaves_all_in_memory(rank: int, world_size: int, tmp_path: pathlib.Path) -> None:
    plain, engine = make(None, rank, 2, "bf16"), make(tmp_path, rank, 2, "bf16")
    assert update(engine, rank, world_size, 0) == update(plain, rank, world_size, 0)
    before = held(engine)
    submit = store.FileStore.submit_write

    def full(self: store.FileStore, name: str, tensor: torch.Tensor, start: int | None = None) -> Any:
        if int(name) == 3:
            raise StorageError(f"cannot write {name}: no space left")
        return submit(self, name, tensor, start)

    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(store.FileStore, "submit_write", full)
        with pytest.raises(StorageError, match="no space left"):
            engine.offload_states(device="nvme")
    assert held(engine) == before
    assert update(engine, rank, world_size, 1) == update(plain, rank, world_size, 1)
    assert all(map(torch.equal, masters(engine), masters(plain)))
