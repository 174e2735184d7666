"""Who am I: every launcher's variables give the right identity, and half-set ones say what is missing."""

from __future__ import annotations

import subprocess
import sys

import pytest

from fullspeed.base.errors import UsageError
from fullspeed.comm.discovery import Identity, discover, first_host, tasks_on_node

TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "head", "MASTER_PORT": "1234"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
SLURM = {
    "SLURM_PROCID": "6",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "2",
    "SLURM_NODEID": "1",
    "SLURM_TASKS_PER_NODE": "4(x2)",
    "SLURM_JOB_NODELIST": "gpu[07-08]",
}
TRACES = ("OMPI_", "MV2_", "PMI_", "MPI_", "SLURM_", "AZ_", "SM_")


@pytest.fixture
def setenv(monkeypatch):
    """Sets exactly the given launcher variables: those of the job this test runs in are taken away."""
    import os

    for name in [name for name in os.environ if name.startswith(TRACES)]:
        monkeypatch.delenv(name)

    def set_all(variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return set_all


def test_no_environment_is_a_world_of_one(setenv):
    expected = Identity(0, 1, 0, 1, "127.0.0.1", 29500, "single process (no launcher variables found)")
    assert discover() == expected
    assert discover(auto_mpi=False, distributed_port=77).master_port == 77


def test_torchrun(setenv):
    setenv({**TORCHRUN, "LOCAL_WORLD_SIZE": "4"})
    assert discover() == Identity(5, 8, 1, 4, "head", 1234, "torchrun variables")


def test_own_variables_read_back_the_same(setenv):
    setenv({**TORCHRUN, "LOCAL_WORLD_SIZE": "4"})
    identity = discover()
    setenv(identity.variables())
    assert discover() == identity


def test_world_of_one_needs_only_rank_and_world_size(setenv):
    setenv({"RANK": "0", "WORLD_SIZE": "1"})
    assert discover(distributed_port=5)[:6] == (0, 1, 0, 1, "127.0.0.1", 5)


@pytest.mark.parametrize("missing", list(TORCHRUN))
def test_partly_set_variables_name_the_missing_one(setenv, missing):
    setenv({name: value for name, value in TORCHRUN.items() if name != missing})
    with pytest.raises(UsageError, match=f"{missing} missing"):
        discover()


def test_address_alone_is_no_launcher(setenv):
    setenv({"MASTER_ADDR": "localhost", "MASTER_PORT": "7"})
    assert discover()[:6] == (0, 1, 0, 1, "localhost", 7)


@pytest.mark.parametrize(("name", "value"), [("RANK", "8"), ("RANK", "-1"), ("WORLD_SIZE", "0"), ("RANK", "x")])
def test_impossible_numbers_are_refused(setenv, name, value):
    setenv({**TORCHRUN, name: value})
    with pytest.raises(UsageError, match=value):
        discover()


def test_open_mpi_with_master_addr(setenv):
    setenv({**OPEN_MPI, "MASTER_ADDR": "head"})
    assert discover(distributed_port=9) == Identity(3, 4, 1, 2, "head", 9, "Open MPI")


def test_open_mpi_on_one_host_needs_no_address(setenv):
    setenv({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_RANK": "3", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"})
    assert discover().master_addr == "127.0.0.1"


def test_open_mpi_on_several_hosts_asks_for_the_address(setenv):
    setenv(OPEN_MPI)
    with pytest.raises(UsageError, match="set MASTER_ADDR"):
        discover()


def test_torchrun_goes_before_mpi(setenv):
    setenv({**OPEN_MPI, **TORCHRUN})
    assert discover().source == "torchrun variables"


def test_world_size_exported_by_a_batch_script_does_not_hide_slurm(setenv):
    setenv({**SLURM, "WORLD_SIZE": "8", "MASTER_ADDR": "gpu07", "MASTER_PORT": "6"})
    assert discover() == Identity(6, 8, 2, 4, "gpu07", 6, "SLURM")


def test_auto_mpi_off_refuses_to_train_alone(setenv):
    setenv(OPEN_MPI)
    with pytest.raises(UsageError, match="auto_mpi_discovery is off"):
        discover(auto_mpi=False)


@pytest.mark.parametrize(
    "local",
    [{"MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}, {"PMI_LOCAL_RANK": "1", "PMI_LOCAL_SIZE": "4"}],
)
def test_mpich_and_intel_mpi(setenv, local):
    setenv({"PMI_RANK": "1", "PMI_SIZE": "4", **local})
    assert discover() == Identity(1, 4, 1, 4, "127.0.0.1", 29500, "MPICH or Intel MPI")


def test_mpi_inside_a_slurm_batch_keeps_mpi_ranks(setenv):
    setenv({**SLURM, "SLURM_PROCID": "0", "PMI_RANK": "1", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1"})
    assert (discover().rank, discover().master_addr) == (1, "gpu07")


def test_mpich_without_local_rank_names_it(setenv):
    setenv({"PMI_RANK": "1", "PMI_SIZE": "4"})
    with pytest.raises(UsageError, match="MPI_LOCALRANKID missing"):
        discover()


def test_mvapich(setenv):
    setenv({f"MV2_COMM_WORLD_{n}": v for n, v in (("RANK", "1"), ("SIZE", "2"), ("LOCAL_RANK", "1"))})
    setenv({"MV2_COMM_WORLD_LOCAL_SIZE": "2"})
    assert discover()[:4] == (1, 2, 1, 2)


def test_slurm(setenv):
    setenv(SLURM)
    assert discover() == Identity(6, 8, 2, 4, "gpu07", 29500, "SLURM")


def test_slurm_step_goes_before_job(setenv):
    setenv({**SLURM, "SLURM_STEP_NUM_TASKS": "7", "SLURM_STEP_NODELIST": "gpu08"})
    assert discover()[1] == 7
    assert discover().master_addr == "gpu08"


def test_slurm_without_world_size_names_it(setenv):
    setenv({"SLURM_PROCID": "0", "SLURM_LOCALID": "0"})
    with pytest.raises(UsageError, match="SLURM_STEP_NUM_TASKS missing"):
        discover()


def test_azure_names_host_and_port(setenv):
    setenv({**OPEN_MPI, "AZ_BATCH_MASTER_NODE": "10.0.0.4:6105"})
    assert (discover().master_addr, discover().master_port) == ("10.0.0.4", 6105)


def test_azure_single_node(setenv):
    setenv({**OPEN_MPI, "AZ_BATCHAI_MPI_MASTER_NODE": "localhost"})
    assert discover().master_addr == "127.0.0.1"


def test_sagemaker_takes_the_first_host(setenv):
    setenv({**OPEN_MPI, "SM_HOSTS": '["algo-10", "algo-2", "algo-1"]'})
    assert discover().master_addr == "algo-1"


def test_sagemaker_hosts_must_be_a_list(setenv):
    setenv({**OPEN_MPI, "SM_HOSTS": "algo-1"})
    with pytest.raises(UsageError, match="SM_HOSTS"):
        discover()


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [
        ("node1", "node1"),
        ("node1,node2", "node1"),
        ("gpu[03-05,9],login1", "gpu03"),
        ("a[7,9]-ib", "a7-ib"),
        ("rack[2-3]n[04-05]", "rack2n04"),
    ],
)
def test_first_host_of_a_nodelist(nodelist, host):
    assert first_host(nodelist) == host


@pytest.mark.parametrize("nodelist", ["", ",a"])
def test_nodelist_without_a_host(nodelist):
    with pytest.raises(UsageError, match="MASTER_ADDR"):
        first_host(nodelist)


def test_tasks_per_node():
    assert [tasks_on_node("4(x2),3", node) for node in range(3)] == [4, 4, 3]
    with pytest.raises(UsageError, match="has 3"):
        tasks_on_node("4(x2),3", 3)
    with pytest.raises(UsageError, match="expected a list"):
        tasks_on_node("four", 0)


def test_discovery_itself_needs_no_torch():
    code = (
        "import runpy, sys; sys.modules['__main__'].__dict__.update(runpy.run_path(sys.argv[1]))\n"
        "discover(); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, sys.modules[Identity.__module__].__file__], check=True)
