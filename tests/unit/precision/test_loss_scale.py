"""The loss scale: golden traces, messages, limits, resuming."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fullspeed.base.errors import CheckpointError, ConfigError, LossScaleError
from fullspeed.precision.loss_scale import DynamicLossScale, StaticLossScale, make_loss_scale

OVERFLOWS = [0, 0, 1, 0, 1, 1, *[0] * 8, 1, *[0] * 4]
KEPT = [
    (256, 2), (256, 2), (256, 1), (256, 1), (128, 1), (64, 1), *[(64, 1)] * 4,
    (128, 2), (128, 2), (128, 2), (128, 2), (128, 1), *[(128, 1)] * 4,
]  # fmt: skip
REFILLED = [
    (256, 2), (256, 2), (256, 1), (256, 2), (256, 1), (128, 1), *[(128, 2)] * 4,
    *[(256, 2)] * 4, (256, 1), *[(256, 2)] * 4,
]  # fmt: skip


@pytest.mark.parametrize(("consecutive", "expected"), [(False, KEPT), (True, REFILLED)])
def test_golden_trace(consecutive, expected):
    scaler = DynamicLossScale(256, window=4, hysteresis=2, consecutive_hysteresis=consecutive)
    seen = []
    for overflow in OVERFLOWS:
        change = scaler.update(bool(overflow))
        assert change.new == scaler.scale
        assert change.hysteresis_after == scaler.hysteresis_left
        seen.append((scaler.scale, scaler.hysteresis_left))
    assert seen == expected


def test_first_overflow_uses_hysteresis_second_halves():
    scaler = make_loss_scale()
    assert scaler.scale == 2**16  # F1
    first, second = scaler.update(True), scaler.update(True)
    assert (first.old, first.new) == (65536, 65536)
    assert "hysteresis 2->1" in first.message
    assert second.new == 32768
    assert "65536 -> 32768" in second.message


def test_good_steps_are_silent_until_growth():
    scaler = DynamicLossScale(8, window=2, hysteresis=1)
    messages = [scaler.update(False).message for _ in range(3)]
    assert messages == ["", "", "loss scale 8 -> 16"]


def test_minimum_raises_and_keeps_state():
    scaler = DynamicLossScale(4, hysteresis=1, min_scale=3)
    assert scaler.update(True).new == 3
    before = scaler.state_dict()
    with pytest.raises(LossScaleError, match="minimum 3"):
        scaler.update(True)
    assert scaler.state_dict() == before


def test_hysteresis_is_spent_before_the_minimum_raises():
    scaler = DynamicLossScale(1, hysteresis=2)
    assert scaler.update(True).hysteresis_after == 1
    with pytest.raises(LossScaleError):
        scaler.update(True)


def test_static_stays():
    scaler = make_loss_scale(128)
    assert not scaler.is_dynamic
    for overflow in (True, False, True):
        change = scaler.update(overflow)
        assert scaler.scale == 128
        assert bool(change.message) == overflow
    scaler.load_state_dict({"scale": 64.0})
    assert scaler.scale == 128


@pytest.mark.parametrize("scale", [float("nan"), float("inf"), -1.0])
def test_static_must_be_finite_and_positive(scale):
    with pytest.raises(ConfigError, match="finite"):
        make_loss_scale(scale)


def test_dynamic_reports_all_faults():
    with pytest.raises(ConfigError) as caught:
        DynamicLossScale(2, window=0, hysteresis=0, min_scale=4)
    assert [fault.path for fault in caught.value.faults] == ["init_scale", "loss_scale_window", "hysteresis"]


@given(st.lists(st.booleans(), max_size=60), st.integers(0, 60), st.booleans())
def test_resuming_anywhere_changes_nothing(overflows, cut, consecutive):
    def make():
        return DynamicLossScale(2.0**80, window=3, hysteresis=2, consecutive_hysteresis=consecutive)

    straight, resumed = make(), make()
    for at, overflow in enumerate(overflows):
        if at == cut:
            saved, resumed = resumed.state_dict(), make()
            resumed.load_state_dict(saved)
        assert straight.update(overflow) == resumed.update(overflow)


@pytest.mark.parametrize("scaler", [StaticLossScale(2), DynamicLossScale()])
def test_state_must_be_complete(scaler):
    with pytest.raises(CheckpointError, match="lacks"):
        scaler.load_state_dict({"iteration": 3})
