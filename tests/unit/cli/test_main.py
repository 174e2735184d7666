"""The `fullspeed` command: subcommands, help, faults on one line, and no torch before it is needed."""

from __future__ import annotations

import subprocess
import sys

import pytest

from fullspeed.cli import main as cli


def test_help_and_version(capsys):
    assert cli.main(["--help"]) == 0
    assert "fullspeed [run]" in capsys.readouterr().out
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("fullspeed ")
    assert cli.main([]) == cli.USAGE_EXIT_CODE


def test_run_help_lists_flags(capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["run", "--help"])
    assert stop.value.code == 0
    shown = capsys.readouterr().out
    assert "--num_gpus" in shown
    assert "--hostfile" in shown


@pytest.mark.parametrize("words", [["--hostfile", "h", "t.py"], ["run", "--num_gpus", "0", "t.py"], ["run"]])
def test_faults_go_to_stderr_with_code_2(words, capsys):
    assert cli.main(words) == cli.USAGE_EXIT_CODE
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("fullspeed: error: ")


def test_missing_script_is_named(capsys):
    assert cli.main(["no_such_script.py"]) == cli.USAGE_EXIT_CODE
    assert "no_such_script.py" in capsys.readouterr().err


def test_report_names_versions_device_and_backends(capsys):
    import torch

    assert cli.main(["report"]) == 0
    rows = dict(line.split(None, 1) for line in capsys.readouterr().out.splitlines())
    assert rows["torch"] == torch.__version__
    assert "gloo" in rows["backends"]
    assert set(rows) >= {"python", "accelerator", "memory", "cores"}
    with pytest.raises(SystemExit) as stop:
        cli.main(["report", "x"])
    assert stop.value.code == cli.USAGE_EXIT_CODE


def test_parsing_needs_no_torch():
    code = (
        "import sys; from fullspeed.cli.main import main; from fullspeed.launcher.options import parse\n"
        "main(['--help']); main(['--version']); parse(['--num_gpus', '2', 't.py'])\n"
        "assert 'torch' not in sys.modules, 'torch was imported'"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
