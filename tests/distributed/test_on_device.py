"""A model on the meta device and an engine: refused by name while it has no values, ordinary once it has."""

from __future__ import annotations

import pytest
import torch

from fullspeed.base.errors import UsageError
from fullspeed.engine.initialize import initialize
from fullspeed.sharding.on_device import OnDevice
from tests.models import mlp
from tests.parity.beside import Pair, adamw, zero_config
from tests.ranks import ranks


@ranks(2)
def test_parameters_without_values_are_refused(rank, world_size):
    with OnDevice(torch.float32):
        model = mlp()
    for stage in (0, 3):
        with pytest.raises(UsageError, match=r"parameter 0\.weight is on the meta device.*load"):
            initialize(model=model, optimizer=adamw, config=zero_config(stage))


@ranks(2)
def test_a_materialised_model_trains(rank, world_size):
    def make(seed):
        with OnDevice(torch.float32):
            model = mlp()
        model.to_empty(device="cpu").load_state_dict(mlp(seed).state_dict())
        return model

    Pair(rank, world_size, make, zero_config(3), adamw).train(2).check()
