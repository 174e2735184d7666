"""Does a model train whose states exceed the memory, with the numbers it would have had, and at what price?

    python benchmarks/offload.py                       # fails without offload, trains with it
    python benchmarks/offload.py --largest 4096        # the largest model in so many MiB a rank, per way

Every rank lives in a memory cgroup of its own, which limits and measures all that it takes, memory shared between
ranks once. Peaks leave out what the process held before it built the model. Needs root on Linux.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from train_step import free_port, rank_environment

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

MIB = 2**20
WIDTH, SEQUENCE_TOKENS = 768, 32
LAYER_NUMEL = 12 * WIDTH**2
LIVE_NUMEL = 2 * LAYER_NUMEL  # whole parameters at a time: one block that computes, one on its way
BYTES_PER_PARAM = {  # on every rank, times parameters / ranks: values, gradients, masters and moments in memory
    ("memory", "fp32"): 16, ("optimizer", "fp32"): 8, ("both", "fp32"): 4,
    ("memory", "bf16"): 16, ("optimizer", "bf16"): 4, ("both", "bf16"): 2,
}  # fmt: skip


class Run(NamedTuple):
    """One training: what waits in files, and how large it is."""

    way: str  # "memory", "optimizer" (masters and states in files), "both" (parameters too)
    precision: str
    layers: int
    ranks: int
    steps: int

    @property
    def numel(self) -> int:
        """Parameters, about."""
        return self.layers * LAYER_NUMEL


def configuration(run: Run, folder: str) -> dict[str, Any]:
    """Stage 3 with few whole parameters at a time."""
    zero: dict[str, Any] = {
        "stage": 3,
        "stage3_max_live_parameters": LIVE_NUMEL,
        "stage3_prefetch_bucket_size": LAYER_NUMEL,
        "stage3_max_reuse_distance": 0,
        "reduce_bucket_size": LAYER_NUMEL,
    }
    file = {"device": "nvme", "nvme_path": folder, "buffer_count": 3}
    if run.way in ("optimizer", "both"):
        zero["offload_optimizer"] = {**file, "pipeline_read": True, "pipeline_write": True}
    if run.way == "both":
        zero["offload_param"] = {**file, "max_in_cpu": 0}
    made: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": zero,
    }
    return made | ({"bf16": {"enabled": True}} if run.precision == "bf16" else {})


# ------------------------------------------------------------------------ a rank


class Cgroup(NamedTuple):
    """A memory cgroup of either version."""

    folder: Path
    is_first: bool  # version 1

    def limit(self, nbytes: int) -> None:
        """Have the kernel end who takes more."""
        name = "memory.limit_in_bytes" if self.is_first else "memory.max"
        self.folder.joinpath(name).write_text(str(nbytes))

    def taken_bytes(self) -> int:
        """Memory taken now."""
        return self._read("memory.usage_in_bytes" if self.is_first else "memory.current")

    def peak_bytes(self) -> int:
        """Memory taken at most."""
        return self._read("memory.max_usage_in_bytes" if self.is_first else "memory.peak")

    def _read(self, name: str) -> int:
        return int(self.folder.joinpath(name).read_text())

    def join(self) -> None:
        """Put this process into it."""
        self.folder.joinpath("cgroup.procs").write_text(str(os.getpid()))


def train(run: Run, folder: str, cgroup: Cgroup) -> None:
    """Train in this process, one rank, and print one line of JSON."""
    import torch
    from gpt import GPT, GPTConfig

    import fullspeed
    from fullspeed import zero

    torch.set_num_threads(1)
    fullspeed.init_distributed(dist_backend="gloo")
    rank = torch.distributed.get_rank()
    config = configuration(run, folder)
    first, *_ = fullspeed.initialize(model=torch.nn.Linear(8, 8), config=config)  # all that is set up once
    first.destroy()
    before_bytes = cgroup.taken_bytes()
    torch.manual_seed(0)
    with zero.Init(config_dict_or_path=config):
        model = GPT(GPTConfig(num_layers=run.layers, num_heads=12, width=WIDTH))
    engine, *_ = fullspeed.initialize(model=model, config=config)
    del model
    result: dict[str, Any] = {"losses": [], "step_s": [], "update_s": []}
    for step in range(run.steps):
        generator = torch.Generator().manual_seed(1000 * step + rank)
        text = torch.randint(0, 256, (1, SEQUENCE_TOKENS + 1), generator=generator)
        began = time.perf_counter()
        logits = engine(text[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), text[:, 1:].flatten())
        engine.backward(loss)
        updating = time.perf_counter()
        engine.step()
        ended = time.perf_counter()
        result["losses"].append(loss.item())
        result["step_s"].append(ended - began)
        result["update_s"].append(ended - updating)
    files = engine.runtime.state_files
    result |= {"peak_bytes": cgroup.peak_bytes() - before_bytes, "held": engine.memory_bytes()}
    result["spent"] = None if files is None else files.spent._asdict()
    result["numel"] = sum(group.numel for group in engine.runtime.groups)
    engine.destroy()
    print(json.dumps(result), flush=True)


@contextmanager
def rank_cgroup(cap_bytes: int | None) -> Iterator[Cgroup]:
    """A cgroup for one rank."""
    is_first = Path("/sys/fs/cgroup/memory").is_dir()
    root = Path("/sys/fs/cgroup/memory" if is_first else "/sys/fs/cgroup")
    cgroup = Cgroup(root / f"fullspeed-{os.getpid()}-{time.monotonic_ns()}", is_first)
    try:
        cgroup.folder.mkdir()
    except OSError as error:
        raise SystemExit(f"cannot make a memory cgroup: {error}") from error
    try:
        if cap_bytes is not None:
            cgroup.limit(cap_bytes)
        yield cgroup
    finally:
        cgroup.folder.rmdir()


def measure(run: Run, cap_bytes: int | None, folder: Path) -> list[dict[str, Any]] | None:
    """Every rank's result, or None when the kernel ended one for want of memory."""
    port = free_port()
    with ExitStack() as stack:
        ranks, logs = [], []
        for rank in range(run.ranks):
            cgroup = stack.enter_context(rank_cgroup(cap_bytes))
            logs.append(stack.enter_context(tempfile.TemporaryFile("w+")))
            words = [json.dumps(run), json.dumps([str(cgroup.folder), cgroup.is_first])]
            command = [sys.executable, __file__, "--worker", *words, "--folder", str(folder)]
            environment = rank_environment(rank, run.ranks, port)
            ranks.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=logs[-1], text=True))
        outputs = [process.communicate()[0] for process in ranks]
        if any(process.returncode for process in ranks):
            if any(process.returncode == -signal.SIGKILL for process in ranks):
                return None
            logs[0].seek(0)
            raise RuntimeError(f"a rank failed; the end of its log:\n{logs[0].read()[-3000:]}")
    return [json.loads(output.splitlines()[-1]) for output in outputs]


# ------------------------------------------------------------------------ tables


def formula_bytes(run: Run, held: dict[str, int], numel: int) -> int:
    """What a rank's peak should be: its share, buffers, whole values and gradients of the groups that are under way."""
    share = BYTES_PER_PARAM[run.way, run.precision] * numel // run.ranks
    gradient_bytes = 4 if run.precision == "fp32" else 2
    return share + held["buffers"] + held["peak_live"] + 2 * LAYER_NUMEL * gradient_bytes


def row(run: Run, cap_bytes: int | None, results: Sequence[dict[str, Any]] | None) -> str:
    """A line of the table."""
    what = f"| {run.way} | {run.precision} | {run.ranks} | {run.numel / 1e6:.0f} M "
    cap = "none" if cap_bytes is None else f"{cap_bytes // MIB}"
    if results is None:
        return f"{what}| {cap} | out of memory | | | | |"
    worst = max(results, key=lambda result: result["peak_bytes"])
    formula = formula_bytes(run, worst["held"], worst["numel"])
    peak, spent = worst["peak_bytes"], worst["spent"]
    text = f"{what}| {cap} | {worst['losses'][-1]:.6f} | {peak // MIB} | {formula // MIB} | {peak / formula:.2f} "
    step_s, update_s = worst["step_s"][-1], worst["update_s"][-1]
    if spent is None:
        return f"{text}| {step_s:.2f} | update {update_s:.2f} |"
    speed = spent["moved_bytes"] / update_s / 1e9
    return (
        f"{text}| {step_s:.2f} | update {update_s:.2f}: compute {spent['compute_s']:.2f}, waited for reads "
        f"{spent['read_s']:.2f}, for writes {spent['write_s']:.2f}; {speed:.2f} GB/s |"
    )


HEAD = """\
| in files | precision | ranks | parameters | cap MiB | last loss | peak MiB | formula MiB | ratio | step s | of which |
|---|---|---|---|---|---|---|---|---|---|---|"""


def prove(options: argparse.Namespace, folder: Path) -> None:
    """Without a cap, without offload under it, with offload under it: losses must agree."""
    print(HEAD, flush=True)
    for precision in options.precision.split(","):
        for ranks in (1, 2):
            cap = options.cap * MIB
            losses = []
            for way, limit in (("memory", None), ("memory", cap), ("optimizer", None), ("both", cap)):
                run = Run(way, precision, options.layers * ranks, ranks, options.steps)
                results = measure(run, limit, folder)
                print(row(run, limit, results), flush=True)
                if results is not None:
                    losses.append(results[0]["losses"])
            for found in losses:
                if any(abs(one - other) > 1e-6 for one, other in zip(found, losses[0], strict=True)):
                    raise SystemExit(f"losses differ: {losses}")


def find_largest(options: argparse.Namespace, folder: Path) -> None:
    """The most layers that train under the cap: halving between one that does and one that does not."""
    print(HEAD, flush=True)
    cap = options.largest * MIB
    for precision in options.precision.split(","):
        for way in ("memory", "optimizer", "both"):
            fits, results = 0, None
            too_large = 2 + cap // (BYTES_PER_PARAM[way, precision] * LAYER_NUMEL)
            guess = int(too_large * 0.85)
            while too_large - fits > max(1, fits // 20):
                run = Run(way, precision, guess, 1, 2)
                found = measure(run, cap, folder)
                if found is None:
                    too_large = guess
                else:
                    fits, results = guess, found
                guess = (fits + too_large) // 2
            print(row(Run(way, precision, fits, 1, 2), cap, results), flush=True)


def main() -> None:
    """Parse the command line and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--layers", type=int, default=28, help="of 7 million parameters each, a rank (default: %(default)s)")
    add("--cap", type=int, default=1560, help="MiB a rank (default: %(default)s)")
    add("--steps", type=int, default=3, help="updates (default: %(default)s)")
    add("--precision", default="fp32", help="fp32, bf16 or both with a comma (default: %(default)s)")
    add("--largest", type=int, metavar="MIB", help="find the largest models for so much memory instead")
    add("--folder", type=Path, default=Path(), help="on the disk to be used (here)")
    add("--worker", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        run, (cgroup_folder, is_first) = (json.loads(word) for word in options.worker)
        cgroup = Cgroup(Path(cgroup_folder), is_first)
        cgroup.join()
        train(Run(*run), str(options.folder), cgroup)
        return
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        (find_largest if options.largest else prove)(options, Path(folder))


if __name__ == "__main__":
    main()
