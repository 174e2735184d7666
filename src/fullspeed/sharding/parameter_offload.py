"""What TRL reads of a ZeRO-3 optimizer to take the hooks off a model that it generates with.

It gathers all parameters first; there our hooks find every group whole and do nothing, so they can stay. The object
only answers the questions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from fullspeed.sharding.attributes import is_zero_param
from fullspeed.sharding.group import FlatGroup


class ShardedParameters:
    """Stands for the model: its sharded parameters, by name."""

    def __init__(self, groups: Sequence[FlatGroup]) -> None:
        self._groups = groups

    def named_parameters(self, recurse: bool = True) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters that are sharded now."""
        del recurse
        for group in self._groups:
            named = zip(group.fqns, group.params, strict=True)
            yield from ((fqn, param) for fqn, param in named if is_zero_param(param))

    def ds_external_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """None but those: whoever uses a parameter, it belongs to the model."""
        return iter(())


class ParameterOffload:
    """Stands for the hooks of a model: two empty lists."""

    def __init__(self, groups: Sequence[FlatGroup]) -> None:
        self.module = ShardedParameters(groups)
        self.forward_hooks: list[Any] = []
        self.backward_hooks: list[Any] = []

    def _register_deepspeed_module(self, module: Any) -> None:
        """Put the hooks back: they never left."""
