"""Memory before there is a model: published numbers of the formulas, and what a table says."""

import pytest
from torch import nn

from fullspeed.base.errors import UsageError
from fullspeed.base.log import logger
from fullspeed.sharding.estimate import (
    FP32_ADAM,
    GIB,
    count_params,
    estimate_zero2_model_states_mem_needs,
    estimate_zero2_model_states_mem_needs_all_cold,
    estimate_zero2_model_states_mem_needs_all_live,
    estimate_zero3_model_states_mem_needs,
    estimate_zero3_model_states_mem_needs_all_cold,
    estimate_zero3_model_states_mem_needs_all_live,
    model_state_bytes,
)
from tests.logs import LogLines

SEVEN_B, LAYER = 7_000_000_000, 500_000_000


def in_gib(needs) -> tuple[float, float]:
    return round(needs.cpu / GIB, 2), round(needs.gpu / GIB, 2)


@pytest.mark.parametrize(("offload", "expected"), [(True, (625.85, 13.04)), (False, (312.92, 20.37))])
def test_zero2_of_seven_billion_on_two_nodes(offload, expected) -> None:
    assert in_gib(estimate_zero2_model_states_mem_needs(SEVEN_B, 8, 2, cpu_offload=offload)) == expected


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, (88.01, 1.86)),
        ({"cpu_offload_params": False}, (78.23, 2.68)),
        ({"cpu_offload": False}, (22.35, 9.20)),
        ({"cpu_offload": False, "cpu_offload_params": False, "zero_init": False}, (312.92, 9.20)),
        ({"zero_init": False}, (312.92, 1.86)),
        ({"cpu_offload_params": False, "zero_init": False}, (312.92, 2.68)),
        ({"additional_buffer_factor": 3.0}, (176.02, 1.86)),
    ],
)
def test_zero3_of_seven_billion_on_two_nodes(settings, expected) -> None:
    needs = estimate_zero3_model_states_mem_needs(SEVEN_B, LAYER, 8, 2, **settings)
    assert in_gib(needs) == expected
    assert needs.largest_layer == 4 * LAYER


def test_results_are_whole_bytes_and_unpack() -> None:
    cpu, gpu = estimate_zero2_model_states_mem_needs(1001, 3, cpu_offload=False)
    assert (cpu, gpu) == (18018, 2002 + 6006)
    cpu, gpu, largest = estimate_zero3_model_states_mem_needs(1001, 7, 7)
    assert (cpu, gpu, largest) == (27027, 28, 28)
    assert all(isinstance(value, int) for value in (cpu, gpu, largest))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.body, self.head = nn.Embedding(10, 4), nn.Linear(4, 4), nn.Linear(4, 10)
        self.head.weight = self.embed.weight


def test_tied_parameters_count_once_and_the_largest_layer_is_one_modules_own() -> None:
    assert count_params(Tied()) == (40 + 20 + 10, 50)


@pytest.fixture
def logged(monkeypatch):
    handler = LogLines()
    monkeypatch.setattr(logger, "handlers", [handler])
    return handler.lines


def test_tables_hold_every_option(logged) -> None:
    two = estimate_zero2_model_states_mem_needs_all_cold(SEVEN_B, 8, 2)
    three = estimate_zero3_model_states_mem_needs_all_cold(SEVEN_B, LAYER, 8, 2)
    assert [in_gib(option.needs) for option in two] == [(625.85, 13.04), (312.92, 20.37)]
    assert [in_gib(option.needs) for option in three] == [
        (88.01, 1.86), (312.92, 1.86), (78.23, 2.68), (312.92, 2.68), (22.35, 9.20), (312.92, 9.20),
    ]  # fmt: skip
    assert three[2].settings == {"cpu_offload": True, "cpu_offload_params": False, "zero_init": True}
    assert len(logged) == 2
    assert "2 nodes with 8 devices each" in logged[0]
    assert "  625.85GB |  13.04GB | cpu_offload=1" in logged[0]
    assert "7000M total params, 500M largest layer params" in logged[1]
    assert "   22.35GB |   9.20GB | cpu_offload=0, cpu_offload_params=0, zero_init=1" in logged[1]


def test_a_live_model_is_counted(logged) -> None:
    model = Tied()
    assert estimate_zero2_model_states_mem_needs_all_live(model, 2) == estimate_zero2_model_states_mem_needs_all_cold(
        70, 2
    )
    assert estimate_zero3_model_states_mem_needs_all_live(model) == estimate_zero3_model_states_mem_needs_all_cold(
        70, 50
    )
    assert "1 node with 1 device each" in logged[-1]


def test_what_an_engine_holds() -> None:
    n = 8
    totals = [model_state_bytes(1000, n, stage).total / 1000 for stage in (0, 1, 2, 3)]
    assert totals == [16, 4 + 12 / n, 2 + 14 / n, 16 / n]
    assert model_state_bytes(1000, n, 1, FP32_ADAM) == (4000, 4000, 0, 1000)


@pytest.mark.parametrize(
    "call",
    [
        lambda: estimate_zero2_model_states_mem_needs(0),
        lambda: estimate_zero3_model_states_mem_needs(10, 5, num_nodes=0),
        lambda: model_state_bytes(10, 0, 3),
    ],
)
def test_counts_below_one_are_refused(call) -> None:
    with pytest.raises(UsageError, match="is 0; give a whole number of at least 1"):
        call()
