"""Loaders made by initialize, `train_batch` and `eval_batch`."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from fullspeed.base.errors import UsageError
from fullspeed.comm import all_gather_object
from fullspeed.engine.initialize import initialize
from tests.models import mlp
from tests.parity.beside import Pair, adamw, difference, sgd, vectors, zero_config
from tests.ranks import ranks

STAGES = (0, 1, 2, 3)


class WithLoss(nn.Module):
    """Returns its loss in the form it is told."""

    def __init__(self, form: str = "tensor") -> None:
        super().__init__()
        self.body = mlp()
        self.form = form

    def forward(self, x, target=None):
        target = torch.full((x.shape[0], 3), 0.5) if target is None else target
        loss = (self.body(x) - target).square().mean()
        return {"tensor": loss, "dict": {"loss": loss}, "tuple": (loss, x)}[self.form]


def _dataset(num=26):
    return TensorDataset(torch.arange(num, dtype=torch.float32).view(num, 1).expand(num, 5) / num, torch.ones(num, 3))


@ranks(2)
def test_training_data_is_shared_out(rank, world_size):
    """Ranks see disjoint shares that make up the data set, in micro-batches, differently each epoch."""
    engine, _, loader, _ = initialize(
        model=WithLoss(), optimizer=sgd, training_data=_dataset(24), config=zero_config(1, micro=4)
    )
    assert loader is engine.training_dataloader
    assert len(loader) == 3
    seen = [round(x[0].item() * 24) for batch, _ in loader for x in batch]
    assert [len(batch) for batch, _ in loader] == [4, 4, 4]
    everything = all_gather_object(seen)
    assert sorted(itertools.chain(*everything)) == list(range(24))
    assert seen != sorted(seen), "not shuffled"


@ranks(2)
def test_drop_last_and_evaluation_order(rank, world_size):
    config = zero_config(1, micro=4) | {"dataloader_drop_last": True}
    engine, _, loader, _ = initialize(model=WithLoss(), optimizer=sgd, training_data=_dataset(26), config=config)
    assert [len(batch) for batch, _ in loader] == [4, 4, 4]
    ordered = engine.deepspeed_io(_dataset(8), batch_size=2, route="eval")
    seen = [round(x[0].item() * 8) for batch, _ in ordered for x in batch]
    assert seen == sorted(seen)
    assert len(seen) == 4


@ranks(2)
def test_train_batch_equals_the_loop(rank, world_size):
    """`train_batch` runs the accumulation window and returns the loss averaged over micro-batches and ranks."""
    for stage in STAGES:
        for form in ("tensor", "dict", "tuple"):
            model, plain = WithLoss(form), WithLoss()
            engine, *_ = initialize(model=model, optimizer=adamw, config=zero_config(stage, accum=3, clip=0.05))
            reference = adamw(plain.parameters())
            for step in range(3):
                rows = [vectors(world_size, step, micro) for micro in range(3)]
                targets = torch.full((4, 3), 0.25)
                mine = [(batches[rank], targets) for batches in rows]
                if step == 1:
                    mine = [{"x": x, "target": target} for x, target in mine]
                loss = engine.train_batch(iter(mine))
                losses = [plain(batch, targets) for batches in rows for batch in batches]
                mean = sum(losses) / len(losses)
                mean.backward()
                nn.utils.clip_grad_norm_(plain.parameters(), 0.05)
                reference.step()
                reference.zero_grad()
                assert loss.item() == pytest.approx(mean.item(), rel=1e-5)
                assert not loss.requires_grad
            assert engine.global_steps == 3
            assert engine.micro_steps == 9
            assert engine.global_samples == 3 * 3 * 4 * world_size
            engine.destroy()
            assert max(difference(model, plain).values()) < 1e-6


@ranks(2)
def test_train_batch_repeats_its_own_loader(rank, world_size):
    """More updates than one epoch holds (3 batches a rank, 2 per update)."""
    engine, *_ = initialize(
        model=WithLoss(), optimizer=sgd, training_data=_dataset(24), config=zero_config(2, accum=2, micro=4)
    )
    losses = [engine.train_batch().item() for _ in range(5)]
    assert losses[-1] < losses[0]
    assert engine.global_steps == 5


@ranks(2)
def test_eval_batch_leaves_training_alone(rank, world_size):
    """eval, train, eval, train: the loss averaged over ranks; weights and mode stay."""
    for stage in STAGES:
        pair = Pair(rank, world_size, lambda seed: WithLoss(), zero_config(stage, accum=2), adamw,
                    loss=lambda module, x: module(x))  # fmt: skip
        for step in range(3):
            batches = vectors(world_size, 50, step)
            expected = sum(pair.reference(batch) for batch in batches) / world_size
            assert pair.engine.eval_batch(iter([batches[rank]])).item() == pytest.approx(expected.item(), rel=1e-5)
            assert pair.engine.training
            pair.train(1)
        pair.check()


@ranks(2)
def test_batches_can_be_processed(rank, world_size):
    engine, *_ = initialize(model=WithLoss(), optimizer=sgd, config=zero_config(1))
    engine.set_data_post_process_func(lambda batch: {"x": batch["raw"] * 2})
    doubled = engine.eval_batch(iter([{"raw": torch.ones(4, 5)}])).item()
    assert doubled == pytest.approx(WithLoss()(2 * torch.ones(4, 5)).item(), rel=1e-5)


@ranks(1)
def test_no_data_is_an_error(rank, world_size):
    engine, *_ = initialize(model=WithLoss(), optimizer=sgd, config=zero_config(1))
    with pytest.raises(UsageError, match="no data"):
        engine.train_batch()
