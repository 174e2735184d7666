"""Resident values in a file: buffers go to whoever needs them, nothing read or written is lost, failures are noted."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from fullspeed.base.errors import ConfigError, StorageError, UsageError
from fullspeed.comm.transport import NullTransport
from fullspeed.config.sharding import OffloadParam
from fullspeed.offload.buffers import BufferPool
from fullspeed.offload.disk import Disk
from fullspeed.offload.engine import Settings
from fullspeed.precision.policy import PrecisionPolicy
from fullspeed.sharding.file_plan import plan_files
from fullspeed.sharding.file_resident import FileResident, ValueFiles
from fullspeed.sharding.links import GroupLinks
from fullspeed.sharding.plan import GroupKey, PlannedGroup

NUMEL = 1025
FP32 = PrecisionPolicy(param=None, compute=None, grad_accum=None, wire=None, buffers=None)


@pytest.fixture
def links() -> GroupLinks:
    alone = NullTransport()
    return GroupLinks(
        dp_group=None, shard_group=None, rank=0, world_size=1, replica=0, num_replicas=1,
        gather=alone, unshard=alone, reduce=alone, node=None,
    )  # fmt: skip


@pytest.fixture
def files(tmp_path: pathlib.Path, links: GroupLinks) -> Iterator[ValueFiles]:
    """Two buffers, each for one group."""
    made = ValueFiles(Disk(tmp_path, Settings()), BufferPool(2, NUMEL * 4), links, ["here"])
    yield made
    made.close()
    assert made.pool.num_in_use == 0
    assert list(tmp_path.iterdir()) == []


def residents(files: ValueFiles, links: GroupLinks, count: int) -> list[FileResident]:
    """The values of group i are i, i + 1, ..."""
    return [FileResident(f"group {i}", torch.arange(NUMEL) + float(i), files, links) for i in range(count)]


def test_more_groups_than_buffers(files: ValueFiles, links: GroupLinks) -> None:
    groups = residents(files, links, 5)
    assert files.pool.num_in_use == 2, "the last ones are still being written"
    for i, group in enumerate(groups):
        full = torch.empty(NUMEL)
        group.all_gather(full, exact=False).wait()
        assert torch.equal(full, torch.arange(NUMEL) + float(i))
    files.flush()
    assert files.pool.num_in_use == 0
    assert sum(group.disk_nbytes() for group in groups) == 5 * NUMEL * 4
    assert sum(group.nbytes() for group in groups) == 0


def test_what_is_read_ahead_gives_way_and_what_is_awake_does_not(files: ValueFiles, links: GroupLinks) -> None:
    first, second, third, fourth = residents(files, links, 4)
    files.flush()
    awake = first.wake()
    second.begin_wake()
    assert not files.has_free_buffer
    third.begin_wake()  # no room: it starts when somebody needs it
    assert third.wake()[0] == 2
    assert awake[0] == 0
    with pytest.raises(UsageError, match="buffer_count"):
        fourth.wake()
    third.begin_sleep(changed=False)
    assert fourth.wake()[0] == 3
    fourth.begin_sleep(changed=False)
    first.begin_sleep(changed=False)


def test_changes_are_kept_and_only_changes_are_written(files: ValueFiles, links: GroupLinks) -> None:
    group, other = residents(files, links, 2)
    files.flush()
    outer, inner = group.wake(), group.wake()
    assert outer.data_ptr() == inner.data_ptr()
    inner[3] = -1.0
    group.begin_sleep(changed=True)
    assert group.is_awake
    group.begin_sleep(changed=False)
    assert group.is_being_written
    with group.editing() as values:
        assert values[3] == -1.0
        values[4] = -2.0
    assert group.values.tolist()[2:6] == [2.0, -1.0, -2.0, 5.0]
    other.wake()[0] = 9.0
    other.begin_sleep(changed=False)  # said not to be changed: not written
    assert other.values[0].item() == 1.0
    group.refresh(torch.full((NUMEL,), 0.1, dtype=torch.float64))
    assert group.values.unique().tolist() == [torch.tensor(0.1).item()]


def test_a_failure_is_noted_given_as_nan_and_raised_once(
    files: ValueFiles, links: GroupLinks, tmp_path: pathlib.Path
) -> None:
    (group,) = residents(files, links, 1)
    files.flush()
    with files.store.path.open("r+b") as file:
        file.truncate(100)
    full = torch.empty(NUMEL)
    group.all_gather(full, exact=False).wait()
    assert full.isnan().all(), "peers wait for something, and nobody may take it for values"
    assert files.failure is not None
    files.raise_failures([])
    assert files.failure is not None, "no rank has told the others yet"
    with pytest.raises(StorageError, match=r"rank 0 \(here\).*cut short"):
        files.raise_failures([0])
    files.raise_failures([])
    assert files.failure is None
    with pytest.raises(StorageError, match="cut short"):
        group.values.sum()


# ------------------------------------------------------------------------ the choice


def planned(*numels: int) -> list[PlannedGroup]:
    key = GroupKey(torch.float32, torch.device("cpu"), requires_grad=True, wire=None, always_sharded=False)
    return [PlannedGroup(key, [(f"p{i}", nn.Parameter(torch.empty(numel)))]) for i, numel in enumerate(numels)]


def disk(**settings: int) -> OffloadParam:
    return OffloadParam.model_validate({"device": "nvme", "nvme_path": "x", "max_in_cpu": 0, **settings})


def test_which_groups_wait_and_how_large_their_buffers_are() -> None:
    groups = planned(160, 320, 32, 640)
    assert plan_files(groups, (), None, FP32, 2).waiting == frozenset()
    assert plan_files(groups, (), disk(), FP32, 2) == (frozenset({0, 1, 2, 3}), 640 // 2 * 4)
    assert plan_files(groups, {3}, disk(), FP32, 2) == (frozenset({0, 1, 2}), 320 // 2 * 4)
    # A rank keeps 80 elements of the first group; 150 more do not hold 160, and then no later group stays.
    assert plan_files(groups, (), disk(max_in_cpu=230), FP32, 2).waiting == {1, 2, 3}
    assert plan_files(groups, (), disk(max_in_cpu=10**9), FP32, 2).waiting == frozenset()


def test_the_largest_shard_that_waits_must_fit_a_buffer() -> None:
    groups = planned(160, 320, 640)
    assert plan_files(groups, (), disk(buffer_size=320), FP32, 2).waiting == {0, 1, 2}
    with pytest.raises(ConfigError, match=r"buffer_size is 100: .* p2, .* 640 elements, has 320 .*set it to 320"):
        plan_files(groups, (), disk(buffer_size=100), FP32, 2)
    assert plan_files(groups, (), disk(buffer_size=10, max_in_cpu=1000), FP32, 2).buffer_bytes == 0
