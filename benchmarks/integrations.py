"""Does Hugging Face's Trainer train alike on FullSpeed, on DeepSpeed and without either, and how fast?

    python benchmarks/integrations.py
    python benchmarks/integrations.py --deepspeed-python ds/bin/python

A small Llama learns source text with a DeepSpeed configuration whose values are "auto", once for each system, stage,
number of ranks and precision, each in fresh processes. The table shows the largest difference of a loss to that of the
first system in the row's group, the first and the last loss, and tokens per second without the first step. `plain` is
the Trainer by itself, so it takes part where optimizer and schedule are its own; groups `sections` let the
configuration name both.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import socket
import subprocess
import sys
import tempfile
import time
from typing import Any, NamedTuple

ROOT = pathlib.Path(__file__).parents[1]
STEPS = 8
STAGES = (0, 1, 2, 3)
# DeepSpeed compiles these at first use. Ranks that are ended meanwhile leave a lock behind, for which all later ones
# wait for ever: so they are compiled before the first run, by one process that nobody ends.
LOAD_OPS = """
import torch
from deepspeed.ops.adam import FusedAdam
from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder
FusedAdam([torch.nn.Parameter(torch.zeros(1))])
ShareMemCommBuilder().load()
"""


class Run(NamedTuple):
    """One training run."""

    system: str  # plain, fullspeed or deepspeed
    stage: int
    world_size: int
    sections: bool  # whether the configuration names optimizer and schedule
    lora: bool = False
    bf16: bool = False

    @property
    def group(self) -> str:
        """Runs that should have the same losses."""
        return " ".join(
            [
                "sections" if self.sections else "own optimizer",
                "bf16" if self.bf16 else "fp32",
                *(["LoRA"] if self.lora else []),
                f"{self.world_size} ranks",
            ]
        )


def matrix(with_deepspeed: bool) -> list[Run]:
    """Every run, group by group; the first of a group is what the others are compared with."""
    systems = ["fullspeed", *(["deepspeed"] if with_deepspeed else [])]
    runs = []
    for world_size in (1, 2):
        for lora in (False, True):
            runs.append(Run("plain", 0, world_size, False, lora))
            runs += [Run(system, stage, world_size, False, lora) for system in systems for stage in STAGES]
        runs += [Run(system, stage, world_size, True) for system in systems for stage in STAGES]
    return runs + [Run(system, stage, 2, True, bf16=True) for system in systems for stage in (1, 3)]


# ------------------------------------------------------------------ in a rank


def train(run: Run, result: pathlib.Path) -> None:
    """Train in this process and its peers; rank 0 writes losses and speed."""
    if run.system == "fullspeed":
        from fullspeed.compat import activate

        activate()
    import torch

    from tests.integration import hugging_face as hf

    torch.set_num_threads(1)
    config = None if run.system == "plain" else hf.auto_config(run.stage)
    if config and not run.sections:
        del config["optimizer"], config["scheduler"]
    with tempfile.TemporaryDirectory() as folder:
        args = hf.arguments(
            folder, config, max_steps=STEPS, bf16=run.bf16, per_device_train_batch_size=4 // run.world_size
        )
        trainer = hf.make_trainer(make_model(hf, run.lora), args)
        ends: list[float] = []
        trainer.add_callback(step_clock(ends))
        trainer.train()
    if trainer.is_world_process_zero():
        tokens = 8 * hf.LENGTH * (STEPS - 1)  # four samples in two micro-batches
        speed = tokens / (ends[-1] - ends[0])
        result.write_text(json.dumps({"losses": hf.logged(trainer, "loss"), "tokens_per_s": speed}))


def make_model(hf: Any, lora: bool) -> Any:
    """The model to train."""
    model = hf.tiny_llama(hidden_size=64, intermediate_size=128)
    if not lora:
        return model
    import torch
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(3)
    return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))


def step_clock(ends: list[float]) -> Any:
    """A callback that notes when each step ended."""
    from transformers import TrainerCallback

    class Clock(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            ends.append(time.monotonic())

    return Clock()


# ------------------------------------------------------------------ the driver


def compile_ops(python: str) -> None:
    """Let DeepSpeed compile what the runs need; minutes at the first time, seconds afterwards."""
    print("compiling DeepSpeed's operations, unless they are there", file=sys.stderr, flush=True)
    path = os.pathsep.join([str(pathlib.Path(python).absolute().parent), os.environ.get("PATH", "")])  # ninja is there
    with tempfile.TemporaryFile() as said:
        done = subprocess.run(
            [python, "-c", LOAD_OPS], env=os.environ | {"PATH": path}, stdout=said, stderr=said, check=False
        )
        said.seek(0)
        if done.returncode:
            raise SystemExit(f"DeepSpeed cannot load its operations:\n{said.read().decode()[-2000:]}")


def carry_out(run: Run, python: str, timeout_s: float) -> dict[str, Any]:
    """Start the run's ranks and wait; what rank 0 wrote, or the end of what a failed rank said."""
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        ranks = start_ranks(run, python, folder)
        try:
            deadline = time.monotonic() + timeout_s
            for rank in ranks:
                rank.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            return {"error": f"not finished after {timeout_s:.0f} s"}
        finally:
            for rank in ranks:
                rank.kill()
        if (folder / "result.json").exists():
            return dict(json.loads((folder / "result.json").read_text()))
        said = [log.read_text().strip().splitlines() for log in sorted(folder.glob("*.log"))]
        return {"error": next((lines[-1] for lines in said if lines), "no output")}


def start_ranks(run: Run, python: str, folder: pathlib.Path) -> list[subprocess.Popen[bytes]]:
    """The processes of a run; they write their output and the result to `folder`."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    paths = [str(ROOT), str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    shared = {
        "WORLD_SIZE": str(run.world_size),
        "LOCAL_WORLD_SIZE": str(run.world_size),
        "LOCAL_SIZE": str(run.world_size),  # of which DeepSpeed makes its shared memory
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(paths),
    }
    command = [python, __file__, "--rank-of", json.dumps(run), str(folder / "result.json")]
    started = []
    for rank in range(run.world_size):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        with open(folder / f"rank{rank}.log", "w") as log:
            started.append(subprocess.Popen(command, env=os.environ | shared | own, stdout=log, stderr=log))
    return started


def main() -> None:
    """Run the matrix and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--deepspeed-python", help="a Python that has DeepSpeed, transformers, accelerate and peft")
    parser.add_argument("--only", default="", help="only groups whose name contains this")
    parser.add_argument("--timeout", type=float, default=300, help="seconds for one run (default: 300)")
    parser.add_argument("--rank-of", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_of:
        train(Run(*json.loads(options.rank_of[0])), pathlib.Path(options.rank_of[1]))
        return
    if options.deepspeed_python:
        compile_ops(options.deepspeed_python)
    print("| group | system | stage | largest difference of a loss | first and last loss | tokens/s |")
    print("|---|---|--:|--:|--:|--:|")
    references: dict[str, list[float]] = {}
    for run in matrix(options.deepspeed_python is not None):
        if options.only not in run.group:
            continue
        python = options.deepspeed_python if run.system == "deepspeed" else sys.executable
        found = carry_out(run, python, options.timeout)
        shown = found.get("error", "")
        if not shown:
            reference = references.setdefault(run.group, found["losses"])
            difference = max(abs(a - b) for a, b in zip(found["losses"], reference, strict=True))
            ends = f"{found['losses'][0]:.4f}, {found['losses'][-1]:.4f}"
            shown = f"{difference:.1e} | {ends} | {found['tokens_per_s']:.0f}"
        print(f"| {run.group} | {run.system} | {run.stage} | {shown} |", flush=True)


if __name__ == "__main__":
    main()
