"""Profiling a model's floating-point operations, with the names of DeepSpeed's FLOPS profiler."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from fullspeed.accelerator import get_accelerator
from fullspeed.base.errors import UsageError
from fullspeed.base.log import log_dist
from fullspeed.monitor.flops import FlopCounter, ModuleCost
from fullspeed.monitor.flops_report import Facts, aggregated_table, amount, model_report
from fullspeed.monitor.peak import peak_flops


class FlopsProfiler:
    """Counts what `model` does between `start_profile` and `stop_profile`; the totals are those of forwards.

    Latencies include the counting itself, which slows small operations down.
    """

    def __init__(self, model: nn.Module, ds_engine: Any = None, recompute_fwd_factor: float = 0.0) -> None:
        """Nothing is counted yet.

        Args:
            model: any module; its parameters may be sharded.
            ds_engine: the engine that trains it, for ranks and batch size in the report.
            recompute_fwd_factor: forwards repeated in backward, as a share; used where no backward was profiled.
        """
        self.model, self.ds_engine, self.recompute_fwd_factor = model, ds_engine, recompute_fwd_factor
        self.started = False
        self._counter: FlopCounter | None = None

    def start_profile(self, ignore_list: Sequence[type[nn.Module]] | None = None) -> None:
        """Begin to count, except in modules of the classes in `ignore_list`. Raises UsageError when counting."""
        if self.started:
            raise UsageError("the FLOPS profiler is counting already; call stop_profile first")
        self._counter = FlopCounter(self.model, ignore=tuple(ignore_list or ()))
        self._counter.start()
        self.started = True

    def stop_profile(self) -> None:
        """End counting; what was counted can be read until `end_profile`. Idempotent."""
        if self._counter is not None:
            self._counter.stop()
        self.started = False

    def reset_profile(self) -> None:
        """Forget what was counted and, while counting, begin again."""
        was_started = self.started
        self.end_profile()
        if was_started:
            self.start_profile()

    def end_profile(self) -> None:
        """End counting and forget the result."""
        self.stop_profile()
        self._counter = None

    @property
    def costs(self) -> Mapping[str, ModuleCost]:
        """What every module cost, by its dotted name; the model's is ""."""
        if self._counter is None:
            raise UsageError("nothing was profiled; call start_profile, run the model, and stop_profile first")
        return self._counter.costs

    def get_total_flops(self, as_string: bool = False) -> Any:
        """FLOPs of the forwards: an int, or text such as "1.29 GFLOPs"."""
        return _shown(self.costs[""].flops, "FLOPs", as_string)

    def get_total_macs(self, as_string: bool = False) -> Any:
        """Multiply-adds of the forwards, half the FLOPs."""
        return _shown(self.costs[""].macs, "MACs", as_string)

    def get_total_params(self, as_string: bool = False) -> Any:
        """Parameters of the model in their logical shapes."""
        return _shown(self.costs[""].num_params, "", as_string)

    def get_total_duration(self, as_string: bool = False) -> Any:
        """Seconds of the forwards."""
        return _shown(self.costs[""].forward_s, "s", as_string)

    def print_model_profile(
        self,
        profile_step: int = 1,
        module_depth: int = -1,
        top_modules: int = 1,
        detailed: bool = True,
        output_file: str | None = None,
    ) -> None:
        """Log the report on rank 0, or write it to `output_file`.

        Args:
            profile_step: the step that was profiled, for the headline.
            module_depth: the deepest level of the table by class; -1 is the deepest there is.
            top_modules: classes listed at each level.
            detailed: add a line for every module.
            output_file: replaces the log.
        """
        text = model_report(self.costs, self._facts(profile_step), module_depth, top_modules, detailed)
        if output_file is None:
            log_dist(f"FLOPS profile\n{text}")
        else:
            Path(output_file).parent.mkdir(parents=True, exist_ok=True)
            Path(output_file).write_text(text + "\n")

    def print_model_aggregated_profile(self, module_depth: int = -1, top_modules: int = 1) -> None:
        """Log the costs by class at every level down to `module_depth`, the `top_modules` dearest of each."""
        log_dist(f"FLOPS by class\n{aggregated_table(self.costs, module_depth, top_modules)}")

    def _facts(self, profile_step: int) -> Facts:
        engine = self.ds_engine
        param = next(self.model.parameters(), None)
        peak = None if param is None else peak_flops(param.device, param.dtype)
        return Facts(
            step=profile_step,
            world_size=1 if engine is None else engine.world_size,
            micro_batch_size=None if engine is None else engine.train_micro_batch_size_per_gpu(),
            recompute_factor=self.recompute_fwd_factor,
            peak_flops=peak,
        )


def get_model_profile(
    model: nn.Module,
    input_shape: tuple[int, ...] | None = None,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    print_profile: bool = True,
    detailed: bool = True,
    module_depth: int = -1,
    top_modules: int = 1,
    warm_up: int = 1,
    as_string: bool = True,
    output_file: str | None = None,
    ignore_modules: Sequence[type[nn.Module]] | None = None,
    mode: Literal["forward", "generate"] = "forward",
) -> tuple[Any, Any, Any]:
    """FLOPs, multiply-adds and parameters of one forward (or `generate`) of `model`.

    Args:
        model: any module; its mode and gradients stay as they are.
        input_shape: shape of a single input of ones, in the model's dtype and on its device; instead of `args`.
        args: positional inputs.
        kwargs: keyword inputs.
        print_profile: log the report.
        detailed: log a line for every module.
        module_depth: deepest level of the table by class; -1 is the deepest there is.
        top_modules: classes listed at each level.
        warm_up: runs before the one that counts.
        as_string: texts instead of numbers.
        output_file: file for the report instead of the log.
        ignore_modules: classes that are not counted.
        mode: what of the model is called.

    Raises:
        UsageError: no input, or an unknown mode.
    """
    if mode not in ("forward", "generate"):
        raise UsageError(f"mode is {mode!r}; choose 'forward' or 'generate'")
    inputs = list(args)
    if input_shape is not None:
        inputs = [_ones(model, input_shape)]
    if not inputs and not kwargs:
        raise UsageError("get_model_profile needs an input: pass input_shape, args or kwargs")
    run: Any = model if mode == "forward" else model.generate
    with torch.no_grad():
        for _ in range(warm_up):
            run(*inputs, **(kwargs or {}))
        profiler = FlopsProfiler(model)
        profiler.start_profile(ignore_modules)
        try:
            run(*inputs, **(kwargs or {}))
        finally:
            profiler.stop_profile()
    if print_profile:
        profiler.print_model_profile(warm_up, module_depth, top_modules, detailed, output_file)
    return (
        profiler.get_total_flops(as_string),
        profiler.get_total_macs(as_string),
        profiler.get_total_params(as_string),
    )


def _ones(model: nn.Module, shape: tuple[int, ...]) -> torch.Tensor:
    param = next(model.parameters(), None)
    if param is None:
        return torch.ones(shape, device=get_accelerator().current_device_name())
    return torch.ones(shape, dtype=param.dtype, device=param.device)


def _shown(value: float, unit: str, as_string: bool) -> float | str:
    return amount(value, unit) if as_string else value
