"""How text, files and dicts become a configuration."""

import base64
import json

import pytest

from fullspeed.base.errors import ConfigError
from fullspeed.config import load_config, require_resolved, resolve_batch, unresolved_auto


def faults(source, overrides=None):
    with pytest.raises(ConfigError) as caught:
        load_config(source, overrides)
    return {fault.path: fault for fault in caught.value.faults}


def test_empty_is_all_defaults():
    config = load_config({})
    assert config.zero_optimization.stage == 0
    assert config.gradient_clipping == 0
    assert config.optimizer is None
    assert config.steps_per_print is None
    assert config.precision_dtype() == "fp32"


def test_source_is_not_changed():
    source = {"zero_optimization.stage": 2, "zero_optimization": {"stage": 1}, "bfloat16": {"enabled": True}}
    before = json.dumps(source)
    assert load_config(source).zero_optimization.stage == 2
    assert json.dumps(source) == before


def test_frozen():
    config = load_config({})
    with pytest.raises(ValueError, match="frozen"):
        config.train_batch_size = 3
    with pytest.raises(ValueError, match="frozen"):
        config.zero_optimization.stage = 3


def test_file_with_comments_and_trailing_commas(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text(
        '\ufeff// first\n{ # second\n"train_batch_size": 8, /* third\n over lines */\n'
        '"wandb": {"project": "a // b # c /* d */ ,}",},\n"zero_optimization": {"stage": 3,},\n}',
        encoding="utf-8",
    )
    for source in (path, str(path)):
        config = load_config(source)
        assert config.train_batch_size == 8
        assert config.wandb.project == "a // b # c /* d */ ,}"
        assert config.zero_optimization.stage == 3


@pytest.mark.parametrize("padding", [True, False])
def test_base64(padding):
    text = json.dumps({"train_batch_size": 4, "wandb": {"project": "\u00ff\u00fe??>>"}})
    code = base64.urlsafe_b64encode(text.encode()).decode()
    config = load_config(code if padding else code.rstrip("="))
    assert config.train_batch_size == 4
    assert config.wandb.project == "\u00ff\u00fe??>>"


def test_json_text():
    assert load_config('{"train_batch_size": 4}').train_batch_size == 4


@pytest.mark.parametrize("text", ['{"a" 1}', '{"train_batch_size": }', "[1]", '"x"'])
def test_broken_file_names_the_place(tmp_path, text):
    path = tmp_path / "broken.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"broken\.json"):
        load_config(path)


def test_error_position_survives_comments(tmp_path):
    path = tmp_path / "x.json"
    path.write_text('// one\n/* two\nthree */\n{"a" 1}')
    with pytest.raises(ConfigError, match="line 4, column 6"):
        load_config(path)


@pytest.mark.parametrize("source", [3, None, ["a"], 1.5, b"{}"])
def test_other_types_name_the_accepted_forms(source):
    with pytest.raises(ConfigError, match="dict, the path of a JSON file"):
        load_config(source)


@pytest.mark.parametrize("source", ["no/such/file.json", "x" * 5000, "", "not base64!"])
def test_missing_file_names_the_accepted_forms(source):
    with pytest.raises(ConfigError, match="no file"):
        load_config(source)


def test_duplicate_keys_at_any_level(tmp_path):
    path = tmp_path / "twice.json"
    path.write_text('{"fp16": {"enabled": true, "enabled": false}, "dump_state": true, "dump_state": true}')
    found = faults(path)
    assert set(found) == {"fp16.enabled", "dump_state"}
    assert "given twice" in found["fp16.enabled"].rule


def test_dotted_keys_are_overrides():
    config = load_config(
        {"zero_optimization": {"stage": 3, "param_persistence_threshold": 7}}
        | {
            "zero_optimization.stage3_param_persistence_threshold": 9,
            "zero_optimization.reduce_bucket_size": 5,
        }
    )
    assert config.zero_optimization.stage3_param_persistence_threshold == 9
    assert config.zero_optimization.reduce_bucket_size == 5


def test_overrides_win_and_merge():
    source = {"zero_optimization.stage": 1, "optimizer": {"type": "Adam", "params": {"lr": 1.0, "eps": 0.5}}}
    config = load_config(source, {"zero_optimization.stage": 3, "optimizer": {"params": {"lr": 2.0}}})
    assert config.zero_optimization.stage == 3
    assert config.optimizer.params == {"lr": 2.0, "eps": 0.5}


def test_override_reaches_a_block_under_its_alias():
    config = load_config({"bfloat16": {"enabled": False}}, {"bf16.enabled": True})
    assert config.bf16.enabled


def test_override_through_a_value_is_a_fault():
    found = faults({"train_batch_size": 4}, {"train_batch_size.x": 1})
    assert "not a block" in found["train_batch_size.x"].rule


def test_unknown_override_is_a_fault():
    assert "stage" in faults({}, {"zero_optimization.stagee": 3})["zero_optimization.stagee"].fix


def test_dump_loads_again():
    source = {
        "train_batch_size": "auto",
        "gradient_clipping": "auto",
        "fp16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": [0.9, 0.99]}},
        "zero_optimization": {"stage": 3, "leaf_module": {}},
    }
    config = load_config(source)
    again = load_config(config.model_dump())
    assert again == config
    assert unresolved_auto(again) == unresolved_auto(config)
    assert config.model_dump()["train_batch_size"] == "auto"
    assert load_config(config) == config
    assert load_config(config, {"train_batch_size": 4}).train_batch_size == 4


def test_auto_in_sections_is_the_default():
    block = {"stage": "auto", "reduce_bucket_size": "auto", "offload_param": {"pin_memory": "auto"}}
    config = load_config({"zero_optimization": block, "fp16": {"enabled": "auto"}, "bf16": {"enabled": "auto"}})
    assert config.zero_optimization.reduce_bucket_size == 500_000_000
    assert not config.fp16.enabled
    assert unresolved_auto(config) == []


def test_auto_elsewhere_stays_open():
    scheduler = {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto", "warmup_min_lr": "auto"}}
    optimizer = {"type": "AdamW", "params": {"lr": "auto", "betas": "auto"}}
    source = {"gradient_clipping": "auto", "train_batch_size": "auto"}
    config = load_config({**source, "optimizer": optimizer, "scheduler": scheduler})
    assert unresolved_auto(config) == [
        "gradient_clipping",
        "train_batch_size",
        "optimizer.params.lr",
        "optimizer.params.betas",
        "scheduler.params.total_num_steps",
        "scheduler.params.warmup_min_lr",
    ]
    assert config.optimizer.params["lr"] == "auto"
    with pytest.raises(ConfigError, match=r"optimizer\.params\.lr"):
        require_resolved(config, "optimizer")
    require_resolved(config, "fp16")
    with pytest.raises(ConfigError, match="train_batch_size"):
        resolve_batch(config, 2, "a test")


def test_auto_of_a_torch_optimizer_stays_open():
    config = load_config({"optimizer": {"type": "SGD", "params": {"lr": "auto", "momentum": 0.5}}})
    assert config.optimizer.params == {"lr": "auto", "momentum": 0.5}
    assert unresolved_auto(config) == ["optimizer.params.lr"]


def test_auto_with_a_meaning_of_its_own():
    source = {"pipeline": {"stages": "auto"}, "data_types": {"keep_in_fp32_modules": "auto"}}
    config = load_config(source)
    assert config.pipeline.stages == "auto"
    assert config.data_types.keep_in_fp32_modules == "auto"
    assert unresolved_auto(config) == []


def test_a6_batch_keys_are_not_needed_to_load():
    assert load_config({"zero_optimization": {"stage": 3}}).train_batch_size is None
    assert load_config({"train_batch_size": "auto"}).train_batch_size is None


def test_third_party_keys_and_comments_are_left_alone():
    source = {"msamp": {"enabled": True}, "inference": {"tensor_parallel": {"tp_size": 2}}}
    load_config({**source, "_comment": "x", "_train_batch_size": 3, "//": 1, "$schema": "x", "fp16": {"_note": 1}})


def test_null_block_is_absent():
    source = {"optimizer": None, "fp16": None, "zero_optimization": {"offload_param": None}}
    assert load_config(source) == load_config({})
