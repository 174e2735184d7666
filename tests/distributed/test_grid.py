"""Case C9: settings of memory and speed change no number, to the bit."""

from __future__ import annotations

import itertools

import pytest
import torch

from fullspeed.engine.initialize import initialize
from tests.models import deep_mlp
from tests.parity.beside import adamw, difference, square, vectors, zero_config
from tests.ranks import ranks

BUCKETS = (1, 8, 50, 10**8)


def _train(rank, world_size, stage, **zero):
    """Parameters and norms after two updates of two micro-batches; how many groups there were."""
    model = deep_mlp()
    config = zero_config(stage, accum=2, **zero)
    engine, *_ = initialize(model=model, optimizer=adamw, config=config)
    num_groups = len(engine.runtime.groups)
    norms = []
    for step in range(2):
        for micro in range(2):
            engine.backward(square(engine, vectors(world_size, step, micro)[rank]))
            engine.step()
        norms.append(engine.get_global_grad_norm())
    engine.destroy()
    return model, norms, num_groups


@pytest.mark.parametrize("stage", [1, 2, 3])
@ranks(2)
def test_c9_buckets_overlap_and_layout(rank, world_size, stage):
    """reduce_bucket_size x overlap_comm x contiguous_gradients x reduce_scatter."""
    expected, expected_norms, num_groups = _train(rank, world_size, stage)
    assert num_groups == 4
    seen = set()
    for bucket, overlap, contiguous, scatter in itertools.product(BUCKETS, *[(False, True)] * 3):
        model, norms, num_groups = _train(
            rank,
            world_size,
            stage,
            reduce_bucket_size=bucket,
            overlap_comm=overlap,
            contiguous_gradients=contiguous,
            reduce_scatter=scatter,
        )
        seen.add(num_groups)
        setting = (bucket, overlap, contiguous, scatter)
        assert max(difference(model, expected).values()) == 0.0, setting
        assert norms == pytest.approx(expected_norms, rel=1e-6), setting
    assert seen == {4, 1}, "the largest bucket merges units, the smallest does not"


@ranks(2, 4)
def test_c9_budgets_of_stage_3(rank, world_size):
    """Prefetch, live and reuse budgets, and persistence, each from nothing to plenty."""
    expected, _, _ = _train(rank, world_size, 3)
    choices = itertools.product((0, 50, 10**8), (0, 200, 10**9), (0, 10**9), (0, 30, 10**5), (1, 10**8))
    # Every third of the 108 combinations: each pair of choices still meets.
    for index, (prefetch, live, reuse, persistence, bucket) in enumerate(choices):
        if index % 3 != (index // 3 + index // 9) % 3:
            continue
        setting = {
            "stage3_prefetch_bucket_size": prefetch,
            "stage3_max_live_parameters": live,
            "stage3_max_reuse_distance": reuse,
            "stage3_param_persistence_threshold": persistence,
            "reduce_bucket_size": bucket,
        }
        model, _, _ = _train(rank, world_size, 3, **setting)
        assert max(difference(model, expected).values()) == 0.0, setting


@ranks(2)
def test_settings_without_effect_on_numbers(rank, world_size):
    """Others of the section that are about speed, memory or compatibility."""
    for stage in (1, 2, 3):
        expected, _, _ = _train(rank, world_size, stage)
        for setting in (
            {"sub_group_size": 1},
            {"sub_group_size": 20},
            {"round_robin_gradients": True},
            {"allgather_partitions": False},
            {"allgather_bucket_size": 4},
            {"use_multi_rank_bucket_allreduce": False},
            {"stage3_module_granularity_threshold": 10},
            {"stage3_allgather_sequential": True},
            {"log_trace_cache_warnings": True},
        ):
            model, _, _ = _train(rank, world_size, stage, **setting)
            assert max(difference(model, expected).values()) == 0.0, (stage, setting)


@ranks(2)
def test_runs_repeat_to_the_bit(rank, world_size):
    for stage in (0, 2, 3):
        first, second = (_train(rank, world_size, stage)[0] for _ in range(2))
        assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
