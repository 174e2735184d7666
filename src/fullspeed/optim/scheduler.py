"""Learning-rate schedulers: they write the values of `schedules` into an optimizer's parameter groups."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch

from fullspeed.base.errors import CheckpointError, ConfigError, ConfigFault
from fullspeed.base.log import warn_once
from fullspeed.optim.names import nearest, unknown_arguments
from fullspeed.optim.schedules import (
    Cycle,
    WarmupType,
    lr_range_factor,
    one_cycle_lr,
    one_cycle_momentum,
    warmup_cosine_ratio,
    warmup_decay_fraction,
    warmup_fraction,
)

LrPerGroup = float | Sequence[float]

_CYCLED_BETA2 = 0.99  # OneCycle sets it whatever the optimizer was built with, as DeepSpeed's does


@runtime_checkable
class HasParamGroups(Protocol):
    """What a scheduler needs of an optimizer: the list of groups whose `lr` and `betas` it writes."""

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups; a wrapper returns those of the optimizer inside."""
        ...


class Scheduler(ABC):
    """A schedule bound to an optimizer.

    The constructor writes the initial values. Call `step` after each optimizer step that was applied; the
    values it writes are those of the next optimizer step. `last_batch_iteration` is the n of the formulas in
    `schedules`.
    """

    def __init__(self, optimizer: HasParamGroups, last_batch_iteration: int = -1) -> None:
        if not isinstance(optimizer, HasParamGroups):
            raise TypeError(f"a scheduler needs an optimizer with param_groups, not {type(optimizer).__name__}")
        self.optimizer = optimizer
        self.last_batch_iteration = last_batch_iteration
        self._last_lr: list[float] | None = None

    @abstractmethod
    def get_lr(self) -> list[float]:
        """The learning rate of each group at the current step number."""

    def step(self, n: int | None = None) -> None:
        """Go to the next step number, or to `n`, and write its values into the groups."""
        self.last_batch_iteration = self.last_batch_iteration + 1 if n is None else n
        self._write()
        self._last_lr = self.get_lr()

    def get_last_lr(self) -> list[float]:
        """The learning rates the last `step` wrote. Raises AssertionError before the first one."""
        if self._last_lr is None:
            # transformers catches this type and looks for these words to learn that no step was taken yet
            raise AssertionError("need to call step() first")
        return self._last_lr

    def state_dict(self) -> dict[str, int]:
        """The step number; everything else comes from the configuration."""
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go to the saved step number and write its values. Raises CheckpointError when it is missing."""
        if "last_batch_iteration" not in state:
            raise CheckpointError(f"scheduler state lacks last_batch_iteration; it has {sorted(state)}")
        self.last_batch_iteration = int(state["last_batch_iteration"])
        self._write()
        self._last_lr = self.get_lr() if self.last_batch_iteration >= 0 else None

    def _write(self) -> None:
        for group, lr in zip(self.optimizer.param_groups, self.get_lr(), strict=True):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(lr)  # a captured graph holds this tensor
            else:
                group["lr"] = lr


class LRRangeTest(Scheduler):
    """Learning rate growing without end, to find where training breaks.

    lr = min_lr * (1 + step_rate * u), u = (n + 1) / step_size, rounded down with `lr_range_test_staircase`.

    >>> sgd = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    >>> test = LRRangeTest(sgd, 0.001, lr_range_test_step_size=5, lr_range_test_step_rate=2)
    >>> test.step(); round(sgd.param_groups[0]["lr"], 6)
    0.0014
    """

    def __init__(
        self,
        optimizer: HasParamGroups,
        lr_range_test_min_lr: LrPerGroup = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        _require_positive(lr_range_test_step_size=lr_range_test_step_size)
        self.min_lr = _per_group("lr_range_test_min_lr", lr_range_test_min_lr, optimizer)
        self.step_size = lr_range_test_step_size
        self.step_rate = lr_range_test_step_rate
        self.staircase = lr_range_test_staircase
        self._write()

    def get_lr(self) -> list[float]:
        """The learning rate of each group at the current step number."""
        n, size, rate = self.last_batch_iteration, self.step_size, self.step_rate
        factor = lr_range_factor(n, step_size=size, step_rate=rate, staircase=self.staircase)
        return [lr * factor for lr in self.min_lr]


class OneCycle(Scheduler):
    """Learning rate up and down once, momentum down and up, then both decay (arXiv:1803.09820).

    lr = min + (max - min) * c and beta1 = max_mom - (max_mom - min_mom) * c, with c the position in the
    `Cycle`; after the cycle, with q decay intervals gone by, lr = min / (1 + decay_lr_rate * q) and beta1 =
    max_mom * (1 + decay_mom_rate * q). Momentum is cycled only when every group has `betas`; beta2 becomes
    0.99.

    >>> adam = torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    >>> cycle = OneCycle(adam, cycle_min_lr=0.01, cycle_max_lr=0.11, cycle_first_step_size=5)
    >>> cycle.step(); round(adam.param_groups[0]["lr"], 6), round(adam.param_groups[0]["betas"][0], 6)
    (0.03, 0.88)
    """

    def __init__(
        self,
        optimizer: HasParamGroups,
        cycle_min_lr: LrPerGroup,
        cycle_max_lr: LrPerGroup,
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: int = 2000,
        cycle_second_step_size: int | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: int = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: float = 0.8,
        cycle_max_mom: float = 0.9,
        decay_mom_rate: float = 0.0,
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        second = cycle_first_step_size if cycle_second_step_size is None else cycle_second_step_size
        _require_positive(cycle_first_step_size=cycle_first_step_size, cycle_second_step_size=second)
        self.cycle = Cycle(
            first_size=cycle_first_step_size,
            second_size=second,
            first_stairs=cycle_first_stair_count,
            second_stairs=cycle_first_stair_count if cycle_second_stair_count is None else cycle_second_stair_count,
            decay_step_size=decay_step_size,
        )
        self.min_lr = _per_group("cycle_min_lr", cycle_min_lr, optimizer)
        self.max_lr = _per_group("cycle_max_lr", cycle_max_lr, optimizer)
        self.decay_lr_rate = decay_lr_rate
        self.min_mom, self.max_mom, self.decay_mom_rate = cycle_min_mom, cycle_max_mom, decay_mom_rate
        self.cycle_momentum = cycle_momentum and all("betas" in group for group in optimizer.param_groups)
        if cycle_momentum and not self.cycle_momentum:
            warn_once("OneCycle: cycle_momentum is off because the optimizer has a group without betas")
        self._write()

    def get_lr(self) -> list[float]:
        """The learning rate of each group at the current step number."""
        return [
            one_cycle_lr(self.last_batch_iteration, self.cycle, min_lr=low, max_lr=high, decay_rate=self.decay_lr_rate)
            for low, high in zip(self.min_lr, self.max_lr, strict=True)
        ]

    def get_mom(self) -> list[tuple[float, float]] | None:
        """The betas of each group at the current step number; None when momentum is not cycled."""
        if not self.cycle_momentum:
            return None
        n, low, high = self.last_batch_iteration, self.min_mom, self.max_mom
        beta1 = one_cycle_momentum(n, self.cycle, min_mom=low, max_mom=high, decay_rate=self.decay_mom_rate)
        return [(beta1, _CYCLED_BETA2)] * len(self.optimizer.param_groups)

    def _write(self) -> None:
        super()._write()
        for group, betas in zip(self.optimizer.param_groups, self.get_mom() or (), strict=False):
            group["betas"] = betas


class WarmupLR(Scheduler):
    """Learning rate from a minimum to a maximum over W = max(2, warmup_num_steps) steps, then constant.

    lr = min + (max - min) * g; g = ln(n + 1) / ln(W) (`log`) or n / W (`linear`) for n < W, then 1. Without
    `warmup_max_lr` the maximum is each group's own learning rate.

    >>> sgd = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    >>> warmup = WarmupLR(sgd, warmup_num_steps=5, warmup_type="linear")
    >>> warmup.step(); warmup.step(); round(sgd.param_groups[0]["lr"], 6)
    0.02
    """

    def __init__(
        self,
        optimizer: HasParamGroups,
        warmup_min_lr: LrPerGroup = 0.0,
        warmup_max_lr: LrPerGroup | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        _require_positive(warmup_num_steps=warmup_num_steps)
        self.min_lr = _per_group("warmup_min_lr", warmup_min_lr, optimizer)
        own = [float(group["lr"]) for group in optimizer.param_groups]
        self.max_lr = own if warmup_max_lr is None else _per_group("warmup_max_lr", warmup_max_lr, optimizer)
        self.warmup_num_steps = warmup_num_steps
        self.warmup_type = _warmup_type(warmup_type)
        self._write()

    def _fraction(self) -> float:
        return warmup_fraction(self.last_batch_iteration, num_steps=self.warmup_num_steps, kind=self.warmup_type)

    def get_lr(self) -> list[float]:
        """The learning rate of each group at the current step number."""
        fraction = self._fraction()
        return [low + (high - low) * fraction for low, high in zip(self.min_lr, self.max_lr, strict=True)]


class WarmupDecayLR(WarmupLR):
    """`WarmupLR`, then a straight line down to the minimum at step `total_num_steps` (T).

    For n >= W: g = max(0, (T - n) / max(1, T - W)).

    >>> sgd = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    >>> decay = WarmupDecayLR(sgd, 10, warmup_max_lr=0.1, warmup_num_steps=4, warmup_type="linear")
    >>> decay.step(7); round(sgd.param_groups[0]["lr"], 6)
    0.05
    """

    def __init__(
        self,
        optimizer: HasParamGroups,
        total_num_steps: int,
        warmup_min_lr: LrPerGroup = 0.0,
        warmup_max_lr: LrPerGroup | None = 1e-3,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self.total_num_steps = total_num_steps
        super().__init__(optimizer, warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type, last_batch_iteration)
        _warn_short("WarmupDecayLR", total_num_steps, warmup_num_steps)

    def _fraction(self) -> float:
        return warmup_decay_fraction(
            self.last_batch_iteration,
            total_steps=self.total_num_steps,
            num_steps=self.warmup_num_steps,
            kind=self.warmup_type,
        )


class WarmupCosineLR(Scheduler):
    """Each group's own learning rate times a ratio that warms up to 1 and follows half a cosine down.

    For n < 0 the ratio is 0; for n < W it is w_min + (1 - w_min) * g with g as in `WarmupLR`; then, with
    p = min(1, (n - W + 1) / max(1, T - W)), max(0, c_min + (1 - c_min) * (1 + cos(pi * p)) / 2).

    >>> sgd = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    >>> cosine = WarmupCosineLR(sgd, total_num_steps=10, warmup_num_steps=4)
    >>> cosine.step(4); round(sgd.param_groups[0]["lr"], 6)
    0.093302
    """

    def __init__(
        self,
        optimizer: HasParamGroups,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 1e-4,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        _require_positive(warmup_num_steps=warmup_num_steps)
        self.total_num_steps = total_num_steps
        self.warmup_min_ratio = warmup_min_ratio
        self.warmup_num_steps = warmup_num_steps
        self.cos_min_ratio = cos_min_ratio
        self.warmup_type = _warmup_type(warmup_type)
        self.own_lr = [float(group["lr"]) for group in optimizer.param_groups]
        _warn_short("WarmupCosineLR", total_num_steps, warmup_num_steps)
        self._write()

    def get_lr(self) -> list[float]:
        """The learning rate of each group at the current step number."""
        ratio = warmup_cosine_ratio(
            self.last_batch_iteration,
            total_steps=self.total_num_steps,
            num_steps=self.warmup_num_steps,
            warmup_min_ratio=self.warmup_min_ratio,
            cos_min_ratio=self.cos_min_ratio,
            kind=self.warmup_type,
        )
        return [lr * ratio for lr in self.own_lr]


_SCHEDULERS: dict[str, type[Scheduler]] = {
    kind.__name__: kind for kind in (LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR)
}
VALID_LR_SCHEDULES: list[str] = list(_SCHEDULERS)


def make_scheduler(type: str, params: Mapping[str, Any], optimizer: HasParamGroups) -> Any:
    """The scheduler a configuration names: in `VALID_LR_SCHEDULES` or a class of `torch.optim.lr_scheduler`.

    params: keyword arguments of that class, without the optimizer. Returns an object with `step`,
    `get_last_lr`, `state_dict` and `load_state_dict`. Raises ConfigError naming every unknown name, missing
    or refused parameter.
    """
    kind = _SCHEDULERS.get(type) or _torch_schedulers().get(type)
    if kind is None:
        close = nearest(type, [*VALID_LR_SCHEDULES, *_torch_schedulers()])
        rule = f"choose {', '.join(VALID_LR_SCHEDULES)} or a class of torch.optim.lr_scheduler"
        raise ConfigError([ConfigFault("scheduler.type", type, rule, close)])
    signature = inspect.signature(kind)
    faults = unknown_arguments("scheduler.params", params, signature, given=("optimizer",))
    if faults:
        raise ConfigError(faults)
    try:
        return kind(optimizer, **params)
    except ConfigError:
        raise
    except (TypeError, ValueError) as error:
        raise ConfigError([ConfigFault("scheduler.params", dict(params), str(error))]) from error


def _torch_schedulers() -> dict[str, Any]:
    base = torch.optim.lr_scheduler.LRScheduler
    classes = {name: kind for name, kind in vars(torch.optim.lr_scheduler).items() if inspect.isclass(kind)}
    return {name: kind for name, kind in classes.items() if issubclass(kind, base) and kind is not base}


def _per_group(name: str, value: LrPerGroup, optimizer: HasParamGroups) -> list[float]:
    num_groups = len(optimizer.param_groups)
    if isinstance(value, (int, float)):
        return [float(value)] * num_groups
    if len(value) != num_groups:
        rule = f"a list needs one value for each of the {num_groups} parameter groups"
        raise ConfigError([ConfigFault(f"scheduler.params.{name}", list(value), rule)])
    return [float(each) for each in value]


def _require_positive(**steps: int) -> None:
    faults = [
        ConfigFault(f"scheduler.params.{name}", value, "must be a whole number of steps, at least 1")
        for name, value in steps.items()
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value < 1 or value != int(value)
    ]
    if faults:
        raise ConfigError(faults)


def _warmup_type(name: str) -> WarmupType:
    if name == "linear":
        return "linear"
    if name != "log":
        warn_once(f"warmup_type {name!r} is neither 'log' nor 'linear'; using 'log'")
    return "log"


def _warn_short(kind: str, total_num_steps: int, warmup_num_steps: int) -> None:
    if total_num_steps < warmup_num_steps:
        warn_once(f"{kind}: total_num_steps {total_num_steps} is less than warmup_num_steps {warmup_num_steps}")
