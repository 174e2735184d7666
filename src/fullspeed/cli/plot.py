"""`fullspeed plot`: the curves of a run as a picture."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fullspeed.base.errors import UsageError
from fullspeed.monitor.history import Curves, read_run
from fullspeed.monitor.services import INSTALL

# What each panel shows: names end in one of these. CSV files have underscores for slashes.
PANELS: Mapping[str, tuple[str, ...]] = {
    "loss": ("train_loss", "loss"),
    "gradient norm": ("grad_norm", "clipped_grad_norm"),
    "learning rate": ("Samples/lr", "Samples_lr"),
    "samples per second": ("samples_per_s",),
    "memory in GiB": ("memory_allocated_bytes",),
}
GIB = 2**30


def describe(words: Sequence[str]) -> list[str]:
    """Draw the run that `words` name; returns where the picture is.

    Raises:
        UsageError: there is no run, nothing to draw in it, or no matplotlib.
    """
    parser = argparse.ArgumentParser(prog="fullspeed plot", description="Draw the curves of a run.")
    parser.add_argument("run", metavar="RUN", type=Path, help="folder that json_monitor or csv_monitor wrote")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="picture to write (RUN/curves.png)")
    given = parser.parse_args(list(words))
    panels = choose_panels(read_run(given.run))
    if not panels:
        raise UsageError(f"the run at {given.run} has none of: {', '.join(PANELS)}")
    folder = given.run if given.run.is_dir() else given.run.parent
    output = given.output or folder / "curves.png"
    draw(panels, output)
    return [str(output)]


def choose_panels(curves: Curves) -> dict[str, Curves]:
    """For each panel the curves it shows; panels without any are left out."""
    panels = {
        title: {name: points for name, points in curves.items() if name.endswith(endings)}
        for title, endings in PANELS.items()
    }
    return {title: shown for title, shown in panels.items() if shown}


def draw(panels: Mapping[str, Curves], output: Path) -> None:
    """Write the panels below one another, over samples, as an image of the output's kind. Raises UsageError."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError(f"plotting needs the package matplotlib, which is not installed; {INSTALL}")
    figure_module: Any = importlib.import_module("matplotlib.figure")  # without pyplot: no display is needed
    figure = figure_module.Figure(figsize=(8, 2.5 * len(panels)), layout="constrained")
    for axes, (title, curves) in zip(figure.subplots(len(panels), squeeze=False)[:, 0], panels.items(), strict=True):
        scale = GIB if title.endswith("GiB") else 1
        for name, points in curves.items():
            axes.plot([samples for samples, _ in points], [value / scale for _, value in points], label=name)
        axes.set_ylabel(title)
        axes.legend(fontsize="small")
        axes.grid(alpha=0.3)
    axes.set_xlabel("samples")
    output.parent.mkdir(parents=True, exist_ok=True)
    try:
        figure.savefig(output)
    except ValueError as error:
        raise UsageError(f"cannot write {output}: {error}") from None
