"""Schedule formulas and scheduler objects against golden vectors, and the scheduler API."""

import doctest
import math

import pytest
import torch
from torch import nn

from fullspeed.base.errors import CheckpointError, ConfigError
from fullspeed.optim import names, scheduler, schedules
from fullspeed.optim.scheduler import (
    VALID_LR_SCHEDULES,
    LRRangeTest,
    OneCycle,
    WarmupCosineLR,
    WarmupDecayLR,
    WarmupLR,
    make_scheduler,
)


def adam(lr=0.1, groups=1):
    return torch.optim.Adam([{"params": [nn.Parameter(torch.zeros(2))]} for _ in range(groups)], lr=lr)


def trace(kind, params, steps):
    optimizer = adam()
    made = make_scheduler(kind, params, optimizer)
    values, moms = [optimizer.param_groups[0]["lr"]], []
    for _ in range(steps):
        made.step()
        values.append(optimizer.param_groups[0]["lr"])
        moms.append(optimizer.param_groups[0]["betas"])
        assert made.get_last_lr() == [values[-1]] == made.get_lr()
    return values, moms


RANGE = {"lr_range_test_min_lr": 0.001, "lr_range_test_step_size": 5, "lr_range_test_step_rate": 2}
CYCLE = {"cycle_min_lr": 0.01, "cycle_max_lr": 0.11, "cycle_first_step_size": 5, "decay_lr_rate": 0.1,
         "decay_step_size": 2, "decay_mom_rate": 0.05}  # fmt: skip
STAIRS = {
    "cycle_min_lr": 0.01,
    "cycle_max_lr": 0.11,
    "cycle_first_step_size": 6,
    "cycle_first_stair_count": 3,
}
LINEAR = {"warmup_type": "linear"}
COSINE = {"total_num_steps": 10, "warmup_num_steps": 4}
GOLDEN = [
    ("LRRangeTest", RANGE,
     [0.001, 0.0014, 0.0018, 0.0022, 0.0026, 0.003, 0.0034, 0.0038, 0.0042, 0.0046, 0.005, 0.0054, 0.0058]),
    ("LRRangeTest", RANGE | {"lr_range_test_staircase": True}, [0.001] * 5 + [0.003] * 5 + [0.005] * 3),
    ("OneCycle", CYCLE,
     [0.01, 0.03, 0.05, 0.07, 0.09, 0.11, 0.09, 0.07, 0.05, 0.03, 0.01, 0.00952381, 0.00909091, 0.00869565,
      0.00833333, 0.008, 0.00769231]),
    ("OneCycle", STAIRS,
     [0.01, 0.01, 0.0433333, 0.0433333, 0.0766667, 0.0766667, 0.11, 0.0766667, 0.0766667, 0.0433333,
      0.0433333, 0.01, 0.01]),
    ("WarmupLR", {"warmup_num_steps": 5}, [0, 0, 0.04306766, 0.06826062, 0.08613531, 0.1, 0.1]),
    ("WarmupLR", {"warmup_num_steps": 5} | LINEAR, [0, 0, 0.02, 0.04, 0.06, 0.08, 0.1, 0.1]),
    ("WarmupDecayLR", {"total_num_steps": 10, "warmup_max_lr": 0.1, "warmup_num_steps": 4} | LINEAR,
     [0, 0, 0.025, 0.05, 0.075, 0.1, 0.08333333, 0.06666667, 0.05, 0.03333333, 0.01666667, 0, 0]),
    ("WarmupCosineLR", COSINE | {"warmup_min_ratio": 0.2, "cos_min_ratio": 0.1} | LINEAR,
     [0, 0.02, 0.04, 0.06, 0.08, 0.09397114, 0.0775, 0.055, 0.0325, 0.01602886, 0.01, 0.01, 0.01]),
    ("WarmupCosineLR", COSINE,  # G2
     [0, 0, 0.05, 0.07924813, 0.1, 0.09330194, 0.0750025, 0.050005, 0.0250075, 0.00670806, 1e-5, 1e-5, 1e-5]),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "params", "expected"), GOLDEN)
def test_golden_learning_rates(kind, params, expected):
    values, _ = trace(kind, params, len(expected) - 1)
    assert values == pytest.approx(expected, rel=1e-5, abs=1e-9)


def test_golden_momentum():
    _, moms = trace("OneCycle", CYCLE, 16)
    expected = [
        0.88,
        0.86,
        0.84,
        0.82,
        0.80,
        0.82,
        0.84,
        0.86,
        0.88,
        0.90,
        0.9225,
        0.945,
        0.9675,
        0.99,
        1.0125,
        1.035,
    ]
    assert [mom[0] for mom in moms] == pytest.approx(expected)
    assert {mom[1] for mom in moms} == {0.99}
    _, moms = trace("OneCycle", STAIRS, 12)
    stairs = [0.9, 13 / 15, 13 / 15, 5 / 6, 5 / 6, 0.8, 5 / 6, 5 / 6, 13 / 15, 13 / 15, 0.9, 0.9]
    assert [mom[0] for mom in moms] == pytest.approx(stairs)


def test_names_in_order():
    assert VALID_LR_SCHEDULES == ["LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR"]


def test_warmup_maximum_defaults_to_the_optimizers_lr():
    optimizer = torch.optim.AdamW([nn.Parameter(torch.zeros(2))], lr=5e-7)  # A8
    warmup = WarmupLR(optimizer, warmup_num_steps=3)
    seen = []
    for _ in range(6):
        warmup.step()
        seen.append(optimizer.param_groups[0]["lr"])
    assert max(seen) == seen[-1] == 5e-7


def test_one_cycle_runs_on_without_decay():
    values, moms = trace("OneCycle", {"cycle_min_lr": 0.01, "cycle_max_lr": 0.11, "cycle_first_step_size": 2}, 20)
    assert values[4:] == pytest.approx([0.01] * 17)  # G3
    assert [mom[0] for mom in moms[4:]] == pytest.approx([0.9] * 16)


def test_one_cycle_second_half_may_differ():
    values, _ = trace("OneCycle", STAIRS | {"cycle_second_step_size": 2, "cycle_second_stair_count": 0}, 8)
    assert values[6:] == pytest.approx([0.11, 0.06, 0.01])


def test_one_cycle_without_betas_keeps_momentum():
    sgd = torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1, momentum=0.5)
    cycle = OneCycle(sgd, 0.01, 0.1)
    cycle.step()
    assert sgd.param_groups[0]["momentum"] == 0.5
    assert cycle.get_mom() is None


def test_last_lr_before_the_first_step():
    for made in (
        WarmupLR(adam()),
        WarmupCosineLR(adam(), 10),
        LRRangeTest(adam()),
        OneCycle(adam(), 0.1, 0.2),
    ):
        with pytest.raises(AssertionError, match="need to call step"):
            made.get_last_lr()


def test_lists_give_one_value_per_group():
    optimizer = adam(groups=2)
    made = WarmupLR(optimizer, warmup_min_lr=[0.0, 0.1], warmup_max_lr=[0.2, 0.3], warmup_num_steps=2)
    made.step(10)
    assert [group["lr"] for group in optimizer.param_groups] == [0.2, 0.3]
    with pytest.raises(ConfigError, match="each of the 2 parameter groups"):
        WarmupLR(optimizer, warmup_min_lr=[0.0, 0.1, 0.2])


def test_tensor_lr_is_written_in_place():
    lr = torch.tensor(0.1)
    optimizer = torch.optim.Adam([nn.Parameter(torch.zeros(2))], lr=lr, capturable=False, foreach=False)
    WarmupLR(optimizer, warmup_num_steps=4, warmup_type="linear").step(2)
    assert optimizer.param_groups[0]["lr"] is lr
    assert lr.item() == pytest.approx(0.05)


@pytest.mark.parametrize(("kind", "params", "expected"), GOLDEN)
def test_resuming(kind, params, expected):
    first = make_scheduler(kind, params, adam())
    for _ in range(6):
        first.step()
    assert first.state_dict() == {"last_batch_iteration": 5}
    optimizer = adam()
    second = make_scheduler(kind, params, optimizer)
    second.load_state_dict(first.state_dict())
    assert second.get_last_lr() == first.get_last_lr() == [optimizer.param_groups[0]["lr"]]
    first.step()
    second.step()
    assert second.get_last_lr() == first.get_last_lr()
    with pytest.raises(CheckpointError):
        second.load_state_dict({})


def test_schedule_is_bound_to_anything_with_param_groups():
    class Wrapper:
        param_groups = adam().param_groups

    WarmupLR(Wrapper()).step()
    with pytest.raises(TypeError, match="param_groups"):
        WarmupLR(nn.Linear(1, 1))


def test_torch_schedulers_by_name():
    optimizer = adam()
    made = make_scheduler("StepLR", {"step_size": 1, "gamma": 0.5}, optimizer)
    assert type(made) is torch.optim.lr_scheduler.StepLR
    optimizer.step()
    made.step()
    assert optimizer.param_groups[0]["lr"] == 0.05
    assert make_scheduler("ReduceLROnPlateau", {}, adam()).patience == 10


@pytest.mark.parametrize(
    ("kind", "params", "paths", "text"),
    [
        ("WarmupLr", {}, ["scheduler.type"], "did you mean WarmupLR"),
        ("LRScheduler", {}, ["scheduler.type"], "choose"),
        ("WarmupLR", {"warmup_steps": 3}, ["scheduler.params.warmup_steps"], "did you mean warmup_num_steps"),
        ("WarmupLR", {"warmup_num_steps": 0}, ["scheduler.params.warmup_num_steps"], "at least 1"),
        (
            "OneCycle",
            {"x": 1},
            [f"scheduler.params.{n}" for n in ("x", "cycle_min_lr", "cycle_max_lr")],
            "required",
        ),
        ("StepLR", {}, ["scheduler.params.step_size"], "required"),
    ],
)
def test_faults(kind, params, paths, text):
    with pytest.raises(ConfigError, match=text) as caught:
        make_scheduler(kind, params, adam())
    assert [fault.path for fault in caught.value.faults] == paths


def test_short_total_never_divides_by_zero():
    for n in range(-1, 12):
        assert 0 <= schedules.warmup_decay_fraction(n, total_steps=3, num_steps=6) <= 1
        assert math.isfinite(schedules.warmup_cosine_ratio(n, total_steps=6, num_steps=6))


def test_decay_warmup_keeps_its_documented_default():
    optimizer = adam()
    WarmupDecayLR(optimizer, 10, warmup_num_steps=2).step(2)
    assert optimizer.param_groups[0]["lr"] == 1e-3


@pytest.mark.parametrize("module", [schedules, scheduler, names])
def test_docstring_examples(module):
    result = doctest.testmod(module)
    assert result.attempted
    assert not result.failed
