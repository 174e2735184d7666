"""Jobs started by a real Open MPI on this host: through the launcher, and by `mpirun` itself."""

import os
import pathlib
import shutil
import subprocess
import sys

import pytest

SRC = pathlib.Path(__file__).parents[2] / "src"
LIMIT_S = 200

TRAIN = """
import torch, fullspeed
torch.manual_seed(0)
config = {"train_batch_size": 4, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "zero_optimization": {"stage": 3}}
engine, *_ = fullspeed.initialize(model=torch.nn.Linear(3, 1), config=config)
data = torch.arange(12.0).view(4, 3) / 12
for step in range(2):
    loss = engine(data.chunk(2)[engine.global_rank]).square().mean()
    engine.backward(loss)
    engine.step()
with open(f"rank{engine.global_rank}", "w") as file:
    file.write(f"{engine.world_size} {loss.item():.6f}")
"""

pytestmark = pytest.mark.skipif(shutil.which("mpirun") is None, reason="no mpirun here (Debian: openmpi-bin)")


def run(folder: pathlib.Path, *words: str) -> None:
    """Run a command that starts two ranks, and check that both trained together."""
    (folder / "train.py").write_text(TRAIN)
    (folder / "hosts").write_text("localhost slots=2\n")
    # Where the tests run as root, Open MPI wants to be told twice.
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    environment = {**os.environ, **root, "PYTHONPATH": str(SRC)}
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    sizes = [(folder / f"rank{rank}").read_text().split()[0] for rank in range(2)]
    assert sizes == ["2", "2"]
    losses = {(folder / f"rank{rank}").read_text().split()[1] for rank in range(2)}
    assert len(losses) == 2  # each had its own half of the data


def test_the_launcher_with_open_mpi(tmp_path: pathlib.Path) -> None:
    launcher = (sys.executable, "-m", "fullspeed.cli.main", "--force_multi", "--launcher", "openmpi", "-H", "hosts")
    run(tmp_path, *launcher, "train.py")


def test_ranks_find_themselves_under_a_plain_mpirun(tmp_path: pathlib.Path) -> None:
    from fullspeed.launcher.launch import find_free_port

    run(
        tmp_path,
        *("mpirun", "--oversubscribe", "-n", "2", "-x", "MASTER_ADDR=127.0.0.1"),
        *("-x", f"MASTER_PORT={find_free_port('127.0.0.1')}", sys.executable, "train.py"),
    )
