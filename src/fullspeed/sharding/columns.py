"""Which columns of a matrix matter most now, and when they are chosen, and the others updated, again.

A rank holds a contiguous piece of a flattened parameter; a column is what has the same position in the rows of its
matrix (dimensions behind the first count as one). Importance is a column's sum of squared gradients in the piece
(arXiv:2505.12242, section on importance: it is concentrated in few columns, which stay the same for many steps).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch

MAX_DEFERRED = 16
"""Updates after which gradients are applied however small they are, where the interval is not given."""


def row_numel(shape: tuple[int, ...]) -> int:
    """Elements in a row of a parameter of this shape; 0 where it has no columns."""
    return math.prod(shape[1:]) if len(shape) > 1 else 0


def important(grad: torch.Tensor, start: int, row: int, ratio: float) -> torch.Tensor:
    """Which elements of a piece are in its most important columns: (n,) bool.

    Args:
        grad: (n,), of elements start to start + n of the flattened parameter.
        start: where the piece begins.
        row: elements in a row.
        ratio: share of the columns to choose, rounded down, one at least.

    >>> important(torch.tensor([1.0, 9.0, 2.0, 1.0, 9.0]), start=0, row=3, ratio=0.4).tolist()
    [False, True, False, False, True]
    """
    columns = torch.arange(start, start + grad.numel(), device=grad.device).remainder_(row)
    sums = torch.zeros(row, dtype=torch.float32, device=grad.device).index_add_(0, columns, grad.float().square())
    chosen = torch.zeros(row, dtype=torch.bool, device=grad.device)
    chosen[sums.topk(max(1, int(ratio * row))).indices] = True
    return chosen[columns]


class Weight(NamedTuple):
    """Sums over a set of gradient elements: of their squares, and of their number."""

    squares: float
    numel: float

    @property
    def mean(self) -> float:
        """Mean square; 0 of nothing."""
        return self.squares / self.numel if self.numel else 0.0


@dataclass
class Rhythm:
    """Counts updates and says what is due in the coming one.

    Attributes:
        select_every: updates from one choice of columns to the next.
        update_every: updates from one update of the other columns to the next; None where `auto_ratio` decides.
        auto_ratio: see `is_due`.
        warm_up: first updates, of every column, before anything is chosen.
        num_updates: updates so far.
        num_deferred: updates since the other columns' gradients were last applied.
    """

    select_every: int
    update_every: int | None
    auto_ratio: float
    warm_up: int
    num_updates: int = 0
    num_deferred: int = 0

    @property
    def chooses(self) -> bool:
        """Whether columns are chosen in the coming update."""
        past = self.num_updates - self.warm_up
        return past >= 0 and past % self.select_every == 0

    def is_due(self, deferred: Weight, chosen: Weight) -> bool:
        """Whether what is deferred, the coming update's gradients included, is applied.

        Without a given interval: when the mean square of the sums that wait has grown to `auto_ratio` times that of the
        chosen columns' gradients, so that to wait longer would leave out what matters as much; after `MAX_DEFERRED` at
        the latest.
        """
        num_waiting = self.num_deferred + 1
        if self.update_every is not None:
            return num_waiting >= self.update_every
        return num_waiting >= MAX_DEFERRED or deferred.mean >= self.auto_ratio * chosen.mean

    def advance(self, *, is_applied: bool) -> None:
        """An update is over; `is_applied` if nothing is deferred any more."""
        self.num_deferred = 0 if is_applied or self.num_updates < self.warm_up else self.num_deferred + 1
        self.num_updates += 1

    def state_dict(self) -> dict[str, Any]:
        """The two counts."""
        return {name: value for name, value in asdict(self).items() if name.startswith("num_")}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` gave; from the start where it gave nothing."""
        self.num_updates, self.num_deferred = state.get("num_updates", 0), state.get("num_deferred", 0)
