"""An engine trained beside plain torch: one process on the union of all ranks' data is the truth."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from fullspeed.engine.engine import Engine
from fullspeed.engine.initialize import initialize

Loss = Callable[[nn.Module, Any], torch.Tensor]
Batches = Callable[[int, int, int], list[Any]]


def zero_config(stage: int, *, accum: int = 1, clip: float = 0.0, micro: int = 4, **zero: Any) -> dict[str, Any]:
    """A configuration under which even tiny layers are groups of their own and stage 3 shards all of them."""
    section = {
        "stage": stage,
        "stage3_param_persistence_threshold": 0,
        "stage3_max_reuse_distance": 0,
        "reduce_bucket_size": 1,
        **zero,
    }
    return {
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": accum,
        "gradient_clipping": clip,
        "zero_optimization": section,
    }


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1)


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=5e-2, momentum=0.9)


def vectors(world_size: int, step: int, micro: int) -> list[torch.Tensor]:
    """Four samples of five features for every rank."""
    generator = torch.Generator().manual_seed(1000 * step + micro)
    return list(torch.randn(world_size, 4, 5, generator=generator))


def tokens(world_size: int, step: int, micro: int) -> list[torch.Tensor]:
    """Two sequences of nine tokens for every rank."""
    generator = torch.Generator().manual_seed(1000 * step + micro)
    return list(torch.randint(0, 61, (world_size, 2, 9), generator=generator))


def square(module: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Mean of squares of the outputs, shifted so that no gradient is small by symmetry."""
    return (module(batch) - 0.5).square().mean()


def causal(module: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """A language model's own loss."""
    loss: torch.Tensor = module(input_ids=batch, labels=batch).loss
    return loss


class Pair:
    """One engine and its plain copy. Ranks above 0 start from other weights: rank 0's must win."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        make_model: Callable[[int], nn.Module],
        config: dict[str, Any],
        make_optimizer: Callable[[Any], torch.optim.Optimizer] | None = adamw,
        *,
        reference_optimizer: Callable[[Any], torch.optim.Optimizer] | None = None,
        groups: Callable[[nn.Module], Any] | None = None,
        loss: Loss = square,
        batches: Batches = vectors,
    ) -> None:
        """`make_optimizer` None leaves the optimizer to the configuration; `groups` makes param groups of a model."""
        self.rank, self.world_size = rank, world_size
        self.model, self.reference = make_model(rank), make_model(0)
        self.loss, self.batches = loss, batches
        self.accum, self.clip = config.get("gradient_accumulation_steps", 1), config.get("gradient_clipping", 0.0)
        self.tolerance = 1e-6
        given = groups(self.model) if groups else None
        self.engine: Engine
        self.engine, self.optimizer, _, self.scheduler = initialize(
            model=self.model, optimizer=make_optimizer, model_parameters=given, config=config
        )
        of_reference = reference_optimizer or make_optimizer
        assert of_reference is not None
        self.reference_optimizer = of_reference(groups(self.reference) if groups else self.reference.parameters())
        self.norms: list[float] = []  # of the reference, before clipping
        self.num_steps = 0

    def train(self, num_steps: int = 3) -> Pair:
        """Updates with `engine.backward`, comparing every loss and norm."""
        for _ in range(num_steps):
            self.update()
        return self

    def update(self) -> None:
        for micro in range(self.accum):
            batches = self.batches(self.world_size, self.num_steps, micro)
            loss = self.loss(self.engine, batches[self.rank])
            self.engine.backward(loss)
            self.engine.step()
            expected = self.reference_backward(batches)
            difference = abs(loss.item() - expected[self.rank].item())
            assert difference <= self.tolerance * max(1.0, abs(loss.item())), (loss, expected)
        self.reference_step()

    def reference_backward(self, batches: Sequence[Any], loss: Loss | None = None) -> list[torch.Tensor]:
        """The reference's gradients of one micro-batch of all ranks; returns every rank's loss."""
        losses = [(loss or self.loss)(self.reference, batch) for batch in batches]
        (sum(losses) / (self.world_size * self.accum)).backward()  # type: ignore[union-attr]
        return losses

    def reference_step(self, *, with_norm: bool = True) -> None:
        """The reference's update; compares the engine's norms with it."""
        self.num_steps += 1
        params = [param for param in self.reference.parameters() if param.grad is not None]
        # Clip as torch does, but in double, as mixed-dtype models need.
        norm = torch.stack([param.grad.double().norm() for param in params]).norm().item()  # type: ignore[union-attr]
        self.norms.append(norm)
        factor = min(1.0, self.clip / (norm + 1e-6)) if self.clip else 1.0
        for param in params:
            assert param.grad is not None
            param.grad.mul_(factor)
        if with_norm:
            ours, clipped = self.engine.get_global_grad_norm(), self.engine.get_clipped_grad_norm()
            assert ours is not None
            assert clipped is not None
            assert abs(ours - norm) <= self.tolerance * max(1.0, norm), (ours, norm)
            assert abs(clipped - norm * factor) <= self.tolerance * max(1.0, norm), (clipped, norm * factor)
        self.reference_optimizer.step()
        self.reference_optimizer.zero_grad()

    def check(self, tolerance: float = 1e-6) -> Engine:
        """End the engine and compare every parameter on this rank with the reference."""
        self.engine.destroy()
        worst = difference(self.model, self.reference)
        assert max(worst.values()) <= tolerance, worst
        return self.engine


def difference(model: nn.Module, reference: nn.Module) -> dict[str, float]:
    """Largest absolute difference of each parameter."""
    theirs = dict(reference.named_parameters())
    return {
        fqn: (param.detach().double() - theirs[fqn].detach().double()).abs().max().item() if param.numel() else 0.0
        for fqn, param in model.named_parameters()
    }
