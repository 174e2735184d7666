"""What files of DeepSpeed's repeat of the configuration they were written with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class RecordedConfig(NamedTuple):
    """The values that files or their readers need beside a whole configuration."""

    grad_accum_steps: int
    gradient_clipping: float
    loss_scale_window: int  # updates
    min_loss_scale: float
    hysteresis: int  # overflows
    consecutive_hysteresis: bool


def recorded_config(raw: Mapping[str, Any]) -> RecordedConfig:
    """Read them from a configuration as the user wrote it; what it leaves open has the usual default.

    >>> recorded_config({"gradient_accumulation_steps": 4}).grad_accum_steps
    4
    """
    fp16 = raw.get("fp16") or {}
    accumulation = raw.get("gradient_accumulation_steps", 1)
    return RecordedConfig(
        grad_accum_steps=accumulation if isinstance(accumulation, int) else 1,  # it may say "auto"
        gradient_clipping=raw.get("gradient_clipping", 0.0),
        loss_scale_window=fp16.get("loss_scale_window", 1000),
        min_loss_scale=fp16.get("min_loss_scale", 1),
        hysteresis=fp16.get("hysteresis", 2),
        consecutive_hysteresis=fp16.get("consecutive_hysteresis", False),
    )
