"""Activations that wait in host memory: the same gradients, each byte counted, buffers used again."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import nn

from fullspeed import checkpointing
from fullspeed.activation.host_pool import HostPool
from fullspeed.activation.measure import SavedBytes
from fullspeed.activation.offload import ActivationOffload
from tests.unit.activation.blocks import Block, assert_same, blocks, gradients, hidden_states


class Inside(nn.Module):
    """A model whose forward runs in a context."""

    def __init__(self, model: nn.Module, context: object) -> None:
        super().__init__()
        self.model, self.context = model, context

    def forward(self, x):
        with self.context:
            return self.model(x)


def _plain_bytes(model: nn.Module) -> int:
    with SavedBytes() as saved:
        output = model(hidden_states())
    assert output.requires_grad
    return saved.nbytes()


@pytest.mark.parametrize(
    "settings",
    [{}, {"keep_last": 0, "prefetch": 0, "max_leaving": 0}, {"keep_last": 3, "prefetch": 100, "max_leaving": 100}],
)
@pytest.mark.parametrize("around_backward", [False, True])
def test_gradients_are_those_of_the_plain_model(settings, around_backward):
    model, x = blocks(), hidden_states()
    expected = gradients(model, x)
    offload = checkpointing.offload_activations(min_bytes=1, **settings)
    for _ in range(2):
        if around_backward:
            with offload:
                grads = gradients(model, x)
        else:
            grads = gradients(Inside(model, offload), x)
        assert_same(grads, expected)
    counts = offload.counts()
    assert counts.fetched == counts.offloaded > 50
    assert (counts.prefetched > 0) == (settings.get("prefetch") != 0)
    assert counts.host_bytes == counts.device_bytes == 0
    assert counts.host_buffers < counts.offloaded


def test_every_activation_waits_on_the_host_once():
    model = blocks()
    plain = _plain_bytes(model)
    offload = checkpointing.offload_activations(min_bytes=1, keep_last=0, max_leaving=0)
    with SavedBytes() as left:
        output = Inside(model, offload)(hidden_states())
    counts = offload.counts()
    assert left.nbytes() == 0
    assert (counts.host_bytes, counts.device_bytes) == (plain, 0) == (counts.offloaded_bytes, 0)
    del output
    assert offload.counts().host_bytes == 0


def test_small_ones_and_the_newest_stay():
    model, x = blocks(1, dropout=0.0), hidden_states()
    threshold = 2 * x.nbytes
    offload = checkpointing.offload_activations(min_bytes=threshold, keep_last=1, max_leaving=0)
    output = Inside(model, offload)(x)
    # qkv is 3 x, the MLP's middle is 4 x before and 4 x after gelu, and the latter is the newest.
    counts = offload.counts()
    assert (counts.offloaded, counts.host_bytes, counts.device_bytes) == (2, 7 * x.nbytes, 4 * x.nbytes)
    output.sum().backward()
    assert offload.counts().host_bytes == offload.counts().device_bytes == 0


def test_views_of_one_storage_move_together_and_small_parts_stay():
    offload = checkpointing.offload_activations(min_bytes=1, keep_last=0, max_leaving=0)
    x = torch.randn(4, 6, requires_grad=True)
    with offload:
        h = x * 1.0
        out = h.t().square().sum() + h[:2].square().sum() + h.view(24)[3:20:4].exp().sum() + h[0, :2].square().sum()
    # h once; the exponential's own result once; of h[0, :2] nothing, as it is a twelfth of h.
    assert offload.counts().offloaded == 2
    assert offload.counts().host_bytes == h.nbytes + 5 * 4
    out.backward()
    expected = 2 * x + torch.zeros(4, 6).index_fill_(0, torch.tensor([0, 1]), 2.0) * x
    expected.view(24)[3:20:4] += x.detach().view(24)[3:20:4].exp()
    expected[0, :2] += 2 * x.detach()[0, :2]
    assert torch.allclose(x.grad, expected)


def test_a_storage_changed_between_two_uses_is_saved_twice():
    offload = checkpointing.offload_activations(min_bytes=1, keep_last=0, max_leaving=0)
    x, weights = torch.randn(5), torch.ones(2, 5, requires_grad=True)
    first = x.clone()
    with offload:
        one = (x * weights[0]).sum()
        x.add_(1)
        two = (x * weights[1]).sum()
    (one + two).backward()
    assert torch.equal(weights.grad, torch.stack([first, first + 1]))


def test_parameters_stay():
    layer, x = nn.Linear(8, 8), torch.randn(4, 8, requires_grad=True)
    offload = checkpointing.offload_activations(min_bytes=1, keep_last=0, max_leaving=0)
    with offload:
        output = layer(x) + torch.nn.functional.linear(x, layer.weight.t())
    assert offload.counts().offloaded_bytes == x.nbytes
    output.sum().backward()
    assert layer.weight.grad is not None


def test_a_recompute_offloads_nothing():
    model, x = blocks(), hidden_states()
    expected = gradients(model, x)
    checkpointing.checkpoint_modules(model, Block)
    offload = checkpointing.offload_activations(min_bytes=1, keep_last=0)
    with offload:
        assert_same(gradients(model, x), expected)
    # The four blocks' inputs, and the last output, which the loss squares.
    assert offload.counts().offloaded == 5


def test_a_graph_that_no_backward_uses_gives_its_buffers_back():
    offload = checkpointing.offload_activations(min_bytes=1)
    output = Inside(blocks(), offload)(hidden_states())
    assert offload.counts().host_bytes > 0
    del output
    gc.collect()
    assert offload.counts().host_bytes == offload.counts().device_bytes == 0


def test_a_graph_may_be_used_twice():
    model, x = blocks(2, dropout=0.0), hidden_states()
    offload = checkpointing.offload_activations(min_bytes=1)
    loss = Inside(model, offload)(x).square().sum()
    loss.backward(retain_graph=True)
    once = x.grad.clone()
    loss.backward()
    assert torch.allclose(x.grad, 2 * once)


def test_hidden_states_of_checkpointed_modules_alone():
    model, x = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), *blocks(), nn.Tanh()), hidden_states()
    checkpointing.checkpoint_modules(model, Block)
    expected = gradients(model, x)
    offload = checkpointing.get_checkpoint_hidden_states_offloading_ctx_manager(
        min_offload_bytes=1, keep_last_count=1, max_fwd_stash_count=0
    )
    for times in (1, 2):
        with offload:
            assert_same(gradients(model, x), expected)
        assert offload.counts().offloaded == 3 * times
    assert offload.counts().host_buffers == 3
    assert offload.counts().peak_host_bytes == 3 * x.nbytes


def test_a_pool_reuses_buffers_of_a_size_and_keeps_few_free():
    pool = HostPool(pin=False, max_free=2)
    one, two, other = pool.take(8), pool.take(8), pool.take(16)
    assert (pool.used_bytes, pool.num_allocated) == (32, 3)
    address = one.data_ptr()
    pool.give_back(one)
    assert pool.take(8).data_ptr() == address
    assert pool.num_allocated == 3
    for buffer in (one, two, other):
        pool.give_back(buffer)
    assert (pool.used_bytes, pool.free_bytes, pool.peak_used_bytes) == (0, 24, 32)


class LateQueue:
    """A stand-in for a device's streams: a copy happens only when computing waits for it, or for one queued later.

    As on a device, a copy under way keeps no memory from being freed.
    """

    def __init__(self) -> None:
        self.waiting: list[tuple[int, Callable[[], torch.Tensor | None], Callable[[], torch.Tensor | None]]] = []
        self.num_copies = 0

    def copy(self, target, source):
        if target.numel():
            target.fill_(255)  # nan: what is read too early shows
        self.num_copies += 1
        self.waiting.append((self.num_copies, weakref.ref(target), weakref.ref(source)))
        return self.num_copies

    def wait(self, done):
        while self.waiting and self.waiting[0][0] <= done:
            _, target_of, source_of = self.waiting.pop(0)
            target, source = target_of(), source_of()
            assert target is not None
            assert source is not None
            target.copy_(source)


@pytest.mark.parametrize(
    ("keep_last", "prefetch", "max_leaving"), [(0, 0, 0), (1, 2, 4), (0, 3, 1), (2, 100, 2), (0, 1, 100)]
)
def test_nothing_is_read_or_written_before_the_copy_that_it_waits_for(keep_last, prefetch, max_leaving):
    model, x = blocks(), hidden_states()
    expected = gradients(model, x)
    queue = LateQueue()
    offload = ActivationOffload(
        min_bytes=1,
        keep_last=keep_last,
        prefetch=prefetch,
        max_leaving=max_leaving,
        pool=HostPool(pin=False, max_free=1000),
        queue=queue,
    )
    for _ in range(3):
        assert_same(gradients(Inside(model, offload), x), expected)
    assert queue.num_copies > 100
    output = Inside(model, offload)(x)
    assert output.requires_grad
    del output
    assert queue.waiting == []  # nothing is freed before its copy
    assert offload.counts().host_bytes == offload.counts().device_bytes == 0
