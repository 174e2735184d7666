"""Wrong keys and wrong values: every fault at once, each with path, rule and remedy."""

import math

import pytest

from fullspeed.base.errors import ConfigError
from fullspeed.config import load_config
from fullspeed.config.hints import walk
from fullspeed.config.root import Config
from fullspeed.config.section import names, shapes


def faults(source, **options):
    with pytest.raises(ConfigError) as caught:
        load_config(source, **options)
    return {fault.path: str(fault) for fault in caught.value.faults}


@pytest.mark.parametrize(
    ("source", "path", "advice"),
    [
        ({"train_batch_size": 1, "gradient_clipp1ng": 1}, "gradient_clipp1ng", "gradient_clipping"),
        ({"zero_optimization": {"stge": 1}}, "zero_optimization.stge", "zero_optimization.stage"),
        ({"fp16": {"enabld": True}}, "fp16.enabld", "fp16.enabled"),
        ({"bf16": {"check_overflow": True}}, "bf16.check_overflow", "bf16.check_grad_overflow"),
        (
            {"zero_optimization": {"offload_param": {"pin_memry": True}}},
            "zero_optimization.offload_param.pin_memry",
            "zero_optimization.offload_param.pin_memory",
        ),
        (
            {"timers": {"throughput": {"enable": True}}},
            "timers.throughput.enable",
            "timers.throughput.enabled",
        ),
        ({"optimizer": {"typ": "Adam", "type": "Adam"}}, "optimizer.typ", "optimizer.type"),
        (
            {"optimizer": {"type": "ADAM", "params": {"betaz": 1}}},
            "optimizer.params.betaz",
            "optimizer.params.betas",
        ),
        (
            {"scheduler": {"type": "WarmupLR", "params": {"warmup_steps": 1}}},
            "scheduler.params.warmup_steps",
            "scheduler.params.warmup_num_steps",
        ),
        ({"data_types": {"grad_accum_dtyp": "fp32"}}, "data_types.grad_accum_dtyp", "grad_accum_dtype"),
        (
            {"STAGE3_prefetch_bucket_sizes": 3},
            "STAGE3_prefetch_bucket_sizes",
            "zero_optimization.stage3_prefetch",
        ),
        (
            {"data_efficiency": {"data_sampling": {"curriculum_learning": {"curriculum_metrics": {"a": {"min": 1}}}}}},
            "data_efficiency.data_sampling.curriculum_learning.curriculum_metrics.a.min",
            "known keys",
        ),
    ],
)
def test_a1_unknown_keys_name_the_nearest(source, path, advice):
    assert advice in faults(source)[path]


def _blocks():
    for path, model in walk(Config, ""):
        if "*" not in path and model.model_config.get("extra") != "allow":
            yield path


@pytest.mark.parametrize("path", sorted(_blocks()))
def test_a1_unknown_keys_are_refused_in_every_block(path):
    source = {}
    block = source
    for key in path.split(".") if path else []:
        block = block.setdefault(key, {})
    if path in ("optimizer", "scheduler"):
        block["type"] = "Adam"
    block["zzz"] = 1
    where = f"{path}.zzz" if path else "zzz"
    assert where in faults(source, check_supported=False)


@pytest.mark.parametrize(
    ("source", "path", "place"),
    [
        ({"stage3_gather_16bit_weights_on_model_save": True}, None, "belongs under zero_optimization"),
        ({"offload_optimizer": {"device": "cpu"}}, None, "belongs under zero_optimization"),
        ({"loss_scale": 0}, None, "belongs under fp16"),
        ({"grad_accum_dtype": "fp32"}, None, "belongs under data_types"),
        ({"fp16": {"train_batch_size": 1}}, "fp16.train_batch_size", "belongs at the top level"),
        ({"zero_optimization": {"loss_scale": 1}}, "zero_optimization.loss_scale", "belongs under fp16"),
        (
            {"zero_optimization": {"nvme_path": "x"}},
            "zero_optimization.nvme_path",
            "zero_optimization.offload_param or",
        ),
    ],
)
def test_a10_misplaced_keys_name_their_section(source, path, place):
    assert place in faults(source)[path or next(iter(source))]


def test_all_faults_at_once():
    found = faults(
        {
            "train_batch_size": "8",
            "gradient_clipping": -1.0,
            "zero_optimization": {"stage": 4, "stagee": 3, "overlap_comm": 1},
            "fp16": {"enabled": True, "loss_scale": math.nan},
            "bf16": {"enabled": True},
            "optimizer": {"type": "Adam", "params": {"lr": -1, "max_grad_norm": 1.0}},
            "amp": {"enabled": True},
        }
    )
    assert set(found) == {
        "train_batch_size",
        "gradient_clipping",
        "zero_optimization.stage",
        "zero_optimization.stagee",
        "zero_optimization.overlap_comm",
        "fp16.enabled",
        "fp16.loss_scale",
        "optimizer.params.lr",
        "optimizer.params.max_grad_norm",
        "amp.enabled",
    }
    assert "choose 0, 1, 2 or 3" in found["zero_optimization.stage"]
    assert "without quotes" in found["train_batch_size"]
    assert "gradient_clipping" in found["optimizer.params.max_grad_norm"]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -1, "128", True, None])
def test_a3_loss_scale_refused(value):
    assert "fp16.loss_scale" in faults({"fp16": {"loss_scale": value}})


@pytest.mark.parametrize("value", [0, 0.0, 128, 128.5, 2**32])
def test_a3_f5_loss_scale_kept(value):
    assert load_config({"fp16": {"enabled": True, "loss_scale": value}}).fp16.loss_scale == value


def test_f1_scale_defaults():
    fp16 = load_config({"fp16": {"enabled": True}}).fp16
    assert (fp16.loss_scale, fp16.initial_scale_power, fp16.loss_scale_window) == (0, 16, 1000)
    assert (fp16.hysteresis, fp16.min_loss_scale, fp16.consecutive_hysteresis) == (2, 1, False)


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf, "1", True, None, -1])
def test_gradient_clipping_refused(value):
    assert "gradient_clipping" in faults({"gradient_clipping": value})


def test_a4_whole_floats_are_counts():
    zero = {"stage": 3.0, "stage3_prefetch_bucket_size": 5e7, "sub_group_size": 1e9}
    made = load_config({"zero_optimization": zero}).zero_optimization
    assert (made.stage, made.stage3_prefetch_bucket_size, made.sub_group_size) == (
        3,
        50_000_000,
        1_000_000_000,
    )
    assert type(made.stage3_prefetch_bucket_size) is int
    assert type(made.stage) is int


def test_a4_fractions_say_how_to_fix():
    value = 0.9 * 1023**2
    text = faults({"zero_optimization": {"stage": 3, "reduce_bucket_size": value}})
    text = text["zero_optimization.reduce_bucket_size"]
    assert "941876" in text
    assert "int(" in text


def test_a4_the_size_that_integrations_compute_is_rounded_down():
    zero = {"stage": 3, "stage3_prefetch_bucket_size": 0.9 * 1023**2}
    assert load_config({"zero_optimization": zero}).zero_optimization.stage3_prefetch_bucket_size == 941_876
    # As TRL writes it for a reference model: beside the block, with a dotted key.
    raw = {"zero_optimization": {"stage": 3}, "zero_optimization.stage3_prefetch_bucket_size": 921.6}
    assert load_config(raw).zero_optimization.stage3_prefetch_bucket_size == 921
    for wrong in (-0.5, math.nan, math.inf, True, "9"):
        zero["stage3_prefetch_bucket_size"] = wrong
        assert "zero_optimization.stage3_prefetch_bucket_size" in faults({"zero_optimization": zero})


@pytest.mark.parametrize("value", [math.inf, None])
def test_steps_per_print_never(value):
    assert load_config({"steps_per_print": value}).steps_per_print is None


@pytest.mark.parametrize("value", [0, -math.inf, math.nan, 1.5, "10"])
def test_steps_per_print_refused(value):
    assert "steps_per_print" in faults({"steps_per_print": value})


@pytest.mark.parametrize("value", [0, 1, "true", "false", None, 1.0])
def test_booleans_are_booleans(value):
    assert "true or false" in faults({"fp16": {"enabled": value}})["fp16.enabled"]


def test_number_text_is_refused_with_advice():
    assert "without quotes" in faults({"zero_optimization": {"stage": "3"}})["zero_optimization.stage"]
    assert "write true without quotes" in faults({"dump_state": "True"})["dump_state"]


@pytest.mark.parametrize("value", [3, "on", [1], True])
def test_block_must_be_a_block(value):
    assert "block" in faults({"fp16": value})["fp16"]


@pytest.mark.parametrize("stage", [-1, 4, True, False, None, "2", 1.5, [1]])
def test_bad_stages(stage):
    assert "zero_optimization.stage" in faults({"zero_optimization": {"stage": stage}})


@pytest.mark.parametrize(
    ("text", "dtype"),
    [("fp16", "fp16"), ("half", "fp16"), ("torch.float16", "fp16"), ("BF16", "bf16"), ("bfloat16", "bf16"),
     ("torch.bfloat16", "bf16"), ("float", "fp32"), ("float32", "fp32"), ("torch.float32", "fp32")],
)  # fmt: skip
def test_dtype_spellings(text, dtype):
    config = load_config({"communication_data_type": text, "data_types": {"grad_accum_dtype": text}})
    assert config.communication_data_type == config.data_types.grad_accum_dtype == dtype


def test_unknown_dtype():
    assert "'bf16'" in faults({"communication_data_type": "fp12"})["communication_data_type"]


def test_every_alias_reaches_a_field():
    for path, model in walk(Config, ""):
        for old, new in names(model).items():
            assert new in model.model_fields, (path, old)
        assert set(shapes(model)) <= set(model.model_fields)


def test_every_key_says_what_it_does():
    for path, model in walk(Config, ""):
        for key, field in model.model_fields.items():
            assert field.description, (path, key)
