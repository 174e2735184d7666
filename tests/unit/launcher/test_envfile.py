"""Which variables go to every node."""

from __future__ import annotations

import pytest

from fullspeed.base.errors import UsageError
from fullspeed.launcher.envfile import exports, read_files


def test_families_of_names_are_passed_on():
    environment = {"NCCL_DEBUG": "INFO", "PYTHONPATH": "a b", "DEEPSPEED_TIMEOUT": "3", "HOME": "/root", "MYTOKEN": "x"}
    assert exports(environment, []) == {"NCCL_DEBUG": "INFO", "PYTHONPATH": "a b", "DEEPSPEED_TIMEOUT": "3"}


def test_files_of_both_names_and_folders_and_the_last_value_wins(tmp_path):
    home, here = tmp_path / "home", tmp_path / "here"
    for folder in (home, here):
        folder.mkdir()
    (home / ".deepspeed_env").write_text('# for all jobs\nA=1\nB=it\'s "quoted" = $HOME \n\n')
    (here / ".fullspeed_env").write_text("A=2\nNCCL_DEBUG=WARN\nEMPTY=\n")
    expected = {"A": "2", "B": 'it\'s "quoted" = $HOME ', "NCCL_DEBUG": "WARN", "EMPTY": ""}
    assert exports({"NCCL_DEBUG": "INFO"}, [home, here]) == expected


def test_another_file_name(tmp_path):
    (tmp_path / ".deepspeed_env").write_text("A=1")
    (tmp_path / "job.env").write_text("B=2")
    assert read_files({"DS_ENV_FILE": "job.env"}, [tmp_path]) == {"B": "2"}
    assert read_files({"DS_ENV_FILE": str(tmp_path / "job.env")}, [tmp_path]) == {"B": "2"}


@pytest.mark.parametrize("line", ["export A=1", "A", "=1", "A B=1"])
def test_bad_lines_are_quoted(tmp_path, line):
    (tmp_path / ".deepspeed_env").write_text(f"OK=1\n{line}\n")
    with pytest.raises(UsageError, match="write KEY=VALUE") as caught:
        read_files({}, [tmp_path])
    assert f"line 2 of environment file {tmp_path / '.deepspeed_env'} is {line!r}" in str(caught.value)
