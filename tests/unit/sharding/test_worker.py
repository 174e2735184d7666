"""The thread of background updates: order, and errors that come out where they are waited for."""

import threading

import pytest
import torch

from fullspeed.base.errors import UpdateError
from fullspeed.comm import get_world_group
from fullspeed.sharding.worker import BackgroundWorker
from tests.ranks import ranks


def fail() -> None:
    raise ValueError("no such column")


@ranks(1)
def test_actions_run_in_order_in_one_other_thread(rank, world_size):
    worker = BackgroundWorker(1, get_world_group())
    seen = []
    futures = [worker.submit(lambda index=index: seen.append((index, threading.get_ident()))) for index in range(5)]
    worker.wait(futures)
    assert [index for index, _ in seen] == list(range(5))
    assert len({thread for _, thread in seen} - {threading.get_ident()}) == 1


@ranks(1)
def test_the_thread_computes_with_its_own_number_of_threads(rank, world_size):
    torch.set_num_threads(2)
    worker = BackgroundWorker(1, get_world_group())
    counted = worker.submit(torch.get_num_threads)
    worker.wait([counted])
    assert (counted.result(), torch.get_num_threads()) == (1, 2)


@ranks(2)
def test_a_failure_on_one_rank_is_raised_on_every_rank_and_once(rank, world_size):
    worker = BackgroundWorker(1, get_world_group())
    with pytest.raises(UpdateError, match=r"rank 1: an update in the background failed: ValueError: no such column"):
        worker.wait([worker.submit(fail if rank == 1 else list)])
    worker.wait([worker.submit(list)])
