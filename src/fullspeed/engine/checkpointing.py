"""The engine's checkpoint methods."""

from __future__ import annotations


class Checkpointing:
    """Mixin: `save_checkpoint` and `load_checkpoint`."""
