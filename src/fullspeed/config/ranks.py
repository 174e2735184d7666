"""Rules between the configuration and the number of ranks, which is known only when training starts."""

from __future__ import annotations

from fullspeed.base.errors import ConfigError, ConfigFault
from fullspeed.config.root import Config


def check_ranks(config: Config, num_ranks: int) -> None:
    """Check that shard groups divide the data-parallel ranks, and hpZ's groups the ranks of a shard group.

    Raises:
        ConfigError: with every fault.
    """
    zero = config.zero_optimization
    faults = []
    shard_ranks = zero.mics_shard_size if zero.mics_shard_size > 0 else num_ranks
    if num_ranks % shard_ranks:
        rule = f"shard groups of this size do not divide the {num_ranks} data-parallel ranks"
        fix = f"use a divisor of {num_ranks}, or remove it"
        faults.append(ConfigFault("zero_optimization.mics_shard_size", shard_ranks, rule, fix))
    elif shard_ranks % zero.zero_hpz_partition_size:
        rule = f"groups of this size do not divide the {shard_ranks} ranks that parameters are sharded over"
        fix = f"use a divisor of {shard_ranks}, usually the ranks of a node, or remove it"
        faults.append(ConfigFault("zero_optimization.zero_hpz_partition_size", zero.zero_hpz_partition_size, rule, fix))
    if faults:
        raise ConfigError(faults)
