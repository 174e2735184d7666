"""The native update gives the numbers of the plain one, whatever the dtypes, sizes and addresses."""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fullspeed.kernels import native, update_native, update_torch
from fullspeed.kernels.update import Item, Update

CPU = torch.device("cpu")
needs_library = pytest.mark.skipif(bool(native.needs_native(CPU)), reason=native.needs_native(CPU))
NUMELS = [0, 1, 15, 16, 17, 31, 33, 1000, (1 << 16) + 5]
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
# param, grad, copy
DTYPES = [(F32, grad, copy) for grad in (F32, BF16, F16) for copy in (None, BF16, F16)] + [
    (BF16, BF16, None), (F16, F16, None),
]  # fmt: skip
UPDATES = [
    Update("adam", 0.0, True, (0.9, 0.999), 1e-8),
    Update("adam", 0.1, True, (0.3, 0.9), 1e-6),
    Update("adam", 0.1, False, (0.9, 0.99), 1e-8),
    Update("adagrad", 0.1, False, eps=1e-10),
    Update("lion", 0.1, True, (0.9, 0.99)),
]


class Case(NamedTuple):
    how: Update
    numel: int
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype | None]
    state: torch.dtype
    seed: int
    shift: int  # elements that the first one lies beyond an aligned address


def item_of(case: Case, step: float) -> Item:
    generator = torch.Generator().manual_seed(case.seed)

    def values(dtype: torch.dtype) -> torch.Tensor:
        spread = torch.randn(case.numel + case.shift, generator=generator)
        return (spread * torch.randn(1, generator=generator).exp()).to(dtype)[case.shift :]

    param, grad, copy = case.dtypes
    second = values(case.state).square() if case.how.rule == "adam" else None
    first = values(case.state)
    return Item(
        values(param),
        values(grad),
        first.abs() if case.how.rule == "adagrad" else first,
        second,
        None if copy is None else values(copy),
        step,
        0.02,
    )


def clones(item: Item) -> Item:
    return Item(*(each.clone() if isinstance(each, torch.Tensor) else each for each in item))


def assert_same(found: Item, expected: Item) -> None:
    """To the last bit but where one side multiplies and adds in one rounding."""
    for name in ("param", "first", "second", "copy"):
        mine, theirs = getattr(found, name), getattr(expected, name)
        if mine is not None:
            step = torch.finfo(mine.dtype).eps
            torch.testing.assert_close(mine, theirs, rtol=2 * step, atol=2e-7, equal_nan=True)


@needs_library
@settings(max_examples=80, deadline=None)
@given(
    case=st.builds(
        Case,
        st.sampled_from(UPDATES),
        st.sampled_from(NUMELS),
        st.sampled_from(DTYPES),
        st.sampled_from([F32, BF16]),
        st.integers(0, 99),
        st.sampled_from([0, 1, 3]),
    ),
    step=st.sampled_from([1.0, 7.0, math.inf]),
)
def test_native_and_plain_updates_agree_for_every_instruction_set(case, step):
    original = item_of(case, step)
    expected = clones(original)
    update_torch.update([expected], case.how)
    for index in range(len(native.require().instruction_sets)):
        found = clones(original)
        update_native.update_with(index, [found], case.how)
        assert_same(found, expected)
        assert torch.equal(found.grad, original.grad)
        if case.numel > 10:
            assert not torch.equal(found.first, original.first)


@needs_library
@pytest.mark.parametrize("how", UPDATES)
def test_an_elements_result_does_not_depend_on_its_place(how):
    case = Case(how, (1 << 16) + 77, (F32, BF16, BF16), F32, 1, 0)
    whole = item_of(case, 3.0)
    parts = [
        clones(Item(*(each[begin:end] if isinstance(each, torch.Tensor) else each for each in whole)))
        for begin, end in ((0, 5), (5, 40_003), (40_003, case.numel))
    ]
    update_native.update([whole], how)
    update_native.update(parts, how)
    for index in (0, 2, 4):
        assert torch.equal(torch.cat([part[index] for part in parts]), whole[index])


@needs_library
@pytest.mark.parametrize("threads", [1, 3])
def test_many_tensors_of_different_dtypes_in_one_call(threads):
    how = UPDATES[1]
    items = [item_of(Case(how, 70_000 + index, dtypes, F32, index, 0), 2.0) for index, dtypes in enumerate(DTYPES)]
    expected = [clones(item) for item in items]
    update_torch.update(expected, how)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        update_native.update(items, how)
    finally:
        torch.set_num_threads(before)
    for mine, theirs in zip(items, expected, strict=True):
        assert_same(mine, theirs)


@needs_library
@pytest.mark.parametrize("rule", ["adam", "adagrad", "lion"])
@pytest.mark.parametrize("grad", [F32, BF16, F16])
def test_infinities_and_nans_go_where_torchs_go(rule, grad):
    how = next(each for each in UPDATES if each.rule == rule)
    bad = [math.nan, math.inf, -math.inf, 0.0, 1.0, -0.0, 65504.0, 6e-8]
    item = item_of(Case(how, 32, (F32, grad, grad if grad != F32 else None), F32, 0, 0), 1.0)
    item.grad[:8] = torch.tensor(bad).to(grad)
    expected = clones(item)
    update_torch.update([expected], how)
    update_native.update([item], how)
    assert_same(item, expected)
    assert item.first[:3].isfinite().sum() == 0


@needs_library
@pytest.mark.parametrize("dtype", [BF16, F16])
def test_every_16_bit_number_is_read_and_rounded_as_torch_does(dtype):
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)
    zeros = [torch.zeros(1 << 16) for _ in range(2)]
    # Adam without decay and a gradient of 0 leaves the parameter: what arrives in the copy is rounded, nothing else.
    between = every.float() * (1 + 2.0**-9)
    for values in (every.float(), between):
        copy = torch.empty(1 << 16, dtype=dtype)
        update_native.update([Item(values, zeros[0], *(z.clone() for z in zeros), copy, 1.0, 0.1)], UPDATES[0])
        torch.testing.assert_close(copy, values.to(dtype), rtol=0, atol=0, equal_nan=True)
    lion = Update("lion", 0.0, True, (0.0, 0.0))
    mean = torch.zeros(1 << 16)
    update_native.update([Item(zeros[0].clone(), every, mean, None, None, 1.0, 0.1)], lion)
    expected = torch.where(every.isinf(), math.nan, every.float())  # m + 1 * (g - m) of an infinite g
    torch.testing.assert_close(mean, expected, rtol=0, atol=0, equal_nan=True)
