"""Kills a random rank at a random moment of a save, again and again, and looks at what is left.

Two ranks train and save without end; one is killed with SIGKILL. The next two ranks load every checkpoint there is and
compare weights and moments with the digest that was taken when they were saved, then go on from the latest:

    python -m tests.checkpoint_kills 200
"""

from __future__ import annotations

import argparse
import hashlib
import os
import pathlib
import random
import shutil
import subprocess
import tempfile
from typing import Any, NamedTuple

import torch
from torch import nn

from fullspeed import zero
from fullspeed.base.errors import CheckpointError
from fullspeed.checkpoint.folder import available_tags, latest_tag
from fullspeed.comm.rendezvous import together
from fullspeed.engine.initialize import initialize
from tests.parity.beside import zero_config
from tests.ranks import RankError, run_ranks

MAX_DELAY_S = 0.8  # some ten saves
ACKNOWLEDGED = "acknowledged"  # step of the last save known to be complete
DIED = "killed by SIGKILL"
PEER_DIED = ("died while rank", "a rank ended while", "Connection closed by peer", "Connection reset by peer")


class Trial(NamedTuple):
    """How one pair of ranks saves, and when it ends."""

    stage: int
    in_background: bool
    reuses_tag: bool
    culprit: int
    delay_s: float


def trial(number: int) -> Trial:
    """The trial of that number: every mode comes equally often."""
    draw = random.Random(number)
    return Trial(
        stage=(number // 4) % 4,
        in_background=bool(number % 2),
        reuses_tag=bool(number // 2 % 2),
        culprit=draw.randrange(2),
        delay_s=draw.uniform(0, MAX_DELAY_S),
    )


def make(stage: int) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 300), nn.Tanh(), nn.Linear(300, 300), nn.Tanh(), nn.Linear(300, 3))
    config = zero_config(stage) | {"checkpoint": {"keep_last": 3}}
    config["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-3}}
    return initialize(model=model, config=config)[0]


def digest(engine: Any) -> str:
    """Of all weights and moments, whole. Collective."""
    found = hashlib.sha256()
    for param in engine.module.parameters():
        found.update(zero.safe_get_full_fp32_param(param).numpy().data)
        for name in ("exp_avg", "exp_avg_sq"):
            found.update(zero.safe_get_full_optimizer_state(param, name).numpy().data)
    return found.hexdigest()


def train(engine: Any, rank: int) -> None:
    x = torch.randn(2, 4, 5, generator=torch.Generator().manual_seed(engine.global_steps))[rank]
    engine.backward(engine(x).square().mean())
    engine.step()


def look(engine: Any, folder: pathlib.Path) -> None:
    """Load every checkpoint, the latest one last; all are whole, and no acknowledged one is lost."""
    latest = together(lambda: latest_tag(folder), CheckpointError)[0]
    for tag in sorted(available_tags(folder), key=lambda tag: tag == latest):
        _, client = engine.load_checkpoint(folder, tag)
        assert client == {"step": engine.global_steps, "digest": digest(engine)}, tag
    acknowledged = folder / ACKNOWLEDGED
    if acknowledged.exists():
        assert engine.global_steps >= int(acknowledged.read_text())


def look_and_save(rank: int, world_size: int, place: str, number: int) -> None:
    """One rank's life: look at what was left, then save until killed."""
    now, folder = trial(number), pathlib.Path(place)
    engine = make(now.stage)
    look(engine, folder)
    train(engine, rank)  # the first step takes longer than all that follow
    if rank == now.culprit:
        subprocess.Popen(["sh", "-c", f"sleep {now.delay_s}; kill -9 {os.getpid()}"])
    while True:
        train(engine, rank)
        step = engine.global_steps
        client = {"step": step, "digest": digest(engine)}
        tag = f"same{step % 2}" if now.reuses_tag else f"step{step}"
        engine.save_checkpoint(place, tag, client_state=client, in_background=now.in_background)
        if rank == 0 and not now.in_background:
            acknowledge(folder, step)
        if now.in_background and not step % 3:
            train(engine, rank)
            engine.wait_for_checkpoint()
            if rank == 0:
                acknowledge(folder, step)


def acknowledge(folder: pathlib.Path, step: int) -> None:
    fresh = folder / f".{ACKNOWLEDGED}"
    fresh.write_text(str(step))
    os.replace(fresh, folder / ACKNOWLEDGED)


def look_only(rank: int, world_size: int, place: str) -> int:
    """Load everything; returns the step of the latest checkpoint."""
    engine = make(3)
    look(engine, pathlib.Path(place))
    return int(engine.global_steps)


def kill(place: str, number: int) -> bool:
    """Look, save and kill once; returns whether an unfinished checkpoint was left behind."""
    try:
        run_ranks(look_and_save, 2, place, number)
    except RankError as error:
        ended = any(words in error.detail for words in (DIED, *PEER_DIED))
        if not ended:
            raise
    return any(pathlib.Path(place).glob(".*.partial"))


def kill_often(place: str, numbers: range) -> tuple[int, int]:
    """Run these trials; returns how many kills met a save, and the step of the checkpoint that is left."""
    unfinished = 0
    for number in numbers:
        unfinished += kill(place, number)
        for partial in pathlib.Path(place).glob(".*.partial"):  # so that the next trial counts its own
            if partial.is_dir():
                shutil.rmtree(partial)
            else:  # of the file that names the latest
                partial.unlink()
    return unfinished, run_ranks(look_only, 2, place)[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("count", type=int, nargs="?", default=200)
    count = parser.parse_args().count
    unfinished = 0
    with tempfile.TemporaryDirectory() as place:
        for first in range(0, count, 20):
            numbers = range(first, min(first + 20, count))
            more, step = kill_often(place, numbers)
            unfinished += more
            print(
                f"{numbers.stop} kills, {unfinished} while saving: all was whole and right at step {step}", flush=True
            )


if __name__ == "__main__":
    main()
