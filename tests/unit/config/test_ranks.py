"""Rules between the configuration and the number of ranks."""

from __future__ import annotations

import pytest

from fullspeed.base.errors import ConfigError
from fullspeed.config import check_ranks, load_config


def _config(**zero):
    return load_config({"zero_optimization": {"stage": 3, **zero}})


@pytest.mark.parametrize("size", [-1, 1, 2, 3, 6])
@pytest.mark.parametrize("node", [1, 2, 4])
def test_groups_must_divide_the_ranks(size, node):
    config = _config(mics_shard_size=size, zero_hpz_partition_size=node)
    for num_ranks in range(1, 25):
        shard_ranks = num_ranks if size == -1 else size
        if num_ranks % shard_ranks == 0 and shard_ranks % node == 0:
            check_ranks(config, num_ranks)
            continue
        with pytest.raises(ConfigError) as caught:
            check_ranks(config, num_ranks)
        (fault,) = caught.value.faults
        is_shard = num_ranks % shard_ranks != 0
        assert fault.path.endswith("mics_shard_size" if is_shard else "zero_hpz_partition_size")
        assert fault.value == (size if is_shard else node)


@pytest.mark.parametrize("size", [0, -2, 1.5, True, "two"])
def test_a_shard_group_is_a_number_of_ranks(size):
    with pytest.raises(ConfigError, match="mics_shard_size"):
        _config(mics_shard_size=size)


def test_the_key_has_a_plain_name():
    assert _config(shard_group_size=4.0).zero_optimization.mics_shard_size == 4
