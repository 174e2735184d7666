"""Training parameters that were frozen when the engine was made: checks before anything changes, then the change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fullspeed.base.errors import UsageError
from fullspeed.comm import all_gather_object
from fullspeed.sharding import placeholder
from fullspeed.sharding.runtime import ShardingRuntime

if TYPE_CHECKING:
    from fullspeed.sharding.optimizer import ShardedOptimizer


def unfreeze(
    optimizer: ShardedOptimizer, params: Sequence[nn.Parameter], into: int | None, options: Mapping[str, Any]
) -> None:
    """Train `params` as well. Collective. See `Engine.unfreeze` for the arguments."""
    runtime = optimizer.runtime
    for param in params:
        _check_managed(runtime, param)
    frozen = [param for param in dict.fromkeys(params) if not runtime.trains(param)]
    index_of = {param: index for index, members in enumerate(optimizer.bit16_groups) for param in members}
    _check_groups(optimizer, [index_of.get(param) for param in frozen], into, options)
    _check_ranks_agree(optimizer, params, into)
    joining = [param for param in frozen if param not in index_of]
    if joining:
        index = _new_group(optimizer, options) if into is None else into
        index_of |= dict.fromkeys(joining, index)
        optimizer.bit16_groups[index].extend(joining)
    for param in params:
        param.requires_grad_(True)
    runtime.train(frozen)
    for param in frozen:
        optimizer.param_groups[index_of[param]]["params"].extend(optimizer.own([param]))
    optimizer.bind_shards()


def _new_group(optimizer: ShardedOptimizer, options: Mapping[str, Any]) -> int:
    """An empty param group, so that options the optimizer refuses are an error before anything else changes."""
    optimizer.before_new_group()
    optimizer.optimizer.add_param_group({**options, "params": []})
    optimizer.bit16_groups.append([])
    return len(optimizer.bit16_groups) - 1


def _check_managed(runtime: ShardingRuntime, param: nn.Parameter) -> None:
    if param not in runtime.slot_of:
        owner = "belongs to another engine" if placeholder.is_adopted(param) else "was not in the model at initialize"
        raise UsageError(
            f"a parameter of shape {tuple(param.shape)} {owner} and cannot join a running one; give it an optimizer of "
            f"its own, or build a new engine with initialize"
        )


def _check_groups(
    optimizer: ShardedOptimizer, indices: Sequence[int | None], into: int | None, options: Mapping[str, Any]
) -> None:
    """`indices` are the param groups that the parameters to be trained are in already."""
    num_groups = len(optimizer.param_groups)
    if into is not None and not 0 <= into < num_groups:
        raise UsageError(f"into is {into}, the optimizer has param groups 0 to {num_groups - 1}")
    if into is not None and options:
        raise UsageError(f"param group {into} has its options; leave out {', '.join(options)} or into")
    members = {index for index in indices if index is not None}
    if members and (into is not None or options):
        raise UsageError(
            f"parameters to unfreeze are in param group {', '.join(map(str, sorted(members)))} since initialize and "
            f"stay there; unfreeze them without into and options"
        )
    if indices and isinstance(optimizer.optimizer, torch.optim.Adagrad):
        raise UsageError("Adagrad makes the state of its parameters when it is built; build a new engine to unfreeze")


def _check_ranks_agree(optimizer: ShardedOptimizer, params: Sequence[nn.Parameter], into: int | None) -> None:
    mine = ([optimizer.runtime.name_of(param) for param in params], into)
    optimizer.runtime.meet()
    asked = all_gather_object(mine, optimizer.dp_group)
    if any(other != asked[0] for other in asked):
        raise UsageError(f"ranks unfreeze different parameters: {'; '.join(str(names) for names, _ in asked)}")
