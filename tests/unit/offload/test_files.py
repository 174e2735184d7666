"""Tensors come back from files as they went in, through every engine; what goes wrong is said with the file's name."""

from __future__ import annotations

import errno
import os
import pathlib

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fullspeed.base.errors import StorageError, UsageError
from fullspeed.offload import files
from fullspeed.offload.aio_handle import AioHandle
from fullspeed.offload.buffers import ALIGNMENT_BYTES, BufferPool, aligned_empty, bytes_of
from fullspeed.offload.engine import ENGINES, Settings, make_engine, obstacle
from fullspeed.offload.files import File
from fullspeed.offload.store import FileStore

HERE = [name for name in ENGINES if not obstacle(name)]
NUMELS = [0, 1, 3, 1023, 1024, 1025, 4096, 20_000]


@pytest.fixture(params=HERE)
def engine(request):
    made = make_engine(Settings(block_bytes=8192, depth=3, engine=request.param))
    assert made.name == request.param
    yield made
    made.close()


@pytest.fixture
def store(tmp_path, engine):
    made = FileStore(tmp_path / "deep" / "tensors", engine)
    yield made
    if made.path.exists():
        made.close()


def random(numel: int, dtype: torch.dtype = torch.float32, *, is_aligned: bool = True) -> torch.Tensor:
    made = aligned_empty(numel, dtype) if is_aligned else torch.empty(numel + 1, dtype=dtype)[1:]
    bytes_of(made).random_(0, 256)
    return made


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    numels=st.lists(st.sampled_from(NUMELS), min_size=1, max_size=6),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.uint8]),
    is_aligned=st.booleans(),
    is_direct=st.booleans(),
)
def test_tensors_come_back_bit_for_bit(tmp_path, engine, numels, dtype, is_aligned, is_direct):
    with pytest.MonkeyPatch.context() as patch:
        if not is_direct:
            patch.setattr(files, "_open_direct", lambda path, flags: None)
        store = FileStore(tmp_path / "tensors", engine)
    for _ in range(2):  # the second time over what is there
        wanted = {str(index): random(numel, dtype, is_aligned=is_aligned) for index, numel in enumerate(numels)}
        for handle in [store.submit_write(name, tensor) for name, tensor in wanted.items()]:
            handle.wait()
        # Into the other kind of memory: what went past the page cache is read through it, and the reverse.
        found = {name: random(len(tensor), dtype, is_aligned=not is_aligned) for name, tensor in wanted.items()}
        for handle in [store.submit_read(name, found[name]) for name in store.names()]:
            handle.wait()
        for name, tensor in wanted.items():
            assert torch.equal(bytes_of(found[name]), bytes_of(tensor))
    store.close()
    assert not store.path.exists()


def test_direct_transfers_are_used_where_the_file_system_has_them(tmp_path, engine):
    file = File(tmp_path / "file", engine, is_writable=True)
    assert file.is_direct == hasattr(os, "O_DIRECT")
    parts = file._cut(random(4 * 4096 + 5, torch.uint8), 0)
    assert [(part.begin, part.end) for part in parts] == [(0, 16384), (16384, 16389)]
    assert parts[0].descriptor != parts[1].descriptor == file.descriptor
    assert [part.descriptor for part in file._cut(random(9000, torch.uint8, is_aligned=False), 0)] == [file.descriptor]
    assert [part.descriptor for part in file._cut(random(8192, torch.uint8), 100)] == [file.descriptor]
    file.close()


def test_many_blocks_are_under_way_at_once_and_waited_for_in_any_order(store):
    tensors = {str(index): random(50_000) for index in range(12)}
    store.reserve((name, tensor.shape, tensor.dtype) for name, tensor in tensors.items())
    handles = [store.submit_write(name, tensor) for name, tensor in tensors.items()]
    for handle in reversed(handles):
        handle.wait()
        handle.wait()
    found = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
    reads = [store.submit_read(name, found[name]) for name in tensors]
    for index in (5, 0, 11, *range(12)):
        reads[index].wait()
    assert all(torch.equal(bytes_of(found[name]), bytes_of(tensor)) for name, tensor in tensors.items())
    assert store.nbytes == os.stat(store.path).st_size == 12 * 200_704


def test_a_tensor_of_another_size_or_dtype_or_name_is_refused(store):
    store.submit_write("w", torch.zeros(5)).wait()
    for wrong in (torch.zeros(6), torch.zeros(5, dtype=torch.int32)):
        with pytest.raises(UsageError, match=r"w in .*tensors is torch.float32 of shape \(5,\), not"):
            store.submit_read("w", wrong)
    with pytest.raises(UsageError, match="no tensor 'v'"):
        store.submit_read("v", torch.zeros(5))
    with pytest.raises(UsageError, match="contiguous"):
        store.submit_write("t", torch.zeros(4, 4)[:, :2])
    with pytest.raises(UsageError, match="wait for that first"):
        (store.submit_write("big", torch.zeros(1 << 20)), store.submit_read("big", torch.zeros(1 << 20)))


def test_a_file_cut_short_or_vanished_is_named(store):
    tensor = random(30_000)
    store.submit_write("w", tensor).wait()
    os.truncate(store.path, 50_001)
    with pytest.raises(StorageError, match=r"cannot read 120000 bytes at 0 of .*tensors: it ends before, at 50001"):
        store.submit_read("w", torch.empty_like(tensor)).wait()
    os.unlink(store.path)
    with pytest.raises(StorageError, match="tensors has vanished"):
        store.submit_read("w", torch.empty_like(tensor))


def test_a_full_disk_is_said_before_anything_is_written(store, monkeypatch):
    def full(descriptor, offset, nbytes):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(StorageError, match=r"cannot reserve 4096 bytes for .*No space left on device; free space"):
        store.submit_write("w", torch.zeros(5))


def test_errors_of_the_system_reach_the_waiter(tmp_path, engine):
    (tmp_path / "file").write_bytes(b"x" * 9000)
    file = File(tmp_path / "file", engine, is_writable=False)
    with pytest.raises(StorageError, match=r"cannot write 9000 bytes at 0 of .*file: Bad file descriptor"):
        file.submit(random(9000, torch.uint8), 0, is_write=True).wait()
    file.close()
    with pytest.raises(StorageError, match=r"cannot open .*removed, or its folder never made"):
        File(tmp_path / "absent" / "file", engine, is_writable=True)
    (tmp_path / "plain").write_bytes(b"")
    with pytest.raises(StorageError, match="cannot make folder"):
        FileStore(tmp_path / "plain" / "tensors", engine)


def test_an_engine_that_cannot_be_had_says_why(monkeypatch):
    monkeypatch.setattr("fullspeed.offload.engine.native.load", lambda: "not built: no compiler")
    with pytest.raises(StorageError, match="engine threads: the native library not built: no compiler"):
        make_engine(Settings(engine="threads"))
    assert make_engine().name == "python"


def test_buffers_are_aligned_reused_and_counted():
    pool = BufferPool(2, 5000)
    assert pool.total_bytes == 2 * 8192
    first, second = pool.acquire(2048, torch.float32), pool.acquire(3, torch.bfloat16)
    assert (len(first), len(second), pool.num_in_use) == (2048, 3, 2)
    assert first.data_ptr() % ALIGNMENT_BYTES == second.data_ptr() % ALIGNMENT_BYTES == 0
    with pytest.raises(UsageError, match="all 2 buffers are in use"):
        pool.acquire(1, torch.uint8)
    address = first.data_ptr()
    pool.release(first)
    assert pool.num_in_use == 1
    with pytest.raises(UsageError, match="released before"):
        pool.release(first)
    with pytest.raises(UsageError, match="9000 bytes do not fit in a buffer of 8192"):
        pool.acquire(9000, torch.uint8)
    assert pool.acquire(7, torch.int64).data_ptr() == address


def test_the_aio_handle_reads_what_it_wrote(tmp_path: pathlib.Path):
    handle = AioHandle(block_size=8192, queue_depth=4, intra_op_parallelism=2)
    assert (handle.get_block_size(), handle.get_queue_depth(), handle.get_intra_op_parallelism()) == (8192, 4, 2)
    locked = handle.new_cpu_locked_tensor(10_000, torch.zeros(0))
    locked.copy_(torch.randn(10_000))
    other, path = torch.randn(33), str(tmp_path / "a")
    assert handle.sync_pwrite(locked, path) == 1
    handle.async_pwrite(other, path, 40_000)
    handle.async_pwrite(other, str(tmp_path / "b"))
    assert handle.wait() == 2
    assert os.stat(path).st_size == 40_000 + 132
    found, tail = torch.empty(10_000), torch.empty(33)
    handle.pread(found, path, False, True)
    assert handle.read(tail, path, False, 40_000) == 2
    assert torch.equal(found, locked)
    assert torch.equal(tail, other)
    with pytest.raises(StorageError, match=r"b has 132 bytes, 132 from 0 on; .* needs 40000"):
        handle.sync_pread(found, str(tmp_path / "b"))
    with pytest.raises(StorageError, match=r"cannot read .*absent: No such file"):
        handle.sync_pread(found, str(tmp_path / "absent"))
    assert handle.free_cpu_locked_tensor(locked)
    assert not handle.free_cpu_locked_tensor(other)
