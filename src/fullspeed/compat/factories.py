"""The seam at which Transformers keeps `zero.Init` from narrowing the positions of rotary embeddings.

It replaces `zero_wrapper_for_fp_tensor_constructor` while a model is built, so that `torch.arange` keeps the dtype it
was asked for. Our `zero.Init` leaves explicit dtypes alone anyway, and replaces no function of torch: so what is put
here has nothing left to do, and is not called.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_orig_torch_arange = torch.arange


def zero_wrapper_for_fp_tensor_constructor(
    fn: Callable[..., torch.Tensor], target_fp_dtype: torch.dtype, target_device: torch.device
) -> Callable[..., torch.Tensor]:
    """`fn` with the device filled in, and the dtype of floating results that were not asked for in another one."""

    def make(*args: Any, **kwargs: Any) -> torch.Tensor:
        is_free = kwargs.get("dtype") is None
        made = fn(*args, **{"device": target_device, **kwargs})
        return made.to(target_fp_dtype) if is_free and made.is_floating_point() else made

    return make
