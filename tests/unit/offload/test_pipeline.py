"""Groups stream through buffers: every plan is legal, overlaps what it says, and nothing stays in use."""

from __future__ import annotations

import itertools

import pytest
import torch

from fullspeed.base.errors import StorageError
from fullspeed.offload.buffers import BufferPool
from fullspeed.offload.engine import ENGINES, Settings, make_engine, obstacle
from fullspeed.offload.pipeline import plan, stream
from fullspeed.offload.store import FileStore


@pytest.mark.parametrize("pipeline_write", [False, True])
@pytest.mark.parametrize("pipeline_read", [False, True])
def test_every_plan_is_legal_and_overlaps_what_it_says(pipeline_read, pipeline_write):
    order = ["read", "await read", "compute", "write", "await write"]
    for num_groups, num_buffers in itertools.product(range(8), range(1, 6)):
        actions = plan(num_groups, num_buffers, pipeline_read=pipeline_read, pipeline_write=pipeline_write)
        holder, reads_in_compute, writes_in_compute = {}, 0, 0
        reading, writing = set(), set()
        for kind, group in actions:
            buffer = group % num_buffers
            if kind == "read":
                assert buffer not in holder, "the buffer is in use"
                holder[buffer] = group
                reading.add(group)
            assert holder[buffer] == group
            if kind == "await read":
                reading.remove(group)
            if kind == "compute":
                reads_in_compute = max(reads_in_compute, len(reading))
                writes_in_compute = max(writes_in_compute, len(writing))
            if kind == "write":
                writing.add(group)
            if kind == "await write":
                writing.remove(group)
                del holder[buffer]
        assert not holder
        for group in range(num_groups):
            assert [kind for kind, of in actions if of == group] == order
        assert [of for kind, of in actions if kind == "compute"] == list(range(num_groups))
        if num_groups > num_buffers:
            assert reads_in_compute == (max(0, num_buffers - 1 - pipeline_write) if pipeline_read else 0)
            assert (writes_in_compute > 0) == (pipeline_write and num_buffers > 1)


NAMES = [[f"{kind}{group}" for kind in ("mean", "square")] for group in range(5)]


@pytest.fixture(params=[name for name in ENGINES if not obstacle(name)])
def store(request, tmp_path):
    engine = make_engine(Settings(block_bytes=4096, depth=2, engine=request.param))
    made = FileStore(tmp_path / "states", engine)
    for index, name in enumerate(itertools.chain.from_iterable(NAMES)):
        made.submit_write(name, torch.full((1000 + index, 2), float(index))).wait()
    yield made
    made.close()
    engine.close()


def values(store: FileStore) -> list[float]:
    found = []
    for name in store.names():
        tensor = torch.empty(store.slot(name).shape)
        store.submit_read(name, tensor).wait()
        assert (tensor == tensor[0, 0]).all()
        found.append(tensor[0, 0].item())
    return found


@pytest.mark.parametrize(("num_buffers", "pipelined"), [(1, False), (2, True), (4, True)])
def test_every_tensor_is_computed_with_once_and_written_back(store, num_buffers, pipelined):
    pool = BufferPool(num_buffers, 1 << 15)
    seen = []

    def compute(group, tensors):
        seen.append((group, list(tensors)))
        for tensor in tensors.values():
            tensor.mul_(10).add_(group)

    stream(store, pool, NAMES, compute, pipeline_read=pipelined, pipeline_write=pipelined)
    assert seen == list(enumerate(NAMES))
    assert values(store) == [10 * index + index // 2 for index in range(10)]
    assert pool.num_in_use == 0


def test_after_a_failure_no_buffer_is_in_use_and_earlier_groups_are_written(store):
    pool = BufferPool(3, 1 << 15)

    def compute(group, tensors):
        if group == 2:
            raise StorageError("failed on purpose")
        for tensor in tensors.values():
            tensor.neg_()

    with pytest.raises(StorageError, match="on purpose"):
        stream(store, pool, NAMES, compute)
    assert pool.num_in_use == 0
    assert values(store) == [0, -1, -2, -3, 4, 5, 6, 7, 8, 9]
