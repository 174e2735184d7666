"""A process's folder on a disk that others use too."""

from __future__ import annotations

import gc
import os
import pathlib
import signal
import subprocess
import sys

import pytest
import torch

from fullspeed.base.errors import StorageError
from fullspeed.offload.disk import Disk
from fullspeed.offload.engine import Settings

KEEP_A_FOLDER = """
import pathlib, sys
from fullspeed.offload.disk import Disk
from fullspeed.offload.engine import Settings
disk = Disk(pathlib.Path(sys.argv[1]), Settings())
print(disk.folder, flush=True)
sys.stdin.read()
"""


def test_tensors_wait_there_and_nothing_is_left_after_close(tmp_path: pathlib.Path):
    disk = Disk(tmp_path / "shared", Settings())
    values = torch.randn(1000)
    disk.store("masters").submit_write("layer.weight", values).wait()
    into = torch.empty(1000)
    disk.store("masters").submit_read("layer.weight", into).wait()
    assert torch.equal(into, values)
    assert disk.nbytes() == 4096
    disk.close()
    disk.close()
    assert list((tmp_path / "shared").iterdir()) == []


def test_nothing_is_left_when_its_owner_is_gone(tmp_path: pathlib.Path):
    disk = Disk(tmp_path, Settings())
    disk.store("masters").submit_write("weight", torch.ones(10)).wait()
    del disk
    gc.collect()
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_process_left_is_removed_and_what_another_uses_is_not(tmp_path: pathlib.Path):
    command = [sys.executable, "-c", KEEP_A_FOLDER, str(tmp_path)]
    others = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    folders = [pathlib.Path(other.stdout.readline().strip()) for other in others]
    os.kill(others[0].pid, signal.SIGKILL)
    others[0].wait()
    somebodys = tmp_path / "fullspeed-results"
    somebodys.mkdir()
    assert folders[0].exists()
    disk = Disk(tmp_path, Settings())
    assert not folders[0].exists()
    assert set(tmp_path.iterdir()) == {folders[1], somebodys, disk.folder}
    others[1].communicate("")
    assert set(tmp_path.iterdir()) == {somebodys, disk.folder}
    disk.close()


def test_a_folder_that_cannot_be_made_is_named(tmp_path: pathlib.Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=f"cannot make a folder in {tmp_path}/file"):
        Disk(tmp_path / "file", Settings())
