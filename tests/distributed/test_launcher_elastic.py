"""Elastic jobs: hosts are lost and come back; the job goes on from the newest checkpoint with the same batch."""

from __future__ import annotations

import json
import os
import pathlib
import signal

import pytest
import torch

from tests.hosts import LIMIT_S, Job, real_hosts, wait_until
from tests.ranks import run_ranks

NUM_STEPS = 7
LOST_AT, BACK_AT = 2, 4  # steps are counted from 0
BATCH = 12
NODE_TIMEOUT_S = 6

# Ranks of the full size stand still at step LOST_AT until a node is lost; those left go on to BACK_AT, where they stand
# still until it is back.
TRAIN = """
import json, os, pathlib, signal, sys, time
import torch, fullspeed
from fullspeed import comm

full_size, num_steps, lost_at, back_at = map(int, sys.argv[-4:])
is_full = int(os.environ["WORLD_SIZE"]) == full_size
lost = pathlib.Path("lost")
while not is_full and not lost.exists():  # while a node is late: its coming ends this start
    time.sleep(0.1)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3))
engine, *_ = fullspeed.initialize(model=model, config="ds_config.json")
engine.load_checkpoint("saved")
micro, accum = engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps()
first_row = engine.global_rank * micro * accum
for step in range(engine.global_steps, num_steps):
    if step == lost_at and is_full:
        lost.touch()
        if os.environ.get("NODE") == "1":
            os.kill(os.getppid(), signal.SIGKILL)  # the node's agent and its rank go at once, as if the host had died
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(200)
    if step == back_at and not is_full:
        pathlib.Path("come back").touch()
        time.sleep(200)
    rows = torch.randn(12, 5, generator=torch.Generator().manual_seed(step))[first_row:]
    total = torch.zeros(())
    for number in range(accum):
        loss = engine(rows[number * micro : (number + 1) * micro]).square().mean()
        engine.backward(loss)
        engine.step()
        total += loss.detach() / accum / engine.world_size
    comm.all_reduce(total)
    if engine.global_rank == 0:
        line = [step, total.item(), engine.world_size, engine.train_batch_size(), accum]
        with open("losses.jsonl", "a") as file:
            file.write(json.dumps(line) + "\\n")
    engine.save_checkpoint("saved")
"""
CONFIG = {
    "optimizer": {"type": "AdamW", "params": {"lr": 0.05, "torch_adam": True}},
    "zero_optimization": {"stage": 2},
    "elasticity": {"enabled": True, "max_train_batch_size": BATCH, "micro_batch_sizes": [2], "version": 0.1},
}


def _job_words(nodes: str, full_size: int) -> list[str]:
    """The launcher's words and the script's."""
    flags = f"--elastic_training {nodes} --elastic_wait 2 --node_timeout {NODE_TIMEOUT_S}"
    return [*flags.split(), "train.py", *map(str, (full_size, NUM_STEPS, LOST_AT, BACK_AT))]


def _node(rank, world_size, folder, port):
    """One node of the job, in a process of its own that may be killed."""
    os.chdir(folder)
    os.environ["NODE"] = str(rank)
    meeting = f"--no_ssh --master_addr 127.0.0.1 --master_port {port} --node_rank {rank}"
    words = _job_words(f"{meeting} --min_elastic_nodes 1 --max_elastic_nodes 2", 2)
    code = _run_node(words)
    if code >= 0:
        return [code]
    wait_until(pathlib.Path("come back").exists, "the node that is left trained on")
    return [code, _run_node(words)]


def _run_node(words):
    pid = os.fork()
    if pid == 0:
        signal.alarm(int(LIMIT_S))  # even if the test is killed
        from fullspeed.cli.main import main

        os._exit(main(words))
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def uninterrupted_losses() -> list[float]:
    """The same job in one plain torch process."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    losses = []
    for step in range(NUM_STEPS):
        loss = model(torch.randn(BATCH, 5, generator=torch.Generator().manual_seed(step))).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def check_losses(folder: pathlib.Path, full: list[int], left: list[int]) -> None:
    """Every step was made once, with these ranks, global batches and accumulation steps, and no loss changed."""
    lines = [json.loads(line) for line in (folder / "losses.jsonl").read_text().splitlines()]
    assert [line[0] for line in lines] == list(range(NUM_STEPS))
    expected = [left if LOST_AT <= step < BACK_AT else full for step in range(NUM_STEPS)]
    assert [line[2:] for line in lines] == expected
    assert [line[1] for line in lines] == pytest.approx(uninterrupted_losses(), rel=1e-5)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "ds_config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def test_a_killed_node_started_by_hand_comes_back(folder):
    from fullspeed.launcher.launch import find_free_port

    codes = run_ranks(_node, 2, folder, find_free_port("127.0.0.1"), timeout_s=LIMIT_S)
    assert codes == [[0], [-9, 0]]
    check_losses(folder, full=[2, BATCH, 3], left=[1, BATCH, 6])


@pytest.mark.timeout(600)
def test_a_host_whose_link_is_cut_and_mended_comes_back(folder):
    with real_hosts(folder, 3) as hosts:
        nodes = "--min_elastic_nodes 2 --max_elastic_nodes 3 --no_local_rank"
        job = Job(hosts, folder, *_job_words(nodes, 3), count=3)
        job.wait_for(folder / "lost")
        with hosts.cut_off(2):
            job.wait_for(folder / "come back")
            wait_until(lambda: not hosts.programs(2), "the cut-off host's processes ended")
        ended = job.wait()
    assert ended.code == 0, ended.output
    assert f"nothing was heard of host {hosts.addresses[2]} for {NODE_TIMEOUT_S} s" in ended.output
    assert f"host {hosts.addresses[2]} is lost" in ended.output
    check_losses(folder, full=[3, BATCH, 2], left=[2, BATCH, 3])
