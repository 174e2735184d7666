"""`fullspeed.kernels.update` in the native library: one call for all tensors of the same dtypes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from fullspeed.kernels.native import DTYPES, TensorStruct, UpdateStruct, require
from fullspeed.kernels.update import Item, Kind, Update, kinds

_RULES = {"adam": 0, "adagrad": 1, "lion": 2}


def update(items: Sequence[Item], how: Update) -> None:
    """See `fullspeed.kernels.update.update`."""
    update_with(require().best_set, items, how)


def update_with(instruction_set: int, items: Sequence[Item], how: Update) -> None:
    """The same, by one of the instruction sets that the library names."""
    for kind, alike in kinds(items, how).items():
        struct = _update_struct(how, kind)
        tensors = (TensorStruct * len(alike))(*_tensor_structs(alike, how))
        code = require().functions.fs_update(struct, tensors, len(alike), torch.get_num_threads(), instruction_set)
        assert code == 0, kind


def _update_struct(how: Update, kind: Kind) -> UpdateStruct:
    codes = (0 if dtype is None else DTYPES[dtype] for dtype in kind[:4])
    beta1, beta2 = how.betas
    penalty = 0.0 if how.is_decoupled else how.weight_decay
    return UpdateStruct(_RULES[how.rule], *codes, beta1, beta2, 1 - beta1, 1 - beta2, how.eps, penalty, kind.shrink)


def _tensor_structs(items: Iterable[Item], how: Update) -> Iterator[TensorStruct]:
    is_adam, (beta1, beta2) = how.rule == "adam", how.betas
    for param, grad, first, second, copy, step, lr in items:
        step_size = lr / (1 - beta1**step) if is_adam else lr
        root_correction = math.sqrt(1 - beta2**step) if is_adam else 1.0
        addresses = (param.data_ptr(), grad.data_ptr(), first.data_ptr(), _address(second), _address(copy))
        yield TensorStruct(*addresses, param.numel(), step_size, root_correction)


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
