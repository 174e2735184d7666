"""Batch arithmetic: examples from the table, and its invariants for all small numbers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fullspeed.base.errors import ConfigError, UsageError
from fullspeed.config import Batch, load_config, resolve_batch
from fullspeed.config.batch import BatchRequest, solve_batch

TB, MB, GAS = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
small = st.integers(1, 64)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ({TB: 8}, (8, 4, 1)),
        ({MB: 2}, (4, 2, 1)),
        ({MB: 2, GAS: 3}, (12, 2, 3)),
        ({TB: 12, MB: 2, GAS: 3}, (12, 2, 3)),
        ({TB: 12, MB: 2}, (12, 2, 3)),
        ({TB: 12, GAS: 3}, (12, 2, 3)),
        ({TB: 8.0}, (8, 4, 1)),
    ],
)
def test_b1_table(source, expected):
    assert resolve_batch(load_config(source), 2, "WORLD_SIZE") == Batch(*expected, 2)


@pytest.mark.parametrize(
    "source",
    [{TB: 1}, {TB: 7}, {TB: 8, MB: 3}, {TB: 8, GAS: 3}, {TB: 8, MB: 2, GAS: 3}, {TB: 2, MB: 4}, {}, {GAS: 4}],
)
def test_misfits_name_all_numbers(source):
    with pytest.raises(ConfigError) as caught:
        resolve_batch(load_config(source), 2, "the device mesh")
    text = str(caught.value)
    for part in (TB, MB, GAS, "world size 2", "the device mesh"):
        assert part in text


def test_b2_text():
    with pytest.raises(ConfigError, match="train_batch_size 1 cannot be split over 2 ranks"):
        resolve_batch(load_config({TB: 1}), 2, "WORLD_SIZE")


@pytest.mark.parametrize("key", [TB, MB, GAS])
@pytest.mark.parametrize("value", [0, -1, 1.5, "8", True, [8], float("nan"), float("inf")])
def test_bad_values(key, value):
    with pytest.raises(ConfigError, match=key):
        load_config({key: value})


def test_bad_world():
    with pytest.raises(UsageError, match="must be positive"):
        solve_batch(BatchRequest(8, None, None), 0, "a test")


def test_all_open_keys_are_reported():
    config = load_config({TB: "auto", MB: "auto", GAS: "auto"})
    with pytest.raises(ConfigError) as caught:
        resolve_batch(config, 2, "a test")
    assert [fault.path for fault in caught.value.faults] == [TB, MB, GAS]


@given(micro=small, accum=small, world=small)
def test_any_sufficient_choice_of_keys_gives_the_same(micro, accum, world):
    whole = Batch(micro * accum * world, micro, accum, world)
    for request in (
        BatchRequest(whole.train_batch_size, micro, accum),
        BatchRequest(whole.train_batch_size, micro, None),
        BatchRequest(whole.train_batch_size, None, accum),
        BatchRequest(None, micro, accum),
    ):
        assert solve_batch(request, world, "a test") == whole


maybe = st.none() | st.integers(1, 12)


@given(train=st.none() | st.integers(1, 200), micro=maybe, accum=maybe, world=st.integers(1, 9))
def test_result_is_consistent_or_refused(train, micro, accum, world):
    request = BatchRequest(train, micro, accum)
    try:
        made = solve_batch(request, world, "a test")
    except ConfigError:
        fits = [(m, a) for m in range(1, 201) for a in range(1, 201) if m * a * world == train]
        fits = [(m, a) for m, a in fits if micro in (None, m) and accum in (None, a)]
        assert (train is None and micro is None) or not fits
        return
    assert made.train_batch_size == made.micro_batch_size * made.grad_accum_steps * world
    assert min(made) >= 1
    for said, got in zip(request, made[:3], strict=True):
        assert said is None or said == got
