"""Which modules of a model recompute, and which of their operations are spared it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, TypeAlias

import torch
from torch import nn
from torch._ops import OpOverload
from torch.utils.checkpoint import create_selective_checkpoint_contexts, noop_context_fn

from fullspeed.activation.checkpointer import ContextFn
from fullspeed.activation.configure import current_checkpointer
from fullspeed.base.errors import UsageError

Select: TypeAlias = type[nn.Module] | tuple[type[nn.Module], ...] | Callable[[str, nn.Module], bool]
Policy: TypeAlias = Literal["full", "save_matmuls"] | Sequence[OpOverload]

_aten = torch.ops.aten
MATMULS: tuple[OpOverload, ...] = (
    _aten.mm.default,
    _aten.addmm.default,
    _aten.bmm.default,
    _aten.baddbmm.default,
    _aten.convolution.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
)
"""Where nearly all of a transformer's time goes: saving their outputs leaves cheap operations to recompute."""


class CheckpointedForward:
    """The forward of one module, as a checkpointed call."""

    def __init__(self, forward: Callable[..., Any], context_fn: ContextFn) -> None:
        self.__wrapped__ = forward  # signatures are read through this
        self._context_fn = context_fn

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Forward that keeps only its arguments."""
        run = current_checkpointer().run
        return run(self._forward, args, kwargs, reentrant=False, context_fn=self._context_fn)

    def _forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self.__wrapped__(*args, **kwargs)


class CheckpointedModules:
    """What `checkpoint_modules` changed."""

    def __init__(self, modules: list[tuple[str, nn.Module]], context_fn: ContextFn) -> None:
        self._modules = modules
        self._replaced = [vars(module).get("forward") for _, module in modules]  # None: the class's forward
        for _, module in modules:
            module.forward = CheckpointedForward(module.forward, context_fn)

    @property
    def fqns(self) -> list[str]:
        """The names of the modules that recompute, in the model's order."""
        return [fqn for fqn, _ in self._modules]

    def remove(self) -> None:
        """Give the modules their own forward back; may be called twice."""
        for (_, module), replaced in zip(self._modules, self._replaced, strict=True):
            if replaced is None:
                del module.forward
            else:
                module.forward = replaced
        self._modules, self._replaced = [], []


def checkpoint_modules(
    model: nn.Module, select: Select, policy: Policy = "full", *, every: int = 1
) -> CheckpointedModules:
    """Let chosen modules of `model` keep only their inputs, and compute the rest again in backward.

    Hooks of a chosen module run outside its recompute, those of modules in it run again.

    Args:
        model: its chosen modules get another `forward`, as objects; their classes stay as they are.
        select: a class or classes, or a function of a module's name and the module. In a chosen module nothing more is
            chosen.
        policy: "full" recomputes everything; "save_matmuls" keeps the outputs of matrix products and attention, which
            costs memory and spares most of the time; so does a list of operations such as `torch.ops.aten.mm.default`
            for those. A graph with saved operations goes through backward once only.
        every: choose only the first of each `every`; the others keep their activations.

    Raises:
        UsageError: nothing is chosen, or what is chosen recomputes already.
    """
    chosen = list(_chosen(model, "", select))[::every]
    if not chosen:
        raise UsageError("checkpoint_modules: no module of the model is selected; name the class of its blocks")
    context_fn = _context_fn(policy)
    for fqn, module in chosen:
        if is_checkpointed(module):
            raise UsageError(f"checkpoint_modules: module {fqn!r} recomputes already; remove that first")
    return CheckpointedModules(chosen, context_fn)


def is_checkpointed(module: nn.Module) -> bool:
    """Whether a call of `module` itself is a checkpointed call: ours, or that of a Hugging Face layer."""
    if isinstance(vars(module).get("forward"), CheckpointedForward):
        return True
    return bool(getattr(module, "gradient_checkpointing", False)) and module.training


def _chosen(module: nn.Module, fqn: str, select: Select) -> list[tuple[str, nn.Module]]:
    """The outermost selected modules, in order."""
    is_selected = isinstance(module, select) if isinstance(select, (type, tuple)) else select(fqn, module)
    if is_selected:
        return [(fqn, module)]
    prefix = f"{fqn}." if fqn else ""
    return [found for name, child in module.named_children() for found in _chosen(child, prefix + name, select)]


def _context_fn(policy: Policy) -> ContextFn:
    if policy == "full":
        return noop_context_fn
    if isinstance(policy, str) and policy != "save_matmuls":
        raise UsageError(f"the policy is {policy!r}: choose 'full', 'save_matmuls' or a list of operations")
    saved = MATMULS if policy == "save_matmuls" else policy
    return partial(create_selective_checkpoint_contexts, list(saved))
