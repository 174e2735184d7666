"""A resumed run sees the batches that the run it continues would have seen."""

from __future__ import annotations

import itertools
import pathlib
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset, RandomSampler, TensorDataset

from fullspeed.base.errors import CheckpointError
from fullspeed.comm import all_gather_object
from fullspeed.comm.rendezvous import together
from fullspeed.engine.initialize import initialize
from tests.parity.beside import sgd, zero_config
from tests.ranks import ranks, run_ranks

NUM = 36


class Noting(nn.Module):
    """A loss, and which samples it came from."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.dropout = nn.Dropout(0.5)
        self.seen: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += x[:, 0].int().tolist()
        return self.dropout(x * self.weight).mean()


def samples() -> TensorDataset:
    return TensorDataset(torch.arange(NUM, dtype=torch.float32).view(NUM, 1))


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        yield from torch.arange(NUM, dtype=torch.float32).view(NUM, 1)


def make(micro: int, data: Any = None, **config: Any) -> Any:
    data = samples() if data is None else data
    return initialize(model=Noting(), optimizer=sgd, training_data=data, config=zero_config(1, micro=micro) | config)[0]


def drawn(engine: Any, num_updates: int) -> tuple[list[list[int]], list[float]]:
    """Samples of each update, of all ranks, and the losses (which dropout makes depend on the generators)."""
    seen, losses = [], []
    for _ in range(num_updates):
        engine.module.seen.clear()
        losses.append(engine.train_batch().item())
        seen.append(sorted(itertools.chain(*all_gather_object(list(engine.module.seen)))))
    return seen, losses


@ranks(1, 2)
def test_in_the_middle_and_at_the_end_of_a_pass(rank, world_size, tmp_path):
    micro = 6 // world_size  # 6 updates a pass
    for done in (0, 2, 6, 8):
        engine, other = make(micro), make(micro)
        torch.manual_seed(rank)
        before = drawn(engine, done)[0]
        engine.save_checkpoint(tmp_path / str(done))
        expected = drawn(engine, 8)
        drawn(other, 1)
        other.load_checkpoint(tmp_path / str(done))
        assert drawn(other, 8) == expected
        if done == 2:
            assert sorted(itertools.chain(*before, *expected[0][:4])) == list(range(NUM)), "one pass, each sample once"


@ranks(2)
def test_a_loop_over_the_loader_goes_on_too(rank, world_size, tmp_path):
    engine, other = make(3), make(3)
    loader, again = engine.training_dataloader, other.training_dataloader
    passing = iter(loader)
    first = [next(passing)[0] for _ in range(2)]
    engine.save_checkpoint(tmp_path)
    other.load_checkpoint(tmp_path)
    rest = [batch for (batch,) in again]
    assert len(rest) == 4
    assert all(torch.equal(one, batch) for (one,), batch in zip(passing, rest, strict=True))
    assert len({int(x) for batch in first + rest for x in batch}) == NUM // 2
    assert len(list(again)) == len(again) == 6, "the next pass is whole"
    other.load_checkpoint(tmp_path, load_module_only=True)
    assert len(list(again)) == 6


@ranks(2)
def test_samplers_and_streams_of_the_callers(rank, world_size, tmp_path):
    def with_sampler(engine: Any) -> Any:
        data = samples()
        engine.training_dataloader = engine.deepspeed_io(data, data_sampler=RandomSampler(data))
        return engine

    for name, build in (("sampler", lambda: with_sampler(make(3))), ("stream", lambda: make(3, Stream()))):
        engine, other = build(), build()
        torch.manual_seed(rank)
        drawn(engine, 3)
        engine.save_checkpoint(tmp_path / name)
        expected = drawn(engine, 12)
        other.load_checkpoint(tmp_path / name)
        assert drawn(other, 12) == expected


def begin(rank: int, world_size: int, folder: str, global_batch: int) -> Any:
    engine = make(global_batch // world_size)
    before = drawn(engine, 2)[0]
    engine.save_checkpoint(folder)
    return before, drawn(engine, 4)[0]


def go_on(rank: int, world_size: int, folder: str, micro: int, num_updates: int) -> Any:
    engine = make(micro)
    engine.load_checkpoint(folder)
    return drawn(engine, num_updates)[0]


def test_at_another_number_of_ranks(tmp_path: pathlib.Path) -> None:
    before, expected = run_ranks(begin, 2, str(tmp_path), 6)[0]
    assert run_ranks(go_on, 3, str(tmp_path), 2, 4)[0] == expected
    assert run_ranks(go_on, 1, str(tmp_path), 6, 4)[0] == expected
    # 12 samples of 36 are behind; the rest in batches of another size, each once.
    rest = run_ranks(go_on, 4, str(tmp_path), 2, 3)[0]
    assert sorted(itertools.chain(*before, *rest)) == list(range(NUM))


def test_where_the_position_does_not_divide_nothing_is_left_out(tmp_path: pathlib.Path) -> None:
    before, _ = run_ranks(begin, 1, str(tmp_path), 5)[0]  # 10 samples, over 4 ranks: 2 each are skipped
    rest = run_ranks(go_on, 4, str(tmp_path), 7, 1)[0]
    assert set(itertools.chain(*before, *rest)) == set(range(NUM))


# --------------------------------------------------------------------- damaged files


@ranks(2)
def test_every_file_of_a_checkpoint_cut_short_or_with_a_wrong_bit_is_named(rank, world_size, tmp_path):
    engine = make(3, checkpoint={"keep_last": 5})
    engine.save_checkpoint(tmp_path, "older", client_state={"rank": rank})
    drawn(engine, 1)
    engine.save_checkpoint(tmp_path, "newer", client_state={"rank": rank})
    paths = [path for path in sorted((tmp_path / "newer").rglob("*")) if path.is_file()]
    assert len(paths) == 8  # two ranks' tensors, generators and client states, what they share, the manifest
    sound = {path: path.read_bytes() for path in [*paths, tmp_path / "latest"]}
    together(lambda: None, CheckpointError)
    for path, data in sound.items():
        middle = len(data) // 2
        for damaged in (b"", data[:middle], data[:-1], data[:middle] + bytes([data[middle] ^ 4]) + data[middle + 1 :]):
            together(lambda path=path, damaged=damaged: rank or path.write_bytes(damaged), CheckpointError)
            words = "has newer, older" if path.name == "latest" else "the previous complete checkpoint is 'older'"
            with pytest.raises(CheckpointError, match=rf"{path.name}\b.*{words}"):
                engine.load_checkpoint(tmp_path)
        together(lambda path=path, data=data: rank or path.write_bytes(data), CheckpointError)
    assert engine.load_checkpoint(tmp_path)[1] == {"rank": rank}
