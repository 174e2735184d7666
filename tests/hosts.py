"""Hosts for launcher tests: network namespaces of this machine, each with an ssh server, on one switch.

They share this machine's files and processes, but nothing of its network: an address of one is reached from another
only through their link, which a test can cut.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import pytest

SSH_PORT = 2222
WAIT_S = 20.0
LIMIT_S = 280.0  # on a busy machine ranks take a minute to start
ENDING_S = 40.0  # in which ranks end by themselves that no launcher watches any more
SRC = pathlib.Path(__file__).parents[1] / "src"


class Hosts:
    """A launching host, `hub`, and some hosts that it reaches with ssh."""

    def __init__(self, folder: pathlib.Path, count: int) -> None:
        self.folder = folder
        self.hub = f"fs{os.getpid()}hub"
        self.spaces = [f"fs{os.getpid()}n{number}" for number in range(count)]
        self.addresses = [f"10.77.0.{number + 1}" for number in range(count)]
        self.servers: list[subprocess.Popen[bytes]] = []

    @property
    def ssh_args(self) -> str:
        """Words that let ssh into the hosts."""
        known = "-o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o LogLevel=ERROR"
        return f"-p {SSH_PORT} -i {self.folder / 'user_key'} {known}"

    def inside(self, space: str, *words: str) -> list[str]:
        """The words that run a command in a namespace."""
        return ["ip", "netns", "exec", space, *words]

    def programs(self, number: int) -> list[str]:
        """Names of the processes that run in a host, but for its ssh server."""
        found = []
        for pid in self._processes(self.spaces[number]):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                found.append(pathlib.Path(f"/proc/{pid}/comm").read_text().strip())
        return [name for name in found if not name.startswith("sshd")]

    def _processes(self, space: str) -> list[int]:
        listed = subprocess.run(["ip", "netns", "pids", space], capture_output=True, text=True, check=False)
        return [int(pid) for pid in listed.stdout.split()]

    @contextlib.contextmanager
    def cut_off(self, number: int) -> Iterator[None]:
        """A host with its cable taken out."""
        link = self.inside(self.spaces[number], "ip", "link", "set", "eth0")
        _run(*link, "down")
        try:
            yield
        finally:
            _run(*link, "up")

    def start(self) -> None:
        """Make the namespaces, connect them and start the servers. Raises CalledProcessError where one may not."""
        _run("ip", "netns", "add", self.hub)
        _run(*self.inside(self.hub, "ip", "link", "add", "switch", "type", "bridge"))
        _run(*self.inside(self.hub, "ip", "link", "set", "switch", "up"))
        _run(*self.inside(self.hub, "ip", "address", "add", "10.77.0.254/24", "dev", "switch"))
        for number, (space, address) in enumerate(zip(self.spaces, self.addresses, strict=True)):
            port = f"port{number}"
            _run("ip", "netns", "add", space)
            _run(*self.inside(self.hub, "ip", "link", "add", port, "type", "veth", "peer", "eth0", "netns", space))
            _run(*self.inside(self.hub, "ip", "link", "set", port, "master", "switch", "up"))
            _run(*self.inside(space, "ip", "link", "set", "lo", "up"))
            _run(*self.inside(space, "ip", "address", "add", f"{address}/24", "dev", "eth0"))
            _run(*self.inside(space, "ip", "link", "set", "eth0", "up"))
        self._serve()

    def end(self) -> None:
        """End the servers and what a host that was cut off still runs, and remove the namespaces."""
        for server in self.servers:
            server.terminate()
            server.wait(WAIT_S)
        for space in (*self.spaces, self.hub):
            for pid in self._processes(space):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            subprocess.run(["ip", "netns", "del", space], capture_output=True, check=False)

    def _serve(self) -> None:
        os.makedirs("/run/sshd", exist_ok=True)
        for name in ("host_key", "user_key"):
            _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.folder / name))
        options = {
            "Port": SSH_PORT, "HostKey": self.folder / "host_key", "PidFile": "none", "UsePAM": "no",
            "AuthorizedKeysFile": self.folder / "user_key.pub", "StrictModes": "no", "PermitRootLogin": "yes",
        }  # fmt: skip
        (self.folder / "sshd_config").write_text("".join(f"{name} {value}\n" for name, value in options.items()))
        sshd = ["/usr/sbin/sshd", "-D", "-f", str(self.folder / "sshd_config")]
        self.servers = [subprocess.Popen(self.inside(space, *sshd)) for space in self.spaces]
        for address in self.addresses:
            deadline = time.monotonic() + WAIT_S
            probe = self.inside(self.hub, "ssh", "-o", "BatchMode=yes", *self.ssh_args.split(), address, "true")
            while subprocess.run(probe, capture_output=True, check=False).returncode and time.monotonic() < deadline:
                time.sleep(0.05)
            _run(*probe)


class Ended(NamedTuple):
    """A finished launcher."""

    code: int
    output: str
    seconds: float


class Job:
    """`fullspeed` started on the hub."""

    def __init__(self, hosts: Hosts, folder: pathlib.Path, *words: str, count: int = 2, launcher: str = "ssh") -> None:
        (folder / "hosts").write_text("".join(f"{address} slots=1\n" for address in hosts.addresses[:count]))
        command = [sys.executable, "-m", "fullspeed.cli.main", "-H", "hosts", "--launcher", launcher]
        command += ["--launcher_args", hosts.ssh_args] if launcher == "ssh" else []
        command += words
        environment = {**os.environ, "PYTHONPATH": str(SRC), "NCCL_DEBUG": "it's on"}
        environment["PDSH_SSH_ARGS_APPEND"] = hosts.ssh_args
        output = (folder / "output").open("wb")
        self.output = folder / "output"
        self.process = subprocess.Popen(
            hosts.inside(hosts.hub, *command), cwd=folder, env=environment, stdout=output, stderr=output
        )

    def wait_for_ranks(self) -> list[int]:
        """Process ids that both ranks have written."""
        paths = [self.output.with_name(f"pid{rank}") for rank in (0, 1)]
        for path in paths:
            self.wait_for(path)
            wait_until(lambda path=path: path.read_text().endswith("\n"), "it wrote all of it")
        return [int(path.read_text()) for path in paths]

    def wait_for(self, path: pathlib.Path) -> None:
        """Wait until a rank has written the file."""

        def is_there() -> bool:
            assert self.process.poll() is None, self.output.read_text()
            return path.exists()

        wait_until(is_there, f"a rank wrote {path.name}")

    def wait(self) -> Ended:
        """Wait for its end; a job that does not end is killed, and the test fails."""
        started = time.monotonic()
        try:
            code = self.process.wait(LIMIT_S)
        finally:
            self.process.kill()
        return Ended(code, self.output.read_text(), time.monotonic() - started)


def is_running(pid: int) -> bool:
    return pathlib.Path(f"/proc/{pid}").exists()


def wait_until_ended(pids: list[int]) -> None:
    """Ranks that no launcher watches any more end by themselves."""
    wait_until(lambda: not any(map(is_running, pids)), "the ranks ended with their job", ENDING_S)


def wait_until(has_come: Callable[[], bool], what: str, limit_s: float = LIMIT_S) -> None:
    """Wait for something; fail with its name when it does not come."""
    deadline = time.monotonic() + limit_s
    while not has_come():
        assert time.monotonic() < deadline, f"waited {limit_s:g} s until {what}"
        time.sleep(0.05)


@contextlib.contextmanager
def real_hosts(folder: pathlib.Path, count: int) -> Iterator[Hosts]:
    """Hosts that last for a `with` block. Skips the test, with the reason, on machines where there can be none."""
    missing = [name for name in ("ip", "ssh", "ssh-keygen", "/usr/sbin/sshd") if shutil.which(name) is None]
    if missing:
        pytest.skip(f"real hosts need {', '.join(missing)} (packages openssh-server, iproute2)")
    if os.geteuid() != 0:
        pytest.skip("only root may make network namespaces")
    hosts = Hosts(folder, count)
    try:
        try:
            hosts.start()
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces here: {error.stderr.decode().strip()}")
        yield hosts
    finally:
        hosts.end()


def _run(*words: str) -> Sequence[str]:
    return subprocess.run(words, capture_output=True, check=True).args
