"""Every stage trains like one plain torch process on the union of the data: losses, norms, parameters."""

from __future__ import annotations

import pytest

from tests.models import deep_mlp, mlp
from tests.parity.beside import Pair, adamw, sgd, zero_config
from tests.ranks import ranks

STAGES = (0, 1, 2, 3)


@pytest.mark.parametrize("stage", STAGES)
@ranks(1, 2, 4)
def test_ten_steps_equal_plain_torch(rank, world_size, stage):
    """Also case C1: several micro-batches, accumulated or not; weights and the global norm are equal."""
    for accum, clip, optimizer in ((1, 0.0, adamw), (3, 0.05, adamw), (1, 0.05, sgd), (3, 0.0, sgd)):
        pair = Pair(rank, world_size, mlp, zero_config(stage, accum=accum, clip=clip), optimizer)
        assert len(pair.engine.runtime.groups) == 2
        pair.train(10).check()
        if clip:
            assert min(pair.norms) > clip, "nothing was clipped"


@pytest.mark.parametrize("stage", STAGES)
@ranks(2, 4)
def test_a_deeper_model_equals_plain_torch(rank, world_size, stage):
    config = zero_config(stage, accum=3, clip=0.05)
    pair = Pair(rank, world_size, deep_mlp, config, adamw)
    groups = pair.engine.runtime.groups
    assert len(groups) == 4
    assert all(group.placement.params == (stage == 3) for group in groups)
    assert all(group.is_whole != (stage == 3) for group in groups)
    pair.train(10).check()
    assert min(pair.norms) > 0.05


@pytest.mark.parametrize("stage", STAGES)
@ranks(2)
def test_default_buckets_merge_small_units(rank, world_size, stage):
    """With the default sizes everything here is one group, persistent at stage 3; numbers are the same."""
    config = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2,
              "zero_optimization": {"stage": stage}}  # fmt: skip
    pair = Pair(rank, world_size, deep_mlp, config, adamw)
    assert len(pair.engine.runtime.groups) == 1
    pair.train(5).check()


@ranks(2)
def test_every_rank_gets_rank_0s_weights(rank, world_size):
    for stage in STAGES:
        pair = Pair(rank, world_size, mlp, zero_config(stage), sgd)
        pair.check(0.0)
