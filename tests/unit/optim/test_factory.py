"""Optimizers by their configuration name: what they resolve to, their numbers, and every refusal."""

import pytest
import torch
from torch import nn

from fullspeed.base.errors import ConfigError
from fullspeed.kernels.registry import using
from fullspeed.optim.factory import declare_elementwise, is_elementwise, is_shardable, make_optimizer
from fullspeed.optim.lamb import Lamb
from fullspeed.optim.lion import Lion
from fullspeed.optim.muon import MuonWithAuxAdam
from fullspeed.optim.uncorrected_adam import UncorrectedAdam


def make_params(dtype=torch.float32):
    generator = torch.Generator().manual_seed(2)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in ((4, 3), (5,))]


def run(optimizer, params, steps=4):
    generator = torch.Generator().manual_seed(3)
    for _ in range(steps):
        for param in params:
            param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)
        optimizer.step()
    return params


def same(type, params, reference, tolerance=1e-6, dtype=torch.float32):
    mine, theirs = make_params(dtype), make_params(dtype)
    optimizer = make_optimizer(type, params, mine)
    run(optimizer, mine)
    run(reference(theirs), theirs)
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)
    return optimizer


DECAY = {"lr": 0.01, "weight_decay": 0.5}


@pytest.mark.parametrize("extra", [{}, {"torch_adam": True}])
@pytest.mark.parametrize(
    ("type", "mode", "kind"),
    [
        ("Adam", {}, torch.optim.Adam),
        ("AdamW", {}, torch.optim.AdamW),
        ("Adam", {"adam_w_mode": True}, torch.optim.AdamW),
        ("adam", {"adam_w_mode": False}, torch.optim.Adam),
        ("ADAMW", {"adam_w_mode": False}, torch.optim.AdamW),
    ],
)
def test_adam_is_torch_adam(type, mode, kind, extra):  # A9
    optimizer = same(type, DECAY | mode | extra, lambda params: kind(params, **DECAY))
    assert isinstance(optimizer, kind)
    assert optimizer.defaults["fused"] is True
    other = torch.optim.Adam if kind is torch.optim.AdamW else torch.optim.AdamW
    with pytest.raises(AssertionError):
        same(type, DECAY | mode | extra, lambda params: other(params, **DECAY))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(
    ("type", "params"),
    [
        ("AdamW", {"lr": 0.01, "betas": [0.8, 0.9], "eps": 1e-6, "weight_decay": 0.1, "amsgrad": True}),
        ("SGD", {"lr": 0.01, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
        ("Adagrad", {"lr": 0.05, "weight_decay": 0.1}),
        ("RMSprop", {"lr": 0.01, "centered": True}),
        ("NAdam", {"lr": 0.01}),
        ("Adafactor", {"lr": 0.01}),
    ],
)
def test_torch_optimizers(type, params, dtype):
    tolerance = {torch.float64: 1e-10, torch.float32: 1e-6, torch.bfloat16: 2e-2}[dtype]
    kind = getattr(torch.optim, type)
    optimizer = same(type, params, lambda given: kind(given, **params), tolerance, dtype)
    assert optimizer.defaults.get("fused", True) is True


def test_case_and_kinds():
    assert type(make_optimizer("sgd", {}, make_params())) is torch.optim.SGD
    assert type(make_optimizer("LION", {"lr": 1e-4}, make_params())) is Lion
    assert type(make_optimizer("Lamb", {"max_coeff": 5.0, "amsgrad": False}, make_params())) is Lamb
    with pytest.raises(ConfigError, match="did you mean RMSprop"):
        make_optimizer("rmsprop", {}, make_params())


def test_decay_defaults():
    assert make_optimizer("AdamW", {}, make_params()).defaults["weight_decay"] == 0.0
    assert make_optimizer("AdamW", {"torch_adam": True}, make_params()).defaults["weight_decay"] == 0.01


@pytest.mark.parametrize("switch", [{"foreach": True}, {"fused": False}, {"foreach": False}])
def test_the_user_decides_about_fused(switch):
    optimizer = make_optimizer("Adam", switch, make_params())
    assert not optimizer.defaults["fused"]
    assert run(optimizer, make_params()) is not None


def test_no_fused_kernel_on_meta():
    params = [nn.Parameter(torch.empty(3, device="meta"))]
    assert not make_optimizer("SGD", {}, params).defaults["fused"]


def test_without_bias_correction():
    mine = make_params()
    optimizer = make_optimizer("Adam", {"bias_correction": False, "amsgrad": False, "weight_decay": 0.1}, mine)
    assert type(optimizer) is UncorrectedAdam
    with using(optimizer_update="torch"):
        assert type(make_optimizer("Adam", {"bias_correction": False}, make_params())) is UncorrectedAdam
    assert optimizer.defaults["decoupled_weight_decay"] is False
    with pytest.raises(ConfigError, match="bias_correction"):
        make_optimizer("Adam", {"bias_correction": False, "amsgrad": True}, make_params())


def test_groups_keep_their_entries_and_iterators_survive():
    first, second = make_params()
    groups = [{"params": iter([first]), "lr": 0.5, "name": "a"}, {"params": second, "weight_decay": 0.3}]
    optimizer = make_optimizer("AdamW", {"lr": 0.1}, groups)
    assert [(g["lr"], g["weight_decay"], len(g["params"])) for g in optimizer.param_groups] == [
        (0.5, 0.0, 1), (0.1, 0.3, 1),
    ]  # fmt: skip
    assert optimizer.param_groups[0]["name"] == "a"
    named = make_optimizer("SGD", {}, [("w", make_params()[0])])
    assert named.param_groups[0]["param_names"] == ["w"]


def test_muon():
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    optimizer = make_optimizer("Muon", {"lr": 0.1, "adam_lr": 0.2}, list(model.named_parameters()))
    assert type(optimizer) is MuonWithAuxAdam
    assert [(g["use_muon"], g["lr"], len(g["params"])) for g in optimizer.param_groups] == [
        (True, 0.1, 2), (False, 0.2, 2),
    ]  # fmt: skip
    ready = [{"params": [nn.Parameter(torch.zeros(6))], "use_muon": True, "lr": 0.3}]
    group = make_optimizer("muon", {"lr": 0.1, "momentum": 0.5}, ready).param_groups[0]
    assert (group["lr"], group["momentum"], group["ns_method"]) == (0.3, 0.5, "gram")
    with pytest.raises(ConfigError, match="did you mean ns_method"):
        make_optimizer("muon", {"ns_methd": "gram"}, list(model.named_parameters()))


@pytest.mark.parametrize("type", ["OneBitAdam", "onebitlamb", "ZeroOneAdam", "MuAdam", "muadamw", "MuSGD"])
def test_unavailable(type):
    with pytest.raises(ConfigError, match="not available in this version"):
        make_optimizer(type, {}, make_params())


@pytest.mark.parametrize("type", ["Adam", "lamb", "SGD", "muon"])
def test_max_grad_norm_is_refused(type):
    with pytest.raises(ConfigError, match="gradient_clipping") as caught:
        make_optimizer(type, {"max_grad_norm": 1.0}, make_params())
    assert caught.value.faults[0].path == "optimizer.params.max_grad_norm"


@pytest.mark.parametrize(
    ("type", "params", "text"),
    [
        ("Adam", {"weigth_decay": 0.1}, "did you mean weight_decay"),
        ("Adam", {"beta": 0.1}, "did you mean betas"),
        ("lion", {"eps": 0.1}, "no such parameter"),
        ("Lamb", {"amsgrad": True}, "no amsgrad"),
        ("SGD", {"momentun": 0.9}, "did you mean momentum"),
        ("Adam", {"betas": [2.0, 0.9]}, "beta"),
        ("lion", {"lr": -1.0}, r"optimizer\.params\.lr"),
        ("Optimizer", {}, "choose"),
        ("FooBar", {}, "class of torch.optim"),
    ],
)
def test_faults(type, params, text):
    with pytest.raises(ConfigError, match=text) as caught:
        make_optimizer(type, params, make_params())
    assert all(fault.path.startswith("optimizer.") for fault in caught.value.faults)


def test_all_faults_at_once():
    with pytest.raises(ConfigError) as caught:
        make_optimizer("Adam", {"a": 1, "b": 2}, make_params())
    assert len(caught.value.faults) == 2


def test_states_are_fp32_where_asked_for_or_it_is_an_error():
    params = make_params(torch.bfloat16)
    optimizer = make_optimizer("Adam", {"fp32_optimizer_states": True}, params)
    run(optimizer, params)
    assert optimizer.state[params[0]]["exp_avg"].dtype == torch.float32
    with pytest.raises(ConfigError, match="fp32_optimizer_states"):
        make_optimizer("Adam", {"fp32_optimizer_states": True, "amsgrad": True}, make_params(torch.bfloat16))


def test_which_may_step_shards():
    for type in ("Adam", "AdamW", "SGD", "Adagrad", "RMSprop", "lion"):
        assert is_elementwise(make_optimizer(type, {}, make_params()))
    lamb, adafactor = (
        make_optimizer("lamb", {}, make_params()),
        make_optimizer("Adafactor", {}, make_params()),
    )
    assert not is_elementwise(lamb)
    assert is_shardable(lamb)
    assert not is_shardable(adafactor)


def test_subclasses_are_untested_until_declared():
    class Mine(torch.optim.Adam):
        pass

    assert not is_elementwise(Mine(make_params()))
    declare_elementwise(Mine)
    assert is_elementwise(Mine(make_params()))
