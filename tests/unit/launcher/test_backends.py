"""Which command starts the nodes, for each back end."""

from __future__ import annotations

import json
import pathlib
import shlex
import subprocess

import pytest

from fullspeed.base.errors import UsageError
from fullspeed.launcher.backends import Task, plan_commands
from fullspeed.launcher.options import LAUNCHERS
from fullspeed.launcher.order import NodeOrder

TRICKY = (
    "--k=a b",
    "it's",
    '5"',
    '{"a": [1, "$HOME"]}',
    "$$",
    "--a",
    "b",
    "--c",
    "",
    "*",
    "50%h",
    "%%",
    "`id`",
    "a\nb",
)
ORDER = NodeOrder(
    hosts=("work1", "work2"), slots=((0, 1), (0, 1)), master_addr="work1", master_port=29500, run_id="id",
    kind="script", target="train.py", words=TRICKY, passes_local_rank=True, each_rank_log=None, save_pid=False,
    log_level="info", cores=None, elastic=None, node_timeout_s=30.0,
)  # fmt: skip
PROGRAM = ["python", "-m", "fullspeed.cli.main", "node"]


def task(folder="/my job", **changes) -> Task:
    plain = Task(ORDER, str(folder), "python", {"A": "it's 100%", "NCCL_DEBUG": "INFO"}, None, None, False, (), {})
    return plain._replace(**changes)


def split(words: list[str]) -> tuple[list[str], NodeOrder, str]:
    """What stands before the order, the order, and which node it is for."""
    return words[:-2], NodeOrder.from_word(words[-2]), words[-1]


START = ["sh", "-c", 'cd "$0" && exec "$@"', "/my job", "env", "A=it's 100%", "NCCL_DEBUG=INFO", *PROGRAM]
SRUN = ["srun", "--nodes", "2", "--ntasks", "2", "--ntasks-per-node", "1"]
HYDRA = ["mpirun", "-n", "2", "-ppn", "1", "-hosts", "work1,work2"]


@pytest.mark.parametrize(
    ("launcher", "own", "which"),
    [
        (
            "openmpi",
            ["mpirun", "-n", "2", "--host", "work1:1,work2:1", "--map-by", "ppr:1:node", "--bind-to", "none"],
            "env:OMPI_COMM_WORLD_RANK",
        ),
        ("mpich", [*HYDRA, "-bind-to", "none"], "env:PMI_RANK"),
        ("impi", [*HYDRA, "-genv", "I_MPI_PIN", "0"], "env:PMI_RANK"),
        ("mvapich", [*HYDRA, "-genv", "MV2_ENABLE_AFFINITY", "0"], "env:MV2_COMM_WORLD_RANK,PMI_RANK"),
        (
            "slurm",
            [*SRUN, "--cpu-bind", "none", "--nodelist", "work1,work2"],
            "env:SLURMD_NODENAME",
        ),
    ],
)
def test_one_command_starts_one_process_per_node(launcher, own, which):
    (command,) = plan_commands(launcher, task(extra=("-v", "x y")))
    before, order, node = split(list(command.argv))
    assert before == [*own, "-v", "x y", *START]
    assert (order, node) == (ORDER, which)


def test_ssh_starts_each_node_by_its_index():
    commands = plan_commands("ssh", task(ssh_port=22022, extra=("-F", "my config")))
    assert [command.name for command in commands] == ["work1", "work2"]
    for node, command in enumerate(commands):
        *own, host, remote = command.argv
        assert own[0] == "ssh"
        assert own[-6:] == ["-o", "BatchMode=yes", "-p", "22022", "-F", "my config"]
        assert host == command.name
        before, order, which = split(shlex.split(remote))
        assert (before, which) == (START, str(node))
        assert order == ORDER._replace(ends_with_stdin=True)
    assert "BatchMode=yes" not in plan_commands("ssh", task(ssh_asks=True))[0].argv


def test_pdsh_keeps_the_users_ssh_arguments():
    environment = {"PDSH_SSH_ARGS_APPEND": "-F 'my config'"}
    (command,) = plan_commands("pdsh", task(ssh_port=7, environment=environment, extra=("-u", "60")))
    assert command.argv[:-1] == ("pdsh", "-S", "-R", "ssh", "-f", "2", "-u", "60", "-w", "work1,work2")
    assert command.env == {"PDSH_SSH_ARGS_APPEND": "-F 'my config' -o BatchMode=yes -p 7"}
    before, order, which = split(shlex.split(command.argv[-1].replace("%%", "%")))
    assert (before, order, which) == (START, ORDER._replace(ends_with_stdin=True), "%h")


@pytest.mark.parametrize("launcher", ["mpich", "impi", "mvapich", "slurm"])
def test_ssh_port_is_refused_where_it_cannot_be_passed_on(launcher):
    with pytest.raises(UsageError, match="--ssh_port is for ssh, pdsh and openmpi"):
        plan_commands(launcher, task(ssh_port=7))


def test_openmpi_passes_the_ssh_port_on():
    (command,) = plan_commands("openmpi", task(ssh_port=7))
    assert command.argv[9:12] == ("--mca", "plm_rsh_args", "-p 7")


def test_every_launcher_has_a_back_end():
    for launcher in LAUNCHERS:
        assert plan_commands(launcher, task())


@pytest.mark.parametrize(
    ("launcher", "shell", "has_venv"), [("ssh", "bash", False), ("ssh", "sh", True), ("pdsh", "bash", True)]
)
def test_words_and_variables_pass_a_real_shell_unchanged(tmp_path, launcher, shell, has_venv):
    folder = tmp_path / "it's my $job"
    folder.mkdir()
    (folder / "activate").write_text("SOURCED='a b'; export SOURCED\n")
    told = 'import json, os, sys; print(json.dumps([sys.argv[1:], os.getcwd(), os.environ["A"], os.getenv("SOURCED")]))'
    (tmp_path / "python").write_text(f"#!/bin/sh\nexec python3 -c '{told}' \"$@\"\n")
    (tmp_path / "python").chmod(0o755)
    changes = {"python": str(tmp_path / "python"), "venv_script": "./activate" if has_venv else None}
    argv = plan_commands(launcher, task(folder, **changes))[0].argv
    line = argv[-1].replace("%%", "%") if launcher == "pdsh" else argv[-1]
    done = subprocess.run([shell, "-c", line], capture_output=True, text=True, check=True)
    heard, at, variable, sourced = json.loads(done.stdout)
    assert NodeOrder.from_word(heard[3]).words == TRICKY
    assert (pathlib.Path(at), variable, sourced) == (folder, "it's 100%", "a b" if has_venv else None)
