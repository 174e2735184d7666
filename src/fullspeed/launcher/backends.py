"""Which command starts a job's nodes, for each kind of cluster: plain data, nothing runs here. No torch.

Every back end starts one process per node, and all start the same words; only how the node learns its index differs.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from typing import NamedTuple

from fullspeed.base.errors import UsageError
from fullspeed.launcher.order import ENV, NodeOrder

SSH_FAILED = 255  # ssh's own code, also when what it started was killed
_MISSED_BEATS = 3
_ENTER = 'cd "$0" && exec "$@"'
_ENTER_VENV = 'cd "$0" && . "$1" && shift && exec "$@"'


class Command(NamedTuple):
    """One process that the launching host starts."""

    name: str  # for people: the host it is for, or the program that starts all
    argv: tuple[str, ...]
    env: Mapping[str, str]  # on top of the launching process's
    ends_with_input: bool = False  # whether its nodes end in their own time once its input does
    code_when_lost: int | None = None  # it is started again after ending so, as long as others run


class Task(NamedTuple):
    """What is to run on every node, and how the nodes are reached."""

    order: NodeOrder
    folder: str  # where nodes start
    python: str
    exports: Mapping[str, str]
    venv_script: str | None
    ssh_port: int | None
    ssh_asks: bool
    extra: tuple[str, ...]  # the user's words for the back end
    environment: Mapping[str, str]  # of the launching process

    def start(self, which: str, ends_with_stdin: bool = False) -> list[str]:
        """Words that start one node, for any program that starts programs; `which` as for `find_node`."""
        enter = [_ENTER, self.folder] if self.venv_script is None else [_ENTER_VENV, self.folder, self.venv_script]
        variables = [f"{name}={value}" for name, value in self.exports.items()]
        order = self.order._replace(ends_with_stdin=ends_with_stdin).to_word()
        return ["sh", "-c", *enter, "env", *variables, self.python, "-m", "fullspeed.cli.main", "node", order, which]


def _ssh(task: Task) -> list[Command]:
    beat_s = max(1, round(task.order.node_timeout_s / _MISSED_BEATS))
    options = ["ConnectTimeout=30", f"ServerAliveInterval={beat_s}", f"ServerAliveCountMax={_MISSED_BEATS}"]
    options += [] if task.ssh_asks else ["BatchMode=yes"]
    words = ["ssh", "-x", "-a", *(word for option in options for word in ("-o", option))]
    words += ["-p", str(task.ssh_port)] if task.ssh_port else []
    commands = []
    for node, host in enumerate(task.order.hosts):
        argv = (*words, *task.extra, host, shlex.join(task.start(str(node), ends_with_stdin=True)))
        # The first host keeps an elastic job's meeting place; any other may come back.
        may_return = task.order.elastic is not None and node > 0
        commands.append(Command(host, argv, {}, True, SSH_FAILED if may_return else None))
    return commands


def _pdsh(task: Task) -> list[Command]:
    append = [task.environment.get("PDSH_SSH_ARGS_APPEND", ""), *([] if task.ssh_asks else ["-o BatchMode=yes"])]
    append += [f"-p {task.ssh_port}"] if task.ssh_port else []
    hosts, num_at_once = ",".join(task.order.hosts), str(len(task.order.hosts))
    # pdsh puts the host's name for %h, and a percent sign for two.
    remote = shlex.join(task.start("HOST", ends_with_stdin=True)[:-1]).replace("%", "%%") + " %h"
    argv = ("pdsh", "-S", "-R", "ssh", "-f", num_at_once, *task.extra, "-w", hosts, remote)
    return [Command("pdsh", argv, {"PDSH_SSH_ARGS_APPEND": " ".join(filter(None, append))}, True)]


def _openmpi(task: Task) -> list[Command]:
    hosts = task.order.hosts
    argv = ["mpirun", "-n", str(len(hosts)), "--host", ",".join(f"{host}:1" for host in hosts)]
    argv += ["--map-by", "ppr:1:node", "--bind-to", "none"]
    argv += ["--mca", "plm_rsh_args", f"-p {task.ssh_port}"] if task.ssh_port else []
    return [Command("mpirun", (*argv, *task.extra, *task.start(f"{ENV}OMPI_COMM_WORLD_RANK")), {})]


def _hydra(task: Task, rank_variables: str, *no_binding: str) -> list[Command]:
    """The mpirun that MPICH, Intel MPI and MVAPICH share."""
    if task.ssh_port:
        raise UsageError("--ssh_port is for ssh, pdsh and openmpi; for this launcher put the port in ~/.ssh/config")
    argv = ["mpirun", "-n", str(len(task.order.hosts)), "-ppn", "1", "-hosts", ",".join(task.order.hosts), *no_binding]
    return [Command("mpirun", (*argv, *task.extra, *task.start(f"{ENV}{rank_variables}")), {})]


def _mpich(task: Task) -> list[Command]:
    return _hydra(task, "PMI_RANK", "-bind-to", "none")


def _impi(task: Task) -> list[Command]:
    return _hydra(task, "PMI_RANK", "-genv", "I_MPI_PIN", "0")


def _mvapich(task: Task) -> list[Command]:
    return _hydra(task, "MV2_COMM_WORLD_RANK,PMI_RANK", "-genv", "MV2_ENABLE_AFFINITY", "0")


def _slurm(task: Task) -> list[Command]:
    if task.ssh_port:
        raise UsageError("--ssh_port is for ssh, pdsh and openmpi; srun does not use ssh")
    count, hosts = str(len(task.order.hosts)), ",".join(task.order.hosts)
    argv = ("srun", "--nodes", count, "--ntasks", count, "--ntasks-per-node", "1", "--cpu-bind", "none")
    # SLURM orders nodes by its own rules, so a node finds itself by its name.
    return [Command("srun", (*argv, "--nodelist", hosts, *task.extra, *task.start(f"{ENV}SLURMD_NODENAME")), {})]


_BACKENDS: Mapping[str, Callable[[Task], list[Command]]] = {
    "ssh": _ssh,
    "pdsh": _pdsh,
    "openmpi": _openmpi,
    "mpich": _mpich,
    "impi": _impi,
    "mvapich": _mvapich,
    "slurm": _slurm,
}


def plan_commands(launcher: str, task: Task) -> list[Command]:
    """The commands that start `task`'s nodes. Raises UsageError when this launcher cannot do what is asked."""
    return _BACKENDS[launcher](task)
