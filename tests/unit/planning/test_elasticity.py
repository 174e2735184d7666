"""Elastic batch arithmetic: golden values, invariants, and what is refused."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fullspeed.base.errors import ConfigError
from fullspeed.config import Batch, load_config, resolve_batch
from fullspeed.config.elastic import elastic_batch, plan_elastic
from fullspeed.config.profiling import Elasticity
from fullspeed.planning.elasticity import (
    ElasticityConfigError,
    ElasticityError,
    ElasticityIncompatibleWorldSize,
    compute_elastic_config,
    elasticity_enabled,
    ensure_immutable_elastic_config,
)

V1 = {"max_train_batch_size": 10000, "micro_batch_sizes": [8, 12, 16, 17], "min_gpus": 32, "max_gpus": 1500,
      "version": 0.1}  # fmt: skip
V2 = {"max_train_batch_size": 2000, "micro_batch_sizes": [2, 4, 6], "version": 0.2}


def config(section, **changes):
    return {"elasticity": {"enabled": True, **section, **changes}}


def compute(section, world_size=0, micro=False, **changes):
    return compute_elastic_config(config(section, **changes), "0.16.0", world_size, return_microbatch=micro)


def test_golden_values_of_version_1():
    batch, gpus, micro = compute(V1, 48, micro=True)
    assert (batch, len(gpus), micro) == (9792, 23, 17)
    assert gpus[:10] == [32, 34, 36, 48, 51, 64, 68, 72, 96, 102]
    assert gpus[-3:] == [612, 816, 1224]


def test_golden_values_of_version_2():
    batch, gpus, micro = compute(V2, 8, micro=True)
    assert (batch, len(gpus), micro) == (1680, 32, 6)
    assert compute(V2) == (1680, gpus)


def test_micro_batch_needs_a_world_size_in_both_versions(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    for section in (V1, V2):
        with pytest.raises(ElasticityConfigError, match="WORLD_SIZE"):
            compute(section, micro=True)
    monkeypatch.setenv("WORLD_SIZE", "48")
    assert compute(V1, micro=True)[2] == 17
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert compute(V2, micro=True)[2] == 6


@pytest.mark.parametrize("version", [0.1, 0.2])
def test_the_least_common_multiple_does_not_exceed_the_largest_batch(version):
    batch, _ = compute(V1, max_train_batch_size=100, micro_batch_sizes=[8, 10, 12], min_gpus=1, version=version)
    assert batch == 96


@pytest.mark.parametrize(
    ("mp", "sizes", "expected"), [(1, [4, 8], 4), (2, [4, 8], 8), (4, [4, 8], 8), (2, [8], 8), (4, [8], 8)]
)
def test_micro_batch_is_that_of_a_data_parallel_rank(mp, sizes, expected):
    section = {"max_train_batch_size": 64, "micro_batch_sizes": sizes, "num_gpus_per_node": 8}
    batch, gpus, micro = compute(section, 16, micro=True, model_parallel_size=mp)
    assert (batch, micro) == (64, expected)
    assert all(count % 8 == 0 for count in gpus)


def test_smaller_batch_can_be_preferred():
    section = {"max_train_batch_size": 40, "micro_batch_sizes": [2, 3], "version": 0.1, "max_gpus": 4}
    larger, smaller = (compute(section, prefer_larger_batch=flag) for flag in (True, False))
    assert len(larger[1]) == len(smaller[1])
    assert larger[0] > smaller[0]


sections = st.builds(
    lambda sizes, extra, low, span, version, per_node: Elasticity(
        enabled=True, micro_batch_sizes=tuple(sizes), max_train_batch_size=max(sizes) * extra, min_gpus=low,
        max_gpus=low + span, version=version, num_gpus_per_node=per_node,
    ),
    st.lists(st.integers(1, 20), min_size=1, max_size=4), st.integers(1, 200), st.integers(1, 20),
    st.integers(0, 300), st.sampled_from([0.1, 0.2]), st.sampled_from([1, 2, 8]),
)  # fmt: skip


@given(sections)
def test_every_valid_count_shares_the_whole_batch(section):
    try:
        plan = plan_elastic(section)
    except ElasticityConfigError:
        return
    assert plan.batch <= section.max_train_batch_size
    assert list(plan.valid_gpus) == sorted(set(plan.valid_gpus))
    for count in plan.valid_gpus:
        assert section.min_gpus <= count <= section.max_gpus
        batch = elastic_batch(section, count)
        assert batch.micro_batch_size in section.micro_batch_sizes
        assert batch.micro_batch_size * batch.grad_accum_steps * count == plan.batch


def test_a_world_that_does_not_fit_is_named_with_near_ones():
    with pytest.raises(ElasticityIncompatibleWorldSize, match=r"11: a batch of 1680 .*10, 12") as caught:
        compute(V2, 11)
    assert isinstance(caught.value, ElasticityError)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"micro_batch_sizes": [8, 20000]}, "20000 is above max_train_batch_size"),
        ({"micro_batch_sizes": []}, "at least one"),
        ({"micro_batch_sizes": [4, 0]}, "micro_batch_sizes"),
        ({"min_gpus": 9, "max_gpus": 8}, "above max_gpus 8"),
        ({"model_parallel_size": 2}, "version 0.2"),
        ({"model_parallel_size": 16, "num_gpus_per_node": 8, "version": 0.2}, "must divide num_gpus_per_node 8"),
        ({"version": 0.3}, "choose 0.1 or 0.2"),
        ({"min_gpus": 1300, "max_gpus": 1400}, "no number of devices"),
        ({"enabled": False}, "no elastic batch"),
    ],
)
def test_faults_of_the_section(changes, message):
    with pytest.raises(ElasticityConfigError, match=message):
        compute(V1, **changes)


def test_required_keys():
    with pytest.raises(ElasticityConfigError) as caught:
        compute({})
    assert [fault.path for fault in caught.value.faults] == [
        "elasticity.max_train_batch_size",
        "elasticity.micro_batch_sizes",
    ]


@pytest.mark.parametrize("version", ["0.2", "0.3.7", "no version"])
def test_versions_without_elasticity(version):
    with pytest.raises(ElasticityError, match=r"0\.3\.8"):
        compute_elastic_config(config(V2), version)


def test_enabled():
    assert elasticity_enabled(config(V2))
    assert not elasticity_enabled({})
    assert not elasticity_enabled(config(V2, enabled=False))


def test_batch_keys_contradict_elasticity_unless_told_to_be_ignored():
    with pytest.raises(ConfigError, match="elasticity chooses"):
        load_config({**config(V2), "train_batch_size": 8})
    settings = load_config({**config(V2, ignore_non_elastic_batch_info=True), "train_batch_size": 8})
    assert resolve_batch(settings, 8, "a test") == Batch(1680, 6, 35, 8)


def test_the_engines_batch_stays_when_the_world_changes():
    settings = load_config(config(V2))
    batches = [resolve_batch(settings, world, "a test") for world in (3, 2, 7)]
    assert {batch.train_batch_size for batch in batches} == {1680}
    assert all(batch.micro_batch_size * batch.grad_accum_steps * batch.world == 1680 for batch in batches)
    with pytest.raises(ElasticityIncompatibleWorldSize):
        resolve_batch(settings, 11, "a test")


def test_scheduler_and_job_must_agree(monkeypatch):
    monkeypatch.delenv("DEEPSPEED_ELASTICITY_CONFIG", raising=False)
    ensure_immutable_elastic_config(V2)
    monkeypatch.setenv("DEEPSPEED_ELASTICITY_CONFIG", json.dumps({**V2, "enabled": True, "max_train_batch_size": 4000}))
    with pytest.raises(ElasticityConfigError, match=r"max_train_batch_size is 2000: .*4000"):
        ensure_immutable_elastic_config(V2)
    with pytest.raises(ElasticityConfigError, match="4000"):
        resolve_batch(load_config(config(V2)), 8, "a test")
    monkeypatch.setenv("DEEPSPEED_ELASTICITY_CONFIG", json.dumps(V2))
    ensure_immutable_elastic_config(V2)
