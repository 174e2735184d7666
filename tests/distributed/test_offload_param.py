"""Parameter shards that wait in files (`offload_param` to nvme): the same numbers, and nothing else in memory."""

import contextlib
import pathlib
import time
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from fullspeed import zero
from fullspeed.activation.configure import checkpoint
from fullspeed.base.errors import CheckpointError, ConfigError, StorageError
from fullspeed.comm import QuantizedGather, agreement, barrier, shared_transport
from fullspeed.comm.transport import PairwiseTransport
from fullspeed.engine.initialize import initialize
from fullspeed.sharding.file_resident import FileResident
from tests.models import LLAMA, branching, paths_for, stack, tiny_llama
from tests.parity.beside import adamw, sgd, square, vectors, zero_config
from tests.ranks import ranks, run_ranks

PRELOAD = (LLAMA,)


def config(folder: Any, *, precision: str = "fp32", accum: int = 1, **offload: Any) -> dict[str, Any]:
    """Stage 3, every group in a file; without a folder, in memory."""
    made = zero_config(3, accum=accum, clip=0.05, stage3_gather_16bit_weights_on_model_save=True)
    if folder is not None:
        block = {"device": "nvme", "nvme_path": str(folder), "max_in_cpu": 0, "buffer_count": 2, **offload}
        made["zero_optimization"]["offload_param"] = block
    if precision != "fp32":
        made[precision] = {"enabled": True}
    return made


def make(folder: Any, model: nn.Module, optimizer: Any = adamw, **settings: Any) -> Any:
    return initialize(model=model, optimizer=optimizer, config=config(folder, **settings))[0]


def updates(engine: Any, rank: int, world_size: int, steps: range) -> list[float]:
    """Losses of updates, each followed by an evaluation. Between passes no buffer is in use."""
    losses = []
    for step in steps:
        for micro in range(engine.gradient_accumulation_steps()):
            x = vectors(world_size, step, micro)[rank]
            loss = square(engine, x)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        with torch.no_grad():
            losses.append(square(engine, x).item())
        if engine.runtime.files is not None:
            assert engine.runtime.files.pool.num_in_use == 0
    return losses


def whole(engine: Any) -> dict[str, torch.Tensor]:
    """Masters and first moments of trained parameters, resident values of all."""
    found = dict(engine.module_state_dict())
    for name, param in engine.module.named_parameters():
        found[f"{name} master"] = zero.safe_get_full_fp32_param(param)
        found[f"{name} moment"] = zero.safe_get_full_optimizer_state(param, "exp_avg")
    return {name: value for name, value in found.items() if value is not None}


def assert_equal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    assert first.keys() == second.keys()
    for name in first:
        assert torch.equal(first[name], second[name]), name


def waiting(engine: Any) -> int:
    return sum(isinstance(group.resident, FileResident) for group in engine.runtime.groups)


# ---------------------------------------------------------------------- training


@ranks(1, 2)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_same_numbers_as_in_memory(rank: int, world_size: int, precision: str, tmp_path: pathlib.Path) -> None:
    plain = make(None, stack(rank), precision=precision, accum=2)
    expected = updates(plain, rank, world_size, range(3))
    for buffer_count in (1, 3):
        engine = make(tmp_path, stack(rank), precision=precision, accum=2, buffer_count=buffer_count)
        assert waiting(engine) == len(engine.runtime.groups) > 3
        assert updates(engine, rank, world_size, range(3)) == expected
        assert_equal(whole(engine), whole(plain))
        held, in_memory = engine.memory_bytes(), plain.memory_bytes()
        assert held["params"] == 0
        assert held["disk"] == in_memory["params"] > 0
        assert held["buffers"] == buffer_count * 4096
        engine.destroy()
        assert torch.equal(engine.module.inner.weight, plain.module_state_dict()["inner.weight"])
    assert list(tmp_path.iterdir()) == []


class OddSizes(nn.Module):
    """Groups of 1, 3, 1023 and 1025 elements, used in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Scale(numel) for numel in (1, 3, 1023, 1025))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([part(x) for part in self.parts])


class Scale(nn.Module):
    def __init__(self, numel: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, numel))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * x.sum()).sum()


@ranks(1, 2)
def test_parameters_of_odd_sizes(rank: int, world_size: int, tmp_path: pathlib.Path) -> None:  # J1
    plain, engine = make(None, OddSizes()), make(tmp_path, OddSizes())
    assert waiting(engine) == 4
    for name, param in engine.module.named_parameters():  # read back as it was, before any step
        assert torch.equal(zero.safe_get_full_fp32_param(param), dict(OddSizes().named_parameters())[name])
    assert updates(engine, rank, world_size, range(2)) == updates(plain, rank, world_size, range(2))
    assert_equal(whole(engine), whole(plain))


@ranks(2)
def test_ranks_of_different_branches(rank: int, world_size: int, tmp_path: pathlib.Path) -> None:
    results = []
    for folder in (None, tmp_path):
        engine = make(folder, branching(rank), sgd)
        losses = []
        for step in range(4):
            batch = paths_for(vectors(world_size, step, 0), step)[rank]
            loss = (engine(batch) - 0.5).square().mean()
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        results.append((losses, {name: value.clone() for name, value in engine.module_state_dict().items()}))
    assert results[0][0] == results[1][0]
    assert_equal(results[0][1], results[1][1])


@ranks(2)
def test_generation_of_different_lengths(rank: int, world_size: int, tmp_path: pathlib.Path) -> None:
    engine, reference = make(tmp_path, tiny_llama(rank), sgd), tiny_llama(0)
    tokens = torch.arange(5)[None] + rank
    settings = {"max_new_tokens": 2 + 3 * rank, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    assert torch.equal(engine.generate(tokens, **settings), reference.generate(tokens, **settings))
    assert waiting(engine) > 2
    engine.destroy()


@ranks(2)
@pytest.mark.parametrize("how", ["quantized", "messages"])
def test_however_gathers_travel(rank: int, world_size: int, how: str, tmp_path: pathlib.Path) -> None:
    results = []
    for folder in (None, tmp_path):
        settings = config(folder, precision="bf16")
        settings["zero_optimization"]["zero_quantized_weights"] = how == "quantized"
        with contextlib.ExitStack() as patches:
            for module in (shared_transport, agreement) if how == "messages" else ():
                patches.enter_context(mock.patch.object(module, "can_share", return_value=False))
            engine = initialize(model=stack(rank), optimizer=adamw, config=settings)[0]
        assert isinstance(engine.runtime.links.unshard, QuantizedGather) == (how == "quantized")
        assert isinstance(engine.runtime.links.gather, PairwiseTransport) == (how == "messages")
        results.append((updates(engine, rank, world_size, range(2)), whole(engine)))
    assert waiting(engine) > 3
    assert results[0][0] == results[1][0]
    assert_equal(results[0][1], results[1][1])


@ranks(4)
def test_replicas_of_shard_groups(rank: int, world_size: int, tmp_path: pathlib.Path) -> None:
    results = []
    for folder in (None, tmp_path):
        settings = config(folder)
        settings["zero_optimization"]["mics_shard_size"] = 2
        engine = initialize(model=stack(rank), optimizer=adamw, config=settings)[0]
        results.append((updates(engine, rank, world_size, range(2)), whole(engine)))
    assert waiting(engine) > 3
    assert results[0][0] == results[1][0]
    assert_equal(results[0][1], results[1][1])


class Recomputed(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.stack = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stack.inner(x)
        for block in self.stack.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.stack.outer(x)


def adapted(rank: int) -> nn.Module:
    """All frozen but the biases, as adapters are trained, with recomputed blocks."""
    model = Recomputed(stack(rank))
    for name, param in model.named_parameters():
        param.requires_grad_(name.endswith("bias"))
    return model


def biases(params: Any) -> torch.optim.Optimizer:
    return adamw([param for param in params if param.requires_grad])


@ranks(2)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_frozen_parameters_recomputing_and_unfreezing(
    rank: int, world_size: int, precision: str, tmp_path: pathlib.Path
) -> None:
    results = []
    for folder in (None, tmp_path):
        engine = make(folder, adapted(rank), biases, precision=precision)
        losses = updates(engine, rank, world_size, range(2))
        engine.unfreeze(["stack.inner.weight"], lr=1e-2)
        before = zero.safe_get_full_fp32_param(engine.module.stack.inner.weight)
        losses += updates(engine, rank, world_size, range(2, 4))
        after = zero.safe_get_full_fp32_param(engine.module.stack.inner.weight)
        assert not torch.equal(before, after)
        results.append((losses, whole(engine)))
    assert results[0][0] == results[1][0]
    assert_equal(results[0][1], results[1][1])


# -------------------------------------------------------------- what stays in memory


@ranks(2)
def test_the_first_groups_stay_in_memory(rank: int, world_size: int, tmp_path: pathlib.Path) -> None:
    plain = make(None, stack(rank))
    numels = [group.layout.shard_numel for group in plain.runtime.groups]
    engine = make(tmp_path, stack(rank), max_in_cpu=sum(numels[:2]) + 1)
    assert [group.resident.waits for group in engine.runtime.groups] == [False] * 2 + [True] * (len(numels) - 2)
    assert engine.memory_bytes()["params"] == 4 * sum(numels[:2])
    assert updates(engine, rank, world_size, range(2)) == updates(plain, rank, world_size, range(2))
    assert_equal(whole(engine), whole(plain))


def test_a_shard_larger_than_a_buffer_names_its_parameter(tmp_path: pathlib.Path) -> None:
    with pytest.raises(
        ConfigError, match=r"offload_param.buffer_size is 50: .* blocks.0.up.weight, .* 72 .*set it to 224"
    ):
        make(tmp_path, stack(0), buffer_size=50)
    assert list(tmp_path.iterdir()) == []


def test_only_as_many_buffers_as_groups_and_only_as_large_as_shards(tmp_path: pathlib.Path) -> None:
    engine = make(tmp_path, OddSizes(), buffer_count=50)
    assert engine.memory_bytes()["buffers"] == 4 * 2 * 4096  # 1025 fp32 elements begin a second page
    engine.destroy()


def test_groups_are_read_ahead_of_their_use(tmp_path: pathlib.Path) -> None:
    engine = make(tmp_path, stack(0), buffer_count=3)
    updates(engine, 0, 1, range(1))
    coming = []
    engine.module.blocks[0].register_forward_pre_hook(
        lambda *_: coming.append([g.index for g in engine.runtime.groups if g.resident._buffer is not None])
    )
    engine(vectors(1, 1, 0)[0])
    assert coming == [[2, 3, 4]], "the block of group 1 computes"
    engine.destroy()


# ------------------------------------------------------------------ writes and reads


@ranks(2)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_edits_reach_the_file(rank: int, world_size: int, precision: str, tmp_path: pathlib.Path) -> None:
    results = []
    for name in ("memory", "file"):
        engine = make(tmp_path if name == "file" else None, stack(rank), precision=precision)
        module = engine.module
        updates(engine, rank, world_size, range(1))
        with zero.GatheredParameters([module.inner.weight], modifier_rank=0):
            if rank == 0:
                module.inner.weight.data.fill_(0.25)
        assert zero.safe_get_full_fp32_param(module.inner.weight).unique().tolist() == [0.25]
        zero.safe_set_full_fp32_param(module.outer.bias, torch.arange(3.0))
        local = zero.safe_get_local_fp32_param(module.blocks[1].up.weight)
        if local is not None:
            doubled = local * 2
            zero.safe_set_local_fp32_param(module.blocks[1].up.weight, doubled)
            assert torch.equal(zero.safe_get_local_fp32_param(module.blocks[1].up.weight), doubled)
        losses = updates(engine, rank, world_size, range(1, 3))
        state = {key: value.clone() for key, value in engine.module_state_dict().items()}
        state["inner.bias"].fill_(0.125)
        engine.load_module_state_dict(state)
        files = zero.save_weights(engine, tmp_path.parent / f"{tmp_path.name}-{name}")
        zero.load_weights(module, files[0].parent)
        losses += updates(engine, rank, world_size, range(3, 4))
        results.append((losses, whole(engine)))
    assert results[0][0] == results[1][0]
    assert_equal(results[0][1], results[1][1])


def _save(rank: int, world_size: int, folder: str, files: str | None, precision: str) -> Any:
    engine = make(files, stack(rank), precision=precision)
    updates(engine, rank, world_size, range(2))
    engine.save_checkpoint(folder, "front")
    engine.save_checkpoint(folder, "back", in_background=True)
    state = whole(engine)
    updates(engine, rank, world_size, range(2, 3))
    engine.destroy()
    return state


def _load(rank: int, world_size: int, folder: str, files: str | None, precision: str, tag: str) -> Any:
    engine = make(files, stack(rank), precision=precision)
    assert engine.load_checkpoint(folder, tag)[0] is not None
    state = whole(engine)
    updates(engine, rank, world_size, range(2, 3))
    engine.destroy()
    return state


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_checkpoints_go_from_files_to_memory_and_back(tmp_path: pathlib.Path, precision: str) -> None:
    files, folder = str(tmp_path / "files"), tmp_path / "checkpoints"
    saved = run_ranks(_save, 2, str(folder / "a"), files, precision)[0]
    assert_equal(saved, run_ranks(_save, 2, str(folder / "b"), None, precision)[0])
    for world_size, source, into, tag in ((2, "a", files, "front"), (1, "a", None, "back"), (1, "b", files, "back")):
        assert_equal(saved, run_ranks(_load, world_size, str(folder / source), into, precision, tag)[0])
    assert list((tmp_path / "files").iterdir()) == []


# ------------------------------------------------------------------------- failures


@ranks(2)
@pytest.mark.parametrize("harm", ["vanished", "cut short"])
def test_a_harmed_file_of_one_rank_is_an_error_on_both(
    rank: int, world_size: int, harm: str, tmp_path: pathlib.Path
) -> None:
    engine = make(tmp_path / "files", stack(rank))
    updates(engine, rank, world_size, range(1))
    engine.save_checkpoint(str(tmp_path / "saved"))
    kept = whole(engine)
    path = engine.runtime.files.store.path
    if rank == 1 and harm == "vanished":
        path.unlink()
    elif rank == 1:
        with path.open("r+b") as file:
            file.truncate(10)
    begin = time.monotonic()
    words = "vanished" if harm == "vanished" else "cut short"
    with pytest.raises(StorageError, match="rank 1") as error:
        updates(engine, rank, world_size, range(1, 2))
    assert time.monotonic() - begin < 5
    assert str(engine.runtime.files.paths[1]) in str(error.value)
    assert (words in str(error.value)) == (rank == 1)
    assert engine.runtime.files.pool.num_in_use == 0
    with pytest.raises(StorageError, match="rank 1"):
        zero.safe_get_full_fp32_param(engine.module.outer.weight)
    with pytest.raises(CheckpointError, match="rank 1"):
        engine.save_checkpoint(str(tmp_path / "saved"), "torn")
    with pytest.raises(StorageError, match="rank 1"):
        engine.destroy()
    again = make(tmp_path / "files", stack(rank))
    again.load_checkpoint(str(tmp_path / "saved"))
    assert_equal(whole(again), kept)
    again.destroy()
    assert list((tmp_path / "files").iterdir()) == []


@ranks(2)
def test_a_file_that_is_lost_between_backward_and_step(rank: int, world_size: int, tmp_path: pathlib.Path) -> None:
    for precision in ("fp32", "bf16"):
        engine = make(tmp_path, stack(rank), precision=precision)
        engine.backward(square(engine, vectors(world_size, 0, 0)[rank]))
        if rank == 1:
            engine.runtime.files.store.path.unlink()
        with pytest.raises(StorageError, match="rank 1"):
            engine.step()


@ranks(2)
def test_a_file_that_is_lost_while_its_rank_is_away(rank: int, world_size: int, tmp_path: pathlib.Path) -> None:
    engine = make(tmp_path, stack(rank))
    x = torch.ones(2, 5)
    with torch.no_grad():
        engine(x)
        barrier()
        if rank == 1:
            engine.runtime.files.store.path.unlink()
            barrier()
            time.sleep(0.5)  # the other rank evaluates alone, served by this one's attendant
        else:
            barrier()
            with pytest.raises(StorageError, match="rank 1"):
                engine(x)
        barrier()
        if rank == 1:
            with pytest.raises(StorageError, match=r"rank 1.*vanished"):
                engine(x)


@ranks(2)
def test_a_rank_without_its_folder_ends_all(rank: int, world_size: int, tmp_path: pathlib.Path) -> None:
    taken = tmp_path / "file"
    taken.touch()
    with pytest.raises(StorageError, match=r"rank 1.*file"):
        make(tmp_path / "good" if rank == 0 else taken, stack(rank))
