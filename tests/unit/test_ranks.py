"""The helper that starts ranks: values, parameters, failures, deaths, time-outs, leftovers."""

from __future__ import annotations

import os
import signal
import subprocess
import time

import pytest
import torch
import torch.distributed as dist

from tests.ranks import RankError, ranks, run_ranks


@ranks(1, 2, 4)
def test_ranks_form_one_world(rank, world_size):
    assert (dist.get_rank(), dist.get_world_size()) == (rank, world_size)
    assert os.environ["RANK"] == os.environ["LOCAL_RANK"] == str(rank)
    assert os.environ["WORLD_SIZE"] == str(world_size)
    assert torch.get_num_threads() == 1
    total = torch.tensor([float(rank + 1)])
    dist.all_reduce(total)
    assert total.item() == world_size * (world_size + 1) / 2


@pytest.mark.parametrize("word", ["a b", "it's"])
@ranks(2)
def test_parameters_and_fixtures_reach_every_rank(rank, world_size, word, tmp_path):
    assert word in ("a b", "it's")
    (tmp_path / f"{rank}.txt").write_text(word)
    dist.barrier()
    assert len(list(tmp_path.iterdir())) == world_size


def _value(rank, world_size, offset, *, scale=1):
    return torch.arange(3) * scale + offset + rank


def test_values_come_back_in_rank_order():
    first, second = run_ranks(_value, 2, 10, scale=2)
    assert first.tolist() == [10, 12, 14]
    assert second.tolist() == [11, 13, 15]


def _raise_on_last(rank, world_size):
    if rank == world_size - 1:
        raise ValueError("the cause")
    dist.barrier()


def test_first_failing_rank_is_named_with_its_traceback():
    match = r"rank 2 failed:[\s\S]*_raise_on_last[\s\S]*ValueError: the cause"
    with pytest.raises(RankError, match=match) as failure:
        run_ranks(_raise_on_last, 3)
    assert failure.value.rank == 2


def _assert_with_locals(rank, world_size):
    seen = rank + 40
    assert seen == 40


def test_failed_assert_shows_the_values_beside_it():
    with pytest.raises(RankError, match="seen = 41"):
        run_ranks(_assert_with_locals, 2)


def _die(rank, world_size):
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def test_dead_rank_is_reported_at_once():
    start = time.monotonic()
    with pytest.raises(RankError, match="SIGKILL"):
        run_ranks(_die, 2)
    assert time.monotonic() - start < 30


def _hang(rank, world_size, folder):
    child = subprocess.Popen(["sleep", "100"])
    (folder / f"{rank}").write_text(f"{os.getpid()} {child.pid}")
    if rank == 1:
        time.sleep(100)


def _is_running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_hanging_rank_is_killed_with_its_children_and_shows_where_it_stands(tmp_path):
    with pytest.raises(RankError, match=r"not finished after 3 s: ranks 1[\s\S]*_hang"):
        run_ranks(_hang, 2, tmp_path, timeout_s=3)
    pids = [int(pid) for file in tmp_path.iterdir() for pid in file.read_text().split()]
    assert len(pids) == 4
    deadline = time.monotonic() + 10
    while any(map(_is_running, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(_is_running, pids))


def _own_env(rank, world_size):
    return os.environ.get("RANKS_TEST_VARIABLE")


def test_environment_of_the_caller_is_seen(monkeypatch):
    assert run_ranks(_own_env, 1) == [None]
    monkeypatch.setenv("RANKS_TEST_VARIABLE", "7")
    assert run_ranks(_own_env, 1) == ["7"]


def test_body_must_be_importable():
    with pytest.raises(TypeError, match="module level"):
        run_ranks(lambda rank, world_size: None, 1)
    with pytest.raises(TypeError, match="rank, world_size"):

        @ranks(2)
        def missing_rank(world_size):
            pass
