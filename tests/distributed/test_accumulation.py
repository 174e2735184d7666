"""Who owns the loop: any accumulation pattern before a step gives what torch gives, at every stage."""

from __future__ import annotations

import copy

import pytest
import torch

from fullspeed.base.errors import ConfigError, UsageError
from fullspeed.engine.initialize import initialize
from tests.models import deep_mlp, mlp
from tests.parity.beside import Pair, adamw, difference, sgd, square, zero_config
from tests.ranks import ranks

STAGES = (0, 1, 2, 3)


def _batches(pair, micro=0):
    return pair.batches(pair.world_size, pair.num_steps, micro)


@ranks(2)
def test_b7_three_backwards_then_one_step(rank, world_size):
    """GAS 1, `backward(loss / 3)` three times, one step: the sum of the three, in every stage."""
    for stage in STAGES:
        pair = Pair(rank, world_size, mlp, zero_config(stage), adamw)
        for _ in range(3):
            for micro in range(3):
                batches = _batches(pair, micro)
                pair.engine.backward(square(pair.engine, batches[rank]) / 3)
                pair.reference_backward(batches, lambda module, batch: square(module, batch) / 3)
            pair.engine.step()
            pair.reference_step()
        pair.check()


@ranks(2)
def test_c4_several_backwards_with_the_optimizer_offloaded(rank, world_size):
    """On the CPU optimizer states are in host memory whether the block says so or not: the same sum, stages 1 to 3."""
    for stage in (1, 2, 3):
        pair = Pair(rank, world_size, mlp, zero_config(stage, offload_optimizer={"device": "cpu"}), adamw)
        assert pair.engine.zero_offload_optimizer().device == "cpu"
        for _ in range(2):
            for micro in range(3):
                batches = _batches(pair, micro)
                pair.engine.backward(square(pair.engine, batches[rank]) / 3)
                pair.reference_backward(batches, lambda module, batch: square(module, batch) / 3)
            pair.engine.step()
            pair.reference_step()
        pair.check()


@ranks(2)
def test_b7_with_unmanaged_accumulation(rank, world_size):
    """`managed_gradient_accumulation: false`: every step updates, whatever the accumulation steps say."""
    for stage in STAGES:
        config = zero_config(stage, accum=3) | {"managed_gradient_accumulation": False}
        pair = Pair(rank, world_size, mlp, config, adamw)
        pair.accum = 1
        for num_backwards in (1, 3, 2):
            for micro in range(num_backwards):
                batches = _batches(pair, micro)
                pair.engine.backward(square(pair.engine, batches[rank]))
                pair.reference_backward(batches)
            pair.engine.step()
            pair.reference_step()
        assert pair.engine.global_steps == 3
        assert pair.engine.global_samples == 4 * world_size * 6
        with pytest.raises(UsageError, match="managed_gradient_accumulation"):
            pair.engine.set_gradient_accumulation_boundary(True)
        pair.check()


@ranks(2)
def test_b9_no_sync(rank, world_size):
    """`engine.no_sync()` around all backwards but the last, and around all of them."""
    for stage in STAGES:
        pair = Pair(rank, world_size, mlp, zero_config(stage, accum=3), adamw)
        for _ in range(3):
            for micro in range(3):
                batches = _batches(pair, micro)
                if micro < 2 or pair.num_steps == 1:
                    with pair.engine.no_sync():
                        pair.engine.backward(square(pair.engine, batches[rank]))
                else:
                    pair.engine.backward(square(pair.engine, batches[rank]))
                pair.engine.step()
                pair.reference_backward(batches)
            pair.reference_step()
        pair.check()


@ranks(2)
def test_b10_one_large_batch_equals_two_small_ones(rank, world_size):
    """Batch 8 x GAS 1 and batch 4 x GAS 2 over the same samples: the same weights."""
    for stage in STAGES:
        finals = []
        for accum in (1, 2):
            model = mlp()
            config = zero_config(stage, accum=accum, micro=8 // accum)
            engine, *_ = initialize(model=model, optimizer=adamw, config=config)
            for step in range(4):
                samples = torch.randn(8, 5, generator=torch.Generator().manual_seed(10 * step + rank))
                for part in samples.chunk(accum):
                    engine.backward(square(engine, part))
                    engine.step()
            assert engine.global_steps == 4
            engine.destroy()
            finals.append(model)
        assert max(difference(*finals).values()) < 1e-6


@ranks(2)
def test_boundary_by_hand(rank, world_size):
    """A last, shorter window: three micro-batches where the configuration says four."""
    for stage in STAGES:
        pair = Pair(rank, world_size, mlp, zero_config(stage, accum=4), adamw)
        for num_micro in (3, 1, 4):
            for micro in range(num_micro):
                pair.engine.set_gradient_accumulation_boundary(micro == num_micro - 1)
                assert pair.engine.is_gradient_accumulation_boundary() == (micro == num_micro - 1)
                batches = _batches(pair, micro)
                pair.engine.backward(square(pair.engine, batches[rank]))
                pair.engine.step()
                assert pair.engine.was_step_applied() == (micro == num_micro - 1)
                pair.reference_backward(batches)
            pair.reference_step()
        assert pair.engine.global_steps == 3
        pair.check()


@ranks(2)
def test_boundary_set_after_backward(rank, world_size):
    """Deciding late costs overlap, never numbers."""
    for stage in STAGES:
        pair = Pair(rank, world_size, mlp, zero_config(stage, accum=4), adamw)
        for _ in range(2):
            for micro in range(2):
                pair.engine.set_gradient_accumulation_boundary(False)
                batches = _batches(pair, micro)
                pair.engine.backward(square(pair.engine, batches[rank]))
                pair.reference_backward(batches)
                pair.engine.set_gradient_accumulation_boundary(micro == 1)
                pair.engine.step()
            pair.reference_step()
        pair.check()


@ranks(2)
def test_plain_loss_backward(rank, world_size):
    """`loss.backward()` instead of `engine.backward(loss)`: the same average over the accumulation steps."""
    for stage in STAGES:
        for accum in (1, 3):
            pair = Pair(rank, world_size, deep_mlp, zero_config(stage, accum=accum, clip=0.05), adamw)
            for _ in range(3):
                for micro in range(accum):
                    batches = _batches(pair, micro)
                    square(pair.engine, batches[rank]).backward()
                    pair.engine.step()
                    pair.reference_backward(batches)
                pair.reference_step()
            pair.check()


@ranks(2)
def test_several_backwards_in_each_micro_batch(rank, world_size):
    for stage in STAGES:
        pair = Pair(rank, world_size, mlp, zero_config(stage, accum=2), sgd)
        for _ in range(3):
            for micro in range(2):
                for part in range(2):
                    batches = _batches(pair, 2 * micro + part)
                    pair.engine.backward(square(pair.engine, batches[rank]))
                    pair.reference_backward(batches)
                pair.engine.step()
            pair.reference_step()
        pair.check()


@ranks(2)
def test_scale_wrt_gas_false(rank, world_size):
    for stage in STAGES:
        pair = Pair(rank, world_size, mlp, zero_config(stage, accum=2), sgd)
        pair.accum = 1
        for _ in range(2):
            for micro in range(2):
                batches = _batches(pair, micro)
                pair.engine.backward(square(pair.engine, batches[rank]), scale_wrt_gas=False)
                pair.engine.step()
                pair.reference_backward(batches)
            pair.reference_step()
        pair.check()


@ranks(2)
def test_coalesced_reduction(rank, world_size):
    for stage in STAGES:
        pair = Pair(rank, world_size, deep_mlp, zero_config(stage), adamw)
        for _ in range(3):
            with pair.engine.coalesce_grad_reduction():
                for micro in range(3):
                    batches = _batches(pair, micro)
                    pair.engine.backward(square(pair.engine, batches[rank]))
                    pair.reference_backward(batches)
            pair.engine.step()
            pair.reference_step()
        pair.check()


@ranks(2)
def test_zero_grad_forgets(rank, world_size):
    """Gradients of a discarded micro-batch do not reach the update."""
    for stage in STAGES:
        pair = Pair(rank, world_size, mlp, zero_config(stage), adamw)
        pair.engine.backward(square(pair.engine, _batches(pair, 9)[rank]))
        pair.engine.zero_grad()
        pair.train(2).check()


@ranks(2)
def test_accumulation_changes_mid_run(rank, world_size):
    for stage in STAGES:
        pair = Pair(rank, world_size, mlp, zero_config(stage), adamw).train(1)
        pair.engine.set_train_batch_size(4 * world_size * 3)
        pair.accum = 3
        assert pair.engine.gradient_accumulation_steps() == 3
        pair.train(2)
        with pytest.raises(UsageError, match="no multiple"):
            pair.engine.set_train_batch_size(4 * world_size + 1)
        pair.check()


@ranks(2)
def test_b1_batch_arithmetic(rank, world_size):
    """What is left out follows from what is given."""
    for keys, expected in (
        ({"train_batch_size": 8}, (8, 4, 1)),
        ({"train_micro_batch_size_per_gpu": 2}, (4, 2, 1)),
        ({"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3}, (12, 2, 3)),
        ({"train_batch_size": 8, "gradient_accumulation_steps": 2}, (8, 2, 2)),
        ({"train_batch_size": 12, "train_micro_batch_size_per_gpu": 2,
          "gradient_accumulation_steps": 3}, (12, 2, 3)),
    ):  # fmt: skip
        engine, *_ = initialize(model=mlp(), optimizer=sgd, config=keys)
        assert engine.get_batch_info() == expected
        assert engine.train_batch_size() == expected[0]
        engine.destroy()


@ranks(2)
def test_b2_a_batch_that_cannot_be_split(rank, world_size):
    with pytest.raises(ConfigError, match="1 cannot be split over 2 ranks"):
        initialize(model=mlp(), optimizer=sgd, config={"train_batch_size": 1})


@ranks(2)
def test_evaluation_between_backward_and_step(rank, world_size):
    """Eval, with and without no_grad, at any point of the loop leaves training alone."""
    for stage in STAGES:
        pair = Pair(rank, world_size, deep_mlp, zero_config(stage, accum=2), adamw)
        for _ in range(3):
            for micro in range(2):
                batches = _batches(pair, micro)
                before = square(pair.reference, batches[rank]).item()
                with torch.no_grad():
                    assert square(pair.engine, batches[rank]).item() == pytest.approx(before, abs=1e-6)
                loss = square(pair.engine, batches[rank])
                with torch.no_grad():  # between forward and backward
                    pair.engine(batches[rank])
                square(pair.engine, batches[rank])  # a graph that is thrown away
                pair.engine.backward(loss)
                pair.engine.eval()
                with torch.inference_mode():
                    assert square(pair.engine, batches[rank]).item() == pytest.approx(before, abs=1e-6)
                pair.engine.train()
                pair.engine.step()
                pair.reference_backward(batches)
            pair.reference_step()
        pair.check()


@ranks(2)
def test_deepcopied_reference_stays_untouched(rank, world_size):
    """Engines do not share state through copies made before initialize."""
    original = mlp()
    model = copy.deepcopy(original)
    engine, *_ = initialize(model=model, optimizer=sgd, config=zero_config(3))
    engine.backward(square(engine, torch.randn(4, 5)))
    engine.step()
    assert max(difference(original, mlp()).values()) == 0.0
