"""Compare the training step of two checkouts, step by step.

    git worktree add ../before COMMIT
    python benchmarks/versions.py ../before . --systems fullspeed-3,fullspeed-0

Both train at once, each with two ranks, and take turns: while one makes a step the other waits. What else the machine
does then meets both alike, so far smaller differences show than between runs that follow each other. The model and the
settings are this checkout's (`systems.py`) for both.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO, NamedTuple

from train_step import RANKS, free_port, rank_environment

READY, GO = "READY", "GO"
WARMUP_STEPS = 3


class Step(NamedTuple):
    """What one step took."""

    seconds: float
    cpu_s: float  # of all ranks


def serve_steps(system: str) -> None:
    """Train in this process, one rank of `system`: a step for every line read, until there is none."""
    import torch

    import fullspeed

    print(Path(fullspeed.__file__).parent, flush=True)
    torch.set_num_threads(1)
    fullspeed.init_distributed(dist_backend="gloo")
    import torch.distributed as dist
    from systems import batches, make_trainer

    trainer, feed = make_trainer(system), batches(dist.get_rank(), dist.get_world_size())
    for _ in range(WARMUP_STEPS):
        trainer.step(next(feed))
    print(READY, flush=True)
    for _ in sys.stdin:
        tokens, before_s = next(feed), time.process_time()
        trainer.step(tokens)
        print(json.dumps({"cpu_s": time.process_time() - before_s}), flush=True)


class Job:
    """The ranks of one checkout; they work only inside `step`."""

    def __init__(self, checkout: Path, system: str, log: IO[str]) -> None:
        port = free_port()
        command = [sys.executable, __file__, "--worker", system]
        self._log = log
        self._ranks = []
        for rank in range(RANKS):
            environment = rank_environment(rank, RANKS, port) | {"PYTHONPATH": str(checkout / "src")}
            self._ranks.append(
                subprocess.Popen(
                    command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
                )
            )
        for process in self._ranks:
            used = self._read(process)
            if Path(used) != checkout / "src" / "fullspeed":
                raise RuntimeError(f"a rank imports FullSpeed from {used}, not from {checkout}")
            while self._read(process) != READY:
                pass

    def step(self) -> Step:
        """Let all ranks make one step."""
        start_s = time.perf_counter()
        for process in self._ranks:
            assert process.stdin is not None
            process.stdin.write(f"{GO}\n")
            process.stdin.flush()
        cpu_s = sum(float(json.loads(self._read(process))["cpu_s"]) for process in self._ranks)
        return Step(time.perf_counter() - start_s, cpu_s)

    def end(self) -> None:
        """End all ranks."""
        for process in self._ranks:
            process.kill()
            process.wait()

    def _read(self, process: subprocess.Popen[str]) -> str:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            self._log.seek(0)
            raise RuntimeError(f"a rank ended; the end of its log:\n{self._log.read()[-3000:]}")
        return line.strip()


def compare(checkouts: list[Path], system: str, num_steps: int) -> list[list[Step]]:
    """The steps of each checkout in one start of both."""
    jobs: list[Job] = []
    with tempfile.TemporaryFile("w+") as log:
        try:
            for checkout in checkouts:
                jobs.append(Job(checkout, system, log))
            steps: list[list[Step]] = [[] for _ in jobs]
            for index in range(num_steps):
                for which in range(len(jobs))[:: 1 if index % 2 else -1]:  # nobody is always first
                    steps[which].append(jobs[which].step())
            return steps
        finally:
            for job in jobs:
                job.end()


def main() -> None:
    """Parse the command line, compare, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkouts", type=Path, nargs="*", help="two folders: before, after")
    parser.add_argument("--systems", default="fullspeed-3", help="see train_step.py (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=20, help="steps of each in a start (default: %(default)s)")
    parser.add_argument("--starts", type=int, default=3, help="times both start anew (default: %(default)s)")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        serve_steps(options.worker)
        return
    if len(options.checkouts) != 2:
        parser.error("name two checkouts")
    checkouts = [path.resolve() for path in options.checkouts]
    for system in options.systems.split(","):
        ratios = []
        for start in range(options.starts):
            before, after = compare(checkouts, system, options.steps)
            pairs = [one.seconds / other.seconds for one, other in zip(before, after, strict=True)]
            cpu = statistics.median(one.cpu_s / other.cpu_s for one, other in zip(before, after, strict=True))
            ratios.append(statistics.median(pairs))
            print(f"{system} start {start + 1}: speed x {ratios[-1]:.3f}, by CPU time x {cpu:.3f}", flush=True)
        print(f"{system}: after is x {statistics.median(ratios):.3f} as fast ({min(ratios):.3f} to {max(ratios):.3f})")


if __name__ == "__main__":
    main()
