"""`fullspeed` on several real hosts: over ssh from a hostfile, with a rank that is killed and a link that is cut."""

from __future__ import annotations

import os
import re
import shutil
import signal
import sys

import pytest

from tests.hosts import Job, is_running, real_hosts, wait_until_ended

NODE_TIMEOUT_S = 5
TIMEOUT = ("--node_timeout", str(NODE_TIMEOUT_S))
WRITE_PID = "echo $$ > pid$RANK; exec sleep 600"
STAND_STILL = (*TIMEOUT, "--no_python", "--no_local_rank", "sh", "-c", WRITE_PID)

TRAIN = """
import sys, torch, fullspeed
torch.manual_seed(0)
model = torch.nn.Linear(3, 1)
config = {"train_batch_size": 6, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "zero_optimization": {"stage": 2}}
engine, *_ = fullspeed.initialize(model=model, config=config)
data = torch.arange(18.0).view(6, 3) / 18
losses = []
for step in range(3):
    loss = engine(data.chunk(engine.world_size)[engine.global_rank]).square().mean()
    engine.backward(loss)
    engine.step()
    losses.append(loss.item())
words = ["losses", engine.global_rank, engine.world_size, *losses]
sys.stdout.write(" ".join(map(str, words)) + "\\n")  # at once: ranks share the terminal
"""


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    with real_hosts(tmp_path_factory.mktemp("hosts"), 3) as found:
        yield found


@pytest.mark.parametrize(("launcher", "count"), [("ssh", 2), ("ssh", 3), ("pdsh", 2)])
def test_training_on_several_hosts(hosts, tmp_path, launcher, count):
    if launcher == "pdsh" and shutil.which("pdsh") is None:
        pytest.skip("no pdsh here")
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / ".deepspeed_env").write_text('GREETING=it\'s a "test"\n')
    (tmp_path / "job.sh").write_text(
        'echo "told $RANK $MASTER_ADDR $GREETING $NCCL_DEBUG"; exec "$PYTHON_HERE" train.py\n'
    )
    os.environ["PYTHON_HERE"] = sys.executable
    words = (*TIMEOUT, "--no_python", "--no_local_rank", "sh", "job.sh")
    ended = Job(hosts, tmp_path, *words, count=count, launcher=launcher).wait()
    assert ended.code == 0, ended.output
    # pdsh puts the host's name before each line.
    told = sorted(re.findall("told .*", ended.output))
    assert told == [f"told {rank} {hosts.addresses[0]} it's a \"test\" it's on" for rank in range(count)]
    losses = [line.split()[1:] for line in sorted(re.findall("losses .*", ended.output))]
    assert [line[:2] for line in losses] == [[str(rank), str(count)] for rank in range(count)]
    assert all(float(line[-1]) < float(line[2]) for line in losses)


def test_a_killed_rank_ends_the_job_on_all_hosts_and_is_named(hosts, tmp_path):
    job = Job(hosts, tmp_path, *STAND_STILL)
    pids = job.wait_for_ranks()
    os.kill(pids[1], signal.SIGKILL)
    ended = job.wait()
    assert ended.code == 128 + signal.SIGKILL
    assert ended.seconds < 20
    assert f"rank 1 on {hosts.addresses[1]} failed first (killed by SIGKILL" in ended.output
    assert not any(is_running(pid) for pid in pids)


def test_a_stopped_launcher_leaves_nothing_on_the_hosts(hosts, tmp_path):
    job = Job(hosts, tmp_path, *STAND_STILL)
    pids = job.wait_for_ranks()
    job.process.terminate()
    assert job.wait().code == 128 + signal.SIGTERM
    wait_until_ended(pids)


def test_a_cut_link_ends_the_job_within_the_time_that_was_set(hosts, tmp_path):
    job = Job(hosts, tmp_path, *STAND_STILL)
    pids = job.wait_for_ranks()
    with hosts.cut_off(1):
        ended = job.wait()
        assert ended.code != 0
        assert f"nothing was heard of host {hosts.addresses[1]} for {NODE_TIMEOUT_S} s" in ended.output
        assert ended.seconds < NODE_TIMEOUT_S + 30
        wait_until_ended(pids)


def test_an_elastic_job_whose_first_host_is_cut_off_ends_on_the_others(hosts, tmp_path):
    job = Job(hosts, tmp_path, "--elastic_training", "--elastic_wait", "1", "--min_elastic_nodes", "2", *STAND_STILL)
    pids = job.wait_for_ranks()
    with hosts.cut_off(0):
        ended = job.wait()
        assert ended.code != 0
        text = f"the first node, {hosts.addresses[0]}, has not answered for {NODE_TIMEOUT_S} s"
        assert text in ended.output
        assert ended.seconds < NODE_TIMEOUT_S + 30
        wait_until_ended(pids)
