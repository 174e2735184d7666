"""Checkpoints written while training goes on: the state of the call, whole or not at all, failures on every rank."""

from __future__ import annotations

import errno
import os
import pathlib
import resource
import signal
import threading
import time
from typing import Any

import pytest
import torch
from torch import nn

from fullspeed import zero
from fullspeed.base.errors import CheckpointError
from fullspeed.checkpoint import writing
from fullspeed.comm.rendezvous import together
from tests.distributed.test_checkpoint import STAGES, files, make, same, train, weights
from tests.models import mlp
from tests.ranks import RankError, ranks, run_ranks

REAL_WRITE = writing.write_file


class Gate:
    """Holds this rank's writer before its first byte, until opened."""

    def __init__(self) -> None:
        self._event, self.was_entered = threading.Event(), threading.Event()
        writing.write_file = self._write

    def open(self) -> None:
        self._event.set()
        writing.write_file = REAL_WRITE

    def _write(self, path: pathlib.Path, parts: Any) -> Any:
        self.was_entered.set()
        assert self._event.wait(30)
        return REAL_WRITE(path, parts)


def save_behind_gate(engine: Any, folder: Any, tag: str) -> Gate:
    gate = Gate()
    engine.save_checkpoint(folder, tag, in_background=True)
    assert gate.was_entered.wait(10)
    return gate


@ranks(1, 2)
def test_the_state_of_the_call_is_written_whatever_happens_later(rank, world_size, tmp_path):  # H20
    for stage in STAGES:
        folder = tmp_path / str(stage)
        engine = make(stage, "bf16" if stage % 2 else "fp32")
        train(engine, 0, 2)
        gate = save_behind_gate(engine, folder, "then")
        then = weights(engine)
        assert not (folder / "latest").exists()
        losses = train(engine, 2, 4)
        with torch.no_grad():
            for group in engine.runtime.groups:
                group.store.fill_(7)  # every resident value
        gate.open()
        engine.wait_for_checkpoint()
        assert files(folder) == ["latest", "then"]
        assert files(folder / "then") == ["data-0", "manifest.json"]
        other = make(stage, "bf16" if stage % 2 else "fp32", seed=5)
        other.load_checkpoint(folder)
        assert same(weights(other), then)
        assert train(other, 2, 4) == losses


@ranks(2)
def test_the_next_save_load_and_destroy_wait(rank, world_size, tmp_path):
    engine = make(2)
    gate = save_behind_gate(engine, tmp_path, "one")
    threading.Timer(0.2, gate.open).start()
    engine.save_checkpoint(tmp_path, "two")
    assert files(tmp_path) == ["latest", "one", "two"]
    gate = save_behind_gate(engine, tmp_path, "three")
    threading.Timer(0.2, gate.open).start()
    assert engine.load_checkpoint(tmp_path)[0] == str(tmp_path / "three")
    gate = save_behind_gate(engine, tmp_path, "four")
    threading.Timer(0.2, gate.open).start()
    engine.destroy()
    assert (tmp_path / "latest").read_text() == "four"


@ranks(2)
def test_the_copy_reuses_its_memory_and_is_counted(rank, world_size, tmp_path):
    engine = make(3, datastates_ckpt={})
    train(engine, 0, 1)
    assert engine.memory_bytes()["staging"] == 0
    engine.save_checkpoint(tmp_path, "a")
    held, address = engine.memory_bytes()["staging"], engine._staging._memory.data_ptr()
    assert held >= sum(engine.memory_bytes()[name] for name in ("params", "optimizer"))
    engine.save_checkpoint(tmp_path, "b")
    assert (engine.memory_bytes()["staging"], engine._staging._memory.data_ptr()) == (held, address)
    engine.wait_for_checkpoint()
    assert files(tmp_path) == ["a", "b", "latest"]


@ranks(2)
def test_a_failed_write_is_raised_by_the_next_step_on_every_rank(rank, world_size, tmp_path):
    engine = make(1, checkpoint={"writer": {"decoupled": True}})
    train(engine, 0, 1)
    engine.save_checkpoint(tmp_path, "good")
    engine.wait_for_checkpoint()
    good = weights(engine)

    def full(path: pathlib.Path, parts: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    for culprit in range(world_size):
        words = rf"checkpoint 'bad' was not completed .*rank {culprit}: OSError: .*No space left on device"
        if rank == culprit:
            writing.write_file = full
        engine.save_checkpoint(tmp_path, "bad")
        with pytest.raises(CheckpointError, match=words):
            train(engine, 1, 200)
        assert not engine._num_micro_steps, "the update is complete when the error is raised"
        writing.write_file = REAL_WRITE
        together(lambda: None, CheckpointError)
        assert files(tmp_path) == ["good", "latest"]
    train(engine, 5, 6)
    engine.load_checkpoint(tmp_path)
    assert same(weights(engine), good)
    engine.save_checkpoint(tmp_path, "better")
    engine.wait_for_checkpoint()
    assert (tmp_path / "latest").read_text() == "better"


def save_and_leave(rank: int, world_size: int, folder: str) -> None:
    """No wait, no destroy; the writer takes its time."""
    engine = make(2)
    train(engine, 0, 1)

    def slow(path: pathlib.Path, parts: Any) -> Any:
        time.sleep(0.3)
        return REAL_WRITE(path, parts)

    writing.write_file = slow
    engine.save_checkpoint(folder, "last", in_background=True)
    assert not pathlib.Path(folder, "latest").exists()


def load_last(rank: int, world_size: int, folder: str) -> None:
    engine, fresh = make(2, seed=3), make(2)
    engine.load_checkpoint(folder)
    train(fresh, 0, 1)
    assert same(weights(engine), weights(fresh))


def test_the_end_of_the_program_waits(tmp_path):
    run_ranks(save_and_leave, 2, str(tmp_path))
    assert (tmp_path / "latest").read_text() == "last"
    run_ranks(load_last, 2, str(tmp_path))


def die_while_writing(rank: int, world_size: int, folder: str, culprit: int) -> None:
    engine = make(2)
    train(engine, 0, 1)
    engine.save_checkpoint(folder, "first")
    gate = save_behind_gate(engine, folder, "second")
    if rank == culprit:
        os.kill(os.getpid(), signal.SIGKILL)
    gate.open()
    train(engine, 1, 3)


@pytest.mark.parametrize("culprit", [0, 1])
def test_killed_before_completion_the_previous_one_stays(tmp_path, culprit):  # H20
    with pytest.raises(RankError):
        run_ranks(die_while_writing, 2, str(tmp_path), culprit)
    assert (tmp_path / "latest").read_text() == "first"
    assert not (tmp_path / "second").exists()
    run_ranks(load_last, 2, str(tmp_path))


@ranks(2)
def test_only_so_many_are_kept(rank, world_size, tmp_path):
    """Those that never were the latest, damaged ones and the user's own files stay."""
    engine = make(1, checkpoint={"keep_last": 2})
    engine.save_checkpoint(tmp_path, "best", save_latest=False)
    for number in range(3):
        engine.save_checkpoint(tmp_path, f"n{number}")
    assert files(tmp_path) == ["best", "latest", "n1", "n2"]
    together(lambda: rank or (tmp_path / "n1" / "notes.txt").write_text("mine"), CheckpointError)
    together(lambda: rank or (tmp_path / "n2" / "manifest.json").write_text("torn"), CheckpointError)
    for number in range(3, 6):
        engine.save_checkpoint(tmp_path, f"n{number}", in_background=True)
    engine.wait_for_checkpoint()
    assert files(tmp_path) == ["best", "latest", "n1", "n2", "n4", "n5"]
    assert files(tmp_path / "n1") == ["notes.txt"]
    engine.load_checkpoint(tmp_path, "n4")
    engine.load_checkpoint(tmp_path, "best")


@pytest.mark.parametrize("in_background", [False, True])
@ranks(2)
def test_a_disk_that_fills_up_in_the_middle_of_a_file(rank, world_size, in_background, tmp_path):
    engine = make(2, model=lambda seed: nn.Sequential(nn.Linear(5, 4000), nn.Tanh(), nn.Linear(4000, 3)))
    train(engine, 0, 1)
    save_whole(engine, tmp_path, in_background, "good")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # then the write fails as on a full disk
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    with pytest.raises(CheckpointError, match=r"rank 1: OSError: .*File too large"):
        save_whole(engine, tmp_path, in_background, "next")
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    together(lambda: None, CheckpointError)
    assert files(tmp_path) == ["good", "latest"]
    save_whole(engine, tmp_path, in_background, "next")
    assert files(tmp_path) == ["good", "latest", "next"]


def save_whole(engine: Any, folder: pathlib.Path, in_background: bool, tag: str) -> None:
    engine.save_checkpoint(folder, tag, in_background=in_background)
    engine.wait_for_checkpoint()


@ranks(2)
def test_wrong_use_fails_on_all_ranks_before_anything_is_written(rank, world_size, tmp_path):
    engine = make(1, checkpoint={"tag_validation": "Fail", "writer": {"decoupled": True}})
    together(lambda: rank or (tmp_path / "occupied").write_text(""), CheckpointError)
    for place, tag, words in (
        ("occupied", "t", "rank 0: .*occupied"),
        ("occupied/inner", "t", "rank 0: NotADirectoryError"),
        ("free", "a/b", "contains a path"),
        ("free", f"tag{rank}", "different checkpoint tags"),
    ):
        with pytest.raises(CheckpointError, match=words):
            engine.save_checkpoint(tmp_path / place, tag)
        engine.wait_for_checkpoint()
    assert files(tmp_path) == ["occupied"]


@ranks(2)
def test_into_a_model_that_was_sharded_while_it_was_built(rank, world_size, tmp_path):
    engine = make(1)
    train(engine, 0, 2)
    engine.save_checkpoint(tmp_path)
    with zero.Init():
        model = mlp(9)
    other = make(3, model=lambda seed: model)
    other.load_checkpoint(tmp_path)
    assert same(weights(engine), weights(other))
    assert train(engine, 2, 3) == pytest.approx(train(other, 2, 3), rel=1e-6)
