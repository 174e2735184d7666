"""Views of values that are freed after their use: those autograd saves, and those a forward would return."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from fullspeed.base.errors import UsageError
from fullspeed.sharding.group import FlatGroup, group_of
from fullspeed.sharding.scopes import uncompiled


class TransientViews:
    """Knows the views of transient groups' `full` by the storage they share with it.

    Args:
        groups: all groups of a model.
        need: called in backward with the groups whose values a saved view needs now.
    """

    def __init__(self, groups: Sequence[FlatGroup], need: Callable[[Sequence[FlatGroup]], None]) -> None:
        self._need = need
        self._groups = {group for group in groups if group.is_transient}
        self._saved_hooks: Any = None

    # ---------------------------------------------------------------- autograd

    def begin_saving(self) -> None:
        """From now on a view that autograd saves calls for its group's values when backward uses it."""
        if self._groups and not _has_saved_tensor_hooks():
            self._saved_hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
            self._saved_hooks.__enter__()

    def end_saving(self) -> None:
        """End what `begin_saving` began, if it did."""
        if self._saved_hooks is not None:
            self._saved_hooks.__exit__(None, None, None)
            self._saved_hooks = None

    @uncompiled
    def _pack(self, tensor: torch.Tensor) -> torch.Tensor | tuple[FlatGroup, torch.Tensor]:
        group = group_of(tensor)
        return (group, tensor) if group in self._groups else tensor

    @uncompiled
    def _unpack(self, packed: torch.Tensor | tuple[FlatGroup, torch.Tensor]) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        group, tensor = packed
        self._need([group])
        return tensor

    # ----------------------------------------------------------------- outputs

    def returned(self, tensors: Sequence[torch.Tensor]) -> Iterator[tuple[FlatGroup, torch.Tensor]]:
        """Views among a module's outputs, each with its group; the parameters themselves know when theirs are freed."""
        for tensor in tensors if self._groups else ():
            if not isinstance(tensor, nn.Parameter) and torch._C._has_storage(tensor):
                group = group_of(tensor)
                if group in self._groups:
                    yield group, tensor

    @staticmethod
    def refuse(returned: Sequence[tuple[FlatGroup, torch.Tensor]]) -> None:
        """Raise UsageError if there are any: nobody may be left with a view of freed memory."""
        for group, view in returned:
            slot = max(i for i, at in enumerate(group.layout.slots) if at.offset <= view.storage_offset())
            raise UsageError(
                f"the forward returns a view of parameter {group.fqns[slot]}, whose values are freed when it ends; "
                f"return the parameter itself or a copy (.clone())"
            )


def _has_saved_tensor_hooks() -> bool:
    """Whether somebody, a checkpoint for one, already listens to saved tensors; only the top listener is called."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
