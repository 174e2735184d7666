"""`linear.Init`: models whose linear layers become optimized ones as they are made.

How it sees layers without touching torch: torch asks registered hooks of every submodule that a module gets, and takes
what a hook returns in its place.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable
from dataclasses import replace
from types import TracebackType
from typing import Any, cast

from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from fullspeed.base.errors import UsageError
from fullspeed.linear.config import LoRAConfig, QuantizationConfig
from fullspeed.linear.layers import FrozenBase, LoRAOptimizedLinear, QuantizedLinear


class Init:
    """Context in which `nn.Linear` layers become frozen bases with adapters, or codes, when a module gets them.

    With `lora_config`, those become `LoRAOptimizedLinear` whose name contains one of its `target_mods`; without, all
    become `QuantizedLinear`. Until the end of the context they hold ordinary weights, so constructors,
    `load_state_dict` and `from_pretrained` fill them as ever. Then codes and adapters are made, and with `lora_config`
    everything else that was made in the context is frozen. What was made before it stays as it is.

    Args:
        lora_config: adapters.
        quant_config: how base weights are kept.

    Raises:
        UsageError: neither is given; or, at the end, no layer became an optimized one.
    """

    def __init__(self, lora_config: LoRAConfig | None = None, quant_config: QuantizationConfig | None = None) -> None:
        if lora_config is None and quant_config is None:
            raise UsageError("linear.Init has nothing to do: give lora_config, quant_config or both")
        self._lora, self._quant = lora_config, quant_config
        self._owners: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # modules that got parameters
        self._layers: dict[FrozenBase, None] = {}  # in the order in which they were made
        self._handles: list[Any] = []
        self._thread = 0

    def __enter__(self) -> Init:
        self._thread = threading.get_ident()
        self._handles = [
            register_module_parameter_registration_hook(self._on_parameter),
            register_module_module_registration_hook(cast(Any, self._on_submodule)),  # what it returns counts
        ]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()
        layers, self._layers = self._layers, {}
        if error is not None:
            return
        if not layers:
            wanted = "" if self._lora is None else f" whose name contains one of {', '.join(self._lora.target_mods)}"
            raise UsageError(
                f"linear.Init: no nn.Linear{wanted} was made in the context; set target_mods, or build the model inside"
            )
        if self._lora is not None:
            _freeze(self._owners)
        for layer in layers:
            if isinstance(layer, LoRAOptimizedLinear):
                layer.init_lora()
            else:
                layer.quantize()

    def _on_parameter(self, module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if threading.get_ident() == self._thread:
            self._owners.add(module)

    def _on_submodule(self, module: nn.Module, name: str, submodule: nn.Module | None) -> nn.Module | None:
        if type(submodule) is not nn.Linear or threading.get_ident() != self._thread:
            return None
        if self._lora is not None and not any(target in name for target in self._lora.target_mods):
            return None
        layer = self._layer_of(submodule)
        self._layers[layer] = None
        return layer

    def _layer_of(self, plain: nn.Linear) -> FrozenBase:
        """A layer with the weight of `plain`; codes and adapters are made at the end."""
        sizes, dtype, has_bias = (plain.in_features, plain.out_features), plain.weight.dtype, plain.bias is not None
        layer: FrozenBase
        if self._lora is None:
            layer = QuantizedLinear(*sizes, has_bias, self._quant, "meta", dtype)
            layer.bias = plain.bias
        else:
            delayed = replace(self._lora, delay_lora_init=True)
            layer = LoRAOptimizedLinear(*sizes, has_bias, delayed, self._quant, "meta", dtype)
        layer.weight = plain.weight
        layer.weight.requires_grad_(False)
        return layer


def init_lora(model: nn.Module) -> None:
    """Make fresh adapters in every `LoRAOptimizedLinear` of a model, and freeze everything else. Before `initialize`.

    Raises:
        UsageError: the model has no such layer.
    """
    layers = [module for module in model.modules() if isinstance(module, LoRAOptimizedLinear)]
    if not layers:
        raise UsageError("init_lora: the model has no LoRAOptimizedLinear; make its layers with linear.OptimizedLinear")
    _freeze(model.modules())
    for layer in layers:
        layer.init_lora()


def _freeze(modules: Iterable[nn.Module]) -> None:
    for module in modules:
        for param in module.parameters(recurse=False):
            param.requires_grad_(False)
