"""From every number of ranks, stage and precision to every other: k + k steps are 2k steps.

    python -m tests.checkpoint_grid

32 points save after 3 steps and go on for 3 more. Every point then loads what every point saved: masters and moments
must be equal to the last bit, and the next 3 losses those of the run that went on (1e-6 between fp32 points, 2e-2 where
16-bit gradients are rounded per rank).
"""

from __future__ import annotations

import argparse
import itertools
import pathlib
import pickle
import tempfile
from typing import Any, NamedTuple

import pytest
import torch

from tests.distributed.test_resize import make, save, states, train
from tests.ranks import run_ranks

OPTIMIZER = "AdamW"
TIMEOUT_S = 1800  # of all ways to the points of one number of ranks


class Point(NamedTuple):
    """How a run is spread out."""

    num_ranks: int
    stage: int
    precision: str

    @property
    def name(self) -> str:
        return f"{self.num_ranks}x{self.stage}-{self.precision}"


POINTS = [Point(*each) for each in itertools.product((1, 2, 3, 4), (0, 1, 2, 3), ("fp32", "bf16"))]


def leave(rank: int, num_ranks: int, place: str, points: list[Point]) -> None:
    """Save at each point, with what must come out of it."""
    for point in points:
        folder = pathlib.Path(place, point.name)
        kept = save(rank, num_ranks, str(folder), point.stage, point.precision, OPTIMIZER)
        if rank == 0:
            folder.with_suffix(".expected").write_bytes(pickle.dumps(kept))


def arrive(rank: int, num_ranks: int, place: str, points: list[Point], origins: list[Point]) -> int:
    """Go on at each point from each origin in turn; returns how many ways that were."""
    for to in points:
        engine: Any = make(to.stage, num_ranks, to.precision, OPTIMIZER)
        for origin in origins:
            folder = pathlib.Path(place, origin.name)
            engine.load_checkpoint(folder)
            saved, losses = pickle.loads(folder.with_suffix(".expected").read_bytes())
            found = states(engine)
            assert found.keys() == saved.keys()
            differing = [name for name, value in saved.items() if not torch.equal(found[name], value)]
            assert not differing, f"from {origin.name} to {to.name}: {differing}"
            is_exact = origin.precision == to.precision == "fp32"
            assert train(engine, rank, num_ranks, 3, 6) == pytest.approx(losses, rel=1e-6 if is_exact else 2e-2)
        engine.destroy()
        if rank == 0:
            print(f"{to.name}: reached from {len(origins)} points", flush=True)
    return len(points) * len(origins)


def by_ranks(points: list[Point]) -> dict[int, list[Point]]:
    """Points by their number of ranks, which are started once for all of them."""
    found: dict[int, list[Point]] = {}
    for point in points:
        found.setdefault(point.num_ranks, []).append(point)
    return found


def go(place: str, origins: list[Point], destinations: list[Point]) -> int:
    """From every origin to every destination; returns how many ways that were."""
    for num_ranks, points in by_ranks(origins).items():
        run_ranks(leave, num_ranks, place, points, timeout_s=TIMEOUT_S)
    return sum(
        run_ranks(arrive, num_ranks, place, points, origins, timeout_s=TIMEOUT_S)[0]
        for num_ranks, points in by_ranks(destinations).items()
    )


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    with tempfile.TemporaryDirectory() as place:
        count = go(place, POINTS, POINTS)
    print(f"{count} ways: masters and moments equal, losses as if never interrupted")


if __name__ == "__main__":
    main()
