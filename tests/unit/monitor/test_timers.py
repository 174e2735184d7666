"""Timers measure what they say, and throughput counts whole updates."""

from __future__ import annotations

import time

import pytest

from fullspeed.base.errors import UsageError
from fullspeed.config.monitor import ThroughputTimer as Section
from fullspeed.monitor import memory, timers
from fullspeed.monitor.timers import NoopTimer, SynchronizedWallClockTimer, ThroughputTimer


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time in seconds, set by hand."""
    now = [100.0]
    monkeypatch.setattr(timers.time, "perf_counter", lambda: now[0])
    return now


def test_intervals_add_up_in_milliseconds(clock: list[float]) -> None:
    timer = SynchronizedWallClockTimer()("forward")
    for spent_s in (0.5, 1.5):
        timer.start()
        clock[0] += spent_s
        timer.stop()
        clock[0] += 10.0
    assert timer.mean() == pytest.approx(1000.0)
    assert timer.elapsed(reset=False) == pytest.approx(2000.0)
    assert timer.elapsed() == pytest.approx(2000.0)
    assert timer.elapsed() == 0.0


def test_elapsed_includes_a_running_interval_and_lets_it_run(clock: list[float]) -> None:
    timer = SynchronizedWallClockTimer()("step")
    timer.start()
    clock[0] += 1.0
    assert timer.elapsed(reset=False) == pytest.approx(1000.0)
    clock[0] += 1.0
    timer.stop()
    assert timer.elapsed() == pytest.approx(2000.0)


def test_wrong_order_names_the_timer() -> None:
    timer = SynchronizedWallClockTimer()("step")
    with pytest.raises(UsageError, match="'step' is not running"):
        timer.stop()
    timer.start()
    with pytest.raises(UsageError, match="'step' is running already"):
        timer.start()


def test_the_log_names_existing_timers_only(monkeypatch: pytest.MonkeyPatch, clock: list[float]) -> None:
    said: list[str] = []
    monkeypatch.setattr(timers, "log_dist", lambda text, ranks: said.append(text))
    group = SynchronizedWallClockTimer()
    group("a").start()
    clock[0] += 0.004
    group("a").stop()
    group.log(["a", "b"], normalizer=2.0, memory_breakdown=True)
    assert said[0].startswith("time (ms) | a: 2.00 | allocated=")
    assert group.get_mean(["a", "b"], reset=False) == {"a": 0.0}  # logging started over


def test_the_device_is_waited_for_at_both_ends() -> None:
    class FakeDevice:
        waits = 0

        def synchronize(self) -> None:
            self.waits += 1

    device = FakeDevice()
    timer = SynchronizedWallClockTimer(device)("a")
    timer.start()
    timer.stop()
    assert device.waits == 2


def test_noop_timers_take_every_call() -> None:
    timer = NoopTimer()
    timer("a").start()
    timer("a").stop()
    timer.log(["a"])
    assert timer("a").elapsed() == timer("a").mean() == 0.0
    assert timer.get_timers() == timer.get_mean(["a"]) == {}


def test_q5_throughput_counts_accumulation(clock: list[float]) -> None:
    timer = ThroughputTimer(Section(), batch_size=24, start_step=2)  # an update is 3 micro-batches of 8 samples
    for _ in range(3):
        for micro in range(3):
            timer.start()
            clock[0] += 2.0
            timer.stop(global_step=micro == 2)
        clock[0] += 50.0  # waiting for data between updates
    assert timer.global_step_count == 3
    assert timer.current_samples_per_sec() == pytest.approx(4.0)
    assert timer.avg_samples_per_sec() == pytest.approx(4.0)


def test_warm_up_counts_for_the_present_speed_only(clock: list[float]) -> None:
    timer = ThroughputTimer(Section(), batch_size=10, start_step=2)
    for spent_s in (100.0, 1.0, 2.0):
        timer.start()
        clock[0] += spent_s
        timer.stop(global_step=True)
        if timer.global_step_count == 1:
            assert timer.current_samples_per_sec() == pytest.approx(0.1)
            assert timer.avg_samples_per_sec() == 0.0
    assert timer.avg_samples_per_sec() == pytest.approx(20 / 3)


def test_a_line_every_few_updates_and_a_disabled_timer_says_nothing(clock: list[float]) -> None:
    said: list[str] = []
    for section in (Section(enabled=False), Section()):
        timer = ThroughputTimer(section, 8, steps_per_output=2, monitor_memory=True, logging_fn=said.append)
        for _ in range(5):
            timer.start()
            clock[0] += 1.0
            timer.stop(global_step=True)
    assert [line.split(",")[0] for line in said] == ["global_step=2", "global_step=4"]
    assert "samples/s=8.00" in said[0]
    assert "peak=" in said[0]


def test_memory_is_logged_only_when_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(memory, "log_dist", said.append)
    memory.see_memory_usage("quiet")
    memory.see_memory_usage("after load", force=True)
    assert len(said) == 1
    assert said[0].startswith("after load: allocated=")
    usage = memory.memory_usage_bytes()
    assert usage["max_allocated"] >= usage["allocated"] > 0
    assert usage["host_used"] > usage["host_rss"] / 2 > 0


def test_timers_run_on_the_real_clock() -> None:
    timer = SynchronizedWallClockTimer()("sleep")
    timer.start()
    time.sleep(0.02)
    timer.stop()
    assert 15.0 < timer.elapsed() < 2000.0
