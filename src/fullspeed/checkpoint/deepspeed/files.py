"""Names of DeepSpeed's files, and those of one checkpoint.

TAG/mp_rank_00_model_states.pt                             weights and counters, where parameters were whole
TAG/zero_pp_rank_R_mp_rank_00_model_states.pt              the same for rank R, where they were sharded
TAG/[bf16_]zero_pp_rank_R_mp_rank_00_optim_states.pt       rank R's masters and optimizer states
TAG/zero/NAME/{fp32,exp_avg,...}.pt, zero/optimizer_state.pt   a universal checkpoint: whole tensors
"""

from __future__ import annotations

import pathlib
import re
from typing import Any

from fullspeed.base.errors import CheckpointError
from fullspeed.checkpoint.deepspeed.unpickle import load

LATEST_UNIVERSAL = "latest_universal"
UNIVERSAL = "zero"  # folder of a universal checkpoint's tensors
UNIVERSAL_OPTIMIZER = "optimizer_state.pt"
MODEL = "mp_rank_00_model_states.pt"
_NAME = re.compile(r"(?:bf16_)?(?:zero_pp_rank_(?P<rank>\d+)_)?mp_rank_(?P<mp>\d+)_(?P<what>model|optim)_states\.pt$")
_FOREIGN = re.compile(r"(layer_\d+|expp_rank_\d+).*_states\.pt$")


def sharded_model(rank: int) -> str:
    """File of a rank's weights and counters, where parameters were sharded."""
    return f"zero_pp_rank_{rank}_{MODEL}"


def optimizer_file(rank: int, *, is_bf16: bool) -> str:
    """File of a rank's masters and optimizer states."""
    return f"{'bf16_' if is_bf16 else ''}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"


def is_deepspeed(path: pathlib.Path) -> bool:
    """Whether a tag's folder has files of DeepSpeed's."""
    return any(path.glob("*_model_states.pt"))


def is_universal(path: pathlib.Path) -> bool:
    """Whether it is a universal checkpoint."""
    return (path / UNIVERSAL).is_dir() and is_deepspeed(path)


class DeepSpeedFiles:
    """The files of one checkpoint, each opened when first needed and then kept.

    Raises:
        CheckpointError: there are files of model-parallel, pipeline or expert ranks, or none of weights.
    """

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path
        self._opened: dict[pathlib.Path, Any] = {}
        self._models: dict[int, pathlib.Path] = {}
        self._optimizers: dict[int, pathlib.Path] = {}
        for file in sorted(path.glob("*_states.pt")):
            found = _NAME.match(file.name)
            if _FOREIGN.match(file.name) or (found is not None and int(found["mp"])):
                raise CheckpointError(
                    f"{file} belongs to a checkpoint of pipeline stages, experts or tensor-parallel ranks; only "
                    f"data-parallel ones can be read"
                )
            if found is not None:
                files = self._models if found["what"] == "model" else self._optimizers
                files[int(found["rank"] or 0)] = file
        if 0 not in self._models:
            raise CheckpointError(f"{path} has no file {MODEL} or {sharded_model(0)}")

    @property
    def has_optimizer(self) -> bool:
        """Whether there are files of masters and optimizer states."""
        return bool(self._optimizers)

    def model(self, rank: int) -> dict[str, Any]:
        """A rank's weights and counters; rank 0's where ranks had none of their own."""
        return self._open(self._models.get(rank, self._models[0]), "module")

    def rank_model(self, rank: int) -> dict[str, Any]:
        """A rank's own weights and counters."""
        return self._open(self._models.get(rank, self.path / sharded_model(rank)), "module")

    def optimizer(self, rank: int) -> dict[str, Any]:
        """A rank's masters and optimizer states."""
        path = self._optimizers.get(rank, self.path / optimizer_file(rank, is_bf16=False))
        outer = self._open(path, "optimizer_state_dict")
        inner: dict[str, Any] = outer["optimizer_state_dict"]
        return inner

    def verify(self, num_parts: int, rank: int, world_size: int) -> None:
        """Check that `num_parts` ranks' optimizer files are there, and that `rank`'s share of all files opens."""
        for part in range(num_parts if self._optimizers else 0):
            if part not in self._optimizers:
                raise CheckpointError(f"{self.path} lacks the optimizer states of rank {part} of {num_parts}")
        for index, path in enumerate([*self._models.values(), *self._optimizers.values()]):
            if index % world_size == rank:
                self._open(path, "module" if path in self._models.values() else "optimizer_state_dict")

    def _open(self, path: pathlib.Path, needs: str) -> dict[str, Any]:
        if path not in self._opened:
            loaded = load(path)
            if not isinstance(loaded, dict) or needs not in loaded:
                raise CheckpointError(f"{path} is no file of DeepSpeed's: it has no entry {needs!r}")
            self._opened[path] = loaded
        found: dict[str, Any] = self._opened[path]
        return found
