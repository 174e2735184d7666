"""The distribution named `deepspeed` in the folder `compat`: it installs, is found, and brings the commands."""

from __future__ import annotations

import pathlib
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[3]


def test_the_distribution_installs_and_its_commands_run(tmp_path):
    shutil.copytree(ROOT / "compat", tmp_path / "compat")
    target, environment = tmp_path / "site", {"PYTHONPATH": f"{tmp_path / 'site'}:{ROOT / 'src'}", "PATH": "/usr/bin"}
    pip = [sys.executable, "-m", "pip", "install", "-qq", "--no-index", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--target", str(target), str(tmp_path / "compat")], check=True, timeout=120)
    code = "import deepspeed, importlib.metadata as m; print(deepspeed.__version__ == m.version('deepspeed'))"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"
    commands = {path.name for path in (target / "bin").iterdir()}
    assert {"deepspeed", "ds", "deepspeed.pt", "ds_report", "dsr", "ds_elastic", "ds_bench"} <= commands
    script = tmp_path / "script.py"
    script.write_text("import deepspeed, sys; print('given', sys.argv[1:], deepspeed.__version__)")
    ran = subprocess.run(
        [str(target / "bin" / "deepspeed"), "--no_local_rank", str(script), "--lr", "1"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert "given ['--lr', '1'] 0.19.8+fullspeed" in ran.stdout, ran.stderr
