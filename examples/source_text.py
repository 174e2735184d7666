"""The bytes the example learns: Python's own standard library, or the `*.py` files of any folder."""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

NOT_SOURCE = frozenset({"site-packages", "dist-packages", "test", "tests", "encodings"})
VALIDATION_EVERY = 20  # one file in twenty is never trained on


class Split(NamedTuple):
    """Training and validation bytes, each a flat int64 tensor of values 0 to 255."""

    train: Tensor
    validation: Tensor


def load_source_text(folder: Path | None = None) -> Split:
    """Read all Python files under `folder` (the standard library by default), in sorted order.

    Whole files go to either side, so no validation text has a beginning that was trained on. Raises
    FileNotFoundError when there are too few files for two sides.
    """
    root = folder or Path(sysconfig.get_paths()["stdlib"])
    files = sorted(file for file in root.rglob("*.py") if NOT_SOURCE.isdisjoint(file.relative_to(root).parts))
    if len(files) < VALIDATION_EVERY:
        raise FileNotFoundError(f"{root} has {len(files)} Python files; at least {VALIDATION_EVERY} are needed")
    sides: tuple[list[bytes], list[bytes]] = ([], [])
    for index, file in enumerate(files):
        sides[index % VALIDATION_EVERY == 0].append(file.read_bytes())
    return Split(*(torch.from_numpy(np.frombuffer(b"".join(side), np.uint8).astype(np.int64)) for side in sides))


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Consecutive pieces of a text: (bytes, the bytes that follow them), both (length,) int64."""

    def __init__(self, text: Tensor, length: int) -> None:
        self.text, self.length = text, length

    def __len__(self) -> int:
        return (self.text.numel() - 1) // self.length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = index * self.length
        piece = self.text[start : start + self.length + 1]
        return piece[:-1], piece[1:]


def spread_windows(text: Tensor, length: int, count: int) -> tuple[Tensor, Tensor]:
    """`count` windows evenly spread over the whole text: bytes and targets, both (count, length)."""
    windows = Windows(text, length)
    chosen = [windows[index * len(windows) // count] for index in range(count)]
    tokens, targets = zip(*chosen, strict=True)
    return torch.stack(tokens), torch.stack(targets)


def bigram_loss(train: Tensor, tokens: Tensor, targets: Tensor, pseudo_count: float = 0.1) -> float:
    """Nats per byte of guessing each byte from the one before it, by counts over `train`."""
    counts = torch.bincount(train[:-1] * 256 + train[1:], minlength=256 * 256).view(256, 256)
    pairs = counts.double() + pseudo_count
    log_chance = (pairs / pairs.sum(1, keepdim=True)).log()
    return -log_chance[tokens, targets].mean().item()
