"""The engine's checkpoint methods: collect, write, agree, commit; find, verify, compare, restore."""

from __future__ import annotations

import contextlib
import functools
import logging
import pathlib
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from fullspeed.base.errors import CheckpointError
from fullspeed.base.log import log_dist
from fullspeed.checkpoint.folder import PendingCheckpoint, check_tag
from fullspeed.checkpoint.manifest import Chunk
from fullspeed.checkpoint.open import default_tag, open_checkpoint
from fullspeed.checkpoint.rng import restore_rng_state
from fullspeed.checkpoint.saved import COMMON, SavedState, client_file
from fullspeed.checkpoint.staging import StagingBuffer
from fullspeed.checkpoint.tensor_file import tensor_parts
from fullspeed.checkpoint.writing import Writing
from fullspeed.comm import get_rank, get_world_size
from fullspeed.comm.rendezvous import rendezvous, together
from fullspeed.data.loader import PositionedLoader
from fullspeed.engine import collect, restore
from fullspeed.engine.background import BackgroundSave
from fullspeed.engine.module_state import ModuleState
from fullspeed.engine.snapshot import Offer, Snapshot, rank_file, tensor_file

if TYPE_CHECKING:
    import torch

    from fullspeed.sharding.optimizer import ShardedOptimizer


class Checkpointing(ModuleState):
    """Mixin: `save_checkpoint` and `load_checkpoint`, with the state dicts of `ModuleState`."""

    optimizer: ShardedOptimizer | None
    lr_scheduler: Any
    device: torch.device
    global_steps: int
    global_samples: int
    micro_steps: int
    skipped_steps: int
    dp_world_size: int
    _num_backwards: int
    _num_micro_steps: int
    _loss_is_scaled: bool
    training_dataloader: Any
    _batches: Any
    _background: BackgroundSave
    _staging: StagingBuffer

    # --------------------------------------------------------------------- save

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
        """Save everything a resumed run needs. Collective: every rank must call it.

        The checkpoint appears whole or not at all: a crash at any moment leaves the previous one loadable,
        also when the tag is written again. Gradients of an unfinished accumulation are not saved.

        Args:
            save_dir: a directory on storage that all ranks share; made if missing.
            tag: name of the checkpoint, made a string; `global_step{N}` by default. Where ranks pass
                different tags, `checkpoint.tag_validation` decides: Fail raises; Warn and Ignore use rank
                0's.
            client_state: what else to save; each rank's own is kept and returned to it by `load_checkpoint`.
                Tensors, numbers, strings, and lists, tuples and dicts of them.
            save_latest: make it the one `load_checkpoint` takes by default.
            exclude_frozen_parameters: leave out parameters that do not require gradients.
            in_background: return as soon as the state is copied, and write the copy while training goes on; the
                checkpoint appears when it is written. By default as the configuration says. See
                `wait_for_checkpoint`.

        Returns:
            True.

        Raises:
            CheckpointError: on every rank with the first cause, when any rank could not save; nothing is left
                behind. Also when an earlier save failed in the background.
            CommError: some ranks did not call it; names them.
        """
        group = self.data_parallel_group
        rank = get_rank(group)
        rendezvous("save_checkpoint", group)
        self._background.wait()
        snapshot = Snapshot(self, exclude_frozen=exclude_frozen_parameters)

        def offer() -> Offer:
            name = check_tag(f"global_step{self.global_steps}" if tag is None else tag)
            return snapshot.offer(str(save_dir), name, client_state or {})

        offers = together(offer, CheckpointError, group)
        folder, name = self._agree_place(offers)
        self._warn_of_unfinished_accumulation()
        use_thread = self._config.saves_in_background if in_background is None else in_background

        contents: dict[str, Callable[[], Iterable[bytes | memoryview]]] = {}

        def begin() -> tuple[int, list[Chunk]]:
            number = PendingCheckpoint.prepare(folder, name).generation if rank == 0 else 0
            chunks = snapshot.complete(offers)
            contents.update(self._contents(snapshot, stage=use_thread))
            return number, chunks

        pending = PendingCheckpoint(folder, name, 0)
        try:
            begun = together(begin, CheckpointError, group)
            pending = PendingCheckpoint(folder, name, begun[0][0])
            settings = self._config.checkpoint
            shares = [chunks for _, chunks in begun]
            writing = Writing(
                pending=pending,
                manifest=snapshot.manifest(pending.data_name, shares, in_rotation=save_latest),
                rank=rank,
                contents=contents,
                keep_last=settings.keep_last,
                shows_speed=settings.writer is not None and settings.writer.show_statistics,
            )
            if use_thread:
                self._background.begin(writing)
            else:
                self._write(writing)
        except BaseException:
            if rank == 0:
                with contextlib.suppress(OSError):  # the cause is more telling
                    pending.discard()
            raise
        return True

    def wait_for_checkpoint(self) -> None:
        """Return when a checkpoint being written in the background has appeared. Collective.

        Saving, loading and `destroy` wait by themselves, and so does the end of the program. A rank that could not
        write is reported by the next `step` at a boundary, or by the next of these calls.

        Raises:
            CheckpointError: on every rank, with the cause: it could not be written.
        """
        self._background.wait()

    def _contents(self, snapshot: Snapshot, *, stage: bool) -> dict[str, Callable[[], Iterable[bytes | memoryview]]]:
        """What yields the bytes of each of this rank's files; of tensors a copy, where it is staged."""
        parts: Callable[[], Iterable[bytes | memoryview]] = functools.partial(tensor_parts, snapshot.tensors)
        if stage:
            parts = functools.partial(iter, [self._staging.fill(snapshot.tensors)])
        objects = {name: functools.partial(iter, [data]) for name, data in snapshot.objects.items()}
        return {**objects, tensor_file(snapshot.rank): parts}

    def _write(self, writing: Writing) -> None:
        files = together(writing.write, CheckpointError, self.data_parallel_group)
        everything = {name: record for each in files for name, record in each.items()}
        together(
            lambda: writing.commit(everything) if writing.rank == 0 else None, CheckpointError, self.data_parallel_group
        )

    def _agree_place(self, offers: list[Offer]) -> tuple[pathlib.Path, str]:
        first = offers[0]
        if any(offer.folder != first.folder for offer in offers):
            said = ", ".join(f"rank {rank}: {offer.folder!r}" for rank, offer in enumerate(offers))
            raise CheckpointError(f"ranks pass different directories: {said}; pass the same one, on shared storage")
        if any(offer.tag != first.tag for offer in offers):
            said = ", ".join(f"rank {rank}: {offer.tag!r}" for rank, offer in enumerate(offers))
            rule = self._config.checkpoint.tag_validation
            if rule == "Fail":
                raise CheckpointError(f"ranks pass different checkpoint tags: {said}")
            if rule == "Warn":
                log_dist(f"ranks pass different checkpoint tags: {said}; rank 0's is used", level=logging.WARNING)
        return pathlib.Path(first.folder), first.tag

    def _warn_of_unfinished_accumulation(self) -> None:
        if any(group.grads.has_local or group.grads.reduced is not None for group in self.runtime.trainable):
            log_dist(
                "gradients accumulated since the last update are not saved; a resumed run repeats their micro-batches",
                level=logging.WARNING,
            )

    # --------------------------------------------------------------------- load

    def load_checkpoint(
        self,
        load_dir: str,
        tag: Any = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Callable[..., Any] | None = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Restore what `save_checkpoint` saved. Collective: every rank must call it.

        Everything is checked first - files against their checksums, names and shapes against the model - and
        nothing is changed if any rank finds a fault. Gradients accumulated so far are forgotten; accumulation
        starts anew.

        Args:
            load_dir: the directory given to `save_checkpoint`.
            tag: which checkpoint; by default the one named in `latest`.
            load_module_strict: names of parameters and buffers must agree exactly; if False, what only one
                side has is left alone.
            load_optimizer_states: also load optimizer state, hyper-parameters, loss scale and random
                generators. The number of ranks, the ZeRO stage and the grouping of parameters may be others than
                when it was saved; generators then start afresh, as there is one per rank. Masters come from saved
                masters (`load_from_fp32_weights` false: from the stored values).
            load_lr_scheduler_states: also load the schedule.
            load_module_only: weights and buffers only; steps, optimizer, schedule and generators stay as they
                are.
            custom_load_fn: called as `custom_load_fn(src=state_dict, dst=module)` to load the weights, with
                all parameters whole.

        Returns:
            (path of the checkpoint, client state); (None, None) with a warning when `tag` is None and nothing
            was ever saved there.

        Raises:
            CheckpointError: on every rank: not found, torn, or not fitting this engine.
        """
        group = self.data_parallel_group
        rank, world_size = get_rank(group), get_world_size(group)
        rendezvous("load_checkpoint", group)
        self._background.wait()
        folder = pathlib.Path(load_dir)
        name = self._find_tag(folder, tag)
        if name is None:
            log_dist(
                f"no checkpoint loaded: {folder} has no file `latest` and no tag was given",
                level=logging.WARNING,
            )
            return None, None
        with_optimizer = load_optimizer_states and not load_module_only and self.optimizer is not None
        names = [] if self.optimizer is None else collect.all_group_names(self.optimizer)
        opened: list[SavedState] = []
        try:

            def open_and_check() -> None:
                opened.append(open_checkpoint(folder, name, rank, names))
                opened[0].verify(world_size)

            together(open_and_check, CheckpointError, group)
            reader = opened[0]
            strict = None if custom_load_fn is not None else load_module_strict
            together(lambda: self._check_fit(reader, name, strict, with_optimizer), CheckpointError, group)
            restore.prepare_for_writing(self.runtime)
            together(
                lambda: self._restore(
                    reader, with_optimizer, load_lr_scheduler_states, load_module_only, custom_load_fn
                ),
                CheckpointError,
                group,
            )
            self.runtime.check_files()
            own = client_file(rank)
            client = reader.objects(own if own in reader.manifest.files else client_file(0))["client_state"]
        finally:
            for each in opened:
                each.close()
        log_dist(f"loaded checkpoint {folder / name}")
        return str(folder / name), client

    def _find_tag(self, folder: pathlib.Path, tag: Any) -> str | None:
        group = self.data_parallel_group
        tags = together(lambda: None if tag is None else check_tag(tag), CheckpointError, group)
        if any(other != tags[0] for other in tags):
            said = ", ".join(f"rank {rank}: {other!r}" for rank, other in enumerate(tags))
            raise CheckpointError(f"ranks load different checkpoint tags: {said}")
        if tags[0] is not None:
            return tags[0]
        # Only rank 0 looks, so that ranks cannot disagree while somebody replaces the file.
        universal = self._config.checkpoint.load_universal
        return together(
            lambda: default_tag(folder, universal=universal) if get_rank(group) == 0 else None, CheckpointError, group
        )[0]

    def _check_fit(self, reader: SavedState, tag: str, strict: bool | None, with_optimizer: bool) -> None:
        manifest = reader.manifest
        if strict is not None:  # None: the caller's own function loads the weights, and knows what fits
            restore.check_names(manifest, collect.named_state(self.module, self.runtime), tag, strict=strict)
        if not with_optimizer:
            return
        assert self.optimizer is not None
        restore.check_optimizer(manifest, reader.objects(COMMON), self.optimizer, tag)

    def _restore(
        self,
        reader: SavedState,
        with_optimizer: bool,
        with_scheduler: bool,
        module_only: bool,
        custom_load_fn: Callable[..., Any] | None,
    ) -> None:
        common = reader.objects(COMMON)
        state = collect.named_state(self.module, self.runtime)
        use_masters = self._config.zero_optimization.load_from_fp32_weights
        weights = restore.SavedWeights(reader, use_masters=use_masters)
        if custom_load_fn is None:
            restore.write_weights(self.runtime, state, weights)
            restore.write_buffers(state, reader)
            restore.write_extra_states(self.module, common["extra_state"])
        else:
            self._load_whole(restore.saved_state_dict(reader), custom_load_fn)
            if with_optimizer:
                restore.write_masters(self.runtime, weights)
        if module_only:
            return
        if with_optimizer:
            assert self.optimizer is not None
            restore.write_optimizer(self.optimizer, reader, common)
        self._restore_rank_state(reader, with_generators=with_optimizer)
        if with_scheduler and hasattr(self.lr_scheduler, "load_state_dict"):
            if "lr_scheduler" in common:
                self.lr_scheduler.load_state_dict(common["lr_scheduler"])
            else:
                log_dist("the checkpoint has no lr schedule; this engine's stays as it is", level=logging.WARNING)
        self._restore_counters(reader.manifest.counters)

    def _restore_rank_state(self, reader: SavedState, *, with_generators: bool) -> None:
        rank, saved, now = get_rank(self.data_parallel_group), reader.manifest.world_size, self.dp_world_size
        name = rank_file(rank if saved == now else 0)
        if name not in reader.manifest.files:
            log_dist("the checkpoint has no random generators: they stay as they are")
            return
        own = reader.objects(name)
        if "data" in own and isinstance(self.training_dataloader, PositionedLoader):
            # Before the generators: finding the place in the data may draw from them.
            self.training_dataloader.load_state_dict(own["data"])
            self._batches = None
        if not with_generators:
            return
        if saved == now:
            restore_rng_state(own["rng"], self.device)
        else:
            log_dist(f"random generators of {_ranks(saved)} do not fit {_ranks(now)}: they stay as they are")

    def _restore_counters(self, counters: Mapping[str, int]) -> None:
        self.global_steps = counters["global_steps"]
        self.global_samples = counters["global_samples"]
        self.skipped_steps = counters["skipped_steps"]
        self.micro_steps = counters["micro_steps"]
        self._num_backwards = self._num_micro_steps = 0
        self._loss_is_scaled = False
        self.runtime.policy.is_boundary = self.is_gradient_accumulation_boundary()

    if TYPE_CHECKING:  # the engine's own

        def is_gradient_accumulation_boundary(self) -> bool:
            """Whether the next `step` updates weights."""
            ...


def _ranks(count: int) -> str:
    return f"{count} rank" if count == 1 else f"{count} ranks"
