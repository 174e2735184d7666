"""Checkpointed calls: what they take and return, what they recompute, where their inputs wait."""

from __future__ import annotations

import gc
import json

import pytest
import torch
from torch import nn

from fullspeed import checkpointing
from fullspeed.base.errors import ConfigError, UsageError
from fullspeed.base.log import logger
from tests.unit.activation.blocks import Block, assert_same, blocks, gradients, hidden_states

KINDS = (True, False)
PLACES = {
    "autograd": {},
    "host": {"checkpoint_in_cpu": True},
    "contiguous": {"partition_activations": True, "contiguous_checkpointing": True, "num_checkpoints": 4},
    "contiguous on the host": {
        "partition_activations": True,
        "contiguous_checkpointing": True,
        "num_checkpoints": 4,
        "checkpoint_in_cpu": True,
    },
}


class Checkpointed(nn.Module):
    """Blocks, each a checkpointed call."""

    def __init__(self, layers: nn.Sequential, use_reentrant: bool) -> None:
        super().__init__()
        self.layers, self.use_reentrant = layers, use_reentrant

    def forward(self, x):
        for layer in self.layers:
            x = checkpointing.checkpoint(layer, x, use_reentrant=self.use_reentrant)
        return x


class CountedCalls(nn.Module):
    """A module that counts how often it computes."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.num_calls = inner, 0

    def forward(self, x):
        self.num_calls += 1
        return self.inner(x)


@pytest.mark.parametrize("use_reentrant", KINDS)
@pytest.mark.parametrize("place", PLACES)
def test_gradients_are_those_of_the_plain_model_wherever_inputs_wait(place, use_reentrant):
    model, x = blocks(), hidden_states()
    expected = gradients(model, x)
    checkpointing.configure(None, **PLACES[place])
    counted = nn.Sequential(*map(CountedCalls, model))
    for _ in range(2):
        assert_same(gradients(Checkpointed(counted, use_reentrant), x), expected)
    assert [layer.num_calls for layer in counted] == [4] * 4
    gc.collect()
    assert checkpointing.held_bytes() == (0, 0)


@pytest.mark.parametrize("use_reentrant", KINDS)
def test_inputs_wait_where_they_are_told_to(use_reentrant):
    x = hidden_states()
    for place, held in (("host", (0, 4 * x.nbytes)), ("contiguous", (4 * x.nbytes, 0)), ("autograd", (0, 0))):
        checkpointing.configure(None, **PLACES[place])
        output = Checkpointed(blocks(), use_reentrant)(x)
        assert checkpointing.held_bytes() == held, place
        del output


@pytest.mark.parametrize("use_reentrant", KINDS)
def test_nested_arguments_and_outputs_of_any_kind(use_reentrant):
    x = torch.randn(3, requires_grad=True)
    seen = []

    def function(inputs, factor, log, nothing):
        log.append(factor)
        total = inputs["x"] * inputs["more"][0] * factor
        return {"total": total, "index": torch.arange(3)}, "name", nothing

    outputs, name, nothing = checkpointing.checkpoint(
        function, {"x": x, "more": (torch.full((3,), 2.0),)}, 5, seen, None, use_reentrant=use_reentrant
    )
    assert (name, nothing) == ("name", None)
    assert not outputs["index"].requires_grad
    outputs["total"].sum().backward()
    assert torch.equal(x.grad, torch.full((3,), 10.0))
    assert seen == [5, 5]  # the caller's own list, written in forward and recompute


@pytest.mark.parametrize("use_reentrant", KINDS)
def test_inputs_without_gradients_and_outputs_without_graph(use_reentrant):
    layer, x = nn.Linear(3, 3), torch.randn(2, 3)
    output = checkpointing.checkpoint(layer, x, use_reentrant=use_reentrant)
    output.sum().backward()
    assert torch.equal(layer.weight.grad, x.sum(0).expand(3, 3))
    assert not checkpointing.checkpoint(torch.tanh, x, use_reentrant=use_reentrant).requires_grad
    with torch.no_grad():
        assert not checkpointing.checkpoint(layer, x, use_reentrant=use_reentrant).requires_grad


@pytest.mark.parametrize("use_reentrant", KINDS)
@pytest.mark.parametrize("place", PLACES)
def test_integer_inputs_and_parameters_as_inputs(place, use_reentrant):
    checkpointing.configure(None, **PLACES[place])
    weight, index = nn.Parameter(torch.randn(4, 3)), torch.tensor([1, 3, 1])
    checkpointing.checkpoint(lambda w, i: w[i] ** 2, weight, index, use_reentrant=use_reentrant).sum().backward()
    expected = torch.zeros(4, 3)
    expected[1], expected[3] = 4 * weight[1], 2 * weight[3]
    assert torch.allclose(weight.grad, expected)
    assert checkpointing.held_bytes() == (0, 0)


def test_non_reentrant_calls_work_with_autograd_grad():
    x = torch.randn(3, requires_grad=True)
    (grad,) = torch.autograd.grad(checkpointing.non_reentrant_checkpoint(torch.square, x).sum(), x)
    assert torch.equal(grad, 2 * x)


def test_a_graph_may_be_used_twice():
    checkpointing.configure(None, checkpoint_in_cpu=True)
    layer, x = Block(), hidden_states()
    for use_reentrant in KINDS:
        loss = checkpointing.checkpoint(layer, x, use_reentrant=use_reentrant).sum()
        x.grad = None
        loss.backward(retain_graph=True)
        once = x.grad.clone()
        loss.backward()
        assert torch.allclose(x.grad, 2 * once)


def test_the_autograd_function_fills_the_list():
    x, outputs = torch.randn(3, requires_grad=True), []
    returned = checkpointing.CheckpointFunction.apply(lambda t, n: (t * n, n), outputs, x, 4)
    assert outputs == list(returned)
    outputs[0].sum().backward()
    assert torch.equal(x.grad, torch.full((3,), 4.0))
    outputs.clear()
    checkpointing.CheckpointFunction.apply(torch.tanh, outputs, x)
    assert [type(output) for output in outputs] == [torch.Tensor]


@pytest.mark.parametrize("use_reentrant", KINDS)
def test_recomputing_draws_what_the_forward_drew_and_leaves_later_draws_alone(use_reentrant):
    tracker = checkpointing.get_cuda_rng_tracker()
    drawn = []

    def noisy(x):
        with tracker.fork():
            apart = torch.rand(4)
        drawn.append(torch.stack([torch.rand(4), apart]))
        return x * drawn[-1].sum()

    checkpointing.model_parallel_cuda_manual_seed(3)
    x = torch.ones(1, requires_grad=True)
    output = checkpointing.checkpoint(noisy, x, use_reentrant=use_reentrant)
    with tracker.fork():
        torch.rand(100)
    torch.rand(100)
    outside, states = torch.get_rng_state(), tracker.get_states()
    output.backward()
    assert len(drawn) == 2
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0][0], drawn[0][1])
    assert torch.equal(torch.get_rng_state(), outside)
    assert torch.equal(tracker.get_states()["model-parallel-rng"], states["model-parallel-rng"])


def test_a_contiguous_buffer_is_allocated_once_and_used_again():
    checkpointing.configure(None, **PLACES["contiguous"])
    x, model = hidden_states(), Checkpointed(blocks(), True)
    gradients(model, x)
    place = checkpointing.current_checkpointer().place
    addresses = {rows.buffer.data_ptr() for rows in place._buffers.values()}
    assert place.allocated_bytes() == 4 * x.nbytes
    gradients(model, x)
    assert {rows.buffer.data_ptr() for rows in place._buffers.values()} == addresses
    gradients(model, hidden_states(length=9))
    assert place.allocated_bytes() == 4 * hidden_states(length=9).nbytes
    checkpointing.reset()
    assert checkpointing.current_checkpointer().place.allocated_bytes() == 0
    assert checkpointing.is_configured()


def test_more_checkpoints_than_rows_name_the_setting():
    checkpointing.configure(None, **{**PLACES["contiguous"], "num_checkpoints": 3})
    with pytest.raises(UsageError, match="number_checkpoints is 3"):
        Checkpointed(blocks(), True)(hidden_states())
    checkpointing.set_num_layers(4)
    gradients(Checkpointed(blocks(), True), hidden_states())


@pytest.mark.parametrize(
    ("settings", "missing"),
    [
        ({"contiguous_checkpointing": True, "num_checkpoints": 2}, "partition_activations"),
        ({"contiguous_checkpointing": True, "partition_activations": True}, "number_checkpoints"),
        ({"num_checkpoints": 0}, "number_checkpoints"),
    ],
)
def test_settings_that_do_not_fit_together_are_refused(settings, missing):
    with pytest.raises(ConfigError, match=missing):
        checkpointing.configure(None, **settings)
    assert not checkpointing.is_configured()


def test_arguments_win_over_the_configuration_and_defaults_fill_the_rest(tmp_path):
    section = {"cpu_checkpointing": True, "number_checkpoints": 7}
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"train_batch_size": 4, "activation_checkpointing": section}))
    for source in (str(file), {"activation_checkpointing": section}):
        checkpointing.configure(None, source, partition_activations=True, contiguous_checkpointing=True)
        section_now = checkpointing.current_settings()
        assert (section_now.cpu_checkpointing, section_now.number_checkpoints) == (True, 7)
        assert (section_now.partition_activations, section_now.contiguous_memory_optimization) == (True, True)
        checkpointing.configure(None, source, checkpoint_in_cpu=False)
        assert not checkpointing.current_settings().cpu_checkpointing
    checkpointing.configure(None)
    assert checkpointing.current_settings() == type(section_now)()


def test_partitioning_can_be_switched():
    checkpointing.configure(None)
    checkpointing.partition_activations_in_checkpoint(True)
    assert checkpointing.current_settings().partition_activations
    checkpointing.partition_activations_in_checkpoint(False)
    assert not checkpointing.current_settings().partition_activations


@pytest.mark.parametrize("use_reentrant", KINDS)
def test_profiling_times_each_unit_of_a_pass(use_reentrant, monkeypatch):
    lines = []
    monkeypatch.setattr(logger, "handle", lambda record: lines.append(record.getMessage()))
    checkpointing.configure(None, profile=True, synchronize=True)
    model, x = Checkpointed(blocks(3), use_reentrant), hidden_states()
    for _ in range(2):
        gradients(model, x)
        times = checkpointing.unit_times()
        assert sorted(unit.unit for unit in times) == [0, 1, 2]
        assert all(unit.forward_ms > 0 for unit in times)
        assert all(unit.recompute_ms > 0 for unit in times)
    assert len(lines) == 1  # the first pass's, when the second began
    assert "checkpointed units, forward + recompute in ms: 0: " in lines[0]
    checkpointing.configure(None)
    gradients(model, x)
    assert checkpointing.unit_times() == []


def test_changing_a_passed_on_tensor_in_place_is_noticed():
    checkpointing.configure(None, checkpoint_in_cpu=True)
    weight = nn.Parameter(torch.randn(3))
    output = checkpointing.checkpoint(torch.square, weight)
    with torch.no_grad():
        weight.add_(1)
    with pytest.raises(UsageError, match="changed in place"):
        output.sum().backward()
