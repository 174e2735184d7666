"""Which modules recompute, and which operations are spared it."""

from __future__ import annotations

import copy
import inspect
from collections import Counter

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from fullspeed import checkpointing
from fullspeed.activation.measure import SavedBytes
from fullspeed.activation.selective import CheckpointedForward
from fullspeed.base.errors import UsageError
from tests.unit.activation.blocks import Block, assert_same, blocks, gradients, hidden_states

MATMUL = torch.ops.aten.addmm.default
ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


class CountOps(TorchDispatchMode):
    """Counts the operations that reach the device."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[object] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[func] += 1
        return func(*args, **(kwargs or {}))


def _count(model: nn.Module) -> tuple[Counter[object], list[torch.Tensor]]:
    with CountOps() as ops:
        grads = gradients(model, hidden_states())
    return ops.counts, grads


def _saved_bytes(model: nn.Module) -> int:
    with SavedBytes() as saved:
        output = model(hidden_states())
    assert output.requires_grad
    return saved.nbytes()


@pytest.mark.parametrize("policy", ["full", "save_matmuls", [MATMUL]])
def test_policies_recompute_less_or_more_with_the_same_gradients(policy):
    model = blocks()
    plain, expected = _count(model)
    checkpointing.checkpoint_modules(model, Block, policy)
    counts, grads = _count(model)
    assert_same(grads, expected)
    again = {op: counts[op] - plain[op] for op in (MATMUL, ATTENTION)}
    # Four linear layers and one attention a block. The last layer's output is needed by nobody in backward.
    assert again == {
        "full": {MATMUL: 12, ATTENTION: 4},
        "save_matmuls": {MATMUL: 0, ATTENTION: 0},
    }.get(str(policy), {MATMUL: 0, ATTENTION: 4})


def test_a_checkpointed_block_keeps_its_input_only():
    model, x = blocks(), hidden_states()
    plain = _saved_bytes(model)
    checkpointing.checkpoint_modules(model, Block)
    assert _saved_bytes(model) == 4 * x.nbytes < plain / 10


def test_every_other_block():
    model = blocks(5)
    expected = gradients(model, hidden_states())
    handle = checkpointing.checkpoint_modules(model, lambda fqn, module: isinstance(module, Block), every=2)
    assert handle.fqns == ["0", "2", "4"]
    assert [isinstance(block.forward, CheckpointedForward) for block in model] == [True, False, True, False, True]
    assert_same(gradients(model, hidden_states()), expected)


def test_objects_change_and_classes_do_not():
    model, other = blocks(2), Block()
    handle = checkpointing.checkpoint_modules(model, Block)
    assert "forward" not in vars(other)
    assert list(inspect.signature(model[0].forward).parameters) == ["x", "scale"]
    assert model[0](hidden_states(), scale=0.5).requires_grad
    twin = copy.deepcopy(model)
    assert twin[0].forward.__wrapped__.__self__ is twin[0]
    handle.remove()
    handle.remove()
    assert all("forward" not in vars(block) for block in model)
    assert isinstance(twin[0].forward, CheckpointedForward)


def test_a_forward_that_somebody_put_there_comes_back():
    model = blocks(1)
    theirs = model[0].forward = lambda x: x * 2
    checkpointing.checkpoint_modules(model, Block).remove()
    assert model[0].forward is theirs


def test_only_the_outermost_chosen_module_recomputes():
    model = blocks(2)
    handle = checkpointing.checkpoint_modules(model, (Block, nn.Linear))
    assert handle.fqns == ["0", "1"]


def test_mistakes_are_told():
    model = blocks(1)
    with pytest.raises(UsageError, match="no module of the model is selected"):
        checkpointing.checkpoint_modules(model, nn.Conv2d)
    with pytest.raises(UsageError, match="'matmul': choose 'full', 'save_matmuls'"):
        checkpointing.checkpoint_modules(model, Block, "matmul")
    assert "forward" not in vars(model[0])
    checkpointing.checkpoint_modules(model, Block)
    with pytest.raises(UsageError, match="module '0' recomputes already"):
        checkpointing.checkpoint_modules(model, Block)


def test_chosen_modules_obey_the_configuration():
    model, x = blocks(), hidden_states()
    expected = gradients(model, x)
    checkpointing.checkpoint_modules(model, Block, "save_matmuls")
    checkpointing.configure(None, checkpoint_in_cpu=True)
    output = model(x)
    assert checkpointing.held_bytes().host == 4 * x.nbytes
    del output
    assert_same(gradients(model, x), expected)
