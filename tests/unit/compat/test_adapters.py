"""Optimizers, tensors and configurations under DeepSpeed's names and arguments."""

from __future__ import annotations

import collections
import copy

import pytest
import torch

from fullspeed.base.errors import ConfigError, UsageError
from fullspeed.compat import bwc, constants, factories, groups, optimizers, tensors
from fullspeed.compat.builders import AsyncIOBuilder
from fullspeed.compat.config import DeepSpeedConfig
from fullspeed.optim.cpu import CPUAdam
from fullspeed.optim.factory import is_shardable
from fullspeed.optim.lion import Lion


def stepped(make, num_steps=3):
    """A parameter after some steps with fixed gradients."""
    torch.manual_seed(0)
    param = torch.nn.Parameter(torch.randn(5))
    optimizer = make([param])
    assert is_shardable(optimizer)
    for _ in range(num_steps):
        param.grad = torch.randn(5)
        optimizer.step()
    return param.detach()


ADAM = {"lr": 0.1, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.1}


@pytest.mark.parametrize(
    ("ours", "expected"),
    [
        (lambda p: optimizers.FusedAdam(p, **ADAM), lambda p: torch.optim.AdamW(p, **ADAM)),
        (lambda p: optimizers.FusedAdam(p, **ADAM, adam_w_mode=False), lambda p: torch.optim.Adam(p, **ADAM)),
        (lambda p: CPUAdam(p, **ADAM), lambda p: torch.optim.AdamW(p, **ADAM)),
        (lambda p: CPUAdam(p, **ADAM, adamw_mode=False), lambda p: torch.optim.Adam(p, **ADAM)),
        (
            lambda p: optimizers.DeepSpeedCPUAdagrad(p, lr=0.1, adamw_mode=True),
            lambda p: torch.optim.Adagrad(p, lr=0.1),
        ),
        (lambda p: optimizers.DeepSpeedCPULion(p, lr=0.1, adamw_mode=True), lambda p: Lion(p, lr=0.1)),
        (lambda p: optimizers.FusedLion(p, lr=0.1), lambda p: Lion(p, lr=0.1)),
    ],
)
def test_optimizers_step_as_what_they_stand_for(ours, expected):
    torch.testing.assert_close(stepped(ours), stepped(expected), rtol=1e-6, atol=1e-7)


def test_lamb_and_refusals():
    assert stepped(lambda p: optimizers.FusedLamb(p, lr=0.1)).isfinite().all()
    with pytest.raises(UsageError, match="gradient_clipping"):
        optimizers.FusedLamb([torch.nn.Parameter(torch.ones(1))], max_grad_norm=1.0)
    with pytest.raises(UsageError, match="in the configuration instead"):
        optimizers.FusedAdam([torch.nn.Parameter(torch.ones(1))], bias_correction=False)
    with pytest.raises(UsageError, match="amsgrad"):
        optimizers.FusedAdam([torch.nn.Parameter(torch.ones(1))], amsgrad=True)


def test_copies_for_saving_keep_containers_and_no_more_memory_than_they_need():
    flat = torch.arange(1000.0)
    Point = collections.namedtuple("Point", "x y")
    item = collections.OrderedDict(a=flat[3:5], b=[Point(flat[:1], 2)])
    copied = tensors.clone_tensors_for_torch_save(item)
    assert type(copied) is collections.OrderedDict
    assert type(copied["b"][0]) is Point
    assert copied["a"].tolist() == [3.0, 4.0]
    assert copied["a"].untyped_storage().nbytes() == 8
    assert copied["b"][0].y == 2
    moved = tensors.move_to_device([flat, flat[:1]], "meta", lambda tensor: tensor.numel() == 1)
    assert [tensor.device.type for tensor in moved] == ["cpu", "meta"]


def test_optimizers_can_be_copied():
    param = torch.nn.Parameter(torch.ones(2))
    copied = copy.deepcopy(optimizers.FusedAdam([param], lr=0.5))
    assert copied.param_groups[0]["lr"] == 0.5


def test_small_functions():
    param = torch.nn.Parameter(torch.zeros(2))
    param.grad = torch.tensor([3.0, 4.0])
    assert tensors.clip_grad_norm_([param], 1.0) == 5
    assert param.grad.norm() == pytest.approx(1.0, abs=1e-5)
    assert tensors.get_global_norm([3, 4]) == 5
    assert tensors.get_only_unique_item([2, 2]) == 2
    with pytest.raises(UsageError, match="got 2"):
        tensors.get_only_unique_item([1, 2])
    assert constants.required_torch_version(min_version=2.0)
    assert not constants.required_torch_version(max_version=1.13)
    assert constants.instrument_w_nvtx(lambda x: x + 1)(1) == 2
    assert groups._get_sequence_parallel_world_size() == 1
    with pytest.raises(UsageError, match="ep_size is 2"):
        groups.initialize(ep_size=2)


def test_factories_narrow_only_what_has_no_dtype():
    make = factories.zero_wrapper_for_fp_tensor_constructor(torch.ones, torch.bfloat16, torch.device("cpu"))
    assert make(2).dtype == torch.bfloat16
    assert make(2, dtype=torch.float64).dtype == torch.float64
    assert factories._orig_torch_arange is torch.arange


def test_a_configuration_is_an_object():
    config = DeepSpeedConfig(
        {"train_batch_size": 8, "gradient_accumulation_steps": 2, "zero_optimization": {"stage": 2}}
    )
    assert config.train_micro_batch_size_per_gpu == 4
    assert config.zero_optimization_stage == 2
    assert config.zero_enabled
    assert config.gradient_clipping == 0.0
    with pytest.raises(ConfigError, match="gradient_clipping"):
        DeepSpeedConfig({"train_batch_size": 8, "gradient_clipp1ng": 1})


def test_file_access_through_its_builder(tmp_path):
    handle = AsyncIOBuilder().load().aio_handle(block_size=4096)
    values, found = torch.arange(1000.0), torch.zeros(1000)
    assert handle.sync_pwrite(values, str(tmp_path / "file")) == 1
    assert handle.sync_pread(found, str(tmp_path / "file")) == 1
    assert torch.equal(found, values)


def test_overflow_is_found_in_gradients_and_norms():
    good, bad = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))
    good.grad = torch.ones(2)
    check = tensors.CheckOverflow([[good], [bad]])
    assert not check.check()
    bad.grad = torch.tensor([1.0, float("nan")])
    assert check.check()
    assert not check.check([[good]])
    assert check.has_overflow([bad])
    assert check.check_using_norm([1.0, float("inf")])
    assert check.check_using_norm([-1.0])
    assert not check.check_using_norm([1.0, 2.0])


def test_small_names_of_runtime_utils(caplog):
    assert tensors.call_to_str("step") == "step()"
    assert tensors.call_to_str("step", 1, lr=0.1) == "step(1, lr=0.1)"
    param = torch.nn.Parameter(torch.ones(1))
    assert tensors.DummyOptim(iter([param])).param_groups == [{"params": [param]}]
    assert constants.ZeroStageEnum(3) is constants.ZeroStageEnum.max_stage is constants.ZeroStageEnum.weights
    logged = []
    constants.logger.addFilter(lambda record: logged.append(record.getMessage()) or True)
    try:
        constants.memory_status("after the step", reset_max=True)
        constants.memory_status("not here", print_rank=1)
    finally:
        constants.logger.filters.pop()
    assert len(logged) == 1
    assert logged[0].startswith("after the step: rank 0, allocated=")


def test_an_mpu_of_any_generation_is_understood():
    class Old:
        def get_model_parallel_rank(self):
            return 3

        def get_model_parallel_group(self):
            return "group"

    class New(Old):
        def get_tensor_model_parallel_rank(self):
            return 5

        def get_slice_parallel_world_size(self):
            return 8

    assert bwc.bwc_tensor_model_parallel_rank() == 0
    assert bwc.bwc_tensor_model_parallel_world_size() == 1
    assert bwc.bwc_tensor_model_parallel_group() is None
    assert bwc.bwc_tensor_model_parallel_rank(Old()) == 3
    assert bwc.bwc_tensor_model_parallel_group(Old()) == "group"
    assert bwc.bwc_tensor_model_parallel_rank(New()) == 5
    assert bwc.bwc_tensor_model_parallel_world_size(New()) == 8
    with pytest.raises(AttributeError, match="get_model_parallel_world_size"):
        bwc.bwc_tensor_model_parallel_world_size(Old())


def test_optimizer_flags_mark_what_muon_orthogonalises():
    model = torch.nn.ModuleDict({"embed": torch.nn.Embedding(3, 2), "inner": torch.nn.Linear(2, 2)})
    batch = {"train_batch_size": 1}
    constants.set_optimizer_flags(DeepSpeedConfig(batch | {"optimizer": {"type": "Adam"}}), model)
    assert not hasattr(model["inner"].weight, "use_muon")
    constants.set_optimizer_flags(DeepSpeedConfig(batch | {"optimizer": {"type": "Muon"}}), model)
    assert {name: param.use_muon for name, param in model.named_parameters()} == {
        "embed.weight": False,
        "inner.weight": True,
        "inner.bias": False,
    }
