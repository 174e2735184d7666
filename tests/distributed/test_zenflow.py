"""ZenFlow: chosen columns are stepped at once, the others later, by the rule a plain simulation follows."""

from __future__ import annotations

import itertools
import threading
from typing import Any

import pytest
import torch
from torch import nn

from fullspeed.base.errors import ConfigError, UpdateError
from fullspeed.comm import all_gather_object
from fullspeed.engine.engine import Engine
from fullspeed.engine.initialize import initialize
from fullspeed.optim.factory import declare_elementwise
from fullspeed.optim.lamb import Lamb
from fullspeed.sharding.access import safe_get_full_fp32_param, safe_set_full_fp32_param
from fullspeed.sharding.stepping import MemoryStepper
from fullspeed.sharding.zenflow import DEFERRED, IMPORTANT, PENDING, ZenFlowStepper
from tests.models import stack
from tests.parity.beside import adamw, difference, square, vectors, zero_config
from tests.ranks import ranks, run_ranks

SELECT, UPDATE, RATIO, LR = 6, 3, 0.34, 0.1


def zenflow(**changes: Any) -> dict[str, Any]:
    section = {"select_strategy": "step", "select_interval": SELECT, "update_interval": UPDATE, "topk_ratio": RATIO}
    return {"zenflow": section | changes}


def plain_sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=LR)


def make(stage: int, zero: dict[str, Any], optimizer: Any = adamw, seed: int = 0, **sections: Any) -> Engine:
    config = zero_config(stage, accum=sections.pop("accum", 1), clip=sections.pop("clip", 0.0), **zero)
    return initialize(model=stack(seed), optimizer=optimizer, config=config | sections)[0]


def train(engine: Engine, first: int, last: int) -> list[torch.Tensor]:
    """Losses of steps [first, last), on data that all ranks share, so that their number does not matter."""
    losses = []
    for step in range(first, last):
        for micro in range(engine.gradient_accumulation_steps()):
            x = vectors(1, step, micro)[0].to(engine.get_data_types()[0])
            losses.append(square(engine, x).float())
            engine.backward(losses[-1])
            engine.step()
    return [loss.detach() for loss in losses]


def finish(engine: Engine) -> list[torch.Tensor]:
    engine.destroy()
    return [param.detach().clone() for param in engine.module.parameters()]


def have(engine: Engine, name: str) -> bool:
    """Whether any piece on any rank has such a state."""
    mine = any(name in state for state in engine.optimizer.state.values())
    return any(all_gather_object(mine, engine.data_parallel_group))


class Simulation:
    """ZenFlow by its definition: SGD over whole tensors in one process."""

    def __init__(self, model: nn.Module, *, overlaps: bool, clip: float) -> None:
        self.params, self.overlaps, self.clip = list(model.parameters()), overlaps, clip
        self.masks: dict[int, torch.Tensor] = {}
        self.sums = [torch.zeros_like(param) for param in self.params]
        self.landing: list[torch.Tensor] | None = None
        self.count = self.num_steps = 0

    @torch.no_grad()
    def step(self) -> None:
        if self.landing is not None:
            for param, change in zip(self.params, self.landing, strict=True):
                param.sub_(change)
            self.landing = None
        if self.clip:
            nn.utils.clip_grad_norm_(self.params, self.clip)
        chooses = self.num_steps % SELECT == 0
        self.count += 1
        is_due = chooses or self.count == UPDATE
        landing = [torch.zeros_like(param) for param in self.params]
        for index, param in enumerate(self.params):
            grad, mask = param.grad, self.masks.get(index)
            if mask is None:
                param.sub_(LR * grad)
            else:
                param.sub_(LR * grad * mask)
                self.sums[index] += grad * ~mask
                if is_due:
                    landing[index] = LR * self.sums[index] / self.count
                    self.sums[index].zero_()
            if chooses and param.dim() > 1:
                best = grad.square().sum(0).topk(max(1, int(RATIO * param.shape[1]))).indices
                self.masks[index] = torch.zeros(param.shape, dtype=torch.bool)
                self.masks[index][:, best] = True
            param.grad = None
        self.num_steps += 1
        if is_due:
            self.count, self.landing = 0, landing
            if chooses or not self.overlaps:
                for param, change in zip(self.params, landing, strict=True):
                    param.sub_(change)
                self.landing = None


@ranks(1)
def test_it_does_what_its_definition_says(rank, world_size):
    for stage, overlaps, clip in ((1, False, 0.0), (2, True, 0.5), (3, True, 0.0), (3, False, 0.5)):
        engine = make(stage, zenflow(overlap_step=overlaps), plain_sgd, clip=clip)
        model = stack()
        simulation = Simulation(model, overlaps=overlaps, clip=clip)
        for step in range(2 * SELECT + 2):
            loss = train(engine, step, step + 1)[0]
            expected = square(model, vectors(1, step, 0)[0])
            expected.backward()
            simulation.step()
            assert abs(loss - expected) < 1e-5, (stage, overlaps, clip, step)
        stepper = engine.optimizer.stepper
        assert isinstance(stepper, ZenFlowStepper)
        assert (stepper.num_taken > 0) == overlaps
        assert stepper.num_redone == 0
        finish(engine)
        assert max(difference(engine.module, model).values()) < 1e-5


@ranks(1, 2)
def test_where_nothing_waits_it_is_the_plain_optimizer(rank, world_size):
    for stage, section in itertools.product((1, 3), ({"update_interval": 1}, {"topk_ratio": 1.0})):
        plain, engine = make(stage, {}), make(stage, zenflow(**section))
        assert isinstance(engine.optimizer.stepper, MemoryStepper)
        assert all(map(torch.equal, train(plain, 0, 4), train(engine, 0, 4)))
    # Every step of warm-up is whole.
    plain, engine = make(2, {}), make(2, zenflow(full_warm_up_rounds=4, overlap_step=True))
    assert isinstance(engine.optimizer.stepper, ZenFlowStepper)
    assert all(map(torch.equal, [*train(plain, 0, 4), *finish(plain)], [*train(engine, 0, 4), *finish(engine)]))


@ranks(2)
def test_stages_agree_in_all_precisions(rank, world_size):
    """With Adam, whose states are split as well; and what is deferred learns."""
    fp16 = {"enabled": True, "initial_scale_power": 18, "hysteresis": 1}
    for sections in ({"accum": 2, "clip": 0.5}, {"bf16": {"enabled": True}}, {"fp16": fp16}):
        runs = []
        for stage in (1, 2, 3):
            engine = make(stage, zenflow(overlap_step=True), **sections)
            losses = train(engine, 0, 12)
            assert engine.optimizer.stepper.num_taken > 0
            assert (engine.skipped_steps > 0) == ("fp16" in sections)
            assert losses[-1] < 0.7 * losses[0]
            runs.append(torch.stack(losses))
            engine.destroy()
        assert torch.allclose(runs[0], runs[1], atol=1e-6)
        assert torch.allclose(runs[0], runs[2], atol=1e-6)


@ranks(2)
def test_without_an_interval_deferred_gradients_are_applied_when_they_have_grown(rank, world_size):
    """On all ranks at once."""
    engine = make(2, zenflow(update_interval="auto", auto_ratio=0.9, select_interval=100))
    applied = []
    for step in range(20):
        train(engine, step, step + 1)
        applied.append(not have(engine, DEFERRED))
        assert len(set(all_gather_object(applied[-1], engine.data_parallel_group))) == 1
    assert 1 < sum(applied) < 19
    engine.destroy()


# ------------------------------------------------------------------------ resuming


@ranks(2)
@pytest.mark.parametrize("overlaps", [False, True])
def test_a_resumed_run_is_the_run_that_never_stopped(rank, world_size, overlaps, tmp_path):
    """Saved with gradients that wait (after 6 steps), and with an update in the background (after 4)."""
    for stage, saved_at in itertools.product((1, 3), (4, 6)):
        whole = make(stage, zenflow(overlap_step=overlaps))
        expected = [*train(whole, 0, 10)[saved_at:], *finish(whole)]
        engine = make(stage, zenflow(overlap_step=overlaps))
        train(engine, 0, saved_at)
        assert have(engine, PENDING) == (overlaps and saved_at == 4)
        assert have(engine, DEFERRED) == (saved_at == 6)
        folder = tmp_path / f"{stage}-{saved_at}"
        engine.save_checkpoint(str(folder))
        engine.destroy()
        again = make(stage, zenflow(overlap_step=overlaps), seed=1)
        train(again, 0, 2)
        again.load_checkpoint(str(folder))
        found = [*train(again, saved_at, 10), *finish(again)]
        assert all(map(torch.equal, found, expected))


def save(rank: int, world_size: int, folder: str) -> list[torch.Tensor]:
    """Three more losses after a save in which an update is under way."""
    engine = make(2, zenflow(overlap_step=True))
    train(engine, 0, 4)
    assert have(engine, PENDING)
    engine.save_checkpoint(folder)
    return train(engine, 4, 6)


def load(rank: int, world_size: int, folder: str) -> list[torch.Tensor]:
    engine = make(3, zenflow(overlap_step=True), seed=1)
    engine.load_checkpoint(folder)
    return train(engine, 4, 6)


def load_plainly(rank: int, world_size: int, folder: str) -> list[torch.Tensor]:
    engine = make(1, {}, seed=1)
    engine.load_checkpoint(folder)
    return train(engine, 4, 6)


def test_what_is_deferred_follows_its_elements_to_other_ranks(tmp_path):
    expected = torch.stack(run_ranks(save, 2, str(tmp_path))[0])
    assert torch.allclose(torch.stack(run_ranks(load, 1, str(tmp_path))[0]), expected, atol=1e-6)
    found = torch.stack(run_ranks(load_plainly, 1, str(tmp_path))[0])
    assert found[0] == pytest.approx(expected[0].item(), abs=1e-6)
    assert not torch.allclose(found[1], expected[1], atol=1e-6)  # every column is stepped


@ranks(2)
def test_without_the_counts_what_waits_is_forgotten(rank, world_size):
    """As in a checkpoint of DeepSpeed's layout, which has no place for them."""
    engine = make(2, zenflow())
    train(engine, 0, 6)
    assert have(engine, IMPORTANT)
    assert have(engine, DEFERRED)
    engine.optimizer.stepper.load_state_dict({})
    assert not have(engine, IMPORTANT)
    assert not have(engine, DEFERRED)
    train(engine, 6, 7)
    assert have(engine, IMPORTANT)


# ------------------------------------------------------------- edits and failures


@ranks(2)
def test_values_set_while_an_update_is_under_way_are_what_it_steps(rank, world_size):
    """Zeroed weights get the deferred step and the coming one, and nothing of their old values comes back."""
    for stage in (1, 3):
        engine = make(stage, zenflow(overlap_step=True), plain_sgd)
        train(engine, 0, 4)
        assert have(engine, PENDING)
        param = engine.module.blocks[1].up.weight
        assert safe_get_full_fp32_param(param).abs().max() > 0.3
        safe_set_full_fp32_param(param, torch.zeros(param.shape))
        train(engine, 4, 5)
        value = safe_get_full_fp32_param(param)
        assert 0 < value.abs().max() < 0.1
        redone = all_gather_object(engine.optimizer.stepper.num_redone, engine.data_parallel_group)
        assert sum(redone) > 0
        engine.destroy()


@declare_elementwise
class Fragile(torch.optim.SGD):
    """Steps in the main thread only."""

    def step(self, closure: Any = None) -> Any:
        if threading.current_thread() is not threading.main_thread():
            raise ArithmeticError("not here")
        return super().step(closure)


@declare_elementwise
class Sturdy(torch.optim.SGD):
    """Steps anywhere."""


@ranks(2)
def test_a_failure_in_the_background_is_raised_at_the_next_step_on_every_rank(rank, world_size):
    engine = make(2, zenflow(overlap_step=True), lambda params: (Fragile if rank else Sturdy)(params, lr=LR))
    train(engine, 0, 4)
    with pytest.raises(UpdateError, match="rank 1: an update in the background failed: ArithmeticError: not here"):
        train(engine, 4, 5)


@ranks(1)
def test_what_cannot_be_carried_out_is_refused(rank, world_size):
    with pytest.raises(ConfigError, match=r"zenflow.*Lamb.*element by element"):
        make(2, zenflow(), lambda params: Lamb(params, lr=LR))
    with pytest.raises(ConfigError, match=r"zenflow\.select_interval is 'auto'.*steps_per_epoch"):
        make(2, {"zenflow": {}})
    data = torch.utils.data.TensorDataset(torch.zeros(40, 5))
    config = zero_config(2, zenflow={"select_interval": 2})
    optimizer = initialize(model=stack(), optimizer=adamw, config=config, training_data=data)[1]
    assert optimizer.stepper._rhythm.select_every == 2 * 40 // 4
