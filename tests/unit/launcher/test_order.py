"""What nodes are told, and which of them a node is."""

from __future__ import annotations

import pytest

from fullspeed.base.errors import UsageError
from fullspeed.launcher.order import ElasticOrder, NodeOrder

ORDER = NodeOrder(
    hosts=("work1", "me@work2"), slots=((0, 1), 3), master_addr="work1", master_port=29500, run_id="id",
    kind="script", target="train.py", words=("--k=a b", "it's", 'line\nbreak', "\udcff", "$x %h"),
    passes_local_rank=True, each_rank_log=None, save_pid=False, log_level="info", cores=None,
    elastic=ElasticOrder(1, 2, 30), node_timeout_s=30.0,
)  # fmt: skip


@pytest.mark.parametrize("order", [ORDER, ORDER._replace(elastic=None, cores="0-3", ends_with_stdin=True)])
def test_order_survives_the_command_line(order):
    word = order.to_word()
    assert word.isascii()
    assert "\n" not in word
    assert NodeOrder.from_word(word) == order


@pytest.mark.parametrize(
    ("which", "node"), [("0", 0), ("1", 1), ("work2", 1), ("env:A_RANK,B_NAME", 1), ("env:B_NAME", 0)]
)
def test_which_node_this_is(monkeypatch, which, node):
    monkeypatch.setenv("A_RANK", "1")
    monkeypatch.setenv("B_NAME", "work1")
    assert ORDER.find_node(which) == node


@pytest.mark.parametrize("which", ["2", "-1", "work3", "env:NOT_SET"])
def test_no_such_node(which):
    with pytest.raises(UsageError, match=r"the nodes are 0\.\.1: work1, me@work2"):
        ORDER.find_node(which)
