"""What a user asks of a linear layer: adapters, and how the base weight is kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from fullspeed.base.errors import ConfigError, ConfigFault
from fullspeed.kernels.format import BlockFormat

LLAMA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_NOT_BUILT = {6: "e3m2", 12: "e4m7"}


@dataclass(frozen=True)
class LoRAConfig:
    """Low-rank adapters (arXiv:2106.09685): y = x @ W.T + (alpha / r) * (x @ A.T) @ B.T, W frozen, A and B trained.

    Attributes:
        lora_r: r, rows of A and columns of B.
        lora_alpha: alpha; outputs of the adapters count alpha / r times.
        base_weight_sharding: ranks that share W at every ZeRO stage: 1, or all that an engine shards over.
        offload: keep W in host memory. It lies there anyway when training on the host; refused elsewhere.
        offload_ratio: share of the layers whose W is kept there.
        delay_lora_init: make the adapters in `init_lora`, not with the layer.
        target_mods: in `linear.Init`, layers whose names contain one of these get adapters.

    Raises:
        ConfigError: with every fault.
    """

    lora_r: int = 64
    lora_alpha: float = 16.0
    base_weight_sharding: int = 1
    offload: bool = False
    offload_ratio: float = 0.0
    delay_lora_init: bool = False
    target_mods: Sequence[str] = field(default_factory=lambda: list(LLAMA_TARGETS))

    def __post_init__(self) -> None:
        faults = [
            ConfigFault(name, getattr(self, name), "must be at least 1")
            for name in ("lora_r", "base_weight_sharding")
            if getattr(self, name) < 1
        ]
        if not 0.0 <= self.offload_ratio <= 1.0:
            faults.append(ConfigFault("offload_ratio", self.offload_ratio, "must lie between 0 and 1"))
        if isinstance(self.target_mods, str):
            faults.append(ConfigFault("target_mods", self.target_mods, "must be a list of names", "put it in brackets"))
        if faults:
            raise ConfigError(faults)

    @property
    def scaling(self) -> float:
        """How often the adapters' output counts: alpha / r."""
        return self.lora_alpha / self.lora_r

    @property
    def offloads(self) -> bool:
        """Whether any base weight is to lie in host memory."""
        return self.offload or self.offload_ratio > 0


@dataclass(frozen=True)
class QuantizationConfig:
    """As which codes a base weight is kept: integers in blocks, each block with a scale (`kernels/quantize.py`).

    Attributes:
        q_bits: bits of a code, 8 or 4.
        mantissa_bits: of floating-point codes, which there are none of; leave it at 3.
        group_size: values that share a scale, even.
        q_dtype: of the tensor that holds the codes, torch.uint8.

    Raises:
        ConfigError: with every fault.
    """

    q_bits: int = 8
    mantissa_bits: int = 3
    group_size: int = 512
    q_dtype: torch.dtype = torch.uint8

    def __post_init__(self) -> None:
        faults = []
        if self.q_bits in _NOT_BUILT:
            fix = f"codes of {self.q_bits} bits ({_NOT_BUILT[self.q_bits]}) are not built, use 8 or 4"
            faults.append(ConfigFault("q_bits", self.q_bits, "must be 8 or 4", fix))
        elif self.q_bits not in (4, 8):
            faults.append(ConfigFault("q_bits", self.q_bits, "must be 8 or 4"))
        if self.mantissa_bits != 3:
            fix = "codes are integers and have no mantissa: leave it out"
            faults.append(ConfigFault("mantissa_bits", self.mantissa_bits, "must be 3", fix))
        if self.group_size < 2 or self.group_size % 2:
            faults.append(ConfigFault("group_size", self.group_size, "must be even and at least 2"))
        if self.q_dtype is not torch.uint8:
            faults.append(ConfigFault("q_dtype", self.q_dtype, "must be torch.uint8"))
        if faults:
            raise ConfigError(faults)

    @property
    def form(self) -> BlockFormat:
        """How the codes are laid out."""
        return BlockFormat(self.q_bits, self.group_size)
