"""What an engine refuses, and what it does not need."""

import os
import subprocess
import sys

import pytest
import torch

from fullspeed.base.errors import UsageError
from fullspeed.engine.initialize import initialize
from tests.ranks import ranks

CONFIG = {"train_batch_size": 2, "optimizer": {"type": "Adam", "params": {"lr": 0.1}}}


@ranks(1)
def test_d12_parameters_cannot_join_a_running_engine(rank: int, world_size: int) -> None:
    engine, optimizer, _, _ = initialize(model=torch.nn.Linear(3, 2), config=CONFIG)
    with pytest.raises(UsageError, match="build a new engine with initialize"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})
    engine.destroy()
    with pytest.raises(UsageError, match="destroyed"):
        engine.step()


def test_s6_import_needs_no_cuda_home() -> None:
    environment = {key: value for key, value in os.environ.items() if "CUDA" not in key}
    done = subprocess.run(
        [sys.executable, "-c", "import fullspeed; fullspeed.initialize; print('ok')"],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stdout == "ok\n", done.stderr


@ranks(1)
def test_the_model_and_one_configuration_are_required(rank: int, world_size: int) -> None:
    with pytest.raises(UsageError, match="needs a model"):
        initialize(config=CONFIG)
    with pytest.raises(UsageError, match="no configuration"):
        initialize(model=torch.nn.Linear(3, 2))
    with pytest.raises(UsageError, match="twice"):
        initialize(model=torch.nn.Linear(3, 2), config=CONFIG, config_params=CONFIG)
