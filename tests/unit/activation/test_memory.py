"""The bytes between forward and backward are those of the formula."""

from __future__ import annotations

import pytest

from fullspeed import checkpointing
from fullspeed.activation.measure import SavedBytes
from tests.unit.activation.blocks import Block, blocks, hidden_states

LAYERS, BATCH, LENGTH, DIM, ITEMSIZE = 5, 2, 12, 32, 4
HIDDEN_BYTES = BATCH * LENGTH * DIM * ITEMSIZE


def _block_bytes() -> int:
    """What one block saves, from its list of operations (see `Block.forward`)."""
    norms = 2 * (HIDDEN_BYTES + 2 * BATCH * LENGTH * ITEMSIZE)  # output, mean and rstd; the input is counted apart
    attention = 3 * HIDDEN_BYTES + HIDDEN_BYTES + BATCH * 4 * LENGTH * ITEMSIZE  # q, k, v; output; log-sum-exp
    residual = HIDDEN_BYTES  # between the two halves
    mlp = 2 * 4 * HIDDEN_BYTES  # before and after gelu
    return HIDDEN_BYTES + norms + attention + residual + mlp


@pytest.mark.parametrize("num_checkpointed", [0, 1, LAYERS])
def test_a_checkpointed_block_costs_its_input(num_checkpointed):
    model = blocks(LAYERS, DIM, dropout=0.0)
    if num_checkpointed:
        checkpointing.checkpoint_modules(model, lambda fqn, module: fqn in map(str, range(num_checkpointed)))
    with SavedBytes() as saved:
        output = model(hidden_states(BATCH, LENGTH, DIM))
    assert output.requires_grad
    plain = LAYERS - num_checkpointed
    assert saved.nbytes() == num_checkpointed * HIDDEN_BYTES + plain * _block_bytes()


def test_on_the_host_nothing_stays():
    model = blocks(LAYERS, DIM, dropout=0.0)
    checkpointing.checkpoint_modules(model, Block)
    checkpointing.configure(None, checkpoint_in_cpu=True)
    with SavedBytes() as saved:
        output = model(hidden_states(BATCH, LENGTH, DIM))
    assert output.requires_grad
    assert saved.nbytes() == 0
    assert checkpointing.held_bytes() == (0, LAYERS * HIDDEN_BYTES)
