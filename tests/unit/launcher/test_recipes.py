"""Job descriptions: what the platforms require of them, and that the words survive."""

from __future__ import annotations

import pathlib
import shlex

import pytest
import yaml

from fullspeed.cli.main import main

RECIPES = pathlib.Path(__file__).parents[3] / "recipes"
SCRIPT = ["train.py", "--k=a b", "it's", '{"a": "$HOME"}']


@pytest.fixture
def recipe(capsys):
    """Prints a recipe and reads it back."""

    def write(*words):
        assert main(["recipe", *words]) == 0
        return yaml.safe_load(capsys.readouterr().out)

    return write


def started(line: str) -> list[str]:
    """The words of a shell line that starts one node."""
    words = shlex.split(line)
    assert words[:2] == ["exec", "fullspeed"]
    return words[2:]


def test_kubernetes(recipe):
    job = recipe("kubernetes", "--name", "gpt", "--nodes", "3", "--gpus", "4", "--image", "i:1", *SCRIPT)
    assert (job["apiVersion"], job["kind"], job["metadata"]) == ("kubeflow.org/v1", "PyTorchJob", {"name": "gpt"})
    roles = job["spec"]["pytorchReplicaSpecs"]
    assert {role: spec["replicas"] for role, spec in roles.items()} == {"Master": 1, "Worker": 2}
    for spec in roles.values():
        (container,) = spec["template"]["spec"]["containers"]
        # The operator sets its variables in the container of this name only.
        assert (container["name"], container["image"]) == ("pytorch", "i:1")
        assert container["resources"]["limits"] == {"nvidia.com/gpu": 4}
        mounts = {mount["name"] for mount in container["volumeMounts"]}
        assert mounts == {volume["name"] for volume in spec["template"]["spec"]["volumes"]}
        assert container["command"][:2] == ["sh", "-c"]
        words = started(container["command"][2])
        assert words[-len(SCRIPT) :] == SCRIPT
        assert words[: -len(SCRIPT)] == [
            "--num_nodes", "3", "--num_gpus", "4", "--node_rank", "$RANK",
            "--master_addr", "$MASTER_ADDR", "--master_port", "$MASTER_PORT",
        ]  # fmt: skip


def test_one_pod_needs_no_workers_and_no_address(recipe):
    job = recipe("kubernetes", "--image", "i", "--gpus", "2", "--", "--module", "train")
    (spec,) = job["spec"]["pytorchReplicaSpecs"].values()
    line = spec["template"]["spec"]["containers"][0]["command"][2]
    assert started(line) == ["--num_nodes", "1", "--num_gpus", "2", "--module", "train"]


def test_azureml(recipe):
    job = recipe("azureml", "--nodes", "2", "--gpus", "8", "--image", "i:1", "--compute", "c", *SCRIPT)
    assert (job["type"], job["compute"], job["environment"]) == ("command", "azureml:c", {"image": "i:1"})
    assert job["resources"] == {"instance_count": 2}
    assert job["distribution"] == {"type": "pytorch", "process_count_per_instance": 1}
    words = started(job["command"])
    assert words[-len(SCRIPT) :] == SCRIPT
    assert words[4:6] == ["--node_rank", "$NODE_RANK"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["slurm"], "kubernetes or azureml"),
        (["azureml", "--image", "i", "t.py"], "--compute names the cluster"),
        (["kubernetes", "--image", "i", "--compute", "c", "t.py"], "only there"),
        (["kubernetes", "--image", "i", "--nodes", "0", "t.py"], "at least 1"),
        (["kubernetes", "--image", "i"], "no script"),
    ],
)
def test_refused(capsys, words, message):
    assert main(["recipe", *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("platform", ["kubernetes", "azureml"])
def test_files_are_what_the_command_prints(capsys, platform):
    words = ["--name", "train-gpt", "--nodes", "2", "--gpus", "8", "--image", "my-image:1"]
    words += ["--compute", "my-cluster"] if platform == "azureml" else []
    assert main(["recipe", platform, *words, "train.py", "--deepspeed_config", "ds_config.json"]) == 0
    assert capsys.readouterr().out == (RECIPES / f"{platform}.yaml").read_text()
