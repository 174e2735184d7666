"""How many floating-point operations each module of a model does: forward, backward, and recomputed in backward.

Counts come from torch's `FlopCounterMode`: matrix products, convolutions and attention, each at its dispatched kernel,
so nothing is counted twice and custom modules need no formula. Element-wise operations count as zero.

Which module an operation belongs to:
- in forward, every module being called (hooks around forward);
- in backward, the modules that were being called when the autograd node now running was made. A module's nodes are
  noted when its forward ends: those between its outputs and what existed before it began.
"""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils import flop_counter
from torch.utils._pytree import tree_leaves

from fullspeed.accelerator import Accelerator, get_accelerator

_NODE_KEY = "fullspeed.modules"  # in the metadata of an autograd node
_OUTSIDE = -1  # torch's id of no backward


@dataclasses.dataclass
class ModuleCost:
    """What one module and all below it cost. Operations are counted in FLOPs, two for a multiply-add."""

    fqn: str  # "" for the model itself
    class_name: str
    num_params: int  # in logical shapes, however they are sharded; each shared one once
    forward: Counter[str] = dataclasses.field(default_factory=Counter)  # operator -> FLOPs
    backward: Counter[str] = dataclasses.field(default_factory=Counter)
    recompute: Counter[str] = dataclasses.field(default_factory=Counter)  # forwards run again inside backward
    forward_s: float = 0.0
    num_calls: int = 0

    @property
    def depth(self) -> int:
        """Steps below the model."""
        return self.fqn.count(".") + 1 if self.fqn else 0

    @property
    def flops(self) -> int:
        """FLOPs of the forwards."""
        return self.forward.total()

    @property
    def macs(self) -> int:
        """Multiply-adds of the forwards."""
        return self.flops // 2


@dataclasses.dataclass
class _Call:
    """A forward under way."""

    costs: tuple[ModuleCost, ...]  # of this module and those that called it
    first_node: int  # autograd nodes made in it have numbers from here on
    began_s: float
    backward: int  # the backward it runs in, or _OUTSIDE


class FlopCounter:
    """Counts from `start` to `stop` what `model` computes; `costs` has the result by module name."""

    def __init__(self, model: nn.Module, *, ignore: Sequence[type[nn.Module]] = ()) -> None:
        self._model = model
        self._accelerator: Accelerator = get_accelerator()
        self._calls: list[_Call] = []
        self._handles: list[Any] = []
        self._mode: flop_counter.FlopCounterMode | None = None
        self.costs = {
            fqn: ModuleCost(fqn, type(module).__name__, sum(p.numel() for p in module.parameters()))
            for fqn, module in model.named_modules()
        }
        # From the model down to each module; empty for what is ignored.
        self._lineage = {fqn: tuple(self.costs[above] for above in _ancestors(fqn)) for fqn in self.costs}
        for fqn, module in model.named_modules():
            if isinstance(module, tuple(ignore)):
                for below in self.costs:
                    if fqn in _ancestors(below):
                        self._lineage[below] = ()

    @property
    def total(self) -> ModuleCost:
        """The cost of the whole model."""
        return self.costs[""]

    def start(self) -> None:
        """Begin to count."""
        for fqn, module in self._model.named_modules():
            enter = partial(self._enter, self._lineage[fqn])
            self._handles.append(module.register_forward_pre_hook(enter, prepend=True))
            self._handles.append(module.register_forward_hook(self._leave, always_call=True))
        self._mode = flop_counter.FlopCounterMode(display=False)
        formulas = {**self._mode.flop_registry, **_more_formulas()}
        self._mode.flop_registry = {op: self._noting(op, formula) for op, formula in formulas.items()}
        self._mode.__enter__()

    def stop(self) -> None:
        """End counting. Idempotent."""
        if self._mode is not None:
            self._mode.__exit__(None, None, None)
            self._mode = None
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._calls.clear()

    def _noting(self, op: Any, formula: Callable[..., int]) -> Callable[..., int]:
        """The formula, as a function that notes its result as well."""

        def count(*args: Any, **kwargs: Any) -> int:
            flops = formula(*args, **kwargs)
            self._note(str(op).removeprefix("aten."), flops)
            return flops

        return count

    def _note(self, op: str, flops: int) -> None:
        backward = torch._C._current_graph_task_id()
        call = self._calls[-1] if self._calls else None
        if call is not None and (backward == _OUTSIDE or call.backward != _OUTSIDE):
            for cost in call.costs:
                (cost.forward if backward == _OUTSIDE else cost.recompute)[op] += flops
        elif backward != _OUTSIDE:
            node: Any = torch._C._current_autograd_node()
            for cost in () if node is None else node.metadata.get(_NODE_KEY, ()):
                cost.backward[op] += flops

    def _enter(self, lineage: tuple[ModuleCost, ...], module: nn.Module, args: Any) -> None:
        # Callers count too where they are not above the module, as for one that two parents share.
        callers = self._calls[-1].costs if self._calls else lineage
        others = tuple(cost for cost in callers if not any(cost is above for above in lineage))
        self._accelerator.synchronize()
        self._calls.append(
            _Call(
                costs=(*others, *lineage) if callers and lineage else (),
                first_node=torch._C._autograd._get_sequence_nr(),
                began_s=time.perf_counter(),
                backward=torch._C._current_graph_task_id(),
            )
        )

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        call = self._calls.pop()
        self._accelerator.synchronize()
        if call.costs and call.backward == _OUTSIDE:
            call.costs[-1].forward_s += time.perf_counter() - call.began_s
            call.costs[-1].num_calls += 1
        _sign_nodes(output, call)


def _sign_nodes(output: Any, call: _Call) -> None:
    """Note the callers on every autograd node that was made in the call and has no note of an inner one."""
    made = range(call.first_node, torch._C._autograd._get_sequence_nr())
    leaves = (leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor))
    waiting = [leaf.grad_fn for leaf in leaves if leaf.grad_fn is not None]
    seen: set[Any] = set()
    while waiting:
        node: Any = waiting.pop()
        if node in seen or node._sequence_nr() not in made:
            continue
        seen.add(node)
        node.metadata.setdefault(_NODE_KEY, call.costs)
        waiting.extend(before for before, _ in node.next_functions if before is not None)


def _ancestors(fqn: str) -> list[str]:
    """Names from the model ("") down to the module itself."""
    words = fqn.split(".") if fqn else []
    return [".".join(words[:count]) for count in range(len(words) + 1)]


def _more_formulas() -> dict[Any, Callable[..., int]]:
    """Attention kernels that torch's table lacks."""
    aten = torch.ops.aten
    forwards = (aten._scaled_dot_product_flash_attention_for_cpu, aten._scaled_dot_product_fused_attention_overrideable)
    backwards = (
        aten._scaled_dot_product_flash_attention_for_cpu_backward,
        aten._scaled_dot_product_fused_attention_overrideable_backward,
    )
    return {**dict.fromkeys(forwards, _attention_flops), **dict.fromkeys(backwards, _attention_backward_flops)}


def _attention_flops(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> int:
    return int(flop_counter.sdpa_flop_count(query.shape, key.shape, value.shape))


def _attention_backward_flops(
    grad_out: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any
) -> int:
    return int(flop_counter.sdpa_backward_flop_count(grad_out.shape, query.shape, key.shape, value.shape))
