"""Modules whose frozen parameters are sharded at every stage: base weights beside small trained adapters."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from fullspeed.base.errors import UsageError


class ShardsFrozen(nn.Module):
    """A module whose own frozen parameters are gathered around its use, whatever the stage.

    Attributes:
        num_shards: ranks that share them; 1 leaves them to the stage.
    """

    num_shards: int = 1


def always_sharded(root: nn.Module) -> set[nn.Parameter]:
    """The parameters of `root` that are sharded at every stage."""
    return {
        param
        for _, module in _sharding_modules(root)
        if module.num_shards > 1
        for param in module.parameters(recurse=False)
        if not param.requires_grad
    }


def check_num_shards(root: nn.Module, num_ranks: int) -> None:
    """Raise UsageError for a module that asks for another number of shards than there are ranks to hold them."""
    for fqn, module in _sharding_modules(root):
        if module.num_shards not in (1, num_ranks):
            raise UsageError(
                f"{fqn or type(module).__name__}: base_weight_sharding is {module.num_shards}, and {num_ranks} ranks "
                f"hold the shards; set it to {num_ranks}, or to 1 to leave sharding to the ZeRO stage"
            )


def _sharding_modules(root: nn.Module) -> Iterator[tuple[str, ShardsFrozen]]:
    for fqn, module in root.named_modules():
        if isinstance(module, ShardsFrozen):
            yield fqn, module
