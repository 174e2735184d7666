"""Who this process is among its peers, read from what its launcher left in the environment. Imports no torch.

Sources, first match wins: torchrun's variables (`fullspeed run` sets them too), Open MPI, MVAPICH, MPICH and
Intel MPI, SLURM. On AzureML and SageMaker ranks come from MPI, and only rank 0's address from the platform.
"""

from __future__ import annotations

import json
import re
from typing import NamedTuple

from fullspeed.base import env
from fullspeed.base.errors import UsageError

LOOPBACK = "127.0.0.1"
DEFAULT_PORT = 29500


class Identity(NamedTuple):
    """One process's place in the job, and where rank 0 listens."""

    rank: int
    world_size: int
    local_rank: int
    local_size: int  # ranks on this host, as far as the launcher says
    master_addr: str
    master_port: int
    source: str  # for people: which launcher said so

    def variables(self) -> dict[str, str]:
        """The same identity as torchrun's environment variables."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_SIZE": str(self.local_size),
            "LOCAL_WORLD_SIZE": str(self.local_size),
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": str(self.master_port),
        }


class _Launcher(NamedTuple):
    """Where one family of launchers tells a process who it is; of several names the first set counts."""

    name: str
    rank: tuple[str, ...]
    world_size: tuple[str, ...]
    local_rank: tuple[str, ...]
    local_size: tuple[str, ...]


# MPI stands before SLURM: mpirun in a SLURM batch leaves every process the SLURM_PROCID of the batch script.
_LAUNCHERS = (
    _Launcher(
        "Open MPI",
        ("OMPI_COMM_WORLD_RANK",),
        ("OMPI_COMM_WORLD_SIZE",),
        ("OMPI_COMM_WORLD_LOCAL_RANK",),
        ("OMPI_COMM_WORLD_LOCAL_SIZE",),
    ),
    _Launcher(
        "MVAPICH",
        ("MV2_COMM_WORLD_RANK",),
        ("MV2_COMM_WORLD_SIZE",),
        ("MV2_COMM_WORLD_LOCAL_RANK",),
        ("MV2_COMM_WORLD_LOCAL_SIZE",),
    ),
    _Launcher(
        "MPICH or Intel MPI",
        ("PMI_RANK",),
        ("PMI_SIZE",),
        ("MPI_LOCALRANKID", "PMI_LOCAL_RANK", "SLURM_LOCALID"),
        ("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"),
    ),
    _Launcher(
        "SLURM",
        ("SLURM_PROCID",),
        ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
        ("SLURM_LOCALID",),
        (),
    ),
)


def discover(auto_mpi: bool = True, distributed_port: int = DEFAULT_PORT) -> Identity:
    """This process's identity; world 1 when no launcher left a trace.

    Args:
        auto_mpi: whether MPI's and SLURM's own variables may be used when torchrun's are not set.
        distributed_port: port of rank 0 when `MASTER_PORT` is not set.

    Raises:
        UsageError: when variables are set in part or contradict each other, naming those that are missing.
    """
    if env.get("RANK") is not None and env.get("WORLD_SIZE") is not None:
        return _from_torchrun(distributed_port)
    launcher = next((known for known in _LAUNCHERS if env.first(*known.rank)), None)
    if launcher is not None and (auto_mpi or (_number(launcher.world_size) or 1) == 1):
        return _from_launcher(launcher, distributed_port)
    _refuse_partial()
    if launcher is not None:
        raise UsageError(
            f"{launcher.name} started this process as one of {_number(launcher.world_size)}, but "
            "auto_mpi_discovery is off; switch it on, or set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and "
            "MASTER_PORT"
        )
    source = "single process (no launcher variables found)"
    port = env.get_int("MASTER_PORT", distributed_port) or distributed_port
    return Identity(0, 1, 0, 1, env.get("MASTER_ADDR") or LOOPBACK, port, source)


def first_host(nodelist: str) -> str:
    """First host of a SLURM node list: "gpu[03-05,9],login1" gives "gpu03"."""
    head = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodelist.strip())
    host = re.sub(r"\[([^\]]*)\]", lambda span: re.split("[-,]", span[1])[0], head[0] if head else "")
    if not host:
        raise UsageError(f"no host in SLURM's node list {nodelist!r}; set MASTER_ADDR to the host of rank 0")
    return host


def tasks_on_node(tasks_per_node: str, node_index: int) -> int:
    """Ranks on one node from SLURM's compressed list: node 2 of "4(x2),3" has 3."""
    counts: list[int] = []
    for part in tasks_per_node.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            raise UsageError(f"SLURM's tasks per node are {tasks_per_node!r}; expected a list such as '4(x2),3'")
        counts += [int(match[1])] * int(match[2] or 1)
    if not 0 <= node_index < len(counts):
        raise UsageError(f"SLURM_NODEID is {node_index}, but tasks per node {tasks_per_node!r} has {len(counts)}")
    return counts[node_index]


def _number(names: tuple[str, ...]) -> int | None:
    """Integer value of the first variable of `names` that is set."""
    return next((value for name in names if (value := env.get_int(name)) is not None), None)


def _from_torchrun(port: int) -> Identity:
    world_size = env.get_int("WORLD_SIZE", 1) or 0
    if world_size != 1:
        needed = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
        _require(needed, "the launcher's variables are set in part")
    identity = Identity(
        env.get_int("RANK", 0) or 0,
        world_size,
        env.get_int("LOCAL_RANK", 0) or 0,
        _number(("LOCAL_WORLD_SIZE", "LOCAL_SIZE")) or 1,
        env.get("MASTER_ADDR") or LOOPBACK,
        env.get_int("MASTER_PORT", port) or port,
        "torchrun variables",
    )
    return _checked(identity)


def _from_launcher(launcher: _Launcher, port: int) -> Identity:
    rank, world_size = _number(launcher.rank), _number(launcher.world_size)
    if rank is None or world_size is None:
        _require(launcher.rank + launcher.world_size[:1], f"{launcher.name} set its variables in part")
    local_rank = _number(launcher.local_rank)
    if local_rank is None:
        if world_size != 1:
            _require(launcher.local_rank[:1], f"{launcher.name} set its variables in part")
        local_rank = 0
    local_size = _number(launcher.local_size) or _slurm_local_size() or 1
    addr, listed_port = _find_master(world_size or 1, local_size, launcher.name)
    identity = Identity(
        rank or 0,
        world_size or 1,
        local_rank,
        max(local_size, local_rank + 1),
        addr,
        env.get_int("MASTER_PORT") or listed_port or port,
        launcher.name,
    )
    return _checked(identity)


def _slurm_local_size() -> int | None:
    tasks = env.first("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
    return None if tasks is None else tasks_on_node(tasks, env.get_int("SLURM_NODEID", 0) or 0)


def _find_master(world_size: int, local_size: int, launcher: str) -> tuple[str, int | None]:
    """Address of rank 0's host, and its port where the platform names one."""
    if (addr := env.get("MASTER_ADDR")) is not None:
        return addr, None
    if (node := env.get("AZ_BATCH_MASTER_NODE")) is not None:
        host, _, listed_port = node.partition(":")
        return host, int(listed_port) if listed_port.isdigit() else None
    if (single_node := env.get("AZ_BATCHAI_MPI_MASTER_NODE")) is not None:
        return (LOOPBACK if single_node == "localhost" else single_node), None
    if (hosts := env.get("SM_HOSTS")) is not None:
        return _first_sagemaker_host(hosts), None
    if local_size >= world_size:
        return LOOPBACK, None
    if (nodes := env.first("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")) is not None:
        return first_host(nodes), None
    raise UsageError(
        f"{launcher} started {world_size} ranks on several hosts, and none of its variables tells the "
        "address of rank 0; set MASTER_ADDR to that host on every rank"
    )


def _first_sagemaker_host(hosts: str) -> str:
    try:
        names = json.loads(hosts)
    except json.JSONDecodeError:
        names = None
    if not (isinstance(names, list) and names and all(isinstance(name, str) for name in names)):
        raise UsageError(f"SM_HOSTS is {hosts!r}; expected a JSON list of host names")
    # SageMaker numbers its hosts algo-1, algo-2, ...; rank 0 runs on the first in that order.
    return str(min(names, key=lambda name: (len(name), name)))


def _require(names: tuple[str, ...], why: str) -> None:
    missing = [name for name in names if env.get(name) is None]
    if missing:
        present = ", ".join(name for name in names if name not in missing) or "others"
        raise UsageError(f"{why}: {present} set, but {', '.join(missing)} missing; set all of them or none")


def _refuse_partial() -> None:
    """A rank without a world, or the other way round, is a broken launch and not a single process."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    if any(env.get(name) is not None for name in names):
        _require(names, "the launcher's variables are set in part")


def _checked(identity: Identity) -> Identity:
    """Return `identity`, or raise UsageError when its numbers cannot be."""
    if identity.world_size < 1:
        raise UsageError(f"world size is {identity.world_size} ({identity.source}); it must be at least 1")
    if not 0 <= identity.rank < identity.world_size:
        raise UsageError(
            f"rank is {identity.rank} ({identity.source}); it must be 0 to {identity.world_size - 1} "
            f"in a world of {identity.world_size}"
        )
    if identity.local_rank < 0:
        raise UsageError(f"local rank is {identity.local_rank} ({identity.source}); it must not be negative")
    return identity
