"""Old names, normalised values, optimizer and scheduler parameters, and rules between keys."""

import copy
import pickle
from itertools import product

import pytest

from fullspeed.base import log
from fullspeed.base.errors import ConfigError
from fullspeed.config import load_config

DISK = {"device": "nvme", "nvme_path": "disk"}
PRECISIONS = ({}, {"bf16": {"enabled": True}}, {"fp16": {"enabled": True}})


def faults(source):
    with pytest.raises(ConfigError) as caught:
        load_config(source, check_supported=False)
    return {fault.path: str(fault) for fault in caught.value.faults}


def parse(source):
    return load_config(source, check_supported=False)


@pytest.fixture
def warnings(monkeypatch):
    said = []
    monkeypatch.setattr(log, "_said", set())
    monkeypatch.setattr(log, "log_dist", lambda message, **_: said.append(message))
    return said


@pytest.mark.parametrize("block", [{"device": "none"}, {}, {"device": "none", "nvme_path": "x"}, None])
@pytest.mark.parametrize("key", ["offload_param", "offload_optimizer"])
def test_a12_no_device_is_no_block(key, block):
    config = load_config({"zero_optimization": {"stage": 3, key: block}})
    assert config == load_config({"zero_optimization": {"stage": 3}})
    assert config.zero_optimization.offload_param is None


def test_a12_typos_in_a_block_without_device_are_still_faults():
    found = faults({"zero_optimization": {"offload_param": {"device": "none", "pin_memry": True}}})
    assert "zero_optimization.offload_param.pin_memry" in found


@pytest.mark.parametrize(
    ("precision", "stage", "accum"),
    list(product([{}, {"bf16": {"enabled": True}}, {"fp16": {"enabled": True}}], range(4), [None, "bf16", "fp32"])),
)
def test_a13_every_accumulation_dtype_loads(precision, stage, accum):
    config = load_config(
        {**precision, "zero_optimization": {"stage": stage}, "data_types": {"grad_accum_dtype": accum}}
    )
    assert config.data_types.grad_accum_dtype == accum
    assert config.precision_dtype() == next(iter(precision), "fp32")


def test_a8_warmup_without_maximum_leaves_it_to_the_optimizer():
    config = load_config(
        {
            "optimizer": {"type": "AdamW", "params": {"lr": 5e-7}},
            "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 100.0}},
        }
    )
    assert config.scheduler.params == {"warmup_num_steps": 100}
    assert config.optimizer.name == "adamw"
    assert config.optimizer.type == "AdamW"


def test_old_names_warn_and_work(warnings):
    zero = {"stage": 3, "stage3_gather_fp16_weights_on_model_save": True}
    assert load_config({"zero_optimization": zero}).zero_optimization.stage3_gather_16bit_weights_on_model_save
    assert "stage3_gather_16bit_weights_on_model_save" in warnings[0]
    load_config({"zero_optimization": zero})
    assert len(warnings) == 1


@pytest.mark.parametrize(
    ("block", "path"),
    [
        (
            {
                "stage3_gather_fp16_weights_on_model_save": True,
                "stage3_gather_16bit_weights_on_model_save": True,
            },
            "stage3_gather_16bit_weights_on_model_save",
        ),
        ({"prefetch_bucket_size": 1, "stage3_prefetch_bucket_size": 1}, "stage3_prefetch_bucket_size"),
        ({"stage": 1, "cpu_offload": True, "offload_optimizer": {"device": "cpu"}}, "cpu_offload"),
        ({"stage": 1, "cpu_offload": "yes"}, "cpu_offload"),
    ],
)
def test_both_names_are_a_fault(block, path):
    assert f"zero_optimization.{path}" in faults({"zero_optimization": block})


def test_both_bf16_names_are_a_fault():
    assert "another name" in faults({"bf16": {"enabled": True}, "bfloat16": {"enabled": True}})["bfloat16"]


def test_bfloat16_is_bf16():
    assert load_config({"bfloat16": {"enabled": True}}).precision_dtype() == "bf16"


@pytest.mark.parametrize("value", [True, False])
def test_zero_optimization_as_a_switch(value, warnings):
    zero = load_config({"zero_optimization": value}).zero_optimization
    assert zero.stage == int(value)
    assert warnings


def test_zero_switch_with_its_bucket_size():
    source = {"zero_optimization": True, "allgather_size": 1000}
    assert load_config(source).zero_optimization.allgather_bucket_size == 1000
    assert "allgather_size" in faults({"zero_optimization": {"stage": 1}, "allgather_size": 1000})


def test_cpu_offload_switches(warnings):
    block = {"stage": 3, "cpu_offload": True, "cpu_offload_param": True, "cpu_offload_use_pin_memory": False}
    zero = parse({"zero_optimization": block}).zero_optimization
    assert zero.offload_optimizer.device == zero.offload_param.device == "cpu"
    assert not zero.offload_optimizer.pin_memory
    assert load_config({"zero_optimization": {"cpu_offload": False}}).zero_optimization.offload_optimizer is None
    assert len(warnings) == 3  # the same text is said once


@pytest.mark.parametrize("old", ["sub_group_size", "stage3_sub_group_size"])
def test_stage3_names_with_and_without_prefix(old):
    assert load_config({"zero_optimization": {old: 7}}).zero_optimization.sub_group_size == 7


def test_documented_misspellings():
    config = parse({"aio": {"thread_count": 4}, "elasticity": {"prefer_large_batch": False}})
    assert config.aio.intra_op_parallelism == 4
    assert not config.elasticity.prefer_larger_batch


@pytest.mark.parametrize("kind", ["Adam", "ADAMW", "adagrad", "Lion", "LAMB", "muon", "OneBitAdam", "onebitlamb"])
def test_max_grad_norm_is_refused(kind):
    found = faults({"optimizer": {"type": kind, "params": {"lr": 0.1, "max_grad_norm": 1.0}}})
    assert "gradient_clipping" in found["optimizer.params.max_grad_norm"]


def test_max_grad_norm_is_refused_for_torch_classes_too():
    assert faults({"optimizer": {"type": "SGD", "params": {"max_grad_norm": 1.0}}})


@pytest.mark.parametrize(
    ("params", "key"),
    [
        ({"lr": -1}, "lr"),
        ({"lr": "1e-3"}, "lr"),
        ({"betas": [0.9]}, "betas.1"),
        ({"betas": [0.9, 0.99, 0.999]}, "betas"),
        ({"betas": [0.9, 1.5]}, "betas.1"),
        ({"betas": 0.9}, "betas"),
        ({"eps": -1e-8}, "eps"),
        ({"torch_adam": 1}, "torch_adam"),
        ({"weight_decay": float("nan")}, "weight_decay"),
        ({"momentum": 0.9}, "momentum"),
    ],
)
def test_adam_parameters_are_checked(params, key):
    assert f"optimizer.params.{key}" in faults({"optimizer": {"type": "Adam", "params": params}})


def test_torch_parameters_go_through():
    params = {"lr": 0.1, "momentum": 0.9, "nesterov": True, "anything": [1]}
    assert load_config({"optimizer": {"type": "SGD", "params": params}}).optimizer.params == params


def test_optimizer_needs_a_type():
    assert "required" in faults({"optimizer": {"params": {"lr": 0.1}}})["optimizer.type"]
    assert load_config({"optimizer": {"type": "adam"}}).optimizer.params == {}
    assert load_config({"optimizer": {"type": "adam", "params": None}}).optimizer.params == {}


@pytest.mark.parametrize(
    ("kind", "params", "key"),
    [
        ("WarmupDecayLR", {}, "total_num_steps"),
        ("WarmupCosineLR", {}, "total_num_steps"),
        ("OneCycle", {"cycle_min_lr": 0.1}, "cycle_max_lr"),
        ("WarmupLR", {"warmup_num_steps": 0}, "warmup_num_steps"),
        ("WarmupLR", {"warmup_num_steps": 1.5}, "warmup_num_steps"),
        ("WarmupLR", {"warmup_type": "cubic"}, "warmup_type"),
        ("LRRangeTest", {"lr_range_test_step_size": 0}, "lr_range_test_step_size"),
        ("LRRangeTest", {"lr_range_test_min_lr": "x"}, "lr_range_test_min_lr"),
    ],
)
def test_scheduler_parameters_are_checked(kind, params, key):
    assert f"scheduler.params.{key}" in faults({"scheduler": {"type": kind, "params": params}})


def test_rates_per_group():
    params = {"cycle_min_lr": [0.1, 0.2], "cycle_max_lr": 0.3}
    made = load_config({"scheduler": {"type": "OneCycle", "params": params}}).scheduler.params
    assert made == {"cycle_min_lr": (0.1, 0.2), "cycle_max_lr": 0.3}


@pytest.mark.parametrize(
    ("source", "path"),
    [
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "fp16.enabled"),
        ({"amp": {"enabled": True, "opt_level": "O1"}, "bf16": {"enabled": True}}, "amp.enabled"),
        ({"fp16": {"enabled": True, "min_loss_scale": 0}}, "fp16.min_loss_scale"),
        ({"data_types": {"param_dtype": "bf16"}}, "data_types.param_dtype"),
        ({"torch_autocast": {"enabled": True, "dtype": "fp32"}}, "torch_autocast.dtype"),
        ({"bf16": {"bf16_optimizer_states": True}}, "bf16.bf16_optimizer_states"),
        ({"bf16": {"bf16_master_weights_and_grads": True}}, "bf16.bf16_master_weights_and_grads"),
        ({"zero_optimization": {"legacy_stage1": True}}, "zero_optimization.legacy_stage1"),
        (
            {"zero_optimization": {"stage": 3, "elastic_checkpoint": True}},
            "zero_optimization.elastic_checkpoint",
        ),
        ({"zero_optimization": {"allgather_bucket_size": 5}}, "zero_optimization.allgather_bucket_size"),
        (
            {"zero_optimization": {"stage": 3, "compute_grad_norm": False}},
            "zero_optimization.compute_grad_norm",
        ),
        (
            {"gradient_clipping": 1, "zero_optimization": {"stage": 1, "compute_grad_norm": False}},
            "zero_optimization.compute_grad_norm",
        ),
        (
            {"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}},
            "zero_optimization.offload_param",
        ),
        (
            {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}},
            "zero_optimization.offload_optimizer",
        ),
        (
            {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme"}}},
            "zero_optimization.offload_optimizer.nvme_path",
        ),
        (
            {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}},
            "zero_optimization.offload_param.nvme_path",
        ),
        (
            {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}},
            "zero_optimization.offload_optimizer.ratio",
        ),
        (
            {"zero_optimization": {"stage": 3, "offload_param": DISK, "zero_hpz_partition_size": 2}},
            "zero_optimization.zero_hpz_partition_size",
        ),
        (
            {"zero_optimization": {"stage": 3, "offload_param": DISK, "zero_quantized_nontrainable_weights": True}},
            "zero_optimization.zero_quantized_nontrainable_weights",
        ),
        (
            {"zero_optimization": {"stage": 2, "offload_param": DISK}},
            "zero_optimization.offload_param",
        ),
        (
            {"zero_optimization": {"stage": 2, "offload_optimizer": {"super_offload": True}}},
            "zero_optimization.offload_optimizer.super_offload",
        ),
        (
            {"zero_optimization": {"stage": 0, "zenflow": {}}},
            "zero_optimization.zenflow",
        ),
        (
            {
                "zero_optimization": {
                    "stage": 2,
                    "zenflow": {},
                    "offload_optimizer": {"device": "nvme", "nvme_path": "/tmp"},
                }
            },
            "zero_optimization.zenflow",
        ),
        (
            {
                "zero_optimization": {
                    "stage": 2,
                    "zenflow": {},
                    "offload_optimizer": {"device": "cpu", "super_offload": True},
                }
            },
            "zero_optimization.zenflow",
        ),
        ({"gradient_allreduce_op": "sum", "zero_optimization": {"stage": 3}}, "gradient_allreduce_op"),
        ({"optimizer": {"type": "OneBitAdam"}, "zero_optimization": {"stage": 1}}, "optimizer.type"),
        ({"optimizer": {"type": "Lamb"}, "fp16": {"enabled": True, "loss_scale": 128}}, "fp16.loss_scale"),
        (
            {"managed_gradient_accumulation": False, "zero_optimization": {"stage": 1, "overlap_comm": True}},
            "zero_optimization.overlap_comm",
        ),
        (
            {"activation_checkpointing": {"contiguous_memory_optimization": True, "partition_activations": True}},
            "activation_checkpointing.contiguous_memory_optimization",
        ),
        ({"elasticity": {"enabled": True}, "train_batch_size": 8}, "elasticity.enabled"),
    ],
)
def test_refused_combinations(source, path):
    assert path in faults(source)


def test_rules_keep_quiet_about_keys_that_are_wrong_anyway():
    source = {"zero_optimization": {"stage": 7, "offload_param": {"device": "cpu"}}}
    assert list(faults(source)) == ["zero_optimization.stage"]


def test_rules_speak_although_another_key_is_wrong():
    found = faults({"dump_state": "no", "fp16": {"enabled": True}, "bf16": {"enabled": True}})
    assert set(found) == {"dump_state", "fp16.enabled"}


def test_case_of_choices():
    config = load_config({"checkpoint": {"tag_validation": "FAIL"}, "log_level": "INFO"})
    assert config.checkpoint.tag_validation == "Fail"
    assert config.log_level == "info"


def test_vocabulary_size_warns(warnings):
    load_config({"vocabulary_size": 50257})
    load_config({"vocabulary_size": 50304})
    assert len(warnings) == 1


def test_copies_and_pickles():
    config = load_config({"optimizer": {"type": "Adam", "params": {"lr": "auto"}}, "gradient_clipping": "auto"})
    assert copy.deepcopy(config) == config
    assert pickle.loads(pickle.dumps(config)) == config


def test_compression_and_elasticity_parse():
    quantize = {
        "shared_parameters": {"enabled": True, "quantize_groups": 4},
        "different_groups": {"g1": {"params": {"start_bits": 8, "target_bits": 4}, "modules": ["attn", "mlp"]}},
    }
    elastic = {"enabled": True, "micro_batch_sizes": [8, 10, 12], "version": 0.1}
    config = parse({"compression_training": {"weight_quantization": quantize}, "elasticity": elastic})
    group = config.compression_training.weight_quantization.different_groups["g1"]
    assert group.params.target_bits == 4
    assert group.modules == ("attn", "mlp")
    assert config.elasticity.micro_batch_sizes == (8, 10, 12)
    assert "elasticity.version" in faults({"elasticity": {"version": 0.3}})


def test_union_faults_leave_the_rest_of_their_section_in_place():
    zero = {"stage": 3, "zenflow": {"select_interval": "often"}, "elastic_checkpoint": True}
    assert set(faults({"zero_optimization": zero})) == {
        "zero_optimization.zenflow.select_interval",
        "zero_optimization.elastic_checkpoint",
    }


def test_item_faults_name_the_item():
    specs = [{"patterns": "a"}, {"partition_type": "diagonal"}, {"patern": "b"}]
    found = faults({"tensor_parallel": {"partition_config": {"layer_specs": specs}}})
    assert set(found) == {
        "tensor_parallel.partition_config.layer_specs.1.partition_type",
        "tensor_parallel.partition_config.layer_specs.2.patern",
    }
