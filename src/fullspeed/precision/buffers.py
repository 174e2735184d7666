"""The dtype of a model's floating-point buffers."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence

import torch
from torch import nn


def cast_buffers(model: nn.Module, dtype: torch.dtype, keep_fp32: Sequence[str]) -> list[str]:
    """Cast floating-point buffers to `dtype`, but those whose name or a part of it matches `keep_fp32` to fp32.

    Patterns are shell-style and match the whole name, or any of its dotted parts. Returns the names that stay fp32.
    """
    kept = []
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(prefix, recurse=False):
            if not buffer.is_floating_point():
                continue
            is_kept = any(_matches(name, pattern) for pattern in keep_fp32)
            if is_kept:
                kept.append(name)
            module._buffers[name.rpartition(".")[2]] = buffer.to(torch.float32 if is_kept else dtype)
    return kept


def fp32_patterns(model: nn.Module, chosen: str | Sequence[str], *, is_fp16: bool) -> Sequence[str]:
    """The patterns of a configuration; "auto" asks a Hugging Face model for the modules it declares."""
    if not isinstance(chosen, str):
        return chosen
    declared = list(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    if is_fp16:
        declared += list(getattr(model, "_keep_in_fp32_modules", None) or ())
    return declared


def _matches(name: str, pattern: str) -> bool:
    return fnmatch.fnmatchcase(name, pattern) or any(fnmatch.fnmatchcase(part, pattern) for part in name.split("."))
