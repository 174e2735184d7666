"""Some of the ways of `python -m tests.checkpoint_grid`: other precisions, three ranks."""

import pathlib

from tests.checkpoint_grid import Point, go


def test_a_part_of_the_grid(tmp_path: pathlib.Path) -> None:
    origins = [Point(3, 3, "bf16"), Point(2, 1, "fp32")]
    destinations = [Point(4, 2, "fp32"), Point(3, 0, "bf16"), Point(1, 3, "fp32")]
    assert go(str(tmp_path), origins, destinations) == 6
