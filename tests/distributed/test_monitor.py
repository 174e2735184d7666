"""An engine's watchers: the scalars it writes, the log of its collectives, its timers and profilers."""

from __future__ import annotations

import gc
import json
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fullspeed import comm
from fullspeed.base.errors import ConfigError
from fullspeed.base.log import logger
from fullspeed.comm import CommRecorder, Group, comms_logger, make_transport, observing
from fullspeed.engine.initialize import initialize
from fullspeed.monitor.history import read_run
from fullspeed.monitor.sinks import EVENTS_FILE
from tests.logs import LogLines
from tests.models import stack
from tests.ranks import ranks

STEPS, MICRO = 3, 2


def build(model: nn.Module, folder: Path, **config: Any) -> Any:
    """An engine that writes JSON lines, with Adam and micro-batches of two samples."""
    settings = {
        "train_micro_batch_size_per_gpu": MICRO,
        "optimizer": {"type": "Adam", "params": {"lr": 0.01}},
        "json_monitor": {"enabled": True, "output_path": str(folder), "job_name": "job"},
    }
    return initialize(model=model, config={**settings, **config})[0]


def train(engine: Any, rank: int, num_updates: int = STEPS) -> list[float]:
    """Train on batches that differ by rank; this rank's losses."""
    generator = torch.Generator().manual_seed(rank)
    losses = []
    for _ in range(num_updates * engine.gradient_accumulation_steps()):
        batch = torch.randn(MICRO, 5, generator=generator)
        loss = engine(batch).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


@contextmanager
def log_lines() -> Iterator[list[str]]:
    """What is logged inside."""
    handler = LogLines()
    logger.addHandler(handler)
    try:
        yield handler.lines
    finally:
        logger.removeHandler(handler)


def per_event(name: str, folder: Path) -> list[tuple[int, float]]:
    return read_run(folder / "job")[f"Train/Samples/{name}"]


@ranks(2)
@pytest.mark.parametrize(("accum", "stage"), [(1, 0), (4, 3)])
def test_every_update_is_written_once_by_rank_0(
    rank: int, world_size: int, tmp_path: Path, accum: int, stage: int
) -> None:
    csv = {"enabled": True, "output_path": str(tmp_path), "job_name": "csv"}
    engine = build(
        stack(), tmp_path, gradient_accumulation_steps=accum, zero_optimization={"stage": stage}, csv_monitor=csv,
        gradient_clipping=0.5,
    )  # fmt: skip
    losses = train(engine, rank)
    norm, clipped = engine.get_global_grad_norm(), engine.get_clipped_grad_norm()
    engine.destroy()
    everyone = comm.all_gather_object(losses)
    if rank:
        return
    samples = [MICRO * accum * world_size * step for step in range(1, STEPS + 1)]
    curves = {name.removeprefix("Train/Samples/"): points for name, points in read_run(tmp_path / "job").items()}
    assert set(curves) == {
        "train_loss", "lr", "grad_norm", "clipped_grad_norm", "skipped_steps", "samples_per_s",
        "memory_allocated_bytes", "max_memory_allocated_bytes",
    }  # fmt: skip
    assert all([at for at, _ in points] == samples for points in curves.values())
    # The mean over micro-batches and ranks, whatever the accumulation.
    expected = torch.tensor(everyone).view(world_size, STEPS, accum).mean(dim=(0, 2)).tolist()
    assert [value for _, value in curves["train_loss"]] == pytest.approx(expected, rel=1e-5)
    assert [value for _, value in curves["lr"]] == [0.01] * STEPS
    assert curves["grad_norm"][-1][1] == pytest.approx(norm)
    assert curves["clipped_grad_norm"][-1][1] == pytest.approx(clipped)
    assert [value for _, value in curves["skipped_steps"]] == [0.0] * STEPS
    assert all(value > 0 for _, value in curves["samples_per_s"])
    assert curves["max_memory_allocated_bytes"][0][1] >= curves["memory_allocated_bytes"][0][1] > 0
    assert read_run(tmp_path / "csv")["Train_Samples_train_loss"] == curves["train_loss"]


@ranks(2)
def test_the_loss_written_does_not_depend_on_accumulation(rank: int, world_size: int, tmp_path: Path) -> None:
    model = stack()
    batch = torch.randn(4 * MICRO, 5, generator=torch.Generator().manual_seed(rank))
    for accum in (1, 4):
        micro = 4 * MICRO // accum
        engine = build(
            stack(), tmp_path / str(accum), train_micro_batch_size_per_gpu=micro, gradient_accumulation_steps=accum
        )
        engine.module.load_state_dict(model.state_dict())
        for part in batch.split(micro):
            engine.backward(engine(part).square().mean())
            engine.step()
        engine.destroy()
    if rank == 0:
        (one,), (four,) = (per_event("train_loss", tmp_path / str(accum)) for accum in (1, 4))
        assert one == pytest.approx(four, rel=1e-6)


@ranks(2)
def test_f7_skipped_steps_and_the_loss_scale_are_written(rank: int, world_size: int, tmp_path: Path) -> None:
    fp16 = {"enabled": True, "initial_scale_power": 4, "hysteresis": 1}
    engine = build(stack().half(), tmp_path, fp16=fp16)
    for scale in (1.0, float("inf"), 1.0):
        engine.backward((engine(torch.ones(MICRO, 5, dtype=torch.float16)) * (scale if rank == 1 else 1.0)).sum())
        engine.step()
    assert (engine.global_steps, engine.skipped_steps) == (3, 1)
    engine.destroy()
    if rank == 0:
        assert [value for _, value in per_event("skipped_steps", tmp_path)] == [0.0, 1.0, 1.0]
        assert [value for _, value in per_event("loss_scale", tmp_path)] == [16.0, 8.0, 8.0]
        assert [at for at, _ in per_event("lr", tmp_path)] == [4, 8, 12]


@ranks(2)
def test_own_events_go_to_the_same_sinks_and_plain_backward_writes_no_loss(
    rank: int, world_size: int, tmp_path: Path
) -> None:
    engine = build(stack(), tmp_path)
    engine.monitor.write_events([("Eval/accuracy", 0.5, 4)])
    engine(torch.ones(MICRO, 5)).sum().backward()
    engine.step()
    engine.destroy()
    if rank == 0:
        run = read_run(tmp_path / "job")
        assert run["Eval/accuracy"] == [(4, 0.5)]
        assert "Train/Samples/train_loss" not in run
        assert [at for at, _ in run["Train/Samples/grad_norm"]] == [4]
    else:
        assert engine.monitor.enabled


@ranks(2)
def test_without_watchers_nothing_is_measured_or_sent(rank: int, world_size: int, tmp_path: Path) -> None:
    engine = build(stack(), tmp_path, json_monitor={"enabled": False})
    recorder = CommRecorder()
    with observing(recorder):
        train(engine, rank)
    assert engine.tput_timer.global_step_count == 0
    assert engine.get_wall_clock_timers() == {}
    assert engine.flops_profiler is None
    assert not engine.monitor.enabled
    assert list(tmp_path.iterdir()) == []
    sent = recorder.counts()["all_reduce"]
    engine.destroy()

    engine = build(stack(), tmp_path)
    recorder = CommRecorder()
    with observing(recorder):
        train(engine, rank)
    assert recorder.counts()["all_reduce"] == sent + STEPS  # the mean loss of each update
    engine.destroy()


@ranks(2)
def test_timers_split_an_update_and_reach_log_and_sinks(rank: int, world_size: int, tmp_path: Path) -> None:
    engine = build(
        stack(), tmp_path, wall_clock_breakdown=True, steps_per_print=2, memory_breakdown=True,
        gradient_accumulation_steps=2, zero_optimization={"stage": 2},
    )  # fmt: skip
    with log_lines() as lines:
        train(engine, rank, num_updates=3)
    spent = engine.get_wall_clock_timers()
    assert spent["forward"] > 0  # of the third update, not shown yet
    engine.destroy()
    if rank:
        assert lines == []
        return
    assert len(lines) == 3
    progress, times, held = lines
    assert "step=2, skipped=0, loss=" in progress
    assert "samples/s=" in progress
    assert all(
        f"{phase}=" in times for phase in ("forward", "backward", "backward_inner", "backward_allreduce", "step")
    )
    assert "params=" in held
    phases = {name: per_event(f"elapsed_time_ms_{name}", tmp_path) for name in (
        "forward", "backward", "backward_inner", "backward_allreduce", "step")}  # fmt: skip
    assert all([at for at, _ in points] == [16] for points in phases.values())
    ms = {name: points[0][1] for name, points in phases.items()}
    assert ms["backward"] == pytest.approx(ms["backward_inner"] + ms["backward_allreduce"])
    assert min(ms.values()) >= 0


@ranks(2)
def test_q5_an_engine_counts_accumulated_samples(rank: int, world_size: int, tmp_path: Path) -> None:
    engine = build(stack(), tmp_path, gradient_accumulation_steps=3)
    train(engine, rank)
    timer = engine.tput_timer
    assert timer.global_step_count == STEPS
    assert timer.batch_size == 3 * MICRO * world_size
    seconds = timer._counted_s
    assert timer.avg_samples_per_sec() == pytest.approx((STEPS - 1) * 3 * MICRO * world_size / seconds)
    engine.destroy()


@ranks(2)
@pytest.mark.parametrize("stage", [0, 3])
def test_the_flops_profiler_reports_one_micro_batch(rank: int, world_size: int, tmp_path: Path, stage: int) -> None:
    report = tmp_path / "flops.txt"
    section = {"enabled": True, "profile_step": 1, "output_file": str(report), "module_depth": 1}
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    engine = build(stack(), tmp_path, flops_profiler=section, zero_optimization=zero, gradient_accumulation_steps=2)
    totals = []
    for _ in range(3):
        engine.eval()
        engine(torch.ones(7, 5))  # evaluation is not profiled
        engine.train()
        train(engine, rank, num_updates=1)
        if rank == 0 and report.exists():
            costs = engine.flops_profiler.costs[""]
            totals.append((costs.flops, costs.backward.total(), costs.num_params))
    linears = [module for module in stack().modules() if isinstance(module, nn.Linear)]
    products = [2 * MICRO * linear.in_features * linear.out_features for linear in linears]
    if rank == 0:
        assert len(totals) == 2  # written in the second update, unchanged in the third
        assert totals[0] == totals[1]
        forward, backward, params = totals[0]
        assert forward == sum(products)
        assert backward == 2 * sum(products) - products[0]  # the inputs need no gradient
        assert params == sum(param.numel() for param in stack().parameters())
        assert "Stack" in report.read_text()
        assert [at for at, _ in per_event("model_flops_per_s", tmp_path)] == [16, 24]
    else:
        assert engine.flops_profiler is None
    engine.destroy()


@ranks(2)
def test_a_window_of_updates_is_traced(rank: int, world_size: int, tmp_path: Path) -> None:
    section = {"enabled": True, "start_step": 1, "num_steps": 1, "output_path": str(tmp_path / "traces"), "ranks": [1]}
    engine = build(stack(), tmp_path, torch_profiler=section)
    train(engine, rank)
    engine.destroy()
    comm.barrier()
    traces = list((tmp_path / "traces").iterdir())
    assert [trace.name for trace in traces] == ["trace_rank1.json"]
    events = json.loads(traces[0].read_text())["traceEvents"]
    forwards = [event for event in events if event.get("name") == "aten::linear"]
    assert len(forwards) == sum(isinstance(module, nn.Linear) for module in stack().modules())  # one update's


@ranks(1)
def test_s1_watchers_keep_no_destroyed_engine_alive(rank: int, world_size: int, tmp_path: Path) -> None:
    model = stack()
    engine = build(
        model, tmp_path, comms_logger={"enabled": True}, wall_clock_breakdown=True, steps_per_print=1,
        flops_profiler={"enabled": True, "output_file": str(tmp_path / "flops.txt")},
        torch_profiler={"enabled": True, "start_step": 0, "num_steps": 9, "output_path": str(tmp_path)},
    )  # fmt: skip
    train(engine, rank)
    seen = [weakref.ref(engine), weakref.ref(engine.module), weakref.ref(engine.monitor)]
    engine.destroy()
    assert (tmp_path / "trace_rank0.json").exists()  # what the window had so far
    del engine, model
    gc.collect()
    assert [ref() for ref in seen] == [None, None, None]


# ------------------------------------------------------------- collectives


@ranks(2)
@pytest.mark.parametrize("stage", [0, 3])
def test_the_log_of_collectives_counts_what_was_sent(rank: int, world_size: int, tmp_path: Path, stage: int) -> None:
    comms_logger.reset()
    engine = build(
        stack(), tmp_path, comms_logger={"enabled": True},
        zero_optimization={"stage": stage, "stage3_param_persistence_threshold": 0},
    )  # fmt: skip
    recorder = CommRecorder()
    comm.reset_log()
    with observing(recorder):
        train(engine, rank)
    counts = recorder.counts()
    assert {op: comm.get_comm_operation_count(op) for op in comm.get_logged_comm_ops()} == counts
    assert sum(counts.values()) == comm.get_comm_operation_count() > 0
    engine.destroy()
    with log_lines() as lines:
        summary = comm.log_summary()
    for op, sizes in summary.items():
        assert sum(row.num_calls * nbytes for nbytes, row in sizes.items()) == recorder.nbytes()[op]
        for nbytes, row in sizes.items():
            assert row.total_ms == pytest.approx(row.mean_ms * row.num_calls)
            assert row.mean_ms > 0
            assert row.algbw_gb_per_s == pytest.approx(nbytes / row.mean_ms / 1e6)
            share = {"all_reduce": 1.0, "all_gather": 0.5, "reduce_scatter": 0.5}[op]  # of two ranks
            assert row.busbw_gb_per_s == pytest.approx(row.algbw_gb_per_s * share)
            assert row.straggler_ms is None
    if rank == 0:
        assert len(lines) == 1
        assert all(op in lines[0] for op in counts)
    else:
        assert lines == []


@ranks(2)
def test_q3_stop_stops_and_reset_forgets(rank: int, world_size: int) -> None:
    comm.configure(enabled=True)
    comm.all_reduce(torch.ones(3))
    comm.configure(enabled=False)
    comm.all_reduce(torch.ones(3))
    assert comm.get_comm_operation_count("all_reduce") == 1
    comms_logger.start()
    comms_logger.start()  # twice counts once
    comm.all_reduce(torch.ones(3))
    comms_logger.stop()
    assert comm.get_comm_operation_count("all_reduce") == 2
    comm.reset_log()
    assert not comm.has_comm_data()
    assert comm.log_summary(return_dict=True) == {}


@ranks(2)
def test_q3_every_collective_has_a_bandwidth(rank: int, world_size: int) -> None:
    comm.configure(enabled=True)
    group: Group = comm.get_world_group()
    transport = make_transport(group, torch.device("cpu"))
    full, shard = torch.ones(8), torch.ones(4)
    comm.broadcast(torch.ones(2))
    comm.barrier()
    for pending in (
        transport.all_gather(full, shard),
        transport.reduce_scatter(full, shard),
        transport.all_reduce(full),
        transport.all_to_all(full, torch.empty(8)),
    ):
        pending.wait()
    comm.configure(enabled=False)
    summary = comm.log_summary()
    assert set(summary) == {"broadcast", "barrier", "all_gather", "reduce_scatter", "all_reduce", "all_to_all"}
    assert summary["barrier"][0].algbw_gb_per_s == 0.0
    assert all(row.busbw_gb_per_s > 0 for op, sizes in summary.items() if op != "barrier" for row in sizes.values())
    comm.reset_log()


@ranks(2)
def test_q3_the_summary_shows_which_rank_waits(rank: int, world_size: int) -> None:
    comm.configure(enabled=True)
    for _ in range(3):
        if rank == 1:
            time.sleep(0.2)
        comm.all_reduce(torch.ones(3))
    comm.configure(enabled=False)
    straggler_ms = comm.log_summary(show_straggler=True)["all_reduce"][12].straggler_ms
    first, second = comm.all_gather_object(straggler_ms)
    assert first > second + 300  # rank 0 waited three times 200 ms for the other
    comm.reset_log()


@ranks(2)
def test_operations_can_be_chosen_by_torchs_names(rank: int, world_size: int) -> None:
    config = {"comms_logger": {"enabled": True, "prof_all": False, "prof_ops": ["all_gather_into_tensor"]}}
    comm.init_distributed(config=config)
    comm.all_reduce(torch.ones(3))
    full = torch.ones(4)
    make_transport(comm.get_world_group(), torch.device("cpu")).all_gather(full, torch.ones(2)).wait()
    assert comm.get_logged_comm_ops() == ["all_gather"]
    comm.configure(enabled=False)
    with pytest.raises(ConfigError, match=r"comms_logger\.prof_ops .* bogus is no operation"):
        comm.configure(prof_ops=["bogus"])
    comm.reset_log()


@ranks(2)
def test_verbose_and_debug_say_who_called(rank: int, world_size: int) -> None:
    comm.configure(enabled=True, verbose=True, debug=True)
    with log_lines() as lines:
        comm.all_reduce(torch.ones(3))
    comm.configure(enabled=False, verbose=False, debug=False)
    assert list(comm.log_summary(return_dict=True)) == ["all_reduce by test_verbose_and_debug_say_who_called"]
    assert comm.get_comm_operation_count("all_reduce") == 1
    if rank == 0:
        assert len(lines) == 1
        assert "12 bytes over 2 ranks" in lines[0]
    comm.reset_log()


@ranks(2)
def test_destroying_the_engine_ends_the_log_and_keeps_its_data(rank: int, world_size: int, tmp_path: Path) -> None:
    engine = build(stack(), tmp_path, comms_logger={"enabled": True})
    train(engine, rank, num_updates=1)
    engine.destroy()
    counted = comm.get_comm_operation_count()
    assert counted > 0
    comm.all_reduce(torch.ones(3))
    assert comm.get_comm_operation_count() == counted
    assert (tmp_path / "job" / EVENTS_FILE).exists()
