"""An optimizer around another one, with a loss scale: what schedulers, trainers and users read of it and set.

Whatever they touch (`param_groups`, `state`, learning rates) is the inner optimizer's own, live and mutable.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer

from fullspeed.offload.file_tensor import FileTensor
from fullspeed.precision.loss_scale import LossScale


class WrappedOptimizer(Optimizer):
    """Everything of an optimizer but its step."""

    def __init__(self, inner: Optimizer, loss_scale: LossScale) -> None:
        # Optimizer.__init__ would build groups of its own; ours are the inner optimizer's.
        self.optimizer = inner
        self.loss_scaler = loss_scale

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The inner optimizer's groups; their "params" are what it steps."""
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The inner optimizer's state, keyed by what it steps."""
        return self.optimizer.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The inner optimizer's defaults."""
        return self.optimizer.defaults

    def get_lr(self) -> list[float]:
        """Learning rate of every group."""
        return [float(group["lr"]) for group in self.param_groups]

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of every group."""
        for group in self.param_groups:
            group["lr"] = lr

    @property
    def loss_scale(self) -> float:
        """What losses are multiplied with before backward; 1 unless fp16."""
        return float(self.loss_scaler.scale)

    @property
    def cur_scale(self) -> float:
        """The same, under its older name."""
        return self.loss_scale

    def override_loss_scale(self, scale: float) -> None:
        """Use `scale` from now on; a dynamic scale moves on from it."""
        self.loss_scaler.override(scale)

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's state as it is on this rank, with the loss scale."""
        return {"optimizer": self.optimizer.state_dict(), "loss_scale": self.loss_scaler.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict` gave, on the same rank of the same number of ranks."""
        self.optimizer.load_state_dict(state_dict["optimizer"])
        self.loss_scaler.load_state_dict(state_dict["loss_scale"])

    def nbytes(self) -> int:
        """Bytes of optimizer state this rank holds in memory."""
        tensors = [
            value
            for state in self.state.values()
            for value in state.values()
            if isinstance(value, torch.Tensor) and not isinstance(value, FileTensor)
        ]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.optimizer!r})"
