"""`fullspeed.kernels.update` in plain PyTorch, its specification: torch's fused optimizers over fp32 values.

Tensors in 16 bits are widened, stepped and rounded a chunk at a time, so no temporary of their size is made.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fullspeed.kernels.update import Item, Update, kinds

_CHUNK_NUMEL = 1 << 20  # 16 MiB of fp32 temporaries; smaller ones cost more in starting threads than they save


class _Wide(NamedTuple):
    """A chunk in fp32: the tensors themselves where they are fp32, else copies to be rounded back."""

    param: Tensor
    grad: Tensor
    first: Tensor
    second: Tensor


@torch.no_grad()
def update(items: Sequence[Item], how: Update) -> None:
    """See `fullspeed.kernels.update.update`."""
    rule = _RULES[how.rule]
    for item in itertools.chain.from_iterable(kinds(items, how).values()):
        for part in _chunks(item):
            second = part.first if part.second is None else part.second
            wide = _Wide(part.param.float(), part.grad.float(), part.first.float(), second.float())
            rule(wide, item, how)
            _round_back(part, wide)


def _chunks(item: Item) -> Iterator[Item]:
    whole = _each(item, lambda tensor: tensor.detach().view(-1))
    if all(tensor is None or tensor.dtype == torch.float32 for tensor in whole[:5]):
        yield whole
        return
    for begin in range(0, item.param.numel(), _CHUNK_NUMEL):
        yield _each(whole, operator.itemgetter(slice(begin, begin + _CHUNK_NUMEL)))


def _each(item: Item, change: Callable[[Tensor], Tensor]) -> Item:
    """The item with all its tensors changed."""
    second, copy = (None if tensor is None else change(tensor) for tensor in (item.second, item.copy))
    return Item(change(item.param), change(item.grad), change(item.first), second, copy, item.step, item.lr)


def _round_back(part: Item, wide: _Wide) -> None:
    for narrow, source in ((part.param, wide.param), (part.first, wide.first), (part.second, wide.second)):
        if narrow is not None and narrow.dtype != torch.float32:
            narrow.copy_(source)
    if part.copy is not None:
        part.copy.copy_(wide.param)


def _adam(wide: _Wide, item: Item, how: Update) -> None:
    step = torch._fused_adamw_ if how.is_decoupled else torch._fused_adam_
    step(
        [wide.param], [wide.grad], [wide.first], [wide.second], [], [torch.tensor(item.step)],
        lr=item.lr, beta1=how.betas[0], beta2=how.betas[1], weight_decay=how.weight_decay, eps=how.eps,
        amsgrad=False, maximize=False,
    )  # fmt: skip


def _adagrad(wide: _Wide, item: Item, how: Update) -> None:
    assert not how.is_decoupled
    torch._fused_adagrad_(
        [wide.param], [wide.grad], [wide.first], [torch.tensor(1.0)],
        lr=item.lr, lr_decay=0.0, weight_decay=how.weight_decay, eps=how.eps, maximize=False,
    )  # fmt: skip


def _lion(wide: _Wide, item: Item, how: Update) -> None:
    beta1, beta2 = how.betas
    sign = torch.lerp(wide.first, wide.grad, 1 - beta1).sign_()
    if how.weight_decay:
        wide.param.mul_(1 - item.lr * how.weight_decay)
    wide.param.add_(sign, alpha=-item.lr)
    wide.first.lerp_(wide.grad, 1 - beta2)


_RULES: dict[str, Callable[[_Wide, Item, Update], None]] = {"adam": _adam, "adagrad": _adagrad, "lion": _lion}
