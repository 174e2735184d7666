"""A checkpoint as a source of plain weights: any slice of any tensor, without reading the rest."""

from __future__ import annotations

import torch

from fullspeed.checkpoint.manifest import BUFFER, MASTER, PARAM
from fullspeed.checkpoint.saved import SavedState


class CheckpointWeights:
    """Parameters, of trained ones the most exact value that was saved, and buffers, by name as `ModelFiles`."""

    def __init__(self, state: SavedState) -> None:
        self._state = state
        self.shapes: dict[str, tuple[int, ...]] = {
            record.fqn: record.shape for record in state.manifest.params if record.is_saved
        }
        self.shapes |= state.manifest.buffers

    def elements(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Elements [start, stop) of the flattened tensor `name`, 1-D, on the CPU."""
        kind = next(kind for kind in (MASTER, PARAM, BUFFER) if self._state.has(kind, name))
        return self._state.elements(kind, name, start, stop)
