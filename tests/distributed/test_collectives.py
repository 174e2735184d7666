"""Collectives of every stage, counted by kind and bytes: exactly those of the table in sharding/placement.py."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from fullspeed.comm import CommRecorder, observing
from fullspeed.engine.initialize import initialize
from tests.models import deep_mlp
from tests.parity.beside import adamw, square, vectors, zero_config
from tests.ranks import ranks

STAGES = (0, 1, 2, 3)
ACCUM = 3
# Of deep_mlp: Linear(5, 13), LayerNorm(13), Linear(13, 13), Linear(13, 3).
NUMELS = (78, 26, 182, 42)


def _sizes(recorder):
    """(kind, bytes) of every collective seen -> how often; without the agreements."""
    return Counter((event.op, event.nbytes) for event in recorder.events if event.op != "agree")


def _engine(config):
    return initialize(model=deep_mlp(), optimizer=adamw, config=config)[0]


def _update(engine, rank, world_size, step):
    for micro in range(ACCUM):
        engine.backward(square(engine, vectors(world_size, step, micro)[rank]))
        engine.step()


def _numels_of(engine, world_size):
    """Elements of each group's messages: its parameters, each padded by less than a cache line, and the tail."""
    numels = [group.numel for group in engine.runtime.groups]
    assert len(numels) == len(NUMELS)
    for numel, own in zip(numels, NUMELS, strict=True):
        assert own <= numel < own + 16 * (2 + world_size)
    return numels


def _groups_of(engine, world_size):
    return [4 * numel for numel in _numels_of(engine, world_size)]


@ranks(2, 4)
def test_stages_without_sharded_parameters(rank, world_size):
    """Per update and group. Stage 0: one all-reduce. 1: one reduce-scatter, one all-gather. 2: a reduce-scatter for
    each micro-batch, one all-gather. Sharded optimizer states add one scalar all-reduce for the norm."""
    for stage in (0, 1, 2):
        for overlap in (True, False):
            engine = _engine(zero_config(stage, accum=ACCUM, overlap_comm=overlap))
            sizes = _groups_of(engine, world_size)
            for step in range(3):
                recorder = CommRecorder()
                with observing(recorder):
                    _update(engine, rank, world_size, step)
                expected = Counter()
                for nbytes in sizes:
                    if stage == 0:
                        expected["all_reduce", nbytes] += 1
                    else:
                        expected["reduce_scatter", nbytes] += 1 if stage == 1 else ACCUM
                        expected["all_gather", nbytes] += 1
                if stage > 0:
                    expected["all_reduce", 8] += 1
                assert _sizes(recorder) == expected
            engine.destroy()


@ranks(2, 4)
def test_stage_3_gathers_around_each_use(rank, world_size):
    """Per group and micro-batch: a gather for forward, one for backward (the last group stays between the two once
    the order is known), a reduce-scatter; nothing after the step, whatever the prefetch."""
    for prefetch in (0, 10**6):
        engine = _engine(zero_config(3, accum=ACCUM, stage3_prefetch_bucket_size=prefetch))
        sizes = _groups_of(engine, world_size)
        for step in range(3):
            recorder = CommRecorder()
            with observing(recorder):
                _update(engine, rank, world_size, step)
            expected = Counter({("all_reduce", 8): 1})
            for index, nbytes in enumerate(sizes):
                is_last = index == len(sizes) - 1
                saved = 0 if not is_last else ACCUM if step else ACCUM - 1
                expected["all_gather", nbytes] += 2 * ACCUM - saved
                expected["reduce_scatter", nbytes] += ACCUM
            assert _sizes(recorder) == expected, (prefetch, step)
        for _ in range(2):  # with prefetch the first may fetch for a backward that does not come
            recorder = CommRecorder()
            with observing(recorder), torch.no_grad():
                square(engine, torch.ones(4, 5))
        assert _sizes(recorder) == Counter(("all_gather", nbytes) for nbytes in sizes)
        engine.destroy()


@ranks(2)
def test_stage_3_keeps_what_is_reused_soon(rank, world_size):
    """With a large reuse distance and live budget, backward finds every group whole: one gather a micro-batch."""
    config = zero_config(3, accum=ACCUM, stage3_max_reuse_distance=10**9, stage3_max_live_parameters=10**9)
    engine = _engine(config)
    sizes = _groups_of(engine, world_size)
    _update(engine, rank, world_size, 0)
    recorder = CommRecorder()
    with observing(recorder):
        _update(engine, rank, world_size, 1)
    gathers = {size: count for (kind, size), count in _sizes(recorder).items() if kind == "all_gather"}
    assert gathers == dict.fromkeys(sizes, ACCUM)


@ranks(2)
def test_persistent_groups_gather_once_an_update(rank, world_size):
    """Small parameters of stage 3 stay whole: they travel like stage 2's."""
    engine = _engine(zero_config(3, accum=ACCUM, stage3_param_persistence_threshold=10**6))
    sizes = _groups_of(engine, world_size)
    _update(engine, rank, world_size, 0)
    recorder = CommRecorder()
    with observing(recorder):
        _update(engine, rank, world_size, 1)
    expected = Counter({("all_reduce", 8): 1})
    for nbytes in sizes:
        expected["all_gather", nbytes] += 1
        expected["reduce_scatter", nbytes] += ACCUM
    assert _sizes(recorder) == expected


@ranks(2)
def test_merged_groups_travel_together(rank, world_size):
    """The default bucket merges these units: one message where there were four."""
    engine = _engine(zero_config(1, reduce_bucket_size=10**6))
    recorder = CommRecorder()
    with observing(recorder):
        engine.backward(square(engine, torch.ones(4, 5)))
        engine.step()
    (group,) = engine.runtime.groups
    assert sum(NUMELS) <= group.numel < sum(NUMELS) + 16 * 10
    total = 4 * group.numel
    assert _sizes(recorder) == Counter([("reduce_scatter", total), ("all_gather", total), ("all_reduce", 8)])


@ranks(2)
def test_bytes_of_16_bit_training(rank, world_size):
    """bf16 values and gradients travel as two bytes an element, unless told otherwise."""
    for stage in (1, 2, 3):
        for wire, itemsize in ((None, 2), ("fp32", 4)):
            config = zero_config(stage) | {"bf16": {"enabled": True}}
            if wire:
                config["communication_data_type"] = wire
            engine = _engine(config)
            engine.backward(square(engine, torch.ones(4, 5).bfloat16()))
            engine.step()
            recorder = CommRecorder()
            with observing(recorder):
                engine.backward(square(engine, torch.ones(4, 5).bfloat16()))
                engine.step()
            nbytes = recorder.nbytes()
            numels = _numels_of(engine, world_size)
            assert nbytes["reduce_scatter"] == itemsize * sum(numels)
            gathers = {1: sum(numels), 2: sum(numels), 3: 2 * sum(numels) - numels[-1]}[stage]
            assert nbytes["all_gather"] == 2 * gathers
            engine.destroy()


@ranks(2)
def test_no_sync_saves_reductions_where_gradients_are_whole(rank, world_size):
    """Stages 0 and 1 reduce once, at the boundary; inside no_sync nothing travels."""
    for stage, kind in ((0, "all_reduce"), (1, "reduce_scatter")):
        engine = _engine(zero_config(stage))
        recorder = CommRecorder()
        with observing(recorder), engine.no_sync():
            for micro in range(3):
                engine.backward(square(engine, vectors(world_size, 0, micro)[rank]))
        assert recorder.counts() == {}
        with observing(recorder):
            engine.backward(square(engine, torch.ones(4, 5)))
            engine.step()
        assert recorder.counts()[kind] == len(NUMELS) if stage else len(NUMELS)
        engine.destroy()


@ranks(1)
def test_one_rank_communicates_nothing(rank, world_size):
    for stage in STAGES:
        recorder = CommRecorder()
        with observing(recorder):
            engine = _engine(zero_config(stage, accum=ACCUM))
            _update(engine, rank, world_size, 0)
            engine.destroy()
        assert recorder.counts(with_agreements=True) == {}


@pytest.mark.parametrize("stage", [1, 2])
@ranks(2)
def test_reduction_by_all_reduce(rank, world_size, stage):
    """`reduce_scatter: false` sends all-reduces instead."""
    engine = _engine(zero_config(stage, accum=ACCUM, reduce_scatter=False))
    recorder = CommRecorder()
    with observing(recorder):
        _update(engine, rank, world_size, 0)
    counts = recorder.counts()
    assert "reduce_scatter" not in counts
    assert counts["all_reduce"] == len(NUMELS) * (1 if stage == 1 else ACCUM) + 1
