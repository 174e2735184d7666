"""The loss scale of fp16 training: a number and the rule that moves it, decided alike on every rank."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple, Protocol

from fullspeed.base.errors import CheckpointError, ConfigError, ConfigFault, LossScaleError


class LossScaleChange(NamedTuple):
    """What one update did to the scale."""

    overflow: bool  # some gradient was inf or nan; the optimizer step is skipped
    old: float
    new: float
    hysteresis_before: int  # overflows the scale still tolerates, counting the one that halves it
    hysteresis_after: int

    @property
    def message(self) -> str:
        """The change in words, for the log; empty when a good step left the scale alone."""
        if not self.overflow:
            return f"loss scale {self.old:g} -> {self.new:g}" if self.new != self.old else ""
        if self.new != self.old:
            outcome = f"loss scale {self.old:g} -> {self.new:g}"
        elif self.hysteresis_after != self.hysteresis_before:
            outcome = f"loss scale stays {self.old:g}, hysteresis {self.hysteresis_before}->{self.hysteresis_after}"
        else:
            outcome = f"loss scale stays {self.old:g}"
        return f"gradient overflow, step skipped: {outcome}"


class LossScale(Protocol):
    """The factor the loss is multiplied with before backward, and how it reacts to overflow.

    Call sequence per optimizer step: (1) multiply the loss with `scale`, (2) agree over all ranks whether any
    gradient is not finite, (3) call `update` with the answer, once, also when the step is skipped.
    """

    @property
    def scale(self) -> float:
        """The current factor; a power of two unless the user chose otherwise."""
        ...

    @property
    def is_dynamic(self) -> bool:
        """Whether `update` can change the scale."""
        ...

    def update(self, overflow: bool) -> LossScaleChange:
        """Count one optimizer step. Raises LossScaleError when the scale cannot go lower."""
        ...

    def override(self, scale: float) -> None:
        """Use `scale` from the next loss on; a dynamic scale moves on from it."""
        ...

    def state_dict(self) -> dict[str, float | int]:
        """Everything a resumed run needs to go on as if it had not stopped."""
        ...

    def load_state_dict(self, state: Mapping[str, float | int]) -> None:
        """Restore what `state_dict` gave. Raises CheckpointError naming missing entries."""
        ...


class StaticLossScale:
    """A scale that never moves. Scale 1 is training without scaling (fp32, bf16)."""

    def __init__(self, scale: float = 1.0) -> None:
        self._scale = _positive(scale)

    @property
    def scale(self) -> float:
        """The factor."""
        return self._scale

    @property
    def is_dynamic(self) -> bool:
        """Always False."""
        return False

    def update(self, overflow: bool) -> LossScaleChange:
        """Report the step; nothing changes."""
        return LossScaleChange(overflow, self._scale, self._scale, 1, 1)

    def override(self, scale: float) -> None:
        """Replace the factor."""
        self._scale = _positive(scale)

    def state_dict(self) -> dict[str, float | int]:
        """The scale."""
        return {"scale": self._scale}

    def load_state_dict(self, state: Mapping[str, float | int]) -> None:
        """Check the entry and nothing else: the configuration, not the checkpoint, sets a static scale."""
        _require(state, ("scale",))


class DynamicLossScale:
    """A scale that halves when gradients overflow and doubles after `window` good steps.

    With i the number of updates seen and h the hysteresis counter:

    - overflow: h > 1 lowers h by one; h == 1 halves the scale, not below `min_scale`. h is not refilled by
      halving.
    - good step: with `consecutive_hysteresis` h is refilled. Let k = i - last_overflow - 1, last_overflow
      being -1 at first; when k > 0 and k is a multiple of `window`, h is refilled and the scale doubles.

    >>> scaler = DynamicLossScale(init_scale=256, window=4, hysteresis=2)
    >>> scaler.update(overflow=True).message
    'gradient overflow, step skipped: loss scale stays 256, hysteresis 2->1'
    >>> scaler.update(overflow=True).message
    'gradient overflow, step skipped: loss scale 256 -> 128'
    """

    def __init__(
        self,
        init_scale: float = 2.0**16,
        window: int = 1000,
        hysteresis: int = 2,
        consecutive_hysteresis: bool = False,
        min_scale: float = 1.0,
    ) -> None:
        _check_dynamic(init_scale, window, hysteresis, min_scale)
        self.window = window
        self.hysteresis = hysteresis
        self.consecutive_hysteresis = consecutive_hysteresis
        self.min_scale = float(min_scale)
        self._scale = float(init_scale)
        self._hysteresis_left = hysteresis
        self._iteration = 0
        self._last_overflow = -1

    @property
    def scale(self) -> float:
        """The current factor."""
        return self._scale

    @property
    def is_dynamic(self) -> bool:
        """Always True."""
        return True

    @property
    def hysteresis_left(self) -> int:
        """Overflows from now to the next halving, counting the one that halves."""
        return self._hysteresis_left

    def update(self, overflow: bool) -> LossScaleChange:
        """Count one optimizer step and move the scale.

        Raises LossScaleError, leaving the state as it was, on an overflow that calls for a scale below the
        minimum: then the gradients are not finite for another reason than the scale.
        """
        old, before = self._scale, self._hysteresis_left
        if overflow:
            self._back_off()
        else:
            self._advance()
        self._iteration += 1
        return LossScaleChange(overflow, old, self._scale, before, self._hysteresis_left)

    def _back_off(self) -> None:
        if self._hysteresis_left > 1:
            self._hysteresis_left -= 1
        elif self._scale <= self.min_scale:
            raise LossScaleError(
                f"gradients overflow and the loss scale is already at its minimum {self.min_scale:g} "
                f"(update {self._iteration}): lower the learning rate, clip gradients, or train in bf16"
            )
        else:
            self._scale = max(self._scale / 2, self.min_scale)
        self._last_overflow = self._iteration

    def _advance(self) -> None:
        num_good = self._iteration - self._last_overflow - 1
        grows = num_good > 0 and num_good % self.window == 0
        if self.consecutive_hysteresis or grows:
            self._hysteresis_left = self.hysteresis
        if grows:
            self._scale *= 2

    def override(self, scale: float) -> None:
        """Replace the current factor; counters stay."""
        self._scale = _positive(scale)

    def state_dict(self) -> dict[str, float | int]:
        """Scale and counters; the rule itself comes from the configuration."""
        return {
            "scale": self._scale,
            "hysteresis_left": self._hysteresis_left,
            "iteration": self._iteration,
            "last_overflow": self._last_overflow,
        }

    def load_state_dict(self, state: Mapping[str, float | int]) -> None:
        """Restore scale and counters. Raises CheckpointError when an entry is missing."""
        _require(state, tuple(self.state_dict()))
        self._scale = float(state["scale"])
        self._hysteresis_left = int(state["hysteresis_left"])
        self._iteration = int(state["iteration"])
        self._last_overflow = int(state["last_overflow"])


def make_loss_scale(
    loss_scale: float = 0.0,
    *,
    initial_scale_power: int = 16,
    window: int = 1000,
    hysteresis: int = 2,
    consecutive_hysteresis: bool = False,
    min_scale: float = 1.0,
) -> LossScale:
    """The loss scale a user asked for: 0 is dynamic from 2**initial_scale_power, another value is static.

    Raises ConfigError for a scale that is negative or not finite, and for impossible dynamic settings.
    """
    if loss_scale == 0:
        return DynamicLossScale(2.0**initial_scale_power, window, hysteresis, consecutive_hysteresis, min_scale)
    return StaticLossScale(loss_scale)


def _positive(scale: float) -> float:
    if not (math.isfinite(scale) and scale > 0):
        raise ConfigError([ConfigFault("loss_scale", scale, "a scale is finite and above 0")])
    return float(scale)


def _check_dynamic(init_scale: float, window: int, hysteresis: int, min_scale: float) -> None:
    faults = []
    if not (math.isfinite(min_scale) and min_scale > 0):
        faults.append(ConfigFault("min_loss_scale", min_scale, "must be finite and above 0"))
    if not (math.isfinite(init_scale) and init_scale >= min_scale):
        faults.append(
            ConfigFault("init_scale", init_scale, f"must be finite and at least min_loss_scale {min_scale:g}")
        )
    if window < 1:
        faults.append(ConfigFault("loss_scale_window", window, "must be at least 1 step"))
    if hysteresis < 1:
        faults.append(ConfigFault("hysteresis", hysteresis, "must be at least 1 overflow"))
    if faults:
        raise ConfigError(faults)


def _require(state: Mapping[str, float | int], names: tuple[str, ...]) -> None:
    missing = [name for name in names if name not in state]
    if missing:
        raise CheckpointError(f"loss scale state lacks {', '.join(missing)}; it has {', '.join(state) or 'nothing'}")
