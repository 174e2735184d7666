"""What an mpu says of tensor parallelism, whichever of three generations of names it has."""

from __future__ import annotations

from typing import Any

_GENERATIONS = ("tensor_model_parallel", "slice_parallel", "model_parallel")  # the newest first


def bwc_tensor_model_parallel_rank(mpu: Any = None) -> int:
    """This rank among those that hold parts of the same tensors; 0 without an mpu."""
    return 0 if mpu is None else int(_ask(mpu, "rank"))


def bwc_tensor_model_parallel_world_size(mpu: Any = None) -> int:
    """Number of ranks that hold parts of the same tensors; 1 without an mpu."""
    return 1 if mpu is None else int(_ask(mpu, "world_size"))


def bwc_tensor_model_parallel_group(mpu: Any = None) -> Any:
    """The ranks that hold parts of the same tensors; None without an mpu."""
    return None if mpu is None else _ask(mpu, "group")


def _ask(mpu: Any, what: str) -> Any:
    """Call the newest of the mpu's methods of that meaning; the oldest one's absence is the caller's AttributeError."""
    *newer, oldest = [f"get_{generation}_{what}" for generation in _GENERATIONS]
    return getattr(mpu, next((name for name in newer if hasattr(mpu, name)), oldest))()
