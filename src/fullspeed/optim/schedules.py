"""The five learning-rate schedules as functions of the step number. Pure Python: no torch, no state.

Everywhere `n` is the number of scheduler steps taken minus one: -1 before the first step, 0 after it. The
formulas are those of the DeepSpeed schedules of the same names, so a run that changes library keeps its
learning rates.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

WarmupType = Literal["log", "linear"]


def lr_range_factor(n: int, *, step_size: int, step_rate: float, staircase: bool = False) -> float:
    """Factor of the minimum learning rate in a range test (arXiv:1506.01186, section 3.3).

    factor = 1 + step_rate * u, with u = (n + 1) / step_size, rounded down when `staircase`.

    >>> [round(lr_range_factor(n, step_size=5, step_rate=2.0), 6) for n in (-1, 0, 4)]
    [1.0, 1.4, 3.0]
    """
    interval = (n + 1) // step_size if staircase else (n + 1) / step_size
    return 1.0 + step_rate * interval


@dataclass(frozen=True)
class Cycle:
    """One triangular cycle, up then down, followed by a decay (1cycle policy, arXiv:1803.09820).

    Let N = first_size + second_size and b = n + 1. While n < N the position c goes 0 -> 1 over the first
    `first_size` steps and back to 0 over the next `second_size`; `stairs` > 0 makes that half climb in as
    many equal jumps. From n = N on, with d = n - N + 1, the decay interval is d / decay_step_size, or 0 when
    `decay_step_size` is 0.

    >>> cycle = Cycle(first_size=5, second_size=5, decay_step_size=2)
    >>> [round(cycle.position(n), 3) for n in (0, 4, 7, 9)]
    [0.2, 1.0, 0.4, 0.0]
    >>> cycle.decay_interval(9), cycle.decay_interval(10)
    (0.0, 0.5)
    """

    first_size: int  # steps going up
    second_size: int  # steps coming down
    first_stairs: int = 0  # 0 is a straight line
    second_stairs: int = 0
    decay_step_size: int = 0  # steps per unit of decay; 0 turns decay off

    def position(self, n: int) -> float:
        """Height in the cycle, from 0 (minimum learning rate) to 1 (maximum); 0 once the cycle is over."""
        total = self.first_size + self.second_size
        if n >= total:
            return 0.0
        t = (n + 1) % total
        if t <= self.first_size:
            return _climb(t, self.first_size, self.first_stairs)
        return _climb(total - t, self.second_size, self.second_stairs)

    def decay_interval(self, n: int) -> float:
        """Units of decay gone by at `n`; 0 during the cycle."""
        done = n - (self.first_size + self.second_size) + 1
        return done / self.decay_step_size if done > 0 and self.decay_step_size else 0.0


def _climb(t: int, size: int, stairs: int) -> float:
    return (t * stairs // size) / stairs if stairs else t / size


def one_cycle_lr(n: int, cycle: Cycle, *, min_lr: float, max_lr: float, decay_rate: float = 0.0) -> float:
    """Learning rate: min + (max - min) * position, then min / (1 + decay_rate * interval) after the cycle.

    >>> cycle = Cycle(5, 5, decay_step_size=2)
    >>> [round(one_cycle_lr(n, cycle, min_lr=0.01, max_lr=0.11, decay_rate=0.1), 8) for n in (0, 4, 10)]
    [0.03, 0.11, 0.00952381]
    """
    return (min_lr + (max_lr - min_lr) * cycle.position(n)) / (1.0 + decay_rate * cycle.decay_interval(n))


def one_cycle_momentum(n: int, cycle: Cycle, *, min_mom: float, max_mom: float, decay_rate: float = 0.0) -> float:
    """Momentum: max - (max - min) * position, after the cycle max * (1 + decay_rate * interval).

    The decay is not bounded: a long run with a positive rate goes above 1, as the formula says.

    >>> cycle = Cycle(5, 5, decay_step_size=2)
    >>> falling = [one_cycle_momentum(n, cycle, min_mom=0.8, max_mom=0.9, decay_rate=0.05) for n in (0, 10)]
    >>> [round(beta1, 6) for beta1 in falling]
    [0.88, 0.9225]
    """
    return (max_mom - (max_mom - min_mom) * cycle.position(n)) * (1.0 + decay_rate * cycle.decay_interval(n))


def warmup_fraction(n: int, *, num_steps: int, kind: WarmupType = "log") -> float:
    """How far a warmup of W = max(2, num_steps) steps has come, 0 to 1.

    0 for n < 0; for n < W it is ln(n + 1) / ln(W) (`log`) or n / W (`linear`); then 1.

    >>> [round(warmup_fraction(n, num_steps=5), 4) for n in (-1, 0, 1, 4)]
    [0.0, 0.0, 0.4307, 1.0]
    >>> [warmup_fraction(n, num_steps=5, kind="linear") for n in (0, 1, 5)]
    [0.0, 0.2, 1.0]
    """
    width = max(2, num_steps)
    if n < 0:
        return 0.0
    if n >= width:
        return 1.0
    return n / width if kind == "linear" else math.log(n + 1) / math.log(width)


def warmup_decay_fraction(n: int, *, total_steps: int, num_steps: int, kind: WarmupType = "log") -> float:
    """Warmup, then a straight line down to 0 at n = T: max(0, (T - n) / max(1, T - W)) for n >= W.

    >>> down = [warmup_decay_fraction(n, total_steps=10, num_steps=4, kind="linear") for n in (3, 4, 7, 11)]
    >>> down
    [0.75, 1.0, 0.5, 0.0]
    """
    width = max(2, num_steps)
    if n < width:
        return warmup_fraction(n, num_steps=num_steps, kind=kind)
    return max(0.0, (total_steps - n) / max(1, total_steps - width))


def warmup_cosine_ratio(
    n: int,
    *,
    total_steps: int,
    num_steps: int,
    warmup_min_ratio: float = 0.0,
    cos_min_ratio: float = 1e-4,
    kind: WarmupType = "log",
) -> float:
    """Warmup from `warmup_min_ratio` to 1, then half a cosine to `cos_min_ratio` (arXiv:1608.03983, eq. 5).

    0 for n < 0; w_min + (1 - w_min) * warmup_fraction for n < W; then, with p = min(1, (n - W + 1) / max(1, T
    - W)), max(0, c_min + (1 - c_min) * (1 + cos(pi * p)) / 2).

    >>> [round(warmup_cosine_ratio(n, total_steps=10, num_steps=4), 4) for n in (-1, 0, 1, 3, 4, 9)]
    [0.0, 0.0, 0.5, 1.0, 0.933, 0.0001]
    """
    width = max(2, num_steps)
    if n < 0:
        return 0.0
    if n < width:
        return warmup_min_ratio + (1.0 - warmup_min_ratio) * warmup_fraction(n, num_steps=num_steps, kind=kind)
    progress = min(1.0, (n - width + 1) / max(1, total_steps - width))
    return max(0.0, cos_min_ratio + (1.0 - cos_min_ratio) * (1.0 + math.cos(math.pi * progress)) / 2.0)
