"""How much memory do activations take between forward and backward, and what does each remedy cost?

Two ranks of one thread hold the same transformer blocks and see the same data, as tensor-parallel ranks do. Memory is
counted, not sampled: the bytes of distinct storages that autograd, or one of FullSpeed's places, holds when the forward
is over, parameters left out. Beside it stands the formula.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from fullspeed import checkpointing
from fullspeed.activation.measure import SavedBytes
from fullspeed.activation.offload import ActivationOffload

RANKS = 2
ITEMSIZE = 4
MIB = 2**20


class Block(nn.Module):
    """Pre-norm attention and MLP; takes and returns (B, S, M)."""

    def __init__(self, dim: int, num_heads: int = 4) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Residual attention, then a residual MLP."""
        batch, length, dim = x.shape
        heads = self.qkv(self.norm1(x)).view(batch, length, 3, self.num_heads, -1)
        q, k, v = heads.permute(2, 0, 3, 1, 4)  # each (B, H, S, D)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(batch, length, dim)
        x = x + self.out(mixed)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Setup(NamedTuple):
    """One row: what is configured, and what the forward runs in."""

    name: str
    every: int = 0  # of so many blocks the first recomputes; 0: none does
    settings: dict[str, Any] | None = None  # of `checkpointing.configure`
    is_offloaded: bool = False


class Row(NamedTuple):
    """What was measured, in bytes and seconds."""

    name: str
    device: int
    formula: int
    host: int
    step_s: float


def setups(num_blocks: int) -> list[Setup]:
    """The rows, each but the first two with one remedy."""
    sharded = {"partition_activations": True}
    buffer = {"contiguous_checkpointing": True, "num_checkpoints": num_blocks}
    return [
        Setup("plain"),
        Setup("every block recomputes", every=1),
        Setup("every second block", every=2),
        Setup("every block, sharded over 2 ranks", every=1, settings=sharded),
        Setup("every block, sharded, one buffer", every=1, settings={**sharded, **buffer}),
        Setup("every block, on the host", every=1, settings={"checkpoint_in_cpu": True}),
        Setup("every block, sharded, on the host", every=1, settings={**sharded, "checkpoint_in_cpu": True}),
        Setup("plain, offloaded", is_offloaded=True),
    ]


def formula(setup: Setup, num_blocks: int, input_bytes: int, block_bytes: int) -> int:
    """Bytes on the device: a recomputing block keeps its input, another all it saves."""
    settings = setup.settings or {}
    if setup.is_offloaded or settings.get("checkpoint_in_cpu"):
        return 0
    num_recomputing = len(range(0, num_blocks, setup.every)) if setup.every else 0
    share = RANKS if settings.get("partition_activations") else 1
    return num_recomputing * input_bytes // share + (num_blocks - num_recomputing) * block_bytes


def measure(setup: Setup, model: nn.Sequential, x: torch.Tensor, num_steps: int, block_bytes: int) -> Row:
    """Run forwards and backwards under one setup."""
    mpu = SimpleNamespace(get_model_parallel_group=lambda: dist.group.WORLD)
    checkpointing.configure(mpu, **(setup.settings or {}))
    handle = checkpointing.checkpoint_modules(model, Block, every=setup.every) if setup.every else None
    offload = checkpointing.offload_activations(min_bytes=1, keep_last=0, max_leaving=0)
    context: ActivationOffload | AbstractContextManager[None] = offload if setup.is_offloaded else nullcontext()
    seconds, device, host = [], 0, 0
    for _ in range(1 + num_steps):
        start = time.perf_counter()
        with SavedBytes() as saved, context:
            output = model(x)
        held, counts = checkpointing.held_bytes(), offload.counts()
        device = saved.nbytes() + held.device + counts.device_bytes
        host = held.host + counts.host_bytes
        output.sum().backward()
        del output
        seconds.append(time.perf_counter() - start)
    if handle is not None:
        handle.remove()
    expected = formula(setup, len(model), x.nbytes, block_bytes)
    return Row(setup.name, device, expected, host, statistics.median(seconds[1:]))


def saved_by(forward: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> int:
    """Bytes that one forward saves."""
    with SavedBytes() as saved:
        output = forward(x)
    assert output.requires_grad
    return saved.nbytes()


def run_rank(rank: int, folder: str, options: argparse.Namespace) -> None:
    """Measure every setup; rank 0 prints."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(RANKS), LOCAL_RANK=str(rank))
    torch.set_num_threads(1)
    rendezvous = Path(folder, "rendezvous").as_uri()
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=RANKS)
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(options.dim) for _ in range(options.blocks)))
    x = torch.randn(options.batch, options.sequence, options.dim, requires_grad=True)
    block_bytes = saved_by(model[0], x)
    rows = [measure(setup, model, x, options.steps, block_bytes) for setup in setups(options.blocks)]
    if rank == 0:
        print_table(rows, x.nbytes, block_bytes)
    dist.destroy_process_group()
    if any(row.device != row.formula for row in rows):
        raise SystemExit("measured bytes differ from the formula")


def print_table(rows: list[Row], input_bytes: int, block_bytes: int) -> None:
    """Markdown: MiB a rank when the forward is over, and the time of a forward and backward."""
    print(f"One block saves {block_bytes / MIB:.2f} MiB, its input is {input_bytes / MIB:.2f} MiB.\n")
    print("| activations | MiB on the device | formula | MiB on the host | forward + backward | vs plain |")
    print("|---|--:|--:|--:|--:|--:|")
    for row in rows:
        memory = f"{row.device / MIB:.2f} | {row.formula / MIB:.2f} | {row.host / MIB:.2f}"
        print(f"| {row.name} | {memory} | {1e3 * row.step_s:.0f} ms | {row.step_s / rows[0].step_s:.2f} |")


def main() -> None:
    """Read the arguments and start the ranks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--sequence", type=int, default=256, help="tokens")
    parser.add_argument("--batch", type=int, default=2, help="sequences")
    parser.add_argument("--steps", type=int, default=3, help="timed forwards and backwards, after one that is not")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(run_rank, (folder, options), nprocs=RANKS)


if __name__ == "__main__":
    main()
