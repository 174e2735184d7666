"""Leftover blocks of features this version lacks are errors; blocks that ask for nothing are not (A15)."""

import pytest

from fullspeed.base.errors import ConfigError
from fullspeed.config import check_offload, check_supported, load_config
from fullspeed.config.root import Config
from fullspeed.config.supported import ENABLED, MISSING, value_at

CPU = {"device": "cpu"}


@pytest.mark.parametrize(
    ("source", "path"),
    [
        *(({block: {"enabled": True}}, f"{block}.enabled") for block in ENABLED if "." not in block),
        ({"zero_optimization": {"enable_sanity_checks": True}}, "zero_optimization.enable_sanity_checks"),
        ({"zero_optimization": {"weight_quantization": {}}}, "zero_optimization.weight_quantization"),
        ({"pipeline": {"stages": 2}}, "pipeline"),
        ({"tensor_parallel": {"autotp_size": 2}}, "tensor_parallel"),
        ({"sequence_parallel_size": 2}, "sequence_parallel_size"),
        ({"checkpoint": {"writer": {"type": "mock"}}}, "checkpoint.writer.type"),
        ({"sparse_attention": {"mode": "fixed"}}, "sparse_attention"),
        ({"sparse_gradients": True}, "sparse_gradients"),
        ({"graph_harvesting": True}, "graph_harvesting"),
        ({"compile": {"deepcompile": True}}, "compile.deepcompile"),
        ({"optimizer": {"type": "OneBitAdam"}}, "optimizer.type"),
        ({"optimizer": {"type": "LBFGS"}}, "optimizer.type"),
        (
            {"compression_training": {"row_pruning": {"shared_parameters": {"enabled": True}}}},
            "compression_training.row_pruning.shared_parameters.enabled",
        ),
    ],
)
def test_a15_unbuilt_features_are_errors(source, path):
    with pytest.raises(ConfigError, match="not available in this version of FullSpeed") as caught:
        load_config(source)
    assert path in [fault.path for fault in caught.value.faults]
    config = load_config(source, check_supported=False)
    with pytest.raises(ConfigError, match="not available"):
        check_supported(config)


def test_blocks_that_ask_for_nothing_pass():
    source = {block: {"enabled": False} for block in ENABLED if "." not in block}
    source |= {"pipeline": {"stages": "auto"}, "activation_checkpointing": {"profile": True}}
    source |= {"sequence_parallel_size": 1, "tensor_parallel": {"autotp_size": 0}, "aio": {"queue_depth": 4}}
    load_config({**source, "zero_optimization": {"stage": 3, "leaf_module": {}, "mics_shard_size": -1}})


def test_remedy_names_the_switch():
    with pytest.raises(ConfigError, match="remove the block or set enabled: false"):
        load_config({"hybrid_engine": {"enabled": True}})


def test_defaults_are_supported_and_paths_exist():
    check_supported(Config())
    for missing in MISSING:
        value_at(Config(), missing.path)


@pytest.mark.parametrize("kind", ["Adam", "adamw", "Adagrad", "lion", "LAMB", "Muon", "SGD", "RMSprop", "NAdam"])
def test_built_optimizers_pass(kind):
    load_config({"optimizer": {"type": kind}})


def test_typical_files_pass():
    load_config(
        {
            "train_batch_size": "auto",
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_accumulation_steps": "auto",
            "gradient_clipping": "auto",
            "zero_allow_untested_optimizer": True,
            "steps_per_print": float("inf"),
            "fp16": {"enabled": "auto", "loss_scale": 0, "initial_scale_power": 16, "auto_cast": True},
            "bf16": {"enabled": "auto"},
            "optimizer": {
                "type": "AdamW",
                "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto"),
            },
            "zero_optimization": {
                "stage": 3,
                "overlap_comm": True,
                "contiguous_gradients": True,
                "sub_group_size": 1e9,
                "reduce_bucket_size": "auto",
                "stage3_prefetch_bucket_size": "auto",
                "stage3_param_persistence_threshold": "auto",
                "stage3_max_live_parameters": 1e9,
                "stage3_max_reuse_distance": 1e9,
                "stage3_gather_16bit_weights_on_model_save": True,
                "offload_optimizer": {"device": "none", "nvme_path": None},
                "offload_param": {"device": "none", "nvme_path": None},
            },
        }
    )


def test_offload_to_host_memory_is_what_a_cpu_does_anyway() -> None:
    config = load_config({"zero_optimization": {"stage": 3, "offload_param": CPU, "offload_optimizer": CPU}})
    check_offload(config, "cpu")
    with pytest.raises(ConfigError) as error:
        check_offload(config, "cuda")
    assert [fault.path for fault in error.value.faults] == [
        "zero_optimization.offload_param",
        "zero_optimization.offload_optimizer",
    ]
