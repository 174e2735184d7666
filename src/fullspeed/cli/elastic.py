"""`fullspeed elastic`: which numbers of devices an elastic configuration can run on."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from fullspeed.base.errors import UsageError
from fullspeed.config import load_config
from fullspeed.config.elastic import elastic_batch, plan_elastic


def describe(words: Sequence[str]) -> list[str]:
    """Lines about the configuration that `words` name. Raises ConfigError or UsageError."""
    parser = argparse.ArgumentParser(prog="fullspeed elastic", description="Sizes of an elastic job.")
    parser.add_argument("-c", "--config", required=True, metavar="FILE", help="a configuration with `elasticity`")
    parser.add_argument("-w", "--world-size", type=int, metavar="N", help="also show how N devices share the batch")
    given = parser.parse_args(list(words))
    config = load_config(given.config, check_supported=False)
    section = config.elasticity
    if not section.enabled:
        raise UsageError(f"elasticity is not enabled in {given.config}; add the section with enabled: true")
    plan = plan_elastic(section)
    lines = [
        f"samples per update   {plan.batch}",
        f"valid device counts  {', '.join(map(str, plan.valid_gpus))}",
    ]
    if given.world_size is None:
        return lines
    if given.world_size < 1 or given.world_size % section.model_parallel_size:
        mp = section.model_parallel_size
        raise UsageError(f"--world-size is {given.world_size}; it must be a positive multiple of {mp}")
    batch = elastic_batch(section, given.world_size // section.model_parallel_size)
    return [
        *lines,
        f"on {given.world_size} devices: micro-batch {batch.micro_batch_size}, "
        f"{batch.grad_accum_steps} accumulation steps, {batch.world} data-parallel ranks",
    ]
