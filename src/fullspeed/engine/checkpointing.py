"""The engine's checkpoint methods: collect, write, agree, commit; find, verify, compare, restore.

Files in the data folder of a checkpoint (see `checkpoint.folder` and `checkpoint.manifest`):

    rank_00000.safetensors   this rank's chunks
    rank_00000.pt            this rank's random generators
    client_00000.pt          client state; of another rank only where it differs from rank 0's
    common.pt                param groups, optimizer entries that are no tensors, loss scale, lr schedule, extra state
                             of modules
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import pathlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from fullspeed.base.errors import CheckpointError
from fullspeed.base.log import log_dist
from fullspeed.checkpoint.durable import sync_folder, write_file
from fullspeed.checkpoint.folder import PendingCheckpoint, check_tag, write_latest
from fullspeed.checkpoint.manifest import Chunk, FileRecord, Manifest
from fullspeed.checkpoint.objects import pack
from fullspeed.checkpoint.open import default_tag, open_checkpoint
from fullspeed.checkpoint.rng import restore_rng_state, rng_state
from fullspeed.checkpoint.saved import COMMON, SavedState, client_file
from fullspeed.checkpoint.tensor_file import write_tensors
from fullspeed.comm import get_rank, get_world_size
from fullspeed.comm.rendezvous import rendezvous, together
from fullspeed.engine import collect, restore
from fullspeed.engine.module_state import ModuleState

if TYPE_CHECKING:
    import torch

    from fullspeed.sharding.optimizer import ShardedOptimizer


class _Offer(NamedTuple):
    """What ranks tell one another before a save."""

    folder: str
    tag: str
    buffers: dict[str, bytes]  # digest of each
    client_state: bytes  # digest


class _Written(NamedTuple):
    """What one rank has written."""

    chunks: list[Chunk]
    files: dict[str, FileRecord]
    optimizer_values: dict[str, dict[str, Any]]  # by parameter: entries of the optimizer's state that are no tensors


class Checkpointing(ModuleState):
    """Mixin: `save_checkpoint` and `load_checkpoint`, with the state dicts of `ModuleState`."""

    optimizer: ShardedOptimizer | None
    lr_scheduler: Any
    device: torch.device
    global_steps: int
    global_samples: int
    micro_steps: int
    skipped_steps: int
    _num_backwards: int
    _num_micro_steps: int
    _loss_is_scaled: bool

    # --------------------------------------------------------------------- save

    def save_checkpoint(
        self,
        save_dir: str,
        tag: Any = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
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

        Returns:
            True.

        Raises:
            CheckpointError: on every rank with the first cause, when any rank could not save; nothing is left
                behind.
            CommError: some ranks did not call it; names them.
        """
        group = self.data_parallel_group
        rank = get_rank(group)
        rendezvous("save_checkpoint", group)
        packed: dict[str, bytes] = {}

        def offer() -> _Offer:
            packed["client_state"] = pack({"client_state": dict(client_state or {})})
            name = check_tag(f"global_step{self.global_steps}" if tag is None else tag)
            digests = collect.buffer_digests(collect.named_state(self.module, self.runtime))
            return _Offer(str(save_dir), name, digests, hashlib.sha256(packed["client_state"]).digest())

        offers = together(offer, CheckpointError, group)
        folder, name = self._agree_place(offers)
        self._warn_of_unfinished_accumulation()
        generations = together(
            lambda: PendingCheckpoint.prepare(folder, name).generation if rank == 0 else 0,
            CheckpointError,
            group,
        )
        pending = PendingCheckpoint(folder, name, generations[0])
        try:
            parts = together(
                lambda: self._write(pending, offers, packed["client_state"], exclude_frozen_parameters),
                CheckpointError,
                group,
            )
            common = together(lambda: self._write_common(pending, parts) if rank == 0 else {}, CheckpointError, group)[
                0
            ]
            manifest = self._manifest(pending, parts, common, exclude_frozen_parameters)
            together(lambda: pending.commit(manifest) if rank == 0 else None, CheckpointError, group)
        except BaseException:
            if rank == 0:
                with contextlib.suppress(OSError):  # the cause is more telling
                    pending.discard()
            raise
        if save_latest:
            together(lambda: write_latest(folder, name) if rank == 0 else None, CheckpointError, group)
        log_dist(f"saved checkpoint {pending.final}")
        return True

    def _agree_place(self, offers: list[_Offer]) -> tuple[pathlib.Path, str]:
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

    def _write(
        self, pending: PendingCheckpoint, offers: list[_Offer], client_state: bytes, exclude_frozen: bool
    ) -> _Written:
        """Write this rank's files."""
        rank = get_rank(self.data_parallel_group)
        name = f"rank_{rank:05d}"
        state = collect.named_state(self.module, self.runtime)
        mine, first = offers[rank], offers[0]
        collector = collect.Collector(rank, f"{name}.safetensors")
        collector.add_weights(self.runtime, exclude_frozen=exclude_frozen)
        collector.add_unmanaged(state, self.runtime, exclude_frozen=exclude_frozen)
        collector.add_buffers(state, {fqn for fqn in mine.buffers if mine.buffers[fqn] != first.buffers.get(fqn)})
        values = {} if self.optimizer is None else collector.add_optimizer(self.optimizer)
        contents = {_rank_file(rank): pack({"rng": rng_state(self.device)})}
        if rank == 0:
            contents[client_file(0)] = client_state
        elif mine.client_state != first.client_state:
            contents[client_file(rank)] = client_state
        pending.data.mkdir(parents=True, exist_ok=True)
        files = {
            f"{name}.safetensors": write_tensors(
                pending.data / f"{name}.safetensors",
                {chunk.key: tensor for chunk, tensor in collector.tensors.items()},
            )
        }
        for file, data in contents.items():
            files[file] = write_file(pending.data / file, [data])
        sync_folder(pending.data)
        return _Written(list(collector.tensors), files, values)

    def _write_common(self, pending: PendingCheckpoint, parts: list[_Written]) -> dict[str, FileRecord]:
        """Write what is the same on every rank."""
        state: dict[str, Any] = {"extra_state": collect.extra_states(self.module)}
        if self.optimizer is not None:
            state["param_groups"] = collect.optimizer_groups(self.optimizer)
            # Whoever owned a part of a parameter has its entries, and they are equal.
            state["optimizer_values"] = {fqn: row for part in parts for fqn, row in part.optimizer_values.items()}
            state["loss_scale"] = dict(self.optimizer.loss_scaler.state_dict())
        if hasattr(self.lr_scheduler, "state_dict"):
            state["lr_scheduler"] = self.lr_scheduler.state_dict()
        record = write_file(pending.data / COMMON, [pack(state)])
        sync_folder(pending.data)
        return {COMMON: record}

    def _manifest(
        self,
        pending: PendingCheckpoint,
        parts: list[_Written],
        common: Mapping[str, FileRecord],
        exclude_frozen: bool,
    ) -> Manifest:
        state = collect.named_state(self.module, self.runtime)
        return Manifest(
            world_size=len(parts),
            stage=self._config.zero_optimization.stage,
            optimizer=None if self.optimizer is None else type(self.optimizer.optimizer).__name__,
            data=pending.data_name,
            params=collect.param_records(state, self.runtime, exclude_frozen=exclude_frozen),
            aliases=state.aliases,
            buffers={fqn: tuple(buffer.shape) for fqn, buffer in state.buffers.items()},
            counters={
                "global_steps": self.global_steps,
                "global_samples": self.global_samples,
                # As of the last update: what came after it is not saved.
                "micro_steps": self.micro_steps - self._num_micro_steps,
                "skipped_steps": self.skipped_steps,
            },
            chunks=tuple(chunk for part in parts for chunk in part.chunks),
            files={**{name: record for part in parts for name, record in part.files.items()}, **common},
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
            self._restore_generators(reader)
        if with_scheduler and hasattr(self.lr_scheduler, "load_state_dict"):
            if "lr_scheduler" in common:
                self.lr_scheduler.load_state_dict(common["lr_scheduler"])
            else:
                log_dist("the checkpoint has no lr schedule; this engine's stays as it is", level=logging.WARNING)
        self._restore_counters(reader.manifest.counters)

    def _restore_generators(self, reader: SavedState) -> None:
        saved, now = reader.manifest.world_size, get_world_size(self.data_parallel_group)
        own = _rank_file(get_rank(self.data_parallel_group))
        if own not in reader.manifest.files and saved == now:
            log_dist("the checkpoint has no random generators: they stay as they are")
        elif saved == now:
            restore_rng_state(reader.objects(own)["rng"], self.device)
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


def _rank_file(rank: int) -> str:
    """File of what only this rank needs again."""
    return f"rank_{rank:05d}.pt"
