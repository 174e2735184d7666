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


class Point(NamedTuple):
    """How a run is spread out."""

    num_ranks: int
    stage: int
    precision: str

    @property
    def name(self) -> str:
        return f"{self.num_ranks}x{self.stage}-{self.precision}"


POINTS = [Point(*each) for each in itertools.product((1, 2, 3, 4), (0, 1, 2, 3), ("fp32", "bf16"))]


def leave(point: Point, place: pathlib.Path) -> None:
    """Save at one point, with what must come out of it."""
    folder = place / point.name
    kept = run_ranks(save, point.num_ranks, str(folder), point.stage, point.precision, OPTIMIZER)[0]
    (place / f"{point.name}.expected").write_bytes(pickle.dumps(kept))


def arrive(rank: int, num_ranks: int, place: str, to: Point, origins: list[Point]) -> int:
    """Go on at `to` from each origin in turn; returns how many."""
    engine: Any = make(to.stage, num_ranks, to.precision, OPTIMIZER)
    for origin in origins:
        engine.load_checkpoint(pathlib.Path(place, origin.name))
        saved, losses = pickle.loads(pathlib.Path(place, f"{origin.name}.expected").read_bytes())
        found = states(engine)
        assert found.keys() == saved.keys()
        differing = [name for name, value in saved.items() if not torch.equal(found[name], value)]
        assert not differing, f"from {origin.name} to {to.name}: {differing}"
        is_exact = origin.precision == to.precision == "fp32"
        assert train(engine, rank, num_ranks, 3, 6) == pytest.approx(losses, rel=1e-6 if is_exact else 2e-2)
    return len(origins)


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    with tempfile.TemporaryDirectory() as place:
        for point in POINTS:
            leave(point, pathlib.Path(place))
        count = 0
        for to in POINTS:
            count += run_ranks(arrive, to.num_ranks, place, to, POINTS, timeout_s=600)[0]
            print(f"{to.name}: reached from {len(POINTS)} points", flush=True)
    print(f"{count} ways: masters and moments equal, losses as if never interrupted")


if __name__ == "__main__":
    main()
