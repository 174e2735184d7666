"""A run goes on with another number of ranks, or at another stage: weights, masters and moments are those it had."""

import pathlib
from typing import Any

import pytest
import torch
from torch import nn

from fullspeed import zero
from fullspeed.engine.initialize import initialize
from tests.models import mlp, stack
from tests.parity.beside import zero_config
from tests.ranks import run_ranks

GLOBAL_BATCH = 12  # for 1, 2, 3 and 4 ranks
ADAM = ("exp_avg", "exp_avg_sq")
MOMENTS = {"AdamW": ADAM, "Lamb": ADAM, "Lion": ("exp_avg",), "MuonWithAuxAdam": ()}


def make(stage: int, num_ranks: int, precision: str, optimizer: str) -> Any:
    config = zero_config(stage, micro=GLOBAL_BATCH // num_ranks)
    if precision != "fp32":
        config[precision] = {"enabled": True, **({"initial_scale_power": 8} if precision == "fp16" else {})}
    config["optimizer"] = {"type": optimizer, "params": {"lr": 1e-2}}
    config["scheduler"] = {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 20}}
    torch.manual_seed(stage)
    return initialize(model=stack(0), config=config)[0]


def train(engine: Any, rank: int, num_ranks: int, first: int, last: int) -> list[float]:
    """Steps of the same global batches however many ranks share them; returns the global losses."""
    from fullspeed.comm import all_reduce

    losses = []
    for step in range(first, last):
        whole = torch.randn(GLOBAL_BATCH, 5, generator=torch.Generator().manual_seed(step))
        loss = (engine(whole.chunk(num_ranks)[rank]).float() - 0.5).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(all_reduce(loss.detach().double()).item() / num_ranks)
    return losses


def states(engine: Any) -> dict[str, torch.Tensor]:
    """Masters and moments, whole."""
    found: dict[str, torch.Tensor] = {}
    for name, param in engine.module.named_parameters():
        found[name] = zero.safe_get_full_fp32_param(param)
        for key in MOMENTS[type(engine.optimizer.optimizer).__name__]:
            found[f"{name}.{key}"] = zero.safe_get_full_optimizer_state(param, key)
    return found


def save(rank: int, num_ranks: int, folder: str, stage: int, precision: str, optimizer: str) -> Any:
    engine = make(stage, num_ranks, precision, optimizer)
    train(engine, rank, num_ranks, 0, 3)
    engine.save_checkpoint(folder)
    return states(engine), train(engine, rank, num_ranks, 3, 6)


def load(rank: int, num_ranks: int, folder: str, stage: int, precision: str, optimizer: str) -> Any:
    engine = make(stage, num_ranks, precision, optimizer)
    engine.load_checkpoint(folder)
    assert engine.global_steps == 3
    found = states(engine)
    again = pathlib.Path(folder, "again")
    engine.save_checkpoint(str(again))
    losses = train(engine, rank, num_ranks, 3, 6)
    return found, losses


CASES = [
    (2, 3, 1, 3, "fp32", "AdamW"),
    (2, 2, 4, 3, "fp32", "AdamW"),
    (4, 3, 2, 1, "fp32", "AdamW"),
    (1, 0, 4, 3, "fp32", "AdamW"),
    (4, 1, 2, 0, "fp32", "AdamW"),
    (2, 3, 4, 2, "bf16", "AdamW"),
    (2, 2, 1, 3, "fp16", "AdamW"),
    (2, 3, 4, 3, "fp32", "Lion"),
    (2, 3, 4, 1, "fp32", "Lamb"),
    (2, 3, 4, 3, "fp32", "Muon"),
]


@pytest.mark.parametrize(("ranks", "stage", "ranks_then", "stage_then", "precision", "optimizer"), CASES)
def test_going_on_elsewhere(  # H1, H2, H3
    tmp_path: pathlib.Path, ranks: int, stage: int, ranks_then: int, stage_then: int, precision: str, optimizer: str
) -> None:
    saved, losses = run_ranks(save, ranks, str(tmp_path), stage, precision, optimizer)[0]
    for folder, count, level in ((tmp_path, ranks_then, stage_then), (tmp_path / "again", ranks, stage)):
        for found, continued in run_ranks(load, count, str(folder), level, precision, optimizer):
            assert found.keys() == saved.keys()
            assert all(torch.equal(found[name], value) for name, value in saved.items())
            tolerance = 1e-6 if precision == "fp32" else 2e-2  # 16-bit gradients are rounded per rank
            assert continued == pytest.approx(losses, rel=tolerance)


def save_frozen(rank: int, num_ranks: int, folder: str) -> None:
    model = mlp(0)
    model[0].requires_grad_(False)
    config = zero_config(3) | {"optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}}
    engine, *_ = initialize(model=model, config=config)
    engine.backward(engine(torch.ones(4, 5)).sum())
    engine.step()
    engine.save_checkpoint(folder)


def load_frozen(rank: int, num_ranks: int, folder: str) -> list[torch.Tensor]:
    model: nn.Module = mlp(9)
    model[0].requires_grad_(False)
    config = zero_config(2) | {"optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}}
    engine, *_ = initialize(model=model, config=config)
    engine.load_checkpoint(folder)
    engine.destroy()
    return [param.detach().clone() for param in model.parameters()]


def test_frozen_parameters_move_too(tmp_path: pathlib.Path) -> None:
    run_ranks(save_frozen, 4, str(tmp_path))
    first, second = run_ranks(load_frozen, 2, str(tmp_path))
    assert torch.equal(first[0], mlp(0)[0].weight)
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
