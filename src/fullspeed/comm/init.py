"""Bring up the process group: find out who we are, choose the backend, fail fast and clearly."""

from __future__ import annotations

import datetime
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from fullspeed.accelerator import get_accelerator
from fullspeed.base import env
from fullspeed.base.errors import CommError, UsageError
from fullspeed.base.log import log_dist
from fullspeed.comm.discovery import discover
from fullspeed.comm.hang import stop_watching, watch_for_hangs
from fullspeed.comm.traffic import configure

DEFAULT_TIMEOUT_MIN = 10


def default_timeout() -> datetime.timedelta:
    """How long a collective may wait for its peers: DEEPSPEED_TIMEOUT minutes, or 10."""
    minutes = env.get("DEEPSPEED_TIMEOUT", str(DEFAULT_TIMEOUT_MIN))
    try:
        return datetime.timedelta(minutes=float(minutes or DEFAULT_TIMEOUT_MIN))
    except ValueError:
        raise UsageError(f"environment variable DEEPSPEED_TIMEOUT is {minutes!r}; it is a number of minutes") from None


def is_initialized() -> bool:
    """Whether a default process group exists."""
    return dist.is_available() and dist.is_initialized()


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = 29500,
    verbose: bool = True,
    timeout: datetime.timedelta | None = None,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Initialise torch.distributed for this process. Does nothing when it already is.

    Identity comes from `rank`/`world_size` when given, else from torchrun's variables, MPI or SLURM; with none of
    them the process is a world of one and needs neither port nor store.

    Args:
        dist_backend: "nccl", "gloo", ...; by default the accelerator's.
        auto_mpi_discovery: look for MPI and SLURM variables when torchrun's are missing.
        distributed_port: port used when a discovered launcher names no port.
        verbose: log one line about what was found.
        timeout: limit for one collective; DEEPSPEED_TIMEOUT minutes, or 10 minutes, by default.
        init_method: a torch.distributed URL such as "file:///tmp/store"; then `rank` and `world_size` are required.
        dist_init_required: False means "must already be initialised".
        config: a configuration whose `comms_logger` section counts from now on.
        rank: this process's global rank, with `world_size`.
        world_size: number of processes, with `rank`.

    Raises:
        UsageError: identity variables are partly set, or `dist_init_required=False` without a process group.
        CommError: the peers could not be reached.
    """
    if config is not None:
        configure(config)
    if is_initialized():
        watch_for_hangs()
        return
    if dist_init_required is False:
        raise UsageError("dist_init_required is False but torch.distributed is not initialised; initialise it first")
    backend = dist_backend or get_accelerator().communication_backend_name()
    limit = timeout or default_timeout()
    if init_method is not None:
        if rank < 0 or world_size < 1:
            raise UsageError("init_method needs rank and world_size; give both")
        _init_group(backend, limit, init_method=init_method, rank=rank, world_size=world_size)
        env.export({"RANK": str(rank), "WORLD_SIZE": str(world_size)})
        env.export_default("LOCAL_RANK", str(rank))
        return
    who = discover(auto_mpi_discovery, distributed_port)
    if verbose:
        log_dist(f"backend {backend}, world size {who.world_size} from {who.source}")
    env.export({"RANK": str(who.rank), "WORLD_SIZE": str(who.world_size), "LOCAL_RANK": str(who.local_rank)})
    if who.world_size == 1:
        _init_group(backend, limit, store=HashStore(), rank=0, world_size=1)
        return
    env.export({"MASTER_ADDR": who.master_addr, "MASTER_PORT": str(who.master_port)})
    _init_group(backend, limit, init_method="env://", rank=who.rank, world_size=who.world_size)


def _init_group(backend: str, limit: datetime.timedelta, **where: Any) -> None:
    try:
        dist.init_process_group(backend, timeout=limit, **where)
    except (RuntimeError, ValueError) as error:
        raise CommError(
            f"rank {where.get('rank')} of {where.get('world_size')} could not join the {backend} process group "
            f"within {limit.total_seconds():.0f} s: {error}; check MASTER_ADDR, MASTER_PORT and that every rank started"
        ) from error
    watch_for_hangs()


def destroy_process_group() -> None:
    """Tear down torch.distributed; does nothing when it is not initialised."""
    stop_watching()
    if is_initialized():
        dist.destroy_process_group()
