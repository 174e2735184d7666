"""From the user's options to a job: which hosts, which slots, and whether it runs here or through a back end."""

from __future__ import annotations

import os
import pathlib
import re
import socket
import subprocess
import sys
from collections.abc import Mapping
from uuid import uuid4

from fullspeed.base import env
from fullspeed.base.errors import UsageError
from fullspeed.base.log import logger, set_log_level
from fullspeed.launcher.backends import SSH_FAILED, Task, plan_commands
from fullspeed.launcher.envfile import exports, read_files
from fullspeed.launcher.fleet import run_commands
from fullspeed.launcher.options import DEFAULT_HOSTFILE, LaunchOptions
from fullspeed.launcher.order import ElasticOrder, NodeOrder
from fullspeed.launcher.rank import MODULE, PROGRAM, SCRIPT
from fullspeed.launcher.slots import Wish, choose_slots, read_hostfile

DEFAULT_PORT = 29500
LOOPBACK = "127.0.0.1"
LOCAL = "localhost"
Places = dict[str, tuple[int, ...] | int]  # slots to use of each host, or only how many ranks


def launch(options: LaunchOptions) -> tuple[int, str]:
    """Run the job and wait for it.

    Returns:
        The exit code, and what went wrong first, in words; empty when nothing did or it is on the screen already.

    Raises:
        UsageError: it cannot be started as asked.
    """
    set_log_level(options.log_level)
    folders = [pathlib.Path.home(), pathlib.Path.cwd()]
    env.export(read_files(env.snapshot(), folders))
    places = _find_places(options)
    is_here = len(places) == 1 and _is_this_host(next(iter(places))) and not options.force_multi
    order = _make_order(options, places, is_here)
    if is_here or options.node_rank is not None:
        # Only where ranks run is torch needed; the host that starts the others does without.
        from fullspeed.launcher.node import run_node

        outcome = run_node(order, options.node_rank or 0)
        return outcome.exit_code, outcome.cause
    task = Task(
        order=order,
        folder=os.getcwd(),
        python="python" if options.venv_script else sys.executable,
        exports=exports(env.snapshot(), folders),
        venv_script=options.venv_script,
        ssh_port=options.ssh_port,
        ssh_asks=options.ssh_asks,
        extra=options.launcher_args,
        environment=env.snapshot(),
    )
    commands = plan_commands(options.launcher, task)
    logger.info(f"starting {len(places)} nodes with {options.launcher}: {', '.join(places)}")
    num_needed = min(order.elastic.min_nodes, len(commands)) if order.elastic else len(commands)
    end = run_commands(commands, task.environment, num_needed)
    # The nodes have said what went wrong; what they cannot say is that one was not reached.
    if end.exit_code == SSH_FAILED and options.launcher == "ssh":
        return end.exit_code, f"host {end.failed[0]} was not reached, or left (ssh ended with code {SSH_FAILED})"
    return end.exit_code, ""


def find_free_port(address: str) -> int:
    """A port of `address` that nobody listens on now. Raises UsageError when `address` is not this host's."""
    with socket.socket() as probe:
        try:
            probe.bind((address, 0))
        except OSError as error:
            raise UsageError(f"--master_addr is {address!r}, not an address of this host: {error}") from None
        return int(probe.getsockname()[1])


def _find_places(options: LaunchOptions) -> Places:
    """The hosts and slots of the job."""
    hosts = _read_hosts(options)
    if hosts is not None:
        return dict(choose_slots(hosts, options.wish))
    num_hosts = _num_unnamed_hosts(options)
    if num_hosts > 1 or options.node_rank is not None:
        return _unnamed_places(options, num_hosts)
    return _local_places(options.wish)


def _read_hosts(options: LaunchOptions) -> dict[str, int] | None:
    """Slots of each host, from the hostfile or SLURM's allocation; None when there is neither."""
    path = pathlib.Path(options.hostfile or DEFAULT_HOSTFILE)
    if path.is_file():
        return read_hostfile(path.read_text(), str(path))
    if options.hostfile is not None:
        raise UsageError(
            f"no hostfile {options.hostfile!r}; write one with lines 'host slots=N', or leave the flag out"
        )
    nodes = env.first("SLURM_JOB_NODELIST", "SLURM_NODELIST")
    if options.launcher != "slurm" or nodes is None or options.node_rank is not None:
        return None
    slots = options.wish.num_slots or env.get_int("SLURM_GPUS_ON_NODE")
    if slots is None:
        raise UsageError("SLURM does not say how many devices each host has; give --num_gpus or a hostfile")
    listed = subprocess.run(["scontrol", "show", "hostnames", nodes], capture_output=True, text=True, check=True)
    return dict.fromkeys(listed.stdout.split(), slots)


def _num_unnamed_hosts(options: LaunchOptions) -> int:
    """How many hosts there are when no file names them."""
    most = options.elastic_nodes[1] if options.elastic_nodes else 0
    return options.wish.num_hosts or most or 1


def _unnamed_places(options: LaunchOptions, num_hosts: int) -> Places:
    """Hosts that are known only by their index, each as this one."""
    if options.node_rank is None:
        raise UsageError(
            f"--num_nodes is {num_hosts}, but no hostfile names the hosts; give --hostfile, or run this command on "
            "every host with --node_rank and --master_addr"
        )
    if options.node_rank >= num_hosts:
        raise UsageError(f"--node_rank is {options.node_rank}; --num_nodes {num_hosts} makes it 0..{num_hosts - 1}")
    if options.master_addr is None:
        raise UsageError("--node_rank needs --master_addr, the address of node 0, when no hostfile names the hosts")
    (here,) = _local_places(options.wish._replace(num_hosts=None)).values()
    return {f"node {node}": here for node in range(num_hosts)}


def _local_places(wish: Wish) -> Places:
    """This host alone: its devices, or as many ranks as asked for where ranks share a CPU."""
    from fullspeed.accelerator import get_accelerator
    from fullspeed.launcher.node import allowed_cores

    accelerator = get_accelerator()
    wish = wish._replace(include=_rename_local(wish.include), exclude=_rename_local(wish.exclude))
    if accelerator.device_name() != "cpu":
        return dict(choose_slots({LOCAL: accelerator.device_count()}, wish))
    if not (wish.include or wish.exclude):
        return {LOCAL: wish.num_slots or 1}
    return dict(choose_slots({LOCAL: len(allowed_cores())}, wish))


def _rename_local(text: str) -> str:
    """A filter with every name of this host made `localhost`."""
    names = "|".join(re.escape(name) for name in (LOOPBACK, socket.gethostname()))
    return re.sub(rf"(^|@)({names})(?=[:@]|$)", rf"\1{LOCAL}", text)


def _is_this_host(name: str) -> bool:
    """Whether `name` is an address of this host, which it is when one can listen there."""
    host = name.rpartition("@")[2]
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.bind(address)
    except OSError:
        return host == LOCAL
    return True


def _make_order(options: LaunchOptions, places: Mapping[str, tuple[int, ...] | int], is_here: bool) -> NodeOrder:
    address = options.master_addr or (LOOPBACK if is_here else next(iter(places)).rpartition("@")[2])
    if len(places) > 1 and options.master_addr is None and address in (LOCAL, LOOPBACK):
        raise UsageError(f"the first host is {address}, where no other host can reach it; give --master_addr")
    port = options.master_port or (find_free_port(address) if is_here else DEFAULT_PORT)
    elastic = None
    if options.elastic_nodes is not None:
        low, high = options.elastic_nodes
        elastic = ElasticOrder(low, max(high, low) if high else max(len(places), low), options.elastic_wait_s)
    return NodeOrder(
        hosts=tuple(places),
        slots=tuple(places.values()),
        master_addr=address,
        master_port=port,
        # Nodes started by hand, at once or to join later, know no more than the port.
        run_id=uuid4().hex if options.node_rank is None and elastic is None else f"port {port}",
        kind=PROGRAM if options.no_python else MODULE if options.module else SCRIPT,
        target=options.target,
        words=options.target_args,
        passes_local_rank=not options.no_local_rank,
        each_rank_log=options.each_rank_log,
        save_pid=options.save_pid,
        log_level=options.log_level,
        cores=options.bind_cores,
        elastic=elastic,
        node_timeout_s=options.node_timeout_s,
    )
