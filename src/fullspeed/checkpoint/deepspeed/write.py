"""Writing a checkpoint in DeepSpeed's layout, from one of any kind. Each rank writes its own files and reads for them.

What that layout cannot hold: the number of updates of each parameter (a group has one, the largest is written), and
random generators.
"""

from __future__ import annotations

import math
import pathlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from fullspeed.checkpoint.deepspeed import files
from fullspeed.checkpoint.deepspeed.layout import Span, flat_shard_numel, flat_spans, part_numel, part_spans
from fullspeed.checkpoint.deepspeed.model_states import EXTRA_STATE
from fullspeed.checkpoint.deepspeed.pickling import save
from fullspeed.checkpoint.deepspeed.unpickle import DynamicLossScaler, FragmentAddress, LossScaler, Number, Record
from fullspeed.checkpoint.manifest import BUFFER, MASTER, OPTIMIZER, PARAM, ParamRecord
from fullspeed.checkpoint.saved import COMMON, SavedState, client_file
from fullspeed.config.recorded import recorded_config

FORMAT = "0.19.8"
"""The release of DeepSpeed whose layout is written."""
UNIVERSAL_FORMAT = 0.4


class Target(NamedTuple):
    """How the run that is written was sharded, or shall seem to have been."""

    stage: int
    world_size: int
    shards_params: bool
    shards_optimizer: bool
    config: Mapping[str, Any]  # as the user gave it


class _Group(NamedTuple):
    """A param group: its hyper-parameters, and the parameters in flat order."""

    row: dict[str, Any]
    params: list[ParamRecord]

    @property
    def numels(self) -> list[int]:
        return [math.prod(record.shape) for record in self.params]


class DeepSpeedWriter:
    """Writes the files of one rank.

    Args:
        state: what to write; its param groups name their parameters.
        target: the layout.
    """

    def __init__(self, state: SavedState, target: Target) -> None:
        self._state, self._target = state, target
        self._common = state.objects(COMMON)
        self._records = {record.fqn: record for record in state.manifest.params}
        self._groups = [
            _Group(
                {name: value for name, value in row.items() if name != "fqns"},
                [self._records[state.resolve(fqn)] for fqn in row["fqns"]],
            )
            for row in self._common.get("param_groups", [])
        ]
        has_optimizer = state.manifest.optimizer is not None
        self._shards_params = target.shards_params and has_optimizer
        self._shards_optimizer = target.shards_optimizer and has_optimizer

    def write(self, folder: pathlib.Path, rank: int) -> None:
        """Write rank `rank`'s files into the tag's folder, which exists."""
        if self._shards_params:
            save(folder / files.sharded_model(rank), self._model_states(rank))
        elif rank == 0:
            save(folder / files.MODEL, self._model_states(rank))
        if self._shards_optimizer:
            inner = self._parted_states(rank) if self._shards_params else self._flat_states(rank)
            outer = {"optimizer_state_dict": inner, "ds_config": dict(self._target.config), "ds_version": FORMAT}
            save(folder / files.optimizer_file(rank, is_bf16=self._is_bf16), outer)

    def write_shared(self, path: pathlib.Path) -> None:
        """Write what a universal checkpoint has besides its tensors, into the tag's folder."""
        version = {"universal_checkpoint_version": UNIVERSAL_FORMAT}
        info = {"universal_checkpoint_info": version}
        save(path / files.MODEL, {**self._model_states(0), **info})
        state = {**self._loss_scale(), "zero_stage": Number(self._target.stage), "param_groups": self._rows(), **info}
        save(path / files.UNIVERSAL / files.UNIVERSAL_OPTIMIZER, {**state, "ds_version": FORMAT})

    @property
    def _is_bf16(self) -> bool:
        trained = [record for group in self._groups for record in group.params]
        return bool(trained) and all(record.dtype == "bfloat16" for record in trained)

    # ------------------------------------------------------------------ weights

    def _model_states(self, rank: int) -> dict[str, Any]:
        manifest = self._state.manifest
        client = client_file(rank) if client_file(rank) in manifest.files else client_file(0)
        flat = [OrderedDict((r.fqn, torch.Size(r.shape)) for r in group.params) for group in self._groups]
        frozen = self._frozen_parts(rank) if self._shards_optimizer else None
        return {
            "module": self._module(),
            "buffer_names": list(manifest.buffers),
            "optimizer": None if self._shards_optimizer or manifest.optimizer is None else self._whole_states(),
            "param_shapes": flat if self._shards_optimizer else None,
            "frozen_param_shapes": None
            if frozen is None
            else OrderedDict((fqn, torch.Size(self._records[fqn].shape)) for fqn in frozen),
            "shared_params": {alias: fqn for alias, fqn in manifest.aliases.items() if fqn in self._records}
            if self._shards_optimizer
            else None,
            "frozen_param_fragments": frozen,
            "lr_scheduler": self._common.get("lr_scheduler"),
            "data_sampler": None,
            "random_ltd": None,
            "skipped_steps": manifest.counters["skipped_steps"],
            "global_steps": manifest.counters["global_steps"],
            "global_samples": manifest.counters["global_samples"],
            "dp_world_size": self._target.world_size,
            "mp_world_size": 1,
            "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 1},
            "ds_config": dict(self._target.config),
            "ds_version": FORMAT,
            **self._state.objects(client)["client_state"],
        }

    def _module(self) -> OrderedDict[str, Any]:
        """The module's state dict; placeholders for sharded parameters, one tensor for tied ones."""
        manifest = self._state.manifest
        found: OrderedDict[str, Any] = OrderedDict((fqn, self._state.whole(BUFFER, fqn)) for fqn in manifest.buffers)
        for fqn, record in self._records.items():
            if record.is_saved:
                dtype: torch.dtype = getattr(torch, record.dtype)
                whole = torch.empty(0) if self._shards_params else self._state.whole(PARAM, fqn)
                found[fqn] = whole.to(dtype)
        found |= {alias: found[fqn] for alias, fqn in manifest.aliases.items() if fqn in found}
        for name, value in self._common["extra_state"].items():
            found[f"{name}.{EXTRA_STATE}" if name else EXTRA_STATE] = value
        return found

    def _frozen_parts(self, rank: int) -> OrderedDict[str, torch.Tensor]:
        found: OrderedDict[str, torch.Tensor] = OrderedDict()
        for fqn, record in self._records.items():
            if record.is_trainable or not record.is_saved:
                continue
            dtype: torch.dtype = getattr(torch, record.dtype)
            if self._shards_params:
                numel = math.prod(record.shape)
                found[fqn] = self._part(PARAM, fqn, numel, rank).to(dtype)
            else:
                found[fqn] = self._state.whole(PARAM, fqn).to(dtype)
        return found

    # ---------------------------------------------------------------- optimizer

    def _flat_states(self, rank: int) -> dict[str, Any]:
        """Param groups one after another, cut evenly."""
        world_size = self._target.world_size
        shard_numels = [flat_shard_numel(group.numels, world_size) for group in self._groups]
        masters, states, paddings, mappings = [], {}, [], []
        for index, (group, shard_numel) in enumerate(zip(self._groups, shard_numels, strict=True)):
            all_spans = flat_spans(group.numels, [0] * len(group.params), shard_numel)
            spans = [[span for span in spans if span.rank == rank] for spans in all_spans]
            padding = shard_numel * world_size - sum(group.numels) if rank == world_size - 1 else 0
            master = self._shard(MASTER, group, spans, shard_numel)
            masters.append(master[: max(0, shard_numel - padding)].clone())
            states[index] = self._state_entries(group, spans, shard_numel)
            paddings.append(padding)
            mappings.append(_slices(group, spans))
        return {
            **self._loss_scale(),
            "clip_grad": recorded_config(self._target.config).gradient_clipping,
            "base_optimizer_state": {"state": states, "param_groups": self._rows()},
            "single_partition_of_fp32_groups": masters,
            "zero_stage": Number(self._target.stage),
            "group_paddings": paddings,
            "param_alignment_paddings": [[0] * len(group.params) for group in self._groups],
            "partition_count": [world_size] * len(self._groups),
            "ds_version": FORMAT,
            "param_slice_mappings": mappings,
        }

    def _parted_states(self, rank: int) -> dict[str, Any]:
        """Every parameter cut evenly."""
        world_size = self._target.world_size
        masters, states = [], {}
        for index, group in enumerate(self._groups):
            shard_numel = sum(part_numel(numel, world_size) for numel in group.numels)
            all_spans = part_spans(group.numels, world_size)
            spans = [[span for span in spans if span.rank == rank] for spans in all_spans]
            masters.append(self._shard(MASTER, group, spans, shard_numel))
            states[index] = self._state_entries(group, spans, shard_numel)
        return {
            "zero_stage": Number(self._target.stage),
            **self._loss_scale(),
            "partition_count": world_size,
            "optimizer_state_dict": {"state": states, "param_groups": self._rows()},
            "fp32_flat_groups": masters,
        }

    def _whole_states(self) -> dict[str, Any]:
        """The optimizer's own state dict: parameters numbered through all groups."""
        states: dict[int, dict[str, Any]] = {}
        rows = []
        for group in self._groups:
            numbers = range(len(states), len(states) + len(group.params))
            for number, record in zip(numbers, group.params, strict=True):
                one = _Group(group.row, [record])
                numel = math.prod(record.shape)
                entries = self._state_entries(one, [[Span(0, numel, 0, 0)]], numel)
                states[number] = {
                    name: value.view(record.shape) if value.dim() else value for name, value in entries.items()
                }
            rows.append({**group.row, "params": list(numbers)})
        base = {"state": states, "param_groups": rows}
        if all(record.dtype == "float32" for group in self._groups for record in group.params):
            return base
        masters = [
            [self._master(record.fqn, 0, math.prod(record.shape)).view(record.shape) for record in group.params]
            for group in self._groups
        ]
        scale = vars(self._loss_scale()["loss_scaler"])
        counters = {"cur_iter": self._state.manifest.counters["global_steps"]}
        kept = ("cur_scale", "cur_iter", "last_overflow_iter", "scale_factor", "scale_window")
        counters |= {name: scale[name] for name in kept if name in scale}
        return {
            "dynamic_loss_scale": scale["dynamic"],
            **counters,
            "optimizer_state_dict": base,
            "fp32_groups": masters,
        }

    def _rows(self) -> list[dict[str, Any]]:
        """Param groups, each with the number of its one flat tensor."""
        return [{**group.row, "params": [index]} for index, group in enumerate(self._groups)]

    def _state_entries(
        self, group: _Group, spans: Sequence[Sequence[Span]], shard_numel: int
    ) -> dict[str, torch.Tensor]:
        """A flat group's optimizer state: entries that any of its parameters has; zeros where one has none."""
        state = self._state
        kinds = dict.fromkeys(kind for record in group.params for kind in state.optimizer_kinds(record.fqn))
        found = {}
        for kind in kinds:
            having = [record.fqn for record in group.params if state.has(kind, record.fqn)]
            if state.describe(kind, having[0]).per_element:
                found[kind.removeprefix(OPTIMIZER)] = self._shard(kind, group, spans, shard_numel)
            else:
                found[kind.removeprefix(OPTIMIZER)] = max(state.whole(kind, fqn) for fqn in having)
        return found

    def _shard(self, kind: str, group: _Group, spans: Sequence[Sequence[Span]], shard_numel: int) -> torch.Tensor:
        """One rank's flat tensor of a group, fp32; padding is zero."""
        flat = torch.zeros(shard_numel)
        for record, own in zip(group.params, spans, strict=True):
            for span in own:
                if kind == MASTER:
                    values = self._master(record.fqn, span.start, span.stop)
                elif self._state.has(kind, record.fqn):
                    values = self._state.elements(kind, record.fqn, span.start, span.stop)
                else:
                    continue
                flat[span.offset : span.offset + span.numel] = values
        return flat

    def _master(self, fqn: str, start: int, stop: int) -> torch.Tensor:
        kind = MASTER if self._state.has(MASTER, fqn) else PARAM
        return self._state.elements(kind, fqn, start, stop).float()

    def _part(self, kind: str, fqn: str, numel: int, rank: int) -> torch.Tensor:
        """A rank's part of one parameter; padding is zero."""
        size = part_numel(numel, self._target.world_size)
        start, stop = min(numel, rank * size), min(numel, (rank + 1) * size)
        values = self._state.elements(kind, fqn, start, stop)
        return torch.cat((values, values.new_zeros(size - (stop - start))))

    def _loss_scale(self) -> dict[str, Any]:
        saved = self._common["loss_scale"]
        scale = saved.get("scale", 1.0)
        if "iteration" not in saved:
            scaler: Record = LossScaler.of(cur_scale=scale, dynamic=False)
            return {"loss_scaler": scaler, "dynamic_loss_scale": False, "overflow": False}
        config = recorded_config(self._target.config)
        scaler = DynamicLossScaler.of(
            cur_scale=scale,
            dynamic=True,
            cur_iter=saved["iteration"],
            last_overflow_iter=saved["last_overflow"],
            scale_factor=2.0,
            scale_window=config.loss_scale_window,
            min_scale=config.min_loss_scale,
            delayed_shift=config.hysteresis,
            cur_hysteresis=saved["hysteresis_left"],
            consecutive_hysteresis=config.consecutive_hysteresis,
            raise_error_at_min_scale=True,
            dtype=torch.float16,
        )
        return {"loss_scaler": scaler, "dynamic_loss_scale": True, "overflow": False}


def _slices(group: _Group, spans: Sequence[Sequence[Span]]) -> OrderedDict[str, Record]:
    """Where a rank's flat tensor has which parameter."""
    found: OrderedDict[str, Record] = OrderedDict()
    for record, own in zip(group.params, spans, strict=True):
        for span in own:
            found[record.fqn] = FragmentAddress.of(numel=span.numel, start=span.offset)
    return found
