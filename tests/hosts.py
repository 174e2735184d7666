"""Hosts for launcher tests: network namespaces of this machine, each with an ssh server, on one switch.

They share this machine's files and processes, but nothing of its network: an address of one is reached from another
only through their link, which a test can cut.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence

import pytest

SSH_PORT = 2222
WAIT_S = 20.0


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
        """End the servers and remove the namespaces."""
        for server in self.servers:
            server.terminate()
            server.wait(WAIT_S)
        for space in (*self.spaces, self.hub):
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
