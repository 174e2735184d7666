"""Offloading only what checkpointed modules keep: the hidden states that enter them."""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle
from typing_extensions import Self

from fullspeed.activation.offload import OffloadCounts, offload_activations
from fullspeed.activation.selective import is_checkpointed

_Key: TypeAlias = tuple[int, int, torch.Size]  # storage, offset, size


class HiddenStatesOffload:
    """A context manager, to be entered as often as one likes, around forwards or forwards and backwards.

    Inside it, the first argument of each module that recomputes itself waits in host memory from the forward until
    backward. Such modules are those of `checkpoint_modules`, and those of Hugging Face while their
    `gradient_checkpointing` is on.
    """

    def __init__(self, **settings: Any) -> None:
        """Takes the settings of `offload_activations`."""
        self._offload = offload_activations(is_wanted=self._is_input, **settings)
        self._entering: list[_Key | None] = []  # the first arguments of the modules we are in, outermost first
        self._handles: list[RemovableHandle] = []

    def __enter__(self) -> Self:
        """Watch modules and what is saved."""
        self._handles.append(register_module_forward_pre_hook(self._enter_module))
        self._handles.append(register_module_forward_hook(self._leave_module, always_call=True))
        self._offload.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        """Watch no more."""
        self._offload.__exit__(*exception)
        for _ in range(2):
            self._handles.pop().remove()

    def counts(self) -> OffloadCounts:
        """What was done so far and what is held now."""
        return self._offload.counts()

    def _enter_module(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if is_checkpointed(module):
            self._entering.append(_key(args[0]) if args and isinstance(args[0], torch.Tensor) else None)

    def _leave_module(self, module: nn.Module, args: Any, output: Any) -> None:
        if is_checkpointed(module) and self._entering:
            self._entering.pop()

    def _is_input(self, tensor: torch.Tensor) -> bool:
        return bool(self._entering) and self._entering[-1] == _key(tensor)


def get_checkpoint_hidden_states_offloading_ctx_manager(
    use_pin_memory: bool = True,
    use_streams: bool = True,
    min_offload_bytes: int = 1024,
    max_fwd_stash_count: int = 5,
    max_cpu_buffer_pool_count: int = 64,
    keep_last_count: int = 1,
) -> HiddenStatesOffload:
    """`HiddenStatesOffload` under DeepSpeed's name and arguments.

    Args:
        use_pin_memory: page-lock host buffers.
        use_streams: copy on a stream of their own.
        min_offload_bytes: smaller ones stay.
        max_fwd_stash_count: how many may still be on the device while they are copied.
        max_cpu_buffer_pool_count: free host buffers kept for the next pass.
        keep_last_count: how many of the newest stay.
    """
    return HiddenStatesOffload(
        pin_memory=use_pin_memory,
        use_side_stream=use_streams,
        min_bytes=min_offload_bytes,
        max_leaving=max_fwd_stash_count,
        max_free_buffers=max_cpu_buffer_pool_count,
        keep_last=keep_last_count,
    )


def _key(tensor: torch.Tensor) -> _Key:
    """The same for two tensors that are the same elements."""
    return tensor.untyped_storage()._cdata, int(tensor.storage_offset()), tensor.size()
