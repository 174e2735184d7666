"""The module's state dict, whole, whatever is sharded; and the file of weights alone."""

from __future__ import annotations

import logging
import pathlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fullspeed.base.errors import CheckpointError, UsageError
from fullspeed.base.log import log_dist
from fullspeed.checkpoint.durable import replace_file
from fullspeed.checkpoint.export import save_pickled
from fullspeed.comm import Group, get_rank
from fullspeed.comm.rendezvous import rendezvous, together
from fullspeed.engine import restore
from fullspeed.engine.collect import is_trainable, named_state
from fullspeed.engine.streamed import StreamedState
from fullspeed.sharding import placeholder
from fullspeed.sharding.group import FlatGroup
from fullspeed.sharding.runtime import ShardingRuntime

if TYPE_CHECKING:
    from fullspeed.config import Config

_GATHER_KEY = "zero_optimization.stage3_gather_16bit_weights_on_model_save"


class ModuleState:
    """Mixin: state dicts of whole tensors. All methods are collective."""

    _config: Config
    module: nn.Module
    runtime: ShardingRuntime
    data_parallel_group: Group

    def module_state_dict(
        self,
        destination: Any = None,
        prefix: str = "",
        keep_vars: bool = False,
        exclude_frozen_parameters: bool = False,
    ) -> Any:
        """The module's state dict: whole tensors on the CPU, as stored (16-bit in bf16 and fp16), on every rank.

        Sharded parameters are gathered group by group. Memory: the whole model in host memory of each rank;
        use `save_16bit_model` where only a file is wanted.

        Args:
            destination: a dict to add to and return.
            prefix: put before every name.
            keep_vars: return the parameters themselves, as `torch.nn.Module.state_dict` does; nothing is
                gathered.
            exclude_frozen_parameters: leave out parameters that do not require gradients.
        """
        rendezvous("module_state_dict", self.data_parallel_group)
        found = self._state_dict(prefix, exclude_frozen_parameters, wanted=True, keep_vars=keep_vars)
        if destination is None:
            return found
        destination.update(found)
        return destination

    def load_module_state_dict(
        self,
        checkpoint: Mapping[str, Any],
        strict: bool = True,
        custom_load_fn: Callable[..., Any] | None = None,
        fetch_z3_params: bool = False,
    ) -> None:
        """Load whole weights into the module and the masters; gradients are forgotten.

        Args:
            checkpoint: a state dict of whole tensors, or a dict that has one under "module"; the same on
                every rank.
            strict: names must agree exactly.
            custom_load_fn: called as `custom_load_fn(src=state_dict, dst=module)`, all parameters being
                whole, in place of the usual loading.
            fetch_z3_params: accepted for compatibility; sharded parameters need no fetching.

        Raises:
            CheckpointError: on every rank, when names or shapes do not fit the model.
        """
        del fetch_z3_params
        inner = checkpoint.get("module")
        state_dict = inner if isinstance(inner, Mapping) else checkpoint
        rendezvous("load_module_state_dict", self.data_parallel_group)
        together(
            lambda: self._check_state_dict(state_dict, strict and custom_load_fn is None),
            CheckpointError,
            self.data_parallel_group,
        )
        restore.prepare_for_writing(self.runtime)
        self._load_whole(state_dict, custom_load_fn)
        self.runtime.check_files()

    def _check_state_dict(self, state_dict: Mapping[str, Any], strict: bool) -> None:
        state = named_state(self.module, self.runtime)
        wanted = {fqn: tuple(tensor.shape) for fqn, tensor in (*state.params.items(), *state.buffers.items())}
        given = {
            fqn: tuple(value.shape)
            for fqn, value in state_dict.items()
            if isinstance(value, torch.Tensor) and (fqn not in state.aliases or state.aliases[fqn] not in state_dict)
        }
        by_name = {canonical: alias for alias, canonical in state.aliases.items()}
        restore.check_shapes(given, wanted, by_name, "the state dict", strict=strict)

    def _load_whole(self, state_dict: Mapping[str, Any], custom_load_fn: Callable[..., Any] | None) -> None:
        """Load a state dict of whole tensors after `prepare_for_writing`."""
        if custom_load_fn is not None:
            self._call_with_whole_params(lambda: custom_load_fn(src=state_dict, dst=self.module))
            return
        state = named_state(self.module, self.runtime)
        complete = dict(state_dict)
        for alias, canonical in state.aliases.items():
            if canonical not in complete and alias in complete:
                complete[canonical] = complete[alias]
        restore.write_weights(self.runtime, state, restore.GivenWeights(complete))
        with torch.no_grad():
            for fqn, buffer in state.buffers.items():
                if fqn in complete:
                    buffer.copy_(complete[fqn])
        suffix = torch.nn.modules.module._EXTRA_STATE_KEY_SUFFIX
        extra = {name.removesuffix(suffix).rstrip("."): complete[name] for name in complete if name.endswith(suffix)}
        restore.write_extra_states(self.module, extra)

    def _call_with_whole_params(self, load: Callable[[], Any]) -> None:
        for group in self.runtime.groups:
            if group.is_transient:
                group.begin_unshard(exact=True)
                group.finish_unshard()
        try:
            load()
        except BaseException:
            for group in self.runtime.groups:
                group.reshard()
            raise
        restore.adopt_whole_params(self.runtime)

    # ------------------------------------------------------------------- export

    def save_16bit_model(
        self, save_dir: str, save_filename: str = "pytorch_model.bin", exclude_frozen_parameters: bool = False
    ) -> bool:
        """Write the module's state dict to one file, as stored; in safetensors format when the name ends so.

        Rank 0 writes; gradients under way stay. Returns False, with a warning, where parameters are sharded
        and the configuration does not allow gathering them.

        Memory on rank 0: for a safetensors file one group of parameters, which goes into the file when it is
        gathered; for another one the whole model in host memory, once. The other ranks hold one group.
        """
        if not self._may_gather():
            log_dist(
                f"save_16bit_model wrote nothing: parameters are sharded and {_GATHER_KEY} is false",
                level=logging.WARNING,
            )
            return False
        rendezvous("save_16bit_model", self.data_parallel_group)
        path = pathlib.Path(save_dir) / save_filename
        if path.suffix == ".safetensors":
            self._stream_weights(path, exclude_frozen_parameters)
            return True
        state_dict = self._consolidated_16bit_state_dict(exclude_frozen_parameters)

        def write() -> None:
            if state_dict is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
                save_pickled(path, state_dict)

        together(write, CheckpointError, self.data_parallel_group)
        return True

    save_fp16_model = save_16bit_model

    def _consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Any] | None:
        """The whole state dict on rank 0, None on the others. Collective. Raises ValueError where not allowed."""
        if not self._may_gather():
            raise ValueError(f"parameters are sharded and {_GATHER_KEY} is false; set it to true")
        rank = get_rank(self.data_parallel_group)
        found = self._state_dict("", exclude_frozen_parameters, wanted=rank == 0)
        return found if rank == 0 else None

    _zero3_consolidated_16bit_state_dict = _consolidated_16bit_state_dict

    def _stream_weights(self, path: pathlib.Path, exclude_frozen: bool) -> None:
        group = self.data_parallel_group
        streamed = StreamedState(self.runtime, self._state_dict("", exclude_frozen, keep_vars=True))
        together(streamed.check, CheckpointError, group)
        self.runtime.meet()
        values = streamed.values(wanted=get_rank(group) == 0)
        failure: OSError | None = None
        try:
            if get_rank(group) == 0:
                path.parent.mkdir(parents=True, exist_ok=True)
                replace_file(path, streamed.file(values))
        except OSError as error:
            failure = error
        for _ in values:  # the others' gathers go on whatever happens here
            pass

        def end() -> None:
            if failure is not None:
                raise failure

        together(end, CheckpointError, group)

    def _may_gather(self) -> bool:
        is_sharded = any(group.needs_gather for group in self.runtime.groups)
        return not is_sharded or self._config.zero_optimization.stage3_gather_16bit_weights_on_model_save

    def _state_dict(
        self, prefix: str, exclude_frozen: bool, *, wanted: bool = True, keep_vars: bool = False
    ) -> dict[str, Any]:
        """`module.state_dict` with whole CPU tensors. A rank that does not want it only helps to gather."""
        whole: dict[nn.Parameter, torch.Tensor] = {}
        if not keep_vars:
            self.runtime.meet()
            for group in self.runtime.groups:
                if not (exclude_frozen and not group.is_trainable):
                    whole.update(_whole_values(group, wanted=wanted))
            self.runtime.check_files()
        if not wanted:
            return {}
        found: dict[str, Any] = {}
        for name, value in self.module.state_dict(prefix=prefix, keep_vars=True).items():
            if exclude_frozen and isinstance(value, nn.Parameter) and not is_trainable(value, self.runtime):
                continue
            if keep_vars or not isinstance(value, torch.Tensor):
                found[name] = value
            elif isinstance(value, nn.Parameter) and value in whole:
                found[name] = whole[value]
            elif placeholder.is_sharded(value):
                raise UsageError(f"parameter {name} belongs to another engine; take that one's state dict")
            else:
                found[name] = value.detach().to("cpu", copy=True)
        return found


@torch.no_grad()
def _whole_values(group: FlatGroup, *, wanted: bool) -> dict[nn.Parameter, torch.Tensor]:
    """Copies on the CPU of a group's resident values, gathered where they are sharded."""
    values = group.whole_resident()
    if not wanted:
        return {}
    return {
        param: values[slot.offset : slot.end].view(slot.shape).to("cpu", copy=True)
        for param, slot in zip(group.params, group.layout.slots, strict=True)
    }
