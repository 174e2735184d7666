"""What each ZeRO stage shards. The only place, with the config, that knows stage numbers.

| stage | params | grads | optimizer states | when gradients are reduced         | after the step |
|-------|--------|-------|------------------|------------------------------------|----------------|
| 0     | whole  | whole | whole            | all-reduce at the boundary         | -              |
| 1     | whole  | whole | shard            | reduce-scatter at the boundary     | all-gather     |
| 2     | whole  | shard | shard            | reduce-scatter each micro-batch    | all-gather     |
| 3     | shard  | shard | shard            | reduce-scatter each micro-batch    | - (next use)   |

(ZeRO: arXiv:1910.02054, section 5.)
"""

from __future__ import annotations

from typing import NamedTuple


class Placement(NamedTuple):
    """Which of a group's tensors are sharded over the data-parallel ranks; the rest are whole on every rank."""

    params: bool
    grads: bool
    optim: bool

    @property
    def persistent(self) -> Placement:
        """The same placement for a group whose parameters stay whole because they are small."""
        return self._replace(params=False)

    @property
    def always_sharded(self) -> Placement:
        """The same placement for a frozen group whose parameters are sharded at every stage."""
        return Placement(params=True, grads=True, optim=True)


_PLACEMENTS = {
    0: Placement(params=False, grads=False, optim=False),
    1: Placement(params=False, grads=False, optim=True),
    2: Placement(params=False, grads=True, optim=True),
    3: Placement(params=True, grads=True, optim=True),
}


def placement_of(stage: int) -> Placement:
    """The placement of a ZeRO stage."""
    return _PLACEMENTS[stage]
