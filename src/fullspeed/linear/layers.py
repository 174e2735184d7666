"""The layers: a base weight that is frozen, as numbers or as codes, with or without trained adapters.

Letters: O outputs, I inputs, r rank of the adapters.

| parameter              | shape  | trained | what it is                                                       |
|------------------------|--------|---------|------------------------------------------------------------------|
| `weight`               | (O, I) | no      | the base weight; or its codes, uint8 (`quantized_weight.py`)     |
| `bias`                 | (O,)   | yes     | of `QuantizedLinear` only                                        |
| `lora_weight_1.weight` | (r, I) | yes     | A, Kaiming-uniform at first                                      |
| `lora_weight_2.weight` | (O, r) | yes     | B, zero at first, so that the layer starts as its base           |

Parameters are ordinary ones, and codes are a parameter of bytes: so an engine shards, gathers and saves them as any.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from fullspeed.accelerator import get_accelerator
from fullspeed.base.errors import ConfigError, ConfigFault, UsageError
from fullspeed.linear.config import LoRAConfig, QuantizationConfig
from fullspeed.linear.quantized_weight import decode, encode, linear
from fullspeed.sharding.always_sharded import ShardsFrozen


class FrozenBase(nn.Linear):
    """A linear layer whose weight is frozen, and kept as codes where that is configured."""

    def __init__(
        self,
        input_dim: int,
        output_dim: int,
        bias: bool,
        quantization_config: QuantizationConfig | None,
        device: Any,
        dtype: torch.dtype,
    ) -> None:
        super().__init__(input_dim, output_dim, bias, device, dtype)
        self.input_dim, self.output_dim, self.dtype = input_dim, output_dim, dtype
        self.quantization_config = quantization_config
        self.weight.requires_grad_(False)

    @property
    def is_quantized(self) -> bool:
        """Whether `weight` is codes now."""
        return self.weight.dtype == torch.uint8

    def quantize(self) -> None:
        """Turn a weight of numbers into codes, if the configuration asks for them. Before `initialize`."""
        if self.quantization_config is not None and not self.is_quantized:
            codes = encode(self.weight, self.quantization_config.form)
            self.weight = nn.Parameter(codes, requires_grad=False)

    def full_weight(self) -> torch.Tensor:
        """The base weight (O, I) in the layer's dtype, as a tensor of its own.

        Where an engine shards it, call this inside `zero.GatheredParameters(layer.weight)`.
        """
        if self.quantization_config is not None and self.is_quantized:
            return decode(self.weight, self._shape, self.dtype, self.quantization_config.form)
        return self.weight.detach().clone()

    def merged_weight(self) -> torch.Tensor:
        """The weight (O, I) of an ordinary layer that computes the same, in the layer's dtype."""
        return self.full_weight()

    @property
    def _shape(self) -> torch.Size:
        return torch.Size((self.output_dim, self.input_dim))

    def _base_output(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.quantization_config is not None and self.is_quantized:
            return linear(inputs, self.weight, self._shape, self.quantization_config.form, self.bias)
        return F.linear(inputs, self.weight, self.bias)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        """Of a layer of codes, take codes, or the numbers of an ordinary layer."""
        given = state_dict.get(prefix + "weight")
        if self.quantization_config is not None and self.is_quantized and _is_numbers(given, self._shape):
            state_dict = {**state_dict, prefix + "weight": encode(given, self.quantization_config.form)}
        super()._load_from_state_dict(state_dict, prefix, *args)


class QuantizedLinear(FrozenBase):
    """A linear layer whose weight is frozen codes; a bias is trained.

    Args:
        input_dim: I.
        output_dim: O.
        bias: add a bias.
        quantization_config: how the weight is kept; by default 8 bits.
        device: where the layer is made.
        dtype: of the numbers that the codes are made of, of `full_weight`, and of the bias. Forward computes in the
            dtype of its input.
    """

    def __init__(
        self,
        input_dim: int,
        output_dim: int,
        bias: bool = False,
        quantization_config: QuantizationConfig | None = None,
        device: Any = None,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        super().__init__(input_dim, output_dim, bias, quantization_config or QuantizationConfig(), device, dtype)
        self.quantize()

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """(..., I) to (..., O)."""
        return self._base_output(input)


class LoRAOptimizedLinear(FrozenBase, ShardsFrozen):
    """A frozen linear layer with trained low-rank adapters beside it; see `LoRAConfig`.

    Args:
        input_dim: I.
        output_dim: O.
        bias: must be false.
        lora_config: the adapters; the defaults of `LoRAConfig` where it is left out.
        quantization_config: keep the base weight as codes.
        device: where the layer is made.
        dtype: of the base weight and the adapters.
        linear_cls: makes an adapter, called as `linear_cls(inputs, outputs, bias=False, device=..., dtype=...)`.

    Raises:
        ConfigError: a bias, or a base weight in host memory of a device.
    """

    def __init__(
        self,
        input_dim: int,
        output_dim: int,
        bias: bool = False,
        lora_config: LoRAConfig | None = None,
        quantization_config: QuantizationConfig | None = None,
        device: Any = None,
        dtype: torch.dtype = torch.bfloat16,
        linear_cls: Callable[..., nn.Linear] = nn.Linear,
    ) -> None:
        config = lora_config or LoRAConfig()
        _check(config, bias=bias)
        super().__init__(input_dim, output_dim, False, quantization_config, device, dtype)
        self.lora_config, self._linear_cls = config, linear_cls
        self.lora_scaling_factor, self.num_shards = config.scaling, config.base_weight_sharding
        self.lora_weight_1: nn.Linear | None = None
        self.lora_weight_2: nn.Linear | None = None
        if not config.delay_lora_init:
            self.init_lora()

    def init_lora(self) -> None:
        """Make fresh adapters, and codes of the base weight where they are configured. Before `initialize`."""
        self.quantize()
        rank, where = self.lora_config.lora_r, {"device": self.weight.device, "dtype": self.dtype}
        self.lora_weight_1 = self._linear_cls(self.input_dim, rank, bias=False, **where)
        self.lora_weight_2 = self._linear_cls(rank, self.output_dim, bias=False, **where)
        nn.init.kaiming_uniform_(self.lora_weight_1.weight, a=math.sqrt(5))
        nn.init.zeros_(self.lora_weight_2.weight)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """(..., I) to (..., O)."""
        first, second = self._adapters()
        output: torch.Tensor = self._base_output(input) + self.lora_scaling_factor * second(first(input))
        return output

    def merged_weight(self) -> torch.Tensor:
        """W + (alpha / r) * B @ A, (O, I), in the layer's dtype, summed in fp32 at least."""
        first, second = self._adapters()
        exact = torch.promote_types(self.dtype, torch.float32)
        product = second.weight.detach().to(exact) @ first.weight.detach().to(exact)
        return self.full_weight().to(exact).add_(product, alpha=self.lora_scaling_factor).to(self.dtype)

    def extra_repr(self) -> str:
        """Sizes, rank and how the base is kept."""
        bits = f", q_bits={self.quantization_config.q_bits}" if self.quantization_config else ""
        return f"{self.input_dim}, {self.output_dim}, lora_r={self.lora_config.lora_r}{bits}, shards={self.num_shards}"

    def _adapters(self) -> tuple[nn.Linear, nn.Linear]:
        if self.lora_weight_1 is None or self.lora_weight_2 is None:
            raise UsageError("the layer has no adapters yet (delay_lora_init); call linear.init_lora(model) first")
        return self.lora_weight_1, self.lora_weight_2


class OptimizedLinear(nn.Module):
    """Makes the layer that the configurations ask for, called like a class.

    Args:
        input_dim: I.
        output_dim: O.
        bias: add a bias; not with adapters.
        lora_config: train adapters beside a frozen weight.
        quantization_config: keep a frozen weight as codes.
        device: where the layer is made.
        dtype: of its numbers.
        linear_cls: makes an ordinary layer: the result, without either configuration, else the adapters.

    Returns:
        A `LoRAOptimizedLinear`, a `QuantizedLinear`, or what `linear_cls` makes.

    Raises:
        ConfigError: as the layers do.
    """

    def __new__(  # type: ignore[misc]
        cls,
        input_dim: int,
        output_dim: int,
        bias: bool = False,
        lora_config: LoRAConfig | None = None,
        quantization_config: QuantizationConfig | None = None,
        device: Any = None,
        dtype: torch.dtype = torch.bfloat16,
        linear_cls: Callable[..., nn.Linear] = nn.Linear,
    ) -> nn.Linear:
        """See the class."""
        if lora_config is not None:
            return LoRAOptimizedLinear(
                input_dim, output_dim, bias, lora_config, quantization_config, device, dtype, linear_cls
            )
        if quantization_config is not None:
            return QuantizedLinear(input_dim, output_dim, bias, quantization_config, device, dtype)
        return linear_cls(input_dim, output_dim, bias=bias, device=device, dtype=dtype)


def _check(config: LoRAConfig, *, bias: bool) -> None:
    faults = []
    if bias:
        faults.append(ConfigFault("bias", bias, "must be false with adapters", "keep the layer with a bias as it is"))
    device = get_accelerator().current_device_name()
    if config.offloads and torch.device(device).type != "cpu":
        fix = "leave offload and offload_ratio out, and keep the weight as codes or in shards instead"
        faults.append(ConfigFault("offload", True, f"base weights lie where the model computes, on {device}", fix))
    if faults:
        raise ConfigError(faults)


def _is_numbers(given: Any, shape: torch.Size) -> bool:
    return isinstance(given, torch.Tensor) and given.is_floating_point() and given.shape == shape
