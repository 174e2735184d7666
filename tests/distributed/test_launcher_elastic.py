"""An elastic job: nodes are lost, the rest goes on from the newest checkpoint with the same global batch."""

from __future__ import annotations

import json
import os
import signal

import pytest
import torch

from tests.ranks import run_ranks

NUM_STEPS = 6
LOST_AT = 3  # steps are counted from 0
BATCH = 12
LIMIT_S = 280

TRAIN = """
import json, os, pathlib, signal, sys, time
import torch, fullspeed
from fullspeed import comm

num_steps, lost_at, lost = int(sys.argv[2]), int(sys.argv[3]), pathlib.Path("lost")
for _ in range(1000):  # while the third node is late: its coming ends this start
    if os.environ["WORLD_SIZE"] == "3" or lost.exists():
        break
    time.sleep(0.1)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3))
engine, *_ = fullspeed.initialize(model=model, config="ds_config.json")
engine.load_checkpoint("saved", load_optimizer_states=False)  # plain SGD has none
micro, accum = engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps()
first_row = engine.global_rank * micro * accum
for step in range(engine.global_steps, num_steps):
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
    "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
    "zero_optimization": {"stage": 2},
    "elasticity": {"enabled": True, "max_train_batch_size": BATCH, "micro_batch_sizes": [2], "version": 0.1},
}


def _node(rank, world_size, folder, port):
    """One node of the job, in a process of its own that may be killed."""
    os.chdir(folder)
    os.environ["NODE"] = str(rank)
    flags = "--elastic_training --no_ssh --min_elastic_nodes 2 --max_elastic_nodes 3 --elastic_wait 2 --node_timeout 15"
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
    pid = os.fork()
    if pid == 0:
        signal.alarm(LIMIT_S)  # even if the test is killed
        from fullspeed.cli.main import main

        os._exit(main([*words, str(NUM_STEPS), str(LOST_AT)]))
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def uninterrupted_losses() -> list[float]:
    """The same job in one plain torch process."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for step in range(NUM_STEPS):
        loss = model(torch.randn(BATCH, 5, generator=torch.Generator().manual_seed(step))).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_a_lost_node_costs_no_step_and_changes_no_loss(tmp_path):
    from fullspeed.launcher.launch import find_free_port

    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "ds_config.json").write_text(json.dumps(CONFIG))
    codes = run_ranks(_node, 3, tmp_path, find_free_port("127.0.0.1"), timeout_s=LIMIT_S)
    assert sorted(codes) == [-9, 0, 0]
    lines = [json.loads(line) for line in (tmp_path / "losses.jsonl").read_text().splitlines()]
    assert [line[0] for line in lines] == list(range(NUM_STEPS))
    assert [line[2:] for line in lines] == [[3, BATCH, 2]] * LOST_AT + [[2, BATCH, 3]] * (NUM_STEPS - LOST_AT)
    assert [line[1] for line in lines] == pytest.approx(uninterrupted_losses(), rel=1e-5)
