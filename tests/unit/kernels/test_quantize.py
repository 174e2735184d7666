"""Quantised values come back within half a step, whatever their number, dtype and size; no inf or nan is hidden."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fullspeed.kernels import quantize_torch
from fullspeed.kernels.format import BlockFormat
from fullspeed.kernels.quantize import DTYPES, dequantize, dequantize_sum, quantize

FORMS = st.builds(BlockFormat, st.sampled_from([4, 8]), st.sampled_from([2, 6, 16, 256]))
NUMELS = st.one_of(st.integers(1, 40), st.sampled_from([255, 256, 257, 511, 512, 513, 1023, 3001]))


@pytest.fixture(autouse=True, scope="module")
def _small_chunks():
    """So that a few values are several chunks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quantize_torch, "_CHUNK_NUMEL", 512)
        yield


def values_of(numel: int, seed: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> torch.Tensor:
    """Of very different sizes from block to block."""
    generator = torch.Generator().manual_seed(seed)
    spread = torch.randn(-(-numel // 16), generator=generator).mul(3).exp().repeat_interleave(16)[:numel]
    return (torch.randn(numel, generator=generator) * spread * scale).to(dtype)


def message_of(values: torch.Tensor, form: BlockFormat) -> torch.Tensor:
    message = torch.full((form.nbytes(len(values)),), 0xAA, dtype=torch.uint8)
    quantize(values.view(1, 1, -1), message.view(1, 1, -1), form)
    return message


def back(message: torch.Tensor, numel: int, form: BlockFormat, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    out = torch.full((1, numel), 7.0, dtype=dtype)
    dequantize(message.view(1, -1), out, form)
    return out[0]


def steps_of(values: torch.Tensor, form: BlockFormat) -> torch.Tensor:
    """The quantisation step at each value, from its definition."""
    steps = [part.float().abs().max() / form.largest_code for part in values.split(form.block)]
    return torch.stack(steps).repeat_interleave(form.block)[: len(values)]


@settings(max_examples=30)
@example(form=BlockFormat(4, 256), numel=1, seed=0, dtype=torch.bfloat16)
@example(form=BlockFormat(8, 2), numel=3001, seed=1, dtype=torch.float32)
@given(form=FORMS, numel=NUMELS, seed=st.integers(0, 99), dtype=st.sampled_from(DTYPES))
def test_values_come_back_within_half_a_step(form, numel, seed, dtype):
    values = values_of(numel, seed, dtype, scale=1e-2)
    found = back(message_of(values, form), numel, form)
    error, bound = (found - values.float()).abs(), steps_of(values, form) / 2
    # One part in 10,000 for the rounding of scale and products.
    assert (error <= bound * 1.0001 + 2.0**-126).all()
    assert error.max() > bound.max() / 100 or numel < 20, "quantisation did happen"
    rounded = back(message_of(values, form), numel, form, dtype)
    assert torch.equal(rounded, found.to(dtype)), "a narrower result is the same, rounded once"


@given(form=FORMS, numel=NUMELS)
def test_codes_scales_and_padding_have_their_places(form, numel):
    codes, scales = form.split(torch.zeros(form.nbytes(numel), dtype=torch.uint8), numel)
    assert len(codes) == -(-numel * form.bits // 8)
    assert len(scales) == -(-numel // form.block)
    assert form.nbytes(numel) % 16 == 0
    assert form.nbytes(numel) <= len(codes) + 4 * len(scales) + 30


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", DTYPES)
def test_zeros_and_whole_codes_are_exact(bits, dtype):
    form = BlockFormat(bits, 16)
    values = torch.zeros(70, dtype=dtype)
    values[17:32] = torch.arange(-7, 8).to(dtype)
    values[40] = -form.largest_code
    found = back(message_of(values, form), 70, form, dtype)
    if bits == 4:
        assert torch.equal(found, values)
    assert found[:16].eq(0).all()
    assert found[40] == values[40]
    assert found[48:].eq(0).all()


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("bad", [float("inf"), -float("inf"), float("nan")])
def test_a_block_with_inf_or_nan_is_neither_hidden_nor_spread(bits, bad):
    form = BlockFormat(bits, 16)
    values = values_of(90, 3)
    clean = back(message_of(values, form), 90, form)
    values[37] = bad
    found = back(message_of(values, form), 90, form)
    assert not found[32:48].isfinite().any()
    assert torch.equal(found[:32], clean[:32])
    assert torch.equal(found[48:], clean[48:])


@pytest.mark.parametrize("scale", [1e-45, 1e-41, 1e-38, 1e30, 1e37])
def test_the_ends_of_the_range_of_fp32(scale):
    values = torch.linspace(-3, 3, 64) * scale
    for bits in (4, 8):
        form = BlockFormat(bits, 64)
        found = back(message_of(values, form), 64, form)
        assert (found - values).abs().max() <= max(3 * scale / form.largest_code / 2, 2.0**-127) * 1.0001


@settings(max_examples=15)
@given(form=FORMS, numel=NUMELS, num_messages=st.integers(1, 5), dtype=st.sampled_from(DTYPES))
def test_sums_are_made_in_fp32_and_rounded_once(form, numel, num_messages, dtype):
    rows = [values_of(numel, seed) for seed in range(2 * num_messages)]
    messages = torch.stack([message_of(row, form) for row in rows]).view(num_messages, 2, -1)
    out = torch.empty((2, numel), dtype=dtype)
    dequantize_sum(messages, out, form)
    for row in range(2):
        expected = back(messages[0, row], numel, form)
        for message in messages[1:, row]:
            expected = expected + back(message, numel, form)
        assert torch.equal(out[row], expected.to(dtype))


@settings(max_examples=15)
@given(form=FORMS, numel=st.integers(1, 300))
def test_rows_may_lie_anywhere(form, numel):
    values = torch.stack([values_of(numel, seed) for seed in range(6)]).view(2, 3, numel).transpose(0, 1)
    messages = torch.zeros((3, 2, form.nbytes(numel)), dtype=torch.uint8)
    quantize(values, messages, form)
    for outer in range(3):
        for inner in range(2):
            found = back(messages[outer, inner], numel, form)
            assert torch.equal(found, back(message_of(values[outer, inner], form), numel, form))


def test_no_temporary_of_the_size_of_the_values(monkeypatch):
    """The plain implementation works through chunks: its intermediates are bounded, however many values there are."""
    seen = []
    chunk = quantize_torch._quantize_chunk

    def spy(values, codes, scales, form):
        seen.append(values.numel())
        chunk(values, codes, scales, form)

    monkeypatch.setattr(quantize_torch, "_quantize_chunk", spy)
    form = BlockFormat(8, 256)
    message = torch.empty((1, 1, form.nbytes(10_001)), dtype=torch.uint8)
    quantize_torch.quantize(torch.ones(1, 1, 10_001), message, form)
    assert sum(seen) == 10_001
    assert max(seen) <= 512
