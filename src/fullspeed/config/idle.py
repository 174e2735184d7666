"""Which settings of a configuration change nothing: for `fullspeed config check`, not for training."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from fullspeed.config.root import Config
from fullspeed.config.section import Section


class Idle(NamedTuple):
    """A setting that the user wrote and that does nothing here."""

    path: str
    reason: str


UNREAD = {
    "disable_allgather": "parameters are gathered wherever they are sharded",
    "seq_parallel_communication_data_type": "there is no sequence parallelism in this version",
    "zero_force_ds_cpu_optimizer": "every optimizer works on offloaded states",
    "aio.single_submit": "a transfer is handed over block by block",
    "aio.overlap_events": "transfers always overlap",
    "aio.use_gds": "files are read into host memory",
    "checkpoint.writer.io_buffer_size": "files are written from where the tensors are, or from one copy of them",
    "checkpoint.writer.io_buffer_double": "the disk begins while the rest is handed over",
    "checkpoint.writer.data_parallel": "every rank writes its share",
    "checkpoint.writer.io_multiplier": "every rank writes one file",
    "datastates_ckpt.host_cache_size": "the copy is as large as the rank's share",
    "datastates_ckpt.parser_threads": "nothing is parsed",
    "zero_optimization.contiguous_gradients": "gradients are always contiguous",
    "zero_optimization.allgather_partitions": "the transport is chosen by measurement",
    "zero_optimization.allgather_bucket_size": "parameters are gathered by group",
    "zero_optimization.use_multi_rank_bucket_allreduce": "gradients are reduced by group",
    "zero_optimization.round_robin_gradients": "the order of reductions follows backward",
    "zero_optimization.parameter_alignment": "parameters always begin on 16 elements",
    "zero_optimization.memory_efficient_linear": "no gathered weight is kept for backward",
    "zero_optimization.override_module_apply": "Module.apply is not patched",
    "zero_optimization.pipeline_loading_checkpoint": "ranks read only what they keep",
    "zero_optimization.log_trace_cache_warnings": "a changed order of modules needs no warning",
    "zero_optimization.save_muon_momentum_buffer_in_memory": "momentum is a state like any other",
    "zero_optimization.stage3_use_all_reduce_for_fetch_params": "the transport is chosen by measurement",
}
"""Settings that are accepted because configurations have them, and the reason why nothing needs them."""


def idle_settings(config: Config) -> list[Idle]:
    """The settings written in the configuration that have no effect, in the order of its sections."""
    found = [Idle(path, reason) for path, reason in UNREAD.items() if _is_written(config, path)]
    found += _of_disabled_blocks(config, "")
    zero = config.zero_optimization
    if zero.stage != 3:
        written = (name for name in zero.model_fields_set if name.startswith("stage3_"))
        known = {idle.path for idle in found}
        paths = (f"zero_optimization.{name}" for name in sorted(written))
        found += [Idle(path, f"counts at stage 3, and stage is {zero.stage}") for path in paths if path not in known]
    return found


def _is_written(config: Config, path: str) -> bool:
    section: Section = config
    *blocks, key = path.split(".")
    for block in blocks:
        inner = getattr(section, block)
        if inner is None:
            return False
        section = inner
    return key in section.model_fields_set


def _of_disabled_blocks(section: Section, path: str) -> Iterator[Idle]:
    """Keys beside an `enabled` that is false."""
    for name in type(section).model_fields:
        inner, inner_path = getattr(section, name), f"{path}.{name}" if path else name
        if not isinstance(inner, Section) or name not in section.model_fields_set:
            continue
        if not getattr(inner, "enabled", True):
            others = sorted(inner.model_fields_set - {"enabled"})
            yield from (Idle(f"{inner_path}.{key}", f"{inner_path}.enabled is false") for key in others)
        else:
            yield from _of_disabled_blocks(inner, inner_path)
