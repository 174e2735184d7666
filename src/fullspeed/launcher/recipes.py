"""Job descriptions for platforms that start one container per node themselves: Kubernetes and Azure ML. No torch."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple


class Job(NamedTuple):
    """What to run, and on how much of the platform."""

    name: str
    words: tuple[str, ...]  # launcher flags, script, and the script's words
    num_nodes: int
    num_gpus: int  # ranks on each node; on Kubernetes also the devices it asks for
    image: str  # container image with the script and FullSpeed
    compute: str = ""  # Azure ML: name of the cluster


def kubernetes(job: Job) -> str:
    """A PyTorchJob of the Kubeflow training operator, which gives each pod RANK, MASTER_ADDR and MASTER_PORT."""
    container = {
        "name": "pytorch",
        "image": job.image,
        "command": ["sh", "-c", _command(job, "RANK")],
        "resources": {"limits": {"nvidia.com/gpu": job.num_gpus}},
        "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],
    }
    # Loader workers and NCCL exchange through /dev/shm, of which a container has 64 MiB by default.
    pod = {"containers": [container], "volumes": [{"name": "shm", "emptyDir": {"medium": "Memory"}}]}
    roles = {"Master": 1, "Worker": job.num_nodes - 1}
    replicas = {
        role: {"replicas": count, "restartPolicy": "Never", "template": {"spec": pod}}
        for role, count in roles.items()
        if count
    }
    # One failing pod ends the others through the launcher; starting a pod anew alone would leave it without peers.
    spec = {"runPolicy": {"cleanPodPolicy": "Running", "backoffLimit": 0}, "pytorchReplicaSpecs": replicas}
    document = {"apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob", "metadata": {"name": job.name}, "spec": spec}
    return to_yaml(document)


def azureml(job: Job) -> str:
    """A command job of Azure ML, which gives each node NODE_RANK, MASTER_ADDR and MASTER_PORT."""
    document = {
        "type": "command",
        "display_name": job.name,
        "code": ".",
        "command": _command(job, "NODE_RANK"),
        "environment": {"image": job.image},
        "compute": f"azureml:{job.compute}",
        # One process per node: the launcher starts the ranks.
        "distribution": {"type": "pytorch", "process_count_per_instance": 1},
        "resources": {"instance_count": job.num_nodes},
    }
    return to_yaml(document)


def to_yaml(value: Any, indent: str = "") -> str:
    """A mapping of plain values as YAML; texts and lists of plain values as JSON, which is YAML too.

    >>> print(to_yaml({"a": {"b": [1, "x"]}, "c": [{"d": 2}]}), end="")
    a:
      b: [1, "x"]
    c:
      - d: 2
    """
    lines = []
    for key, item in value.items():
        if isinstance(item, Mapping):
            lines.append(f"{indent}{key}:\n{to_yaml(item, indent + '  ')}")
        elif isinstance(item, Sequence) and item and isinstance(item[0], Mapping):
            blocks = (to_yaml(one, indent + "    ") for one in item)
            lines.append(f"{indent}{key}:\n" + "".join(f"{indent}  - {block.lstrip(' ')}" for block in blocks))
        else:
            lines.append(f"{indent}{key}: {json.dumps(item)}\n")
    return "".join(lines)


def _command(job: Job, rank_variable: str) -> str:
    """The shell line of one node."""
    flags = f"--num_nodes {job.num_nodes} --num_gpus {job.num_gpus}"
    if job.num_nodes == 1:
        return f"exec fullspeed {flags} {shlex.join(job.words)}"
    place = f'--node_rank "${rank_variable}" --master_addr "$MASTER_ADDR" --master_port "$MASTER_PORT"'
    return f"exec fullspeed {flags} {place} {shlex.join(job.words)}"
