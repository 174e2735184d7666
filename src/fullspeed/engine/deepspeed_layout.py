"""`save_checkpoint` in DeepSpeed's layout: a checkpoint of our own first, which each rank then turns into its files.

save_dir/.staging/         our own checkpoint, removed at the end
save_dir/.TAG.partial/     DeepSpeed's files, which get the name TAG in one step when all are there
"""

from __future__ import annotations

import pathlib
import shutil
from collections.abc import Mapping
from typing import Any

from fullspeed.base.errors import CheckpointError, UsageError
from fullspeed.base.log import log_dist
from fullspeed.checkpoint.deepspeed.write import DeepSpeedWriter, Target
from fullspeed.checkpoint.durable import replace_folder
from fullspeed.checkpoint.folder import available_tags, partial_folder, remove_stale, write_latest
from fullspeed.checkpoint.open import open_checkpoint
from fullspeed.comm import get_rank, get_world_size
from fullspeed.comm.rendezvous import rendezvous, together
from fullspeed.engine.checkpointing import Checkpointing
from fullspeed.sharding.placement import placement_of

_STAGING = ".staging"


class LayoutCheckpointing(Checkpointing):
    """Mixin: `save_checkpoint` in the layout that `checkpoint.layout` names."""

    def save_checkpoint(
        self,
        save_dir: str,
        tag: Any = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
        *,
        in_background: bool | None = None,
    ) -> bool:
        """See `Checkpointing.save_checkpoint`. DeepSpeed's layout cannot be written in the background: UsageError."""
        if self._config.checkpoint.layout == "fullspeed":
            return super().save_checkpoint(
                save_dir, tag, client_state, save_latest, exclude_frozen_parameters, in_background=in_background
            )
        if in_background:
            raise UsageError(
                "DeepSpeed's layout cannot be written in the background; leave in_background out, or set "
                "checkpoint.layout to fullspeed and convert afterwards"
            )
        group = self.data_parallel_group
        rank = get_rank(group)
        rendezvous("save_checkpoint", group)
        folder = pathlib.Path(save_dir)
        staging = folder / _STAGING
        made: list[pathlib.Path] = [staging]  # what to remove at the end

        def prepare() -> str:
            (name,) = available_tags(staging)
            if rank == 0:
                made.append(partial_folder(folder, name))
                shutil.rmtree(made[-1], ignore_errors=True)
                made[-1].mkdir()
                remove_stale(folder)
            return name

        def convert(name: str) -> None:
            state = open_checkpoint(staging, name, rank)
            try:
                DeepSpeedWriter(state, self._target()).write(partial_folder(folder, name), rank)
            finally:
                state.close()

        def put_in_place(name: str) -> None:
            replace_folder(partial_folder(folder, name), folder / name)
            if save_latest:
                write_latest(folder, name)
            log_dist(f"saved checkpoint {folder / name} in DeepSpeed's layout")

        try:
            together(lambda: shutil.rmtree(staging, ignore_errors=True) if rank == 0 else None, CheckpointError, group)
            super().save_checkpoint(
                str(staging), tag, client_state, False, exclude_frozen_parameters, in_background=False
            )
            name = together(prepare, CheckpointError, group)[0]
            together(lambda: convert(name), CheckpointError, group)
            together(lambda: put_in_place(name) if rank == 0 else None, CheckpointError, group)
        finally:
            if rank == 0:
                for leftover in made:
                    shutil.rmtree(leftover, ignore_errors=True)
        return True

    def _target(self) -> Target:
        stage = self._config.zero_optimization.stage
        placement = placement_of(stage)
        return Target(
            stage=stage,
            world_size=get_world_size(self.data_parallel_group),
            shards_params=placement.params,
            shards_optimizer=placement.optim,
            config=self._config.model_dump(mode="json", exclude_unset=True),
        )
