"""What is fetched next and which reduction goes first, as integers."""

from hypothesis import given
from hypothesis import strategies as st

from fullspeed.sharding.order import ReductionOrder
from fullspeed.sharding.trace import UseTrace


def record(trace: UseTrace, uses: list[int]) -> None:
    for group in uses:
        trace.use(group)
    trace.end_pass()


def test_a_first_pass_predicts_nothing() -> None:
    trace = UseTrace([1, 1])
    trace.use(0)
    assert trace.upcoming() == []
    assert trace.reuse_distance(0) is None


def test_forward_and_backward_are_followed() -> None:
    trace = UseTrace([10, 20, 30])
    record(trace, [0, 1, 2, 2, 1, 0])
    trace.use(0)
    assert trace.upcoming() == [1, 2, 2, 1, 0]
    assert trace.reuse_distance(0) == 10 * 0 + 20 + 30 + 30 + 20
    trace.use(1)
    trace.use(2)
    assert trace.reuse_distance(2) == 0


def test_a_detour_silences_predictions_until_the_order_is_met_again() -> None:
    trace = UseTrace([1] * 4)
    record(trace, [0, 1, 2, 3])
    trace.use(0)
    trace.use(3)  # skips ahead
    assert trace.upcoming() == []
    trace.end_pass()
    trace.use(0)
    assert trace.upcoming() == [3], "the new order replaced the record"


def test_an_unknown_group_does_not_move_the_cursor() -> None:
    trace = UseTrace([1] * 4)
    record(trace, [0, 1])
    trace.use(3)
    assert trace.upcoming() == [0, 1]


def test_an_empty_pass_keeps_the_record() -> None:
    trace = UseTrace([1, 1])
    record(trace, [0, 1])
    trace.end_pass()
    trace.use(0)
    assert trace.upcoming() == [1]


def test_groups_wait_for_their_turn() -> None:
    order = ReductionOrder([2, 1, 0])
    assert order.ready(0) == []
    assert order.ready(2) == [2]
    assert order.ready(1) == [1, 0]
    assert order.remaining() == []


@given(st.permutations(range(6)), st.permutations(range(6)), st.integers(0, 6))
def test_every_group_is_launched_once_in_the_agreed_order(agreed: list[int], arrival: list[int], arrived: int) -> None:
    order = ReductionOrder(agreed)
    launched = [group for ready in arrival[:arrived] for group in order.ready(ready)]
    assert launched + order.remaining() == list(agreed)
    order.begin_pass()
    assert order.num_launched == 0
