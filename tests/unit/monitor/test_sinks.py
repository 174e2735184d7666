"""Every sink writes what its own reader reads back."""

from __future__ import annotations

import csv
import io
import json
import struct
import time
import zipfile
from pathlib import Path

import pytest
from rich.console import Console

from fullspeed.base.errors import ConfigError, UsageError
from fullspeed.config import load_config
from fullspeed.config.monitor import Comet
from fullspeed.monitor import services
from fullspeed.monitor.dashboard import DashboardSink, curve
from fullspeed.monitor.history import read_run
from fullspeed.monitor.monitor import PACKAGES, Monitor
from fullspeed.monitor.services import CometSink, WandBSink
from fullspeed.monitor.sinks import CSVSink, JSONSink

LR, LOSS = "Train/Samples/lr", "Train/Samples/train_loss"
WRITTEN = [(4, {LR: 0.5, LOSS: 2.25}), (8, {LR: 0.25, LOSS: 1.5})]
CURVES = {LR: [(4, 0.5), (8, 0.25)], LOSS: [(4, 2.25), (8, 1.5)]}


def test_csv_has_one_file_per_name_and_goes_on_with_old_files(tmp_path: Path) -> None:
    for samples, values in WRITTEN:  # a sink for each, as a run that is resumed has
        sink = CSVSink(tmp_path / "job")
        sink.write_scalars(samples, values)
        sink.close()
        sink.close()
    rows = list(csv.reader((tmp_path / "job" / "Train_Samples_lr.csv").open()))
    assert rows == [["step", "lr"], ["4", "0.5"], ["8", "0.25"]]
    assert read_run(tmp_path / "job") == {name.replace("/", "_"): points for name, points in CURVES.items()}


def test_json_lines_are_whole_after_every_write_and_go_on(tmp_path: Path) -> None:
    first = JSONSink(tmp_path)
    first.write_scalars(*WRITTEN[0])
    assert [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()] == [
        {"samples": 4, LR: 0.5, LOSS: 2.25}
    ]
    first.close()
    second = JSONSink(tmp_path)
    second.write_scalars(*WRITTEN[1])
    second.close()
    assert read_run(tmp_path) == read_run(tmp_path / "events.jsonl") == CURVES


def test_reading_forgives_a_torn_last_line_only(tmp_path: Path) -> None:
    file = tmp_path / "events.jsonl"
    whole = json.dumps({"samples": 4, LR: 0.5})
    file.write_text(f'{whole}\n{{"samples": 8, "Tr')
    assert read_run(tmp_path) == {LR: [(4, 0.5)]}
    file.write_text(f"{whole}\nnonsense\n{whole}\n")
    with pytest.raises(UsageError, match="line 2 is no event"):
        read_run(tmp_path)


def test_reading_says_where_a_run_should_be(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"expected events\.jsonl or CSV files"):
        read_run(tmp_path / "nowhere")
    (tmp_path / "other.csv").write_text("a,b\nx,y\n")
    with pytest.raises(UsageError, match=r"other\.csv is no file of csv_monitor"):
        read_run(tmp_path)


def test_tensorboard_reads_its_events(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = load_config({"tensorboard": {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}})
    monitor = Monitor(config, rank=0)
    monitor.write_events([(name, value, samples) for samples, values in WRITTEN for name, value in values.items()])
    monitor.close()
    reader = EventAccumulator(str(tmp_path / "job"))
    reader.Reload()
    assert {tag: [(e.step, e.value) for e in reader.Scalars(tag)] for tag in reader.Tags()["scalars"]} == CURVES


def test_wandb_reads_its_offline_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    sink = WandBSink(load_config({"wandb": {"enabled": True, "project": "p", "group": "g"}}).wandb)
    for samples, values in WRITTEN:
        sink.write_scalars(samples, values)
    sink.close()
    (file,) = tmp_path.rglob("*.wandb")
    records = _wandb_records(file)
    rows = [{item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            for record in records if record.WhichOneof("record_type") == "history"]  # fmt: skip
    assert [(row["_step"], {LR: row[LR], LOSS: row[LOSS]}) for row in rows] == WRITTEN
    (run,) = [record.run for record in records if record.WhichOneof("record_type") == "run"]
    assert (run.project, run.run_group) == ("p", "g")


def _wandb_records(file: Path) -> list:
    """The protobuf records of an offline run. Another process writes them, and may still do so after `finish`."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        records = _records_in(file)
        if any(record.WhichOneof("record_type") == "exit" for record in records):
            return records
        time.sleep(0.1)
    raise AssertionError(f"{file} has no end: {[record.WhichOneof('record_type') for record in records]}")


def _records_in(file: Path) -> list:
    """What is there: a 7 byte header, then LevelDB's log format in blocks of 32 KiB."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, records, part = file.read_bytes(), 7, [], b""
    while at + 7 <= len(data):
        room = 32768 - at % 32768
        if room < 7:
            at += room
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        if at + 7 + length > len(data):
            break  # being written
        part += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or last part
            records.append(Record.FromString(part))
            part = b""
    return records


def test_comet_reads_its_offline_experiment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("comet_ml")
    monkeypatch.setenv("COMET_OFFLINE_DIRECTORY", str(tmp_path))
    section = load_config(
        {"comet": {"enabled": True, "online": False, "project": "p", "experiment_name": "n", "samples_log_interval": 4}}
    ).comet
    sink = CometSink(section)
    sink.write_scalars(4, {LR: 0.5})
    sink.write_scalars(6, {LR: 0.4})  # fewer than four samples later
    sink.write_scalars(8, {LR: 0.25})
    sink.close()
    (file,) = tmp_path.glob("*.zip")
    with zipfile.ZipFile(file) as archive:
        messages = [json.loads(line) for line in archive.read("messages.json").splitlines()]
        experiment = json.loads(archive.read("experiment.json"))
    metrics = [message["payload"]["metric"] for message in messages if message["type"] == "metric_msg"]
    assert [(m["step"], m["metricValue"]) for m in metrics if m["metricName"] == LR] == [(4, 0.5), (8, 0.25)]
    assert experiment["project_name"] == "p"


def test_comet_thins_each_name_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    class FakeExperiment:
        def __init__(self) -> None:
            self.logged: list = []

        def log_metric(self, name: str, value: float, step: int) -> None:
            self.logged.append((name, step))

    class FakeComet:
        experiment = FakeExperiment()
        ExperimentConfig = staticmethod(lambda **given: given)

        @classmethod
        def start(cls, **given: object) -> FakeExperiment:
            assert given["experiment_config"] == {"name": "n"}
            return cls.experiment

    monkeypatch.setattr(services.importlib, "import_module", lambda name: FakeComet)
    sink = CometSink(Comet(enabled=True, experiment_name="n", samples_log_interval=10))
    for samples, names in [(1, "a"), (5, "ab"), (11, "ab"), (15, "ab")]:
        sink.write_scalars(samples, dict.fromkeys(names, 0.0))
    assert FakeComet.experiment.logged == [("a", 1), ("b", 5), ("a", 11), ("b", 15)]


@pytest.mark.parametrize("section", list(PACKAGES))
@pytest.mark.parametrize("rank", [0, 1])
def test_a_missing_package_is_an_error_on_every_rank(section: str, rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(services.importlib.util, "find_spec", lambda name: None)
    config = load_config({section: {"enabled": True}})
    with pytest.raises(ConfigError, match=r"fullspeed\[monitor\]") as caught:
        Monitor(config, rank)
    assert caught.value.faults[0].path == f"{section}.enabled"


def test_only_rank_0_writes_and_closing_twice_is_fine(tmp_path: Path) -> None:
    config = load_config({"csv_monitor": {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}})
    other = Monitor(config, rank=1)
    other.write_scalars(4, {LR: 0.5})
    assert other.enabled
    assert list(tmp_path.iterdir()) == []
    mine = Monitor(config, rank=0)
    mine.write_scalars(4, {LR: 0.5})
    mine.close()
    mine.close()
    mine.write_scalars(8, {LR: 0.5})
    assert read_run(tmp_path / "job") == {"Train_Samples_lr": [(4, 0.5)]}


def test_without_sinks_nothing_is_enabled() -> None:
    assert not Monitor(load_config({}), rank=0).enabled


def test_the_dashboard_shows_the_newest_values_and_their_course() -> None:
    shown = io.StringIO()
    sink = DashboardSink(console=Console(file=shown, width=80))
    sink.write_scalars(*WRITTEN[0])
    sink.write_scalars(*WRITTEN[1])
    sink.close()
    text = shown.getvalue()
    assert "8 samples" in text
    assert "train_loss" in text
    assert "1.5" in text
    assert "█▁" in text


def test_a_curve_survives_what_is_not_finite() -> None:
    assert curve([0.0, float("nan"), 1.0, float("inf")]) == "▁ █ "
    assert curve([2.0, 2.0]) == "▁▁"
    assert curve([float("nan")]) == ""
