"""How much memory a rank needs to build a model and load its weights, with and without `zero.Init`.

Starts fresh ranks for each way, and prints the growth of each rank's resident memory at its highest, beside this
rank's share of the model and the largest layer:

    python benchmarks/init_memory.py --ranks 4
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile

LIMIT = 1.35  # times (share + largest layer)
MIB = 2**20


def llama(size: str):
    """A Llama-like configuration of about 300 million parameters, or a tiny one to try the script."""
    from transformers import LlamaConfig

    hidden, layers, vocabulary = (1024, 18, 32000) if size == "300m" else (128, 4, 2000)
    return LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=hidden * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64,
        tie_word_embeddings=False,
    )


def write_weights(folder: str, size: str) -> None:
    """Random weights as sharded safetensors files; in a process of its own, which needs the whole model."""
    import torch
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    LlamaForCausalLM(llama(size)).save_pretrained(folder, max_shard_size="200MB")


def resident(field: str) -> int:
    """Bytes: `VmHWM` at its highest since `reset_peak`, `VmRSS` now."""
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


def reset_peak() -> None:
    """Begin a new highest."""
    pathlib.Path("/proc/self/clear_refs").write_text("5")


def run_rank(way: str, size: str, folder: str) -> None:
    """Build and load in this rank; rank 0 prints what was measured, of all ranks, as JSON."""
    import torch
    from transformers import LlamaForCausalLM

    import fullspeed
    from fullspeed import zero
    from fullspeed.comm import all_gather_object, barrier

    fullspeed.init_distributed()
    config = llama(size)
    sharded = torch.nn.Linear(8, 8)  # everything that is imported or set up on first use
    with zero.Init():
        sharded = torch.nn.Linear(8, 8)
    del sharded
    barrier()
    reset_peak()
    before = resident("VmRSS")
    if way == "zero.Init":
        with zero.Init():
            model = LlamaForCausalLM(config)
        built = resident("VmHWM") - before
        zero.load_weights(model, folder)
    else:
        model = LlamaForCausalLM(config)
        built = resident("VmHWM") - before
        zero.load_weights(model, folder)
    grown = resident("VmHWM") - before
    peaks = all_gather_object((built, grown))
    if torch.distributed.get_rank() == 0:
        numels = [param.numel() for param in model.parameters()]
        print(json.dumps({"peaks": peaks, "model": 4 * sum(numels), "largest": 4 * max(numels)}), flush=True)


def measure(way: str, args: argparse.Namespace, folder: str) -> dict:
    """Start the ranks of one way and read what rank 0 printed."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(args.ranks)]
    command += [__file__, "--way", way, "--size", args.size, "--folder", folder]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment).stdout
    return json.loads(next(line[line.index("{") :] for line in output.splitlines() if '"peaks"' in line))


def main() -> None:
    """Measure all ways and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--size", choices=("300m", "tiny"), default="300m")
    parser.add_argument("--way", help="internal: run as a rank")
    parser.add_argument("--folder", help="internal: where the weights are")
    parser.add_argument("--local_rank", type=int, default=0)
    args = parser.parse_args()
    if args.way:
        run_rank(args.way, args.size, args.folder)
        return
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [sys.executable, "-c", f"import init_memory; init_memory.write_weights({folder!r}, {args.size!r})"],
            check=True, cwd=pathlib.Path(__file__).parent, capture_output=True,
        )  # fmt: skip
        print("| way | model MiB | share + largest layer MiB | built MiB | loaded MiB | ratio |")
        print("|---|---|---|---|---|---|")
        for way in ("zero.Init", "whole on every rank"):
            found = measure(way, args, folder)
            bound = found["model"] / args.ranks + found["largest"]
            built, loaded = (max(peak[index] for peak in found["peaks"]) for index in (0, 1))
            print(
                f"| {way} | {found['model'] / MIB:.0f} | {bound / MIB:.0f} | {built / MIB:.0f} | {loaded / MIB:.0f} "
                f"| {loaded / bound:.2f} |"
            )


if __name__ == "__main__":
    main()
