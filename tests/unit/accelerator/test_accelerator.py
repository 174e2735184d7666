"""The accelerator on a CPU-only machine, the choice among devices, and the tables for the others."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from fullspeed.accelerator import (
    Accelerator,
    choose,
    get_accelerator,
    is_current_accelerator_supported,
    set_accelerator,
)
from fullspeed.accelerator.cpu import CpuAccelerator
from fullspeed.accelerator.device import DeviceAccelerator
from fullspeed.base.errors import UsageError

DOCUMENTED = (
    "is_synchronized_device use_host_timers resolves_data_dependency handles_memory_backpressure "
    "device_name device set_device current_device current_device_name device_count synchronize random "
    "set_rng_state get_rng_state manual_seed manual_seed_all initial_seed default_generator Stream "
    "stream current_stream default_stream Event empty_cache memory_allocated max_memory_allocated "
    "reset_max_memory_allocated memory_cached max_memory_cached reset_max_memory_cached memory_stats "
    "reset_peak_memory_stats memory_reserved max_memory_reserved total_memory available_memory amp "
    "is_available range_push range_pop lazy_call communication_backend_name "
    "communication_backend_version is_triton_supported prefer_triton_grouped_mm is_bf16_supported "
    "is_fp16_supported supported_dtypes create_graph capture_to_graph replay_graph BFloat16Tensor "
    "ByteTensor DoubleTensor FloatTensor HalfTensor IntTensor LongTensor pin_memory is_pinned "
    "unpin_memory on_accelerator export_envs visible_devices_envs set_visible_devices_envs "
    "get_compile_backend set_compile_backend "
)


@pytest.fixture(autouse=True)
def _choose_anew(monkeypatch):
    monkeypatch.setattr(choose, "_current", None)
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)


@pytest.fixture
def cpu():
    return CpuAccelerator()


@pytest.mark.parametrize("kind", [CpuAccelerator, DeviceAccelerator])
def test_documented_names_exist(kind):
    assert [name for name in DOCUMENTED.split() if not hasattr(kind, name)] == []
    assert not kind.__abstractmethods__


def test_choice_is_made_once():
    assert get_accelerator() is get_accelerator()
    assert is_current_accelerator_supported()


def test_environment_forces_the_cpu(monkeypatch):
    monkeypatch.setattr(choose, "_find_device_type", lambda: "cuda")
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    assert isinstance(get_accelerator(), CpuAccelerator)


def test_without_a_name_torch_decides(monkeypatch):
    monkeypatch.setattr(choose, "_find_device_type", lambda: "cuda")
    chosen = get_accelerator()
    assert isinstance(chosen, DeviceAccelerator)
    assert chosen.device_type == "cuda"
    monkeypatch.setattr(choose, "_current", None)
    monkeypatch.setattr(choose, "_find_device_type", lambda: None)
    assert isinstance(get_accelerator(), CpuAccelerator)


def test_absent_device_is_an_error_that_says_what_is_there(monkeypatch):
    monkeypatch.setattr(choose, "_find_device_type", lambda: None)
    monkeypatch.setenv("DS_ACCELERATOR", "cuda")
    with pytest.raises(UsageError, match=r"'cuda'.*finds only the CPU here"):
        get_accelerator()


def test_unknown_device_lists_the_known_ones(monkeypatch):
    monkeypatch.setenv("DS_ACCELERATOR", "gpu")
    with pytest.raises(UsageError, match="'gpu'; choose one of cuda, cpu"):
        get_accelerator()


def test_set_accelerator_wins(cpu):
    set_accelerator(cpu)
    assert get_accelerator() is cpu


def test_import_initialises_no_device():
    code = "import torch, fullspeed.accelerator as a; a.get_accelerator()\nassert not torch.cuda.is_initialized()"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_cpu_names(cpu):
    assert (cpu.device_name(), cpu.device_name(1), cpu.current_device_name()) == ("cpu", "cpu", "cpu")
    assert cpu.device(0) == torch.device("cpu")
    assert cpu.communication_backend_name() == "gloo"
    assert cpu.on_accelerator(torch.zeros(1))
    assert not cpu.on_accelerator(torch.zeros(1, device="meta"))


def test_cpu_devices_are_the_ranks_of_this_host(cpu, monkeypatch):
    assert (cpu.device_count(), cpu.current_device()) == (1, 0)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert (cpu.device_count(), cpu.current_device()) == (4, 3)


def test_cpu_dtypes(cpu):
    assert cpu.supported_dtypes() == [torch.float32, torch.float16, torch.bfloat16]
    assert cpu.has_native_matmul(torch.float32)
    assert not cpu.has_native_matmul(torch.int8)
    assert cpu.has_native_matmul(torch.bfloat16) == torch.ops.mkldnn._is_mkldnn_bf16_supported()
    assert cpu.has_native_matmul(torch.float16) == torch.ops.mkldnn._is_mkldnn_fp16_supported()


def test_cpu_peak_memory_follows_allocations_and_resets(cpu):
    cpu.reset_peak_memory_stats()
    before_bytes = cpu.max_memory_allocated()
    block = torch.ones(64 * 2**20, dtype=torch.uint8)
    during_bytes = cpu.max_memory_allocated()
    assert during_bytes - before_bytes > 48 * 2**20
    del block
    assert cpu.memory_stats()["allocated_bytes.all.peak"] >= during_bytes - 2**20
    cpu.reset_peak_memory_stats()
    assert cpu.max_memory_allocated() < during_bytes - 32 * 2**20
    assert cpu.memory_allocated() < cpu.total_memory()
    assert 0 < cpu.available_memory() <= cpu.total_memory()


def test_cpu_random_state_goes_there_and_back(cpu):
    cpu.manual_seed(3)
    assert cpu.initial_seed() == 3
    state = cpu.get_rng_state()
    first = torch.rand(4)
    cpu.set_rng_state(state)
    assert torch.equal(torch.rand(4), first)
    assert cpu.default_generator(0) is torch.default_generator


def test_cpu_streams_events_and_graphs_change_nothing(cpu):
    event = cpu.Event()
    with cpu.stream(cpu.current_stream()), cpu.capture_to_graph(cpu.create_graph()):
        total = torch.ones(2).sum()
    cpu.replay_graph(None)
    event.record()
    event.synchronize()
    cpu.synchronize()
    assert total.item() == 2
    called = []
    cpu.lazy_call(lambda: called.append(1))
    assert called == [1]


def test_cpu_pinning_is_identity(cpu):
    tensor = torch.zeros(3)
    assert cpu.pin_memory(tensor) is tensor
    assert cpu.is_pinned(tensor)
    assert cpu.unpin_memory(tensor) is tensor


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("BFloat16Tensor", torch.bfloat16), ("HalfTensor", torch.float16), ("LongTensor", torch.int64)],
)
def test_tensor_makers(cpu, name, dtype):
    made = getattr(cpu, name)([1, 2])
    assert made.dtype == dtype
    assert made.tolist() == [1, 2]


def test_compile_backend_must_be_known(cpu):
    assert cpu.get_compile_backend() == "inductor"
    cpu.set_compile_backend("eager")
    assert cpu.get_compile_backend() == "eager"
    with pytest.raises(ValueError, match="'fast'; choose one of"):
        cpu.set_compile_backend("fast")


def test_cuda_tables_need_no_device():
    cuda: Accelerator = DeviceAccelerator("cuda")
    assert (cuda.communication_backend_name(), cuda.device_name(), cuda.device_name(2)) == (
        "nccl",
        "cuda",
        "cuda:2",
    )
    assert not cuda.is_synchronized_device()
    child_env: dict[str, str] = {}
    cuda.set_visible_devices_envs(child_env, [1, 3])
    assert child_env == {"CUDA_VISIBLE_DEVICES": "1,3"}
    assert not torch.cuda.is_initialized()
