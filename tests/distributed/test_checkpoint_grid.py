"""Some of the ways of `python -m tests.checkpoint_grid`: other precisions, three ranks."""

import pathlib

from tests.checkpoint_grid import Point, arrive, leave
from tests.ranks import run_ranks


def test_a_part_of_the_grid(tmp_path: pathlib.Path) -> None:
    origins = [Point(3, 3, "bf16"), Point(2, 1, "fp32")]
    for origin in origins:
        leave(origin, tmp_path)
    for to in (Point(4, 2, "fp32"), Point(3, 0, "bf16"), Point(1, 3, "fp32")):
        run_ranks(arrive, to.num_ranks, str(tmp_path), to, origins)
