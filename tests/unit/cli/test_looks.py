"""`fullspeed report`, `config check`, `plot` and `bench`: what they print."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from fullspeed.base.errors import UsageError
from fullspeed.cli import aliases, plot
from fullspeed.cli import main as cli
from fullspeed.cli.bench_comm import COLUMNS, Row, Sweep, measure
from fullspeed.cli.bench_memory import host_actions
from fullspeed.monitor.sinks import JSONSink
from tests.ranks import ranks


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = cli.main(words)
    shown = capsys.readouterr()
    return code, shown.out, shown.err


def test_report_as_json_says_the_same_and_names_kernels(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "report", "--json")
    rows = json.loads(out)
    assert code == 0
    assert rows["torch"] == torch.__version__
    assert rows["tensorboard"] != "not installed"
    assert rows["kernel quantize"].startswith(("native (", "torch (", "triton ("))
    assert rows["kernel optimizer_update"].startswith(
        "native (" if rows["native library"][:6] == "loaded" else "torch ("
    )
    assert "deepspeed module" in rows


@pytest.fixture
def config(tmp_path: Path) -> Any:
    """Writes a configuration; returns its path."""

    def write(**content: Any) -> str:
        file = tmp_path / "ds_config.json"
        file.write_text(json.dumps(content))
        return str(file)

    return write


def test_config_check_lists_every_fault(capsys: pytest.CaptureFixture[str], config: Any) -> None:
    file = config(gradient_clipp1ng=1, zero_optimization={"stage": 5}, amp={"enabled": True})
    code, out, err = run(capsys, "config", "check", file)
    assert (code, out) == (cli.USAGE_EXIT_CODE, "")
    assert "3 faults" in err
    assert all(key in err for key in ("gradient_clipp1ng", "zero_optimization.stage", "amp.enabled"))


def test_config_check_shows_values_batch_and_memory(capsys: pytest.CaptureFixture[str], config: Any) -> None:
    file = config(train_batch_size=16, gradient_accumulation_steps=2, bf16={"enabled": True},
                  zero_optimization={"stage": 3})  # fmt: skip
    code, out, _ = run(capsys, "config", "check", file, "--ranks", "4", "--params", "1e9")
    assert code == 0
    assert "no faults" in out
    assert json.loads(out.split("default\n")[1].split("\n\n")[0]) == {
        "train_batch_size": 16,
        "gradient_accumulation_steps": 2,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3},
    }
    assert "16 samples per update = 2 per forward * 2 accumulation steps * 4" in out
    assert f"{16e9 / 4 / 2**30:.2f} GiB on each rank" in out  # 16 bytes a parameter, all sharded
    assert "do nothing" not in out


def test_config_check_names_idle_settings_with_reasons(capsys: pytest.CaptureFixture[str], config: Any) -> None:
    file = config(train_batch_size=1, csv_monitor={"job_name": "x"}, zero_optimization={
        "stage": 1, "round_robin_gradients": True, "stage3_max_live_parameters": 9})  # fmt: skip
    _, out, _ = run(capsys, "config", "check", file)
    assert out.split("do nothing\n")[1].splitlines() == [
        "  zero_optimization.round_robin_gradients: the order of reductions follows backward",
        "  csv_monitor.job_name: csv_monitor.enabled is false",
        "  zero_optimization.stage3_max_live_parameters: counts at stage 3, and stage is 1",
    ]


def test_config_check_leaves_auto_to_integrations_and_checks_its_flags(
    capsys: pytest.CaptureFixture[str], config: Any
) -> None:
    _, out, _ = run(capsys, "config", "check", config(train_batch_size="auto"))
    assert '"auto", for an integration to fill in: train_batch_size' in out
    code, _, err = run(capsys, "config", "check", config(train_batch_size=3), "--ranks", "2")
    assert code == cli.USAGE_EXIT_CODE
    assert "train_batch_size" in err
    for flag, value in (("--ranks", "0"), ("--params", "0")):
        code, _, err = run(capsys, "config", "check", config(train_batch_size=4), flag, value)
        assert code == cli.USAGE_EXIT_CODE
        assert f"{flag} is 0" in err


def write_run(folder: Path) -> None:
    sink = JSONSink(folder)
    for samples in (4, 8, 12):
        values = {"train_loss": 1 / samples, "lr": 0.1, "samples_per_s": 3.0, "memory_allocated_bytes": 2.0**30}
        sink.write_scalars(samples, {f"Train/Samples/{name}": value for name, value in values.items()})
    sink.write_scalars(12, {"Eval/other": 1.0})
    sink.close()


def test_plot_chooses_panels_by_name() -> None:
    points = [(4, 1.0)]
    names = ("Train/Samples/train_loss", "Train_Samples_lr", "Train/Samples/memory_allocated_bytes", "Eval/other")
    panels = plot.choose_panels(dict.fromkeys(names, points))
    assert {title: list(curves) for title, curves in panels.items()} == {
        "loss": ["Train/Samples/train_loss"],
        "learning rate": ["Train_Samples_lr"],
        "memory in GiB": ["Train/Samples/memory_allocated_bytes"],
    }


def test_plot_draws_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    write_run(tmp_path / "run")
    code, out, _ = run(capsys, "plot", str(tmp_path / "run"))
    assert (code, out) == (0, f"{tmp_path / 'run' / 'curves.png'}\n")
    assert (tmp_path / "run" / "curves.png").read_bytes().startswith(b"\x89PNG")
    code, _, err = run(capsys, "plot", str(tmp_path / "run"), "-o", str(tmp_path / "a.bogus"))
    assert code == cli.USAGE_EXIT_CODE
    assert "a.bogus" in err


def test_plot_says_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="no run at"):
        plot.describe([str(tmp_path / "nowhere")])
    sink = JSONSink(tmp_path / "other")
    sink.write_scalars(4, {"Eval/other": 1.0})
    sink.close()
    with pytest.raises(UsageError, match="has none of: loss, gradient norm"):
        plot.describe([str(tmp_path / "other")])
    write_run(tmp_path / "run")
    monkeypatch.setattr(plot.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"matplotlib, which is not installed; .*fullspeed\[monitor\]"):
        plot.describe([str(tmp_path / "run")])


@ranks(2)
def test_bench_measures_every_operation_at_every_size(rank: int, world_size: int) -> None:
    rows = list(measure(Sweep(sizes=(1024, 4098), trials=3, warmups=1, dtype=torch.bfloat16)))
    operations = ["all_gather", "reduce_scatter", "all_reduce", "all_to_all"]
    assert [(row.op, row.nbytes) for row in rows] == [(op, size) for size in (1024, 4096) for op in operations]
    assert all(0 < row.ours_s < 10 and 0 < row.torch_s < 10 for row in rows)


def test_bench_speeds_are_those_of_a_link() -> None:
    text = Row("all_reduce", nbytes=4 * 10**9, ours_s=1.0, torch_s=2.0, world_size=4).text()
    assert len(text) == len(COLUMNS)
    assert text.split() == ["all_reduce", "4000000000", "1000.000", "2000.000", "6.00", "3.00"]


def test_bench_refuses_sizes_that_make_no_sense(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "bench", "comm", "--minsize", "20", "--maxsize", "10")
    assert code == cli.USAGE_EXIT_CODE
    assert "minsize <= maxsize" in err


def test_bench_io_measures_a_folder_and_names_the_best_settings(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    flags = ("--mib", "1", "--block-kib", "64,256", "--depth", "2", "--trials", "1", "--engine", "python")
    code, out, _ = run(capsys, "bench", "io", str(tmp_path), *flags)
    rows = [line.split() for line in out.splitlines() if line.startswith("python ")]
    assert (code, [row[:3] for row in rows]) == (0, [["python", "64", "2"], ["python", "256", "2"]])
    assert all(float(speed) >= 0 for row in rows for speed in row[3:])
    best = json.loads(out[out.index("{") :])["aio"]
    assert (best["queue_depth"], best["block_size"] in (65536, 262144)) == (2, True)
    assert list(tmp_path.iterdir()) == []
    code, _, err = run(capsys, "bench", "io", str(tmp_path / "absent"))
    assert (code, "absent is no folder" in err) == (cli.USAGE_EXIT_CODE, True)


def test_bench_io_reports_one_direction_where_asked(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    flags = ("--mib", "1", "--block-kib", "64", "--depth", "1", "--trials", "1", "--engine", "python")
    code, out, _ = run(capsys, "bench", "io", str(tmp_path), *flags, "--only", "write")
    (row,) = [line.split() for line in out.splitlines() if line.startswith("python ")]
    assert (code, row[3], float(row[4]) >= 0) == (0, "-", True)


def test_ds_io_and_ds_nvme_tune_take_their_users_flags(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []
    monkeypatch.setattr(aliases, "main", lambda words: asked.append(words) or 0)
    line = f"ds_io --folder {tmp_path} --io_size 64M --block_size 1M --queue_depth 32 --loops 2 --read --gpu"
    monkeypatch.setattr(sys, "argv", line.split())
    assert aliases.ds_io() == 0
    words = f"{tmp_path} --mib 64 --trials 2 --block-kib 1024 --depth 32 --only read"
    assert asked.pop() == ["bench", "io", *words.split()]
    assert capsys.readouterr().err == "ds_io: without effect here: --gpu\n"
    monkeypatch.setattr(sys, "argv", ["ds_nvme_tune", "--nvme_dir", "one", "two", "--no_read", "--io_size", "10M"])
    assert aliases.ds_nvme_tune() == 0
    expected = ["--mib", "10", "--trials", "3", "--only", "write"]
    assert asked == [["bench", "io", "one", *expected], ["bench", "io", "two", *expected]]
    monkeypatch.setattr(sys, "argv", ["ds_io", "--io_size", "much"])
    with pytest.raises(SystemExit):
        aliases.ds_io()
    assert "'much' is no size" in capsys.readouterr().err


def test_bench_memory_times_copies_and_updates(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "bench", "memory", "--mib", "1", "--threads", "1,2", "--trials", "1")
    rows = [line for line in out.splitlines() if line.startswith(("copy", "scale", "update"))]
    assert (code, len(rows)) == (0, 6)
    assert all(float(line.split()[-1]) > 0 for line in rows)
    code, _, err = run(capsys, "bench", "memory", "--mib", "0")
    assert (code, "must be at least 1" in err) == (cli.USAGE_EXIT_CODE, True)


def test_bench_memory_counts_the_bytes_of_an_update_once_each() -> None:
    moved = {name: nbytes for name, (_, nbytes) in host_actions(100).items()}
    assert moved == {"copy": 800, "scale in place": 800, "update (Adam)": 2800}
