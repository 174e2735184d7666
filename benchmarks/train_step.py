"""How fast is one training step? FullSpeed, DDP, FSDP2 and DeepSpeed on the same work, in turns.

Two ranks of one thread each train the model of `systems.py`. In every round every system runs once, in
fresh processes, one system at a time, so that a change in the machine's mood hits all of them. `README.md`
here has the commands.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from typing import IO, Any

from systems import DEEPSPEED, FULLSPEED, MICRO_BATCH, SEQUENCE_TOKENS, TORCH, VARIANTS, ZERO, batches, make_trainer

RANKS = 2
MARK = "RESULT "  # begins the line of a worker's output that is meant for us
Runs = dict[str, list[list[dict[str, Any]]]]  # system -> round -> rank -> what the worker measured


def resident_bytes(field: str) -> int:
    """A resident size of this process, as Linux counts: `VmRSS` is now, `VmHWM` the peak since its reset."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def reset_peak_resident() -> None:
    """Start a new peak, so that building the model does not count as training."""
    Path("/proc/self/clear_refs").write_text("5")


def run_worker(system: str, num_warmup: int, num_steps: int) -> None:
    """Train in this process, one rank of `system`, and print one line of JSON."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if system.startswith("fullspeed"):
        import fullspeed

        fullspeed.init_distributed(dist_backend="gloo")
    elif system.startswith("deepspeed"):
        import deepspeed

        deepspeed.init_distributed(dist_backend="gloo")
    else:
        dist.init_process_group("gloo")
    import_module("transformers.models.llama.modeling_llama")  # their code is no part of what training holds
    import_module("torch._dynamo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    before_bytes = resident_bytes("VmRSS")
    trainer = make_trainer(system)
    feed = batches(rank, world_size)
    reset_peak_resident()
    for _ in range(num_warmup):
        trainer.step(next(feed))
    inputs = [next(feed) for _ in range(num_steps)]
    dist.barrier()
    start = time.perf_counter()
    for tokens in inputs:
        loss = trainer.step(tokens)
    dist.barrier()
    seconds = time.perf_counter() - start
    mean_loss = loss.detach().float()
    dist.all_reduce(mean_loss)
    result = {
        "rank": rank,
        "step_s": seconds / num_steps,
        "tokens_per_s": world_size * MICRO_BATCH * SEQUENCE_TOKENS * num_steps / seconds,
        "loss": mean_loss.item() / world_size,
        "rss_before_model_bytes": before_bytes,
        "peak_rss_bytes": resident_bytes("VmHWM"),
        "max_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,  # model building included
        "held_bytes": trainer.held_bytes(),
    }
    print(MARK + json.dumps(result), flush=True)
    dist.destroy_process_group()


def free_port() -> int:
    """A TCP port nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def rank_environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    """What a launcher would set for one rank, and one thread to compute with."""
    return os.environ | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
    }


def run_system(system: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Run every rank of `system` in fresh processes.

    Returns one result a rank. Raises RuntimeError with the end of its log when a rank fails or is too slow.
    """
    world_size = 1 if system.startswith("alone") else RANKS
    python = options.deepspeed_python if system.startswith("deepspeed") else sys.executable
    counts = ["--steps", str(options.steps), "--warmup", str(options.warmup)]
    command = [str(python), __file__, "--worker", system, *counts]
    port = free_port()
    with ExitStack() as stack:
        logs = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(world_size)]
        ranks = []
        for rank, log in enumerate(logs):
            environment = rank_environment(rank, world_size, port)
            ranks.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log, text=True))
        try:
            ended = wait_for_all(ranks, time.monotonic() + options.timeout)
        finally:
            for process in ranks:
                process.kill()
                process.wait()
        what = "failed" if ended else f"did not finish in {options.timeout:.0f} s (--timeout)"
        return [read_result(log, f"rank {rank} of {system} {what}") for rank, log in enumerate(logs)]


def read_result(log: IO[str], complaint: str) -> dict[str, Any]:
    """The worker's line of JSON among whatever else it printed. Raises RuntimeError when there is none."""
    log.seek(0)
    text = log.read()
    line = next((line for line in text.splitlines() if line.startswith(MARK)), None)
    if line is None:
        raise RuntimeError(f"{complaint}; the end of its log:\n{text[-3000:]}")
    result: dict[str, Any] = json.loads(line.removeprefix(MARK))
    return result


def wait_for_all(processes: Sequence[subprocess.Popen[str]], deadline: float) -> bool:
    """Return True when all have ended or one has failed, False when the clock passes `deadline` first."""
    while time.monotonic() < deadline:
        codes = [process.poll() for process in processes]
        if any(codes) or None not in codes:
            return True
        time.sleep(0.05)
    return False


def run_rounds(systems: Sequence[str], options: argparse.Namespace) -> Runs:
    """Let the systems take turns. Returns system -> round -> rank -> result."""
    runs: Runs = {system: [] for system in systems}
    for round_index in range(options.rounds):
        shift = round_index % len(systems)  # nobody is always first
        for system in [*systems[shift:], *systems[:shift]]:
            ranks = run_system(system, options)
            runs[system].append(ranks)
            speed, loss = ranks[0]["tokens_per_s"], ranks[0]["loss"]
            print(f"round {round_index + 1}  {system:<20} {speed:8.0f} tokens/s  loss {loss:.6f}", flush=True)
    return runs


def peer_of(system: str, column: str) -> str:
    """The system that `column` compares `system` with; FSDP2 keeps parameters whole up to stage 2."""
    name, at, dtype = system.partition("@")
    stage = name.partition(":")[0].rpartition("-")[2]
    fsdp2 = "fsdp2-reshard" if stage == "3" else "fsdp2-keep"
    peers = {"DDP": "ddp", "DeepSpeed": f"deepspeed-{stage}", "FSDP2": fsdp2}
    return peers[column] + at + dtype


def spread(values: Sequence[float], digits: int) -> str:
    """Median and, behind it, the least and the most."""
    low, middle, high = min(values), statistics.median(values), max(values)
    return f"{middle:.{digits}f} ({low:.{digits}f}-{high:.{digits}f})"


HEADINGS = (
    "system",
    "tokens/s",
    "vs DDP",
    "vs DeepSpeed, same stage",
    "vs FSDP2",
    "peak MB a rank",
    "MB over imports",
    "loss",
)


def ratio_cell(system: str, column: str, speeds: dict[str, list[float]]) -> str:
    """Speed relative to the peer of `column`, round by round; empty for the peers themselves."""
    same_dtype, fp32 = peer_of(system, column), peer_of(system.partition("@")[0], column)
    other = speeds.get(same_dtype) or speeds.get(fp32)
    if other is None or not system.startswith("fullspeed"):
        return ""
    return spread([ours / theirs for ours, theirs in zip(speeds[system], other, strict=True)], 2)


def table_rows(runs: Runs) -> list[list[str]]:
    """One row a system, cells as text, in the order of HEADINGS."""
    speeds = {system: [ranks[0]["tokens_per_s"] for ranks in rounds] for system, rounds in runs.items()}
    rows = []
    for system, rounds in runs.items():
        ranks = [rank for one_round in rounds for rank in one_round]
        peak_bytes = max(rank["peak_rss_bytes"] for rank in ranks)
        growth_bytes = max(rank["peak_rss_bytes"] - rank["rss_before_model_bytes"] for rank in ranks)
        ratios = [ratio_cell(system, column, speeds) for column in ("DDP", "DeepSpeed", "FSDP2")]
        sizes = [f"{count / 2**20:.0f}" for count in (peak_bytes, growth_bytes)]
        rows.append([system, spread(speeds[system], 0), *ratios, *sizes, f"{ranks[0]['loss']:.6f}"])
    return rows


def loss_verdict(runs: Runs, tolerance: float = 1e-4) -> tuple[bool, str]:
    """Whether all fp32 systems of two ranks ended at the same loss, and a sentence that says so."""
    losses = {
        system: rank["loss"]
        for system, rounds in runs.items()
        if "@" not in system and not system.startswith("alone")
        for ranks in rounds
        for rank in ranks
    }
    if len(losses) < 2:
        return True, "Too few fp32 systems to compare losses."
    low, high = min(losses, key=losses.__getitem__), max(losses, key=losses.__getitem__)
    gap = losses[high] - losses[low]
    is_equal = gap <= tolerance
    verdict = f"Final fp32 losses of {len(losses)} systems {'agree' if is_equal else 'DISAGREE'}"
    return is_equal, f"{verdict}: {gap:.1e} from {low} up to {high} (allowed {tolerance:.0e})."


def describe_machine() -> dict[str, Any]:
    """What the numbers depend on besides the code."""
    import torch

    lines = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = [line for line in lines if line.startswith("model name")]
    return {
        "cpu": cpu[0].partition(":")[2].strip() if cpu else platform.processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "load_1min": os.getloadavg()[0],
    }


def as_markdown(rows: Sequence[Sequence[str]]) -> str:
    """A GitHub table, numbers to the right."""
    rule = ["---"] + ["--:"] * (len(HEADINGS) - 1)
    return "\n".join("| " + " | ".join(row) + " |" for row in [HEADINGS, rule, *rows]) + "\n"


def show(rows: Sequence[Sequence[str]]) -> None:
    """The table on screen."""
    from rich.console import Console
    from rich.table import Table

    table = Table(*HEADINGS)
    for row in rows:
        table.add_row(*row)
    console = Console()
    console.width = max(console.width, 150)
    console.print(table)


def chosen_systems(options: argparse.Namespace) -> list[str]:
    """The systems asked for, without those that need a missing interpreter."""
    default = [*FULLSPEED, *TORCH, *DEEPSPEED, "alone"]
    if options.dtype == "bf16":
        default = [*FULLSPEED, *(f"{system}@bf16" for system in FULLSPEED), "ddp"]
    systems = options.systems.split(",") if options.systems else default
    known = {*FULLSPEED, *VARIANTS, *TORCH, *DEEPSPEED, "alone"}
    unknown = [system for system in systems if system.removesuffix("@bf16") not in known]
    if unknown:
        sys.exit(f"unknown system {', '.join(unknown)}; choose from {', '.join(sorted(known))}, or with @bf16")
    if options.deepspeed_python is None and any(system.startswith("deepspeed") for system in systems):
        print("DeepSpeed is left out: give --deepspeed-python PATH (see benchmarks/README.md).")
        systems = [system for system in systems if not system.startswith("deepspeed")]
    return systems


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add = parser.add_argument
    add("--systems", help="comma-separated, e.g. fullspeed-3,ddp,deepspeed-3,fullspeed-3@bf16")
    add("--dtype", choices=("fp32", "bf16"), default="fp32", help="bf16 puts our bf16 beside our fp32")
    add("--rounds", type=int, default=5)
    add("--steps", type=int, default=6, help="timed steps a round")
    add("--warmup", type=int, default=2, help="steps before the clock starts")
    add("--timeout", type=float, default=600.0, help="seconds one system may take in a round")
    add("--deepspeed-python", type=Path, help="an interpreter that has deepspeed and transformers")
    add("--json", type=Path, help="write every result here")
    add("--markdown", type=Path, help="write the table here")
    add("--worker", metavar="SYSTEM", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    """Run the rounds and print the table. Returns 1 when losses disagree."""
    options = parse_arguments()
    if options.worker:
        run_worker(options.worker, options.warmup, options.steps)
        return 0
    machine = describe_machine()
    runs = run_rounds(chosen_systems(options), options)
    rows = table_rows(runs)
    agree, sentence = loss_verdict(runs)
    show(rows)
    print(sentence)
    if options.json:
        options.json.write_text(json.dumps({"machine": machine, "zero": ZERO, "runs": runs}, indent=1))
    if options.markdown:
        options.markdown.write_text(as_markdown(rows) + f"\n{sentence}\n")
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
