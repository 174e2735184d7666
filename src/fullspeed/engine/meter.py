"""What the progress line says: losses, learning rate, gradient norm and throughput since the last line."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch


class ProgressMeter:
    """Counts samples and seconds, and keeps losses as tensors, so that nothing waits for the device between lines."""

    def __init__(self) -> None:
        self._losses: list[torch.Tensor] = []
        self._num_samples = 0
        self._since = time.perf_counter()

    def add_loss(self, loss: torch.Tensor) -> None:
        """Note the unscaled loss of one micro-batch."""
        self._losses.append(loss.detach())

    def add_samples(self, num_samples: int) -> None:
        """Note the samples of one update."""
        self._num_samples += num_samples

    def line(self, step: int, skipped: int, lr: Sequence[float], mom: Sequence[object], norm: float | None) -> str:
        """One line for people; starts the next interval."""
        now = time.perf_counter()
        seconds = max(now - self._since, 1e-9)
        parts = [f"step={step}", f"skipped={skipped}"]
        if self._losses:
            parts.append(f"loss={torch.stack([loss.float() for loss in self._losses]).mean().item():.4f}")
        parts.append(f"lr={[float(f'{value:.6g}') for value in lr]}")
        if mom:
            parts.append(f"mom={list(mom)}")
        if norm is not None:
            parts.append(f"grad_norm={norm:.4f}")
        parts.append(f"samples/s={self._num_samples / seconds:.2f}")
        self._losses, self._num_samples, self._since = [], 0, now
        return ", ".join(parts)

    def trim(self) -> None:
        """Without progress lines, keep only the newest loss."""
        del self._losses[:-1]
