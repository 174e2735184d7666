"""Which collective libraries this torch build carries."""

from __future__ import annotations

import torch.distributed as dist

# Name of each library and the question torch answers about it.
_QUESTIONS = {
    "gloo": "is_gloo_available",
    "nccl": "is_nccl_available",
    "mpi": "is_mpi_available",
    "ucc": "is_ucc_available",
    "xccl": "is_xccl_available",
}


def available_backends() -> list[str]:
    """Names of the libraries that can be used here; empty when torch was built without distributed."""
    if not dist.is_available():
        return []
    return [name for name, question in _QUESTIONS.items() if dist.__dict__[question]()]
