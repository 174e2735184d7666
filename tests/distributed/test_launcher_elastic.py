"""An elastic job: a node is lost and comes back; the job goes on from the newest checkpoint with the same batch."""

from __future__ import annotations

import json
import os
import signal
import time

import pytest
import torch

from tests.ranks import run_ranks

NUM_STEPS = 7
LOST_AT, BACK_AT = 2, 4  # steps are counted from 0
BATCH = 12
LIMIT_S = 280

TRAIN = """
import json, os, pathlib, signal, sys, time
import torch, fullspeed
from fullspeed import comm

num_steps, lost_at, back_at = map(int, sys.argv[-3:])
lost = pathlib.Path("lost")
for _ in range(1000):  # while the third node is late: its coming ends this start
    if os.environ["WORLD_SIZE"] == "3" or lost.exists():
        break
    time.sleep(0.1)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3))
engine, *_ = fullspeed.initialize(model=model, config="ds_config.json")
engine.load_checkpoint("saved")
micro, accum = engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps()
first_row = engine.global_rank * micro * accum
for step in range(engine.global_steps, num_steps):
    if step == back_at and os.environ["WORLD_SIZE"] == "2":
        pathlib.Path("come back").touch()
        time.sleep(200)  # the third node's coming ends this start
    if step == lost_at and os.environ["NODE"] == "2":
        lost.touch()
        os.kill(os.getppid(), signal.SIGKILL)  # the node's agent and its rank go at once, as if the host had died
        os.kill(os.getpid(), signal.SIGKILL)
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


def _node(rank, world_size, folder, port):
    """One node of the job, in a process of its own that may be killed."""
    os.chdir(folder)
    os.environ["NODE"] = str(rank)
    flags = "--elastic_training --no_ssh --min_elastic_nodes 2 --max_elastic_nodes 3 --elastic_wait 2 --node_timeout 9"
    words = [
        *flags.split(),
        "--master_addr",
        "127.0.0.1",
        "--master_port",
        str(port),
        "--node_rank",
        str(rank),
        "train.py",
    ]
    code = _run_node([*words, str(NUM_STEPS), str(LOST_AT), str(BACK_AT)])
    if code >= 0:
        return [code]
    while not os.path.exists("come back"):
        time.sleep(0.1)
    return [code, _run_node([*words, str(NUM_STEPS), str(LOST_AT), str(BACK_AT)])]


def _run_node(words):
    pid = os.fork()
    if pid == 0:
        signal.alarm(LIMIT_S)  # even if the test is killed
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


def test_a_node_is_lost_and_comes_back_and_no_loss_changes(tmp_path):
    from fullspeed.launcher.launch import find_free_port

    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "ds_config.json").write_text(json.dumps(CONFIG))
    codes = run_ranks(_node, 3, tmp_path, find_free_port("127.0.0.1"), timeout_s=LIMIT_S)
    assert codes == [[0], [0], [-9, 0]]
    lines = [json.loads(line) for line in (tmp_path / "losses.jsonl").read_text().splitlines()]
    assert [line[0] for line in lines] == list(range(NUM_STEPS))
    three, two = [3, BATCH, 2], [2, BATCH, 3]  # ranks, global batch, accumulation steps
    assert [line[2:] for line in lines] == [
        three if step < LOST_AT or step >= BACK_AT else two for step in range(NUM_STEPS)
    ]
    assert [line[1] for line in lines] == pytest.approx(uninterrupted_losses(), rel=1e-5)
