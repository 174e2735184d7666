"""What every optimizer of ours does alike around its update rule: run the closure, check hyperparameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fullspeed.base.errors import ConfigError, ConfigFault


def run_closure(closure: Callable[[], Any] | None) -> Any:
    """The closure's loss, computed with autograd on; None without a closure."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def check_hyperparameters(
    *, lr: float, betas: tuple[float, float] | None = None, eps: float = 0.0, weight_decay: float = 0.0
) -> None:
    """Raise ConfigError naming every value that cannot work."""
    faults = [
        ConfigFault(name, value, "must not be negative")
        for name, value in (("lr", lr), ("eps", eps), ("weight_decay", weight_decay))
        if not value >= 0
    ]
    if betas is not None and not (len(betas) == 2 and all(0 <= beta < 1 for beta in betas)):
        faults.append(ConfigFault("betas", betas, "two numbers, each at least 0 and below 1"))
    if faults:
        raise ConfigError(faults)
