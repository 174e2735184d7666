"""What answers for a running engine's parameters outside their modules: operations, copies, the values as a whole.

Parameters that no engine runs have a `ShardHolder` instead (`sharding/holder.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from typing_extensions import override

from fullspeed.base.errors import UsageError
from fullspeed.comm import Group
from fullspeed.sharding import placeholder
from fullspeed.sharding.group import FlatGroup
from fullspeed.sharding.scopes import uncompiled

if TYPE_CHECKING:
    from fullspeed.sharding.runtime import ShardingRuntime


class RuntimeOwner(placeholder.Owner):
    """Owner of a runtime's parameters: their values can be had inside a forward or backward, or by all ranks."""

    def __init__(self, runtime: ShardingRuntime) -> None:
        self.runtime = runtime

    @property
    @override
    def group(self) -> Group:
        return self.runtime.links.dp_group

    @override
    def place_of(self, param: torch.Tensor) -> tuple[FlatGroup, int]:
        return self.runtime.slot_of[cast(nn.Parameter, param)]

    @override
    @uncompiled
    def run(self, tensors: list[torch.Tensor], operation: placeholder.Operation) -> Any:
        self._make_whole(cast("list[nn.Parameter]", tensors))
        return operation.carry_out()

    @override
    def copy_of(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.deep_copy_of(cast(nn.Parameter, tensor))

    @override
    def deep_copy_of(self, param: nn.Parameter) -> nn.Parameter:
        """Ordinary, for no engine runs it."""
        self._make_whole([param])
        return nn.Parameter(param.detach().clone(), param.requires_grad)

    def _make_whole(self, params: Sequence[nn.Parameter]) -> None:
        """Gather parameters that are used outside the modules that own them, or say why that cannot be."""
        if not self.runtime.is_computing:
            names = ", ".join(dict.fromkeys(self.runtime.name_of(param) for param in params))
            raise UsageError(
                f"parameter {names} is sharded over ranks and its values are not here now; use it inside the model's "
                f"forward, read or change it inside zero.GatheredParameters, or save with save_checkpoint"
            )
        self.runtime.lend(dict.fromkeys(self.place_of(param)[0] for param in params))

    @override
    def assemble(self) -> None:
        if not self.runtime.is_computing:  # else ranks come by themselves
            self.runtime.sync()

    @override
    @contextmanager
    def whole(self, groups: Sequence[FlatGroup]) -> Iterator[None]:
        self.assemble()
        for group in groups:
            group.users += 1
            self.runtime.gatherer.fetch(group)
        try:
            self.runtime.check_files()
            yield
            self.runtime.check_files()
        finally:
            for group in groups:
                group.users -= 1
                if not group.users and not group.held_by_backward:
                    self.runtime.gatherer.free(group)

    @override
    def replace(self, param: nn.Parameter, value: torch.Tensor) -> None:
        """Refused: the optimizer's state is bound to the parameter's shape and dtype."""
        raise UsageError(
            f"parameter {self.runtime.name_of(param)} of a running engine, of shape {tuple(param.shape)} and "
            f"{param.dtype}, cannot become one of shape {tuple(value.shape)} and {value.dtype}; change it before "
            f"initialize"
        )
