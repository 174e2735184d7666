"""Ranks that take different ways through the model, and parameters that nobody uses."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fullspeed.base.errors import UsageError
from tests.models import stack
from tests.parity.beside import Pair, adamw, sgd, square, vectors, zero_config
from tests.ranks import ranks

STAGES = (0, 1, 2, 3)


class Branching(nn.Module):
    """The batch says which branch to take: {"x": (B, 5), "path": names of branches in order}."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 6)
        self.branches = nn.ModuleDict({name: nn.Linear(6, 6) for name in "abc"})
        self.outer = nn.Linear(6, 3)

    def forward(self, batch):
        x = torch.tanh(self.inner(batch["x"]))
        for name in batch["path"]:
            x = torch.tanh(self.branches[name](x))
        return self.outer(x)


def branching(seed=0):
    torch.manual_seed(seed)
    return Branching()


def _paths(paths):
    """Batches whose ranks take the paths of `paths[step % len]`, rank by rank."""

    def batches(world_size, step, micro):
        chosen = paths[(step + micro) % len(paths)]
        return [{"x": x, "path": chosen[rank % len(chosen)]} for rank, x in enumerate(vectors(world_size, step, micro))]

    return batches


@ranks(2, 4)
def test_d5_ranks_take_different_branches(rank, world_size):
    """Rank 0 takes branch a, rank 1 branch b: the side not taken counts as zeros, the values are the reference's."""
    for stage in STAGES:
        for accum in (1, 2):
            pair = Pair(rank, world_size, branching, zero_config(stage, accum=accum, clip=0.05), adamw,
                        batches=_paths([("a", "b")]))  # fmt: skip
            pair.train(4).check()
            original = branching().branches
            assert torch.equal(pair.model.branches["c"].weight, original["c"].weight), "unused, so untouched"
            assert not torch.equal(pair.model.branches["a"].weight, original["a"].weight)


@ranks(2, 4)
def test_branches_change_from_step_to_step(rank, world_size):
    """Different orders, different numbers of uses, no branch at all; the momentum of AdamW sees every step."""
    paths = [("ab", "ba"), ("", "abc"), ("aaa", "c"), ("abc", "cba"), ("c", "")]
    for stage in STAGES:
        for prefetch in (0, 10**6):
            config = zero_config(stage, accum=2, stage3_prefetch_bucket_size=prefetch)
            pair = Pair(rank, world_size, branching, config, adamw, batches=_paths(paths))
            pair.train(5).check()


@ranks(2)
def test_ranks_of_unequal_length(rank, world_size):
    """Rank 0 does one forward a step without gradients, rank 1 three (generation of unequal length)."""
    for stage in STAGES:
        pair = Pair(rank, world_size, stack, zero_config(stage), adamw)
        for _ in range(3):
            with torch.no_grad():
                for _ in range(1 + 2 * rank):
                    pair.engine(torch.ones(2, 5))
            pair.train(1)
        pair.check()


class WithUnused(nn.Module):
    """A layer that no forward uses."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(5, 3)
        self.unused = nn.Linear(4, 4)
        self.alone = nn.Parameter(torch.ones(7))

    def forward(self, x):
        return self.used(x)


def with_unused(seed=0):
    torch.manual_seed(seed)
    return WithUnused()


@ranks(2)
def test_d3_a_module_never_used(rank, world_size):
    """No hang, and weight decay does not touch it, as torch leaves parameters without gradient alone."""
    for stage in STAGES:
        pair = Pair(rank, world_size, with_unused, zero_config(stage, accum=2), adamw).train(3)
        pair.check()
        assert torch.equal(pair.model.unused.weight, with_unused().unused.weight)
        assert torch.equal(pair.model.alone, torch.ones(7))


@ranks(2)
def test_unused_in_the_same_group_as_used(rank, world_size):
    """With merged groups, slots without gradient stay untouched beside slots with one."""
    for stage in STAGES:
        config = zero_config(stage, reduce_bucket_size=10**6)
        pair = Pair(rank, world_size, with_unused, config, adamw)
        assert len(pair.engine.runtime.groups) == 1
        pair.train(3).check()
        assert torch.equal(pair.model.unused.weight, with_unused().unused.weight)


@ranks(2)
def test_unused_for_some_steps(rank, world_size):
    """Momentum goes on only in steps with a gradient, as in torch where `grad` is None."""
    for stage in STAGES:
        for optimizer in (adamw, sgd):
            pair = Pair(rank, world_size, branching, zero_config(stage), optimizer,
                        batches=_paths([("a", "a"), ("b", "b"), ("ab", "a")]))  # fmt: skip
            pair.train(6).check()


@ranks(2)
def test_unused_parameters_can_be_an_error(rank, world_size):
    """`ignore_unused_parameters: false` names them."""
    for stage in (1, 2, 3):
        config = zero_config(stage, ignore_unused_parameters=False)
        pair = Pair(rank, world_size, with_unused, config, sgd)
        pair.engine.backward(square(pair.engine, torch.randn(4, 5)))
        with pytest.raises(UsageError, match=r"alone.*unused|unused.*alone"):
            pair.engine.step()
        pair.engine.destroy()


@ranks(2)
def test_loss_that_ignores_part_of_the_output(rank, world_size):
    """Rank 1's loss needs only the first half of the model."""

    def halves(module, x):
        inner = module.module if hasattr(module, "runtime") else module
        out = module(x)
        return out.square().mean() if x[0, 0] > 0 else inner.inner(x).square().mean()

    def batches(world_size, step, micro):
        rows = vectors(world_size, step, micro)
        for index, x in enumerate(rows):
            x[0, 0] = 1.0 if (index + step) % 2 else -1.0
        return rows

    for stage in STAGES:
        config = zero_config(stage, accum=2)
        Pair(rank, world_size, stack, config, adamw, loss=halves, batches=batches).train(4).check()
