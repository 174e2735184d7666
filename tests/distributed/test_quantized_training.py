"""Training with quantised gathers (qwZ) and reductions (qgZ): what forward sees, what stays exact, what travels."""

from __future__ import annotations

import copy
import os
from collections import Counter

import pytest
import torch

from fullspeed.base.errors import ConfigError
from fullspeed.comm import CommRecorder, all_gather_object, observing
from fullspeed.config import load_config
from fullspeed.engine.initialize import initialize
from fullspeed.kernels.format import BlockFormat
from fullspeed.kernels.quantize import dequantize, quantize
from fullspeed.sharding.access import safe_get_full_fp32_param, safe_get_full_grad
from fullspeed.zero import GatheredParameters
from tests.models import deep_mlp, stack
from tests.parity.beside import adamw, square, vectors, zero_config
from tests.ranks import ranks

WEIGHTS = {"zero_quantized_weights": True}
GRADIENTS = {"zero_quantized_gradients": True}
PREFETCH = {"stage3_prefetch_bucket_size": 10**6, "stage3_max_reuse_distance": 10**6}


def _engine(model, config):
    return initialize(model=model, optimizer=adamw, config=config)[0]


def _train(engine, rank, world_size, num_steps):
    losses = []
    for step in range(num_steps):
        loss = square(engine, vectors(world_size, step % 2, 0)[rank])
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def _quantized(engine, model, form):
    """A copy of the model whose parameters went through the kernels, shard by shard."""
    reference = copy.deepcopy(model)
    params = dict(reference.named_parameters())
    for group in engine.runtime.groups:
        numel = group.store.numel()
        message, out = torch.empty(form.nbytes(numel), dtype=torch.uint8), torch.empty((1, numel))
        quantize(group.store.view(1, 1, -1), message.view(1, 1, -1), form)
        dequantize(message.view(1, -1), out, form)
        full = torch.cat(all_gather_object(out[0]))
        for slot in group.layout.slots:
            params[slot.fqn].data = full[slot.offset : slot.end].view(slot.shape)
    return reference


@pytest.mark.parametrize("bits", [8, 4])
@ranks(2, 4)
def test_c14_forward_sees_quantized_weights(rank, world_size, bits):
    """The loss is that of quantised weights, close to plain stage 3's, and falls; whatever is prefetched or kept."""
    batch = vectors(world_size, 0, 0)[rank]
    exact = square(stack(), batch).item()
    for prefetch in ({}, PREFETCH):
        config = zero_config(3, zero_quantized_weights_bits=bits, zero_quantized_block_size=32, **WEIGHTS, **prefetch)
        engine = _engine(stack(), config)
        reference = _quantized(engine, stack(), BlockFormat(bits, 32))
        recorder = CommRecorder()
        with observing(recorder):
            loss = square(engine, batch).item()
        assert loss == pytest.approx(square(reference, batch).item(), rel=1e-5)
        assert loss != exact
        assert loss == pytest.approx(exact, rel=0.01 if bits == 8 else 0.2)
        gathered = [event.nbytes for event in recorder.events if event.op == "all_gather"]
        assert gathered[: len(engine.runtime.groups)] == [
            world_size * BlockFormat(bits, 32).nbytes(group.store.numel()) for group in engine.runtime.groups
        ]
        losses = _train(engine, rank, world_size, 12)
        assert losses[-1] < 0.6 * losses[0]
        engine.destroy()


@ranks(2)
def test_masters_and_whatever_is_saved_stay_exact(rank, world_size):
    model = stack()
    config = zero_config(3, stage3_gather_16bit_weights_on_model_save=True, **WEIGHTS)
    engine = _engine(model, config)
    originals = dict(stack().named_parameters())
    for fqn, param in model.named_parameters():
        assert torch.equal(safe_get_full_fp32_param(param), originals[fqn])
    saved = engine.module_state_dict()
    assert all(torch.equal(saved[fqn], value) for fqn, value in originals.items())
    engine.destroy()
    assert all(torch.equal(param, originals[fqn]) for fqn, param in model.named_parameters())


@ranks(2)
def test_persistent_groups_are_never_quantized(rank, world_size):
    """Parameters that stay whole are resident values, not messages: they are published as they are."""
    config = zero_config(3, stage3_param_persistence_threshold=10**6, **WEIGHTS)
    model, plain = deep_mlp(), deep_mlp()
    results = []
    for each, zero in ((model, config), (plain, zero_config(3))):
        engine = _engine(each, zero)
        results.append(_train(engine, rank, world_size, 3))
        engine.destroy()
    assert results[0] == pytest.approx(results[1], rel=1e-6)


@ranks(4)
def test_16_bit_parameters_and_a_second_copy(rank, world_size):
    """bf16 storage, and hpZ on top: the second copy is what the quantised gather delivered, so losses are the same."""
    found, counts = [], []
    for zero in (WEIGHTS, WEIGHTS | {"zero_hpz_partition_size": 2}):
        engine = _engine(stack(), zero_config(3, **zero) | {"bf16": {"enabled": True}})
        losses, recorder = [], CommRecorder()
        for _ in range(6):
            with observing(recorder):
                loss = square(engine, vectors(world_size, 0, 0)[rank].bfloat16()).float()
                engine.backward(loss)
                engine.step()
            losses.append(loss.item())
        gathers = [event for event in recorder.events if event.op == "all_gather"]
        counts.append(Counter((len(event.ranks), event.dtype) for event in gathers))
        assert losses[-1] < 0.9 * losses[0]
        found.append(losses)
        engine.destroy()
    assert found[0] == found[1]
    without, with_copy = counts
    assert without.keys() == {(4, "torch.uint8")}
    assert with_copy.keys() == {(4, "torch.uint8"), (2, "torch.bfloat16")}, "backward gathers inside nodes, exactly"
    assert with_copy.total() == without.total()


def _grads(model, world_size, config):
    """Every parameter's gradient after one backward; the same data on all ranks, so each rank's own is the mean."""
    engine = _engine(model, config)
    engine.backward(square(engine, vectors(world_size, 0, 0)[0]))
    grads = {fqn: safe_get_full_grad(param) for fqn, param in model.named_parameters()}
    engine.destroy()
    return grads


@pytest.mark.parametrize("stage", [2, 3])
@ranks(2, 4)
def test_quantized_gradients_are_near(rank, world_size, stage):
    """Within half a step of each hop, the step being the group's largest gradient over 7."""
    plain = _grads(stack(), world_size, zero_config(stage))
    largest = max(grad.abs().max().item() for grad in plain.values())
    for per_host in (1, 2, world_size):
        os.environ["LOCAL_WORLD_SIZE"] = str(per_host)
        num_hops = 2 if 1 < per_host < world_size else 1
        recorder = CommRecorder()
        with observing(recorder):
            found = _grads(stack(), world_size, zero_config(stage, **GRADIENTS))
        worst = max((found[fqn] - plain[fqn]).abs().max().item() for fqn in plain)
        assert 0 < worst <= largest / 14 * (1 if num_hops == 1 else 1 + 8 / 7) * 1.001
        counts = recorder.counts()
        assert counts["all_to_all"] == num_hops * 5, "a group for each of two layers and three blocks"
        assert "reduce_scatter" not in counts


@ranks(2, 4)
def test_training_with_both(rank, world_size):
    """8 bits each way, several micro-batches, two hops on four ranks: follows plain stage 3 closely."""
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    found = []
    for zero in ({}, WEIGHTS | GRADIENTS | {"zero_quantized_gradients_bits": 8}):
        engine = _engine(stack(), zero_config(3, accum=2, clip=1.0, **zero, **PREFETCH))
        found.append(_train(engine, rank, world_size, 24))
        engine.destroy()
    plain, ours = found
    assert ours != plain
    assert ours[-1] == pytest.approx(plain[-1], rel=0.1)
    assert ours[-1] < 0.5 * ours[0]


@ranks(4)
def test_shard_groups_with_replicas(rank, world_size):
    """MiCS: quantised inside a shard group, then summed exactly across the groups; wherever the nodes end."""
    plain = _grads(stack(), world_size, zero_config(2))
    largest = max(grad.abs().max().item() for grad in plain.values())
    for per_host in (4, 1):
        os.environ["LOCAL_WORLD_SIZE"] = str(per_host)
        for stage in (2, 3):
            recorder = CommRecorder()
            with observing(recorder):
                found = _grads(stack(), world_size, zero_config(stage, mics_shard_size=2, **GRADIENTS))
            worst = max((found[fqn] - plain[fqn]).abs().max().item() for fqn in plain)
            assert 0 < worst <= largest / 14 * 1.001
            counts = recorder.counts()
            assert counts["all_to_all"] == 5
            assert counts["all_reduce"] >= 5
            assert "reduce_scatter" not in counts


@ranks(2)
def test_an_overflow_on_one_rank_skips_the_step_on_all(rank, world_size):
    model = stack()
    config = zero_config(3, **GRADIENTS) | {"fp16": {"enabled": True, "initial_scale_power": 4, "hysteresis": 1}}
    engine = _engine(model, config)
    before = [safe_get_full_fp32_param(param) for param in model.parameters()]
    factor = float("inf") if rank == 1 else 1.0
    engine.backward(square(engine, vectors(world_size, 0, 0)[rank].half()).float() * factor)
    engine.step()
    assert engine.skipped_steps == 1
    for param, value in zip(model.parameters(), before, strict=True):
        assert torch.equal(safe_get_full_fp32_param(param), value)
    engine.backward(square(engine, vectors(world_size, 0, 0)[rank].half()).float())
    engine.step()
    assert engine.skipped_steps == 1
    engine.destroy()


@ranks(1)
def test_one_rank_sends_nothing_and_so_quantizes_nothing(rank, world_size):
    found = []
    for zero in ({}, WEIGHTS | GRADIENTS):
        engine = _engine(stack(), zero_config(3, **zero))
        found.append(_train(engine, rank, world_size, 3))
        engine.destroy()
    assert found[0] == found[1]


@ranks(2, 4)
def test_loco_trains_and_counts_what_it_keeps(rank, world_size):
    """Error feedback changes the numbers, not that the loss falls; the error is as large as the gradients."""
    for extra in ({}, {"mics_shard_size": 2}):
        config = zero_config(2, zeropp_loco_param={"err_beta": 0.5, "reset_T": 7}, **GRADIENTS, **extra)
        engine = _engine(stack(), config)
        losses = _train(engine, rank, world_size, 12)
        assert losses[-1] < 0.6 * losses[0]
        numels = sum(group.layout.padded_numel for group in engine.runtime.groups)
        # Between steps nothing else of gradients is held.
        assert engine.memory_bytes()["grads"] >= 4 * numels
        engine.destroy()
        plain = _engine(stack(), zero_config(2, **GRADIENTS, **extra))
        assert _train(plain, rank, world_size, 12) != losses
        plain.destroy()


FROZEN = {"zero_quantized_nontrainable_weights": True, "zero_quantized_block_size": 32}


def _half_frozen():
    model = stack()
    for param in model.blocks.parameters():
        param.requires_grad_(False)
    return model


@pytest.mark.parametrize("bits", [8, 4])
@ranks(2, 4)
def test_frozen_weights_are_kept_and_sent_as_codes(rank, world_size, bits):
    """Forward sees the codes' values, so do checkpoints; the bytes at rest and on the wire are those of the codes."""
    model, form = _half_frozen(), BlockFormat(bits, 32)
    plain = _engine(_half_frozen(), zero_config(3))
    reference = _quantized(plain, model, form)
    originals = dict(stack().named_parameters())
    for name, param in reference.named_parameters():
        if param.requires_grad:
            param.data = originals[name].data
    frozen_numel = [group.store.numel() for group in plain.runtime.groups if not group.is_trainable]
    assert frozen_numel
    engine = _engine(model, zero_config(3, zero_quantized_weights_bits=bits, **FROZEN))
    held = [group.nbytes()["params"] for group in engine.runtime.groups if not group.is_trainable]
    assert held == [form.nbytes(numel) for numel in frozen_numel]
    batch = vectors(world_size, 0, 0)[rank]
    recorder = CommRecorder()
    with observing(recorder):
        loss = square(engine, batch)
    assert loss.item() == pytest.approx(square(reference, batch).item(), rel=1e-6)
    sent = Counter(event.nbytes for event in recorder.events if event.op == "all_gather")
    assert all(sent[world_size * form.nbytes(numel)] for numel in frozen_numel)
    engine.backward(loss)
    engine.step()
    expected = dict(reference.named_parameters())
    for name, value in engine.module_state_dict().items():
        if not expected[name].requires_grad:
            assert torch.equal(value, expected[name].detach())
    losses = _train(engine, rank, world_size, 8)
    assert losses[-1] < losses[0]


@ranks(2)
def test_quantized_frozen_weights_can_be_written_saved_loaded_and_trained(rank, world_size, tmp_path):
    model = _half_frozen()
    engine = _engine(model, zero_config(3, **FROZEN))
    name, param = next((name, param) for name, param in model.named_parameters() if not param.requires_grad)
    with GatheredParameters([param], modifier_rank=0):
        if rank == 0:
            param.fill_(0.5)
    saved = engine.module_state_dict()
    if rank == 0:
        assert torch.equal(saved[name], torch.full_like(saved[name], 0.5)), "a constant block is exact"
    engine.save_checkpoint(tmp_path)
    other = _engine(_half_frozen(), zero_config(3, **FROZEN))
    other.load_checkpoint(tmp_path)
    for key, value in other.module_state_dict().items():
        assert torch.equal(value, saved[key])
    other.unfreeze([name])
    assert torch.equal(
        safe_get_full_fp32_param(dict(other.module.named_parameters())[name]), torch.full(param.shape, 0.5)
    )
    _train(other, rank, world_size, 2)
    assert not torch.equal(other.module_state_dict()[name], saved[name])


@pytest.mark.parametrize(
    ("section", "path"),
    [
        ({"stage": 2, **WEIGHTS}, "zero_quantized_weights"),
        ({"stage": 1, **GRADIENTS}, "zero_quantized_gradients"),
        ({"stage": 2, "reduce_scatter": False, **GRADIENTS}, "zero_quantized_gradients"),
        ({"stage": 3, "zero_quantized_weights_bits": 6, **WEIGHTS}, "zero_quantized_weights_bits"),
        ({"stage": 3, "zero_quantized_block_size": 33, **WEIGHTS}, "zero_quantized_block_size"),
        ({"stage": 3, "zeropp_loco_param": {}}, "zeropp_loco_param"),
        ({"stage": 3, "zeropp_loco_param": {"reset_T": 0}, **GRADIENTS}, "zeropp_loco_param.reset_T"),
        ({"stage": 2, "zero_quantized_nontrainable_weights": True}, "zero_quantized_nontrainable_weights"),
    ],
)
def test_what_cannot_be_is_an_error(section, path):
    with pytest.raises(ConfigError) as caught:
        load_config({"zero_optimization": section})
    assert [fault.path for fault in caught.value.faults] == [f"zero_optimization.{path}"]
