"""Linear layers that cost less to finetune: a frozen base, kept as codes or in shards, and small trained adapters.

The names of `deepspeed.linear`; `docs/linear.md` shows their use.
"""

from __future__ import annotations

from fullspeed.linear.config import LoRAConfig, QuantizationConfig
from fullspeed.linear.context import Init, init_lora
from fullspeed.linear.export import merged_state_dict
from fullspeed.linear.layers import LoRAOptimizedLinear, OptimizedLinear, QuantizedLinear

__all__ = [
    "Init",
    "LoRAConfig",
    "LoRAOptimizedLinear",
    "OptimizedLinear",
    "QuantizationConfig",
    "QuantizedLinear",
    "init_lora",
    "merged_state_dict",
]
