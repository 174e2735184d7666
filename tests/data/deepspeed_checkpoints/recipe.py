"""The model, the batches and the configurations of the recorded checkpoints; imports torch only."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import nn


class Recipe(NamedTuple):
    """One recorded run."""

    stage: int
    dtype: str  # fp32, bf16 or fp16
    world_size: int
    zero: Mapping[str, Any] = MappingProxyType({})  # further keys of the ZeRO section
    scale_power: int = 8  # of the first loss scale


# Without sharding, DeepSpeed 0.19.8 divides fp16 gradients by the loss scale without having multiplied the loss by it;
# so that run has the scale 1.
RECIPES = {
    "z0_fp32_w1": Recipe(0, "fp32", 1),
    "z0_bf16_w2": Recipe(0, "bf16", 2),
    "z0_fp16_w1": Recipe(0, "fp16", 1, scale_power=0),
    "z1_fp32_w2": Recipe(1, "fp32", 2),
    "z1_bf16_w1": Recipe(1, "bf16", 1, {"round_robin_gradients": True}),
    "z2_bf16_w2": Recipe(2, "bf16", 2, {"parameter_alignment": True}),
    "z2_fp16_w2": Recipe(2, "fp16", 2, {"round_robin_gradients": True}),
    "z3_fp32_w2": Recipe(3, "fp32", 2, {"stage3_param_persistence_threshold": 0}),
    "z3_bf16_w2": Recipe(3, "bf16", 2, {"sub_group_size": 40}),
    "z3_fp16_w1": Recipe(3, "fp16", 1),
}


class Tied(nn.Module):
    """Odd sizes, a frozen layer, two layers that share a weight, a buffer that counts."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 7)
        self.frozen = nn.Linear(7, 7)
        self.first = nn.Linear(7, 7)
        self.second = nn.Linear(7, 7, bias=False)
        self.outer = nn.Linear(7, 3)
        self.second.weight = self.first.weight
        self.frozen.requires_grad_(False)
        self.register_buffer("scale", torch.tensor([1.0, 0.5, 2.0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.frozen(self.inner(x)))
        return self.outer(self.second(torch.tanh(self.first(x)))) * self.scale


def build(recipe: Recipe, seed: int = 0) -> nn.Module:
    """The model before its first update."""
    del recipe
    torch.manual_seed(seed)
    return Tied()


def param_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Weights decay, biases do not."""
    trained = [param for param in model.parameters() if param.requires_grad]
    return [
        {"params": [param for param in trained if param.dim() > 1], "weight_decay": 0.1},
        {"params": [param for param in trained if param.dim() < 2], "weight_decay": 0.0},
    ]


def config(recipe: Recipe) -> dict[str, Any]:
    """What `initialize` is given."""
    found: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.5,
        "zero_optimization": {"stage": recipe.stage, **recipe.zero},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    if recipe.dtype != "fp32":
        found[recipe.dtype] = {"enabled": True}
    if recipe.dtype == "fp16":
        found["fp16"] |= {"initial_scale_power": recipe.scale_power, "loss_scale_window": 3}
    return found


def batches(step: int, world_size: int) -> torch.Tensor:
    """Inputs of all ranks at a step, (W, B, 5)."""
    return torch.randn(world_size, 4, 5, generator=torch.Generator().manual_seed(1000 + step))


def update(engine: Any, x: torch.Tensor) -> torch.Tensor:
    """One update on this rank's inputs; returns its loss."""
    dtype = next(engine.module.parameters()).dtype
    loss = (engine(x.to(dtype)).float() - 0.5).square().mean()
    engine.backward(loss)
    engine.step()
    return loss.detach()
