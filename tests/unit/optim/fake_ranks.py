"""Ranks as threads of one process, holding shards cut anywhere, with counted collectives."""

import threading
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import nn

from fullspeed.optim.shards import gather_by_sum


class FakeRanks:
    """A world of threads that sum vectors; `calls` lists each rank's collectives in order."""

    def __init__(self, world):
        self.world = world
        self.barrier = threading.Barrier(world, timeout=20)
        self.given = [None] * world
        self.calls = [[] for _ in range(world)]

    def all_reduce_sum(self, rank, vector):
        self.calls[rank].append(("all_reduce", vector.numel(), vector.dtype))
        self.given[rank] = vector.clone()
        self.barrier.wait()
        vector.copy_(sum(self.given))
        self.barrier.wait()

    def run(self, function):
        """`function(rank)` on every rank at once; results by rank."""

        def guarded(rank):
            try:
                return function(rank)
            except BaseException:
                self.barrier.abort()
                raise

        with ThreadPoolExecutor(self.world) as pool:
            return list(pool.map(guarded, range(self.world)))


class FakeShards:
    """The `ShardView` of one rank: parameter `i` is cut at `cuts[i]`, world + 1 positions from 0 to numel."""

    device = torch.device("cpu")

    def __init__(self, ranks, rank, shapes, cuts):
        self.ranks, self.rank, self.shapes, self.cuts = ranks, rank, shapes, cuts
        self.index = {}

    def take(self, index, whole):
        """A piece of `whole`, or None when this rank owns nothing of it."""
        start, stop = self.slice_of(index)
        if start == stop:
            return None
        piece = nn.Parameter(whole.detach().flatten()[start:stop].clone())
        self.index[id(piece)] = index
        return piece

    def num_params(self):
        return len(self.shapes)

    def param_index(self, piece):
        return self.index[id(piece)]

    def full_shape(self, index):
        return self.shapes[index]

    def slice_of(self, index):
        return self.cuts[index][self.rank], self.cuts[index][self.rank + 1]

    def all_reduce_sum(self, vector):
        self.ranks.all_reduce_sum(self.rank, vector)

    def gather_whole(self, pieces, indices):
        self.ranks.calls[self.rank].append(("gather", tuple(indices)))
        for index, piece in pieces.items():
            start, stop = self.slice_of(index)
            assert piece.shape == (stop - start,)
            assert piece.dtype == torch.float32
        return gather_by_sum(self, pieces, indices)


def shard_groups(groups, shards):
    """`groups` with each parameter replaced by this rank's piece, and {index: (piece, whole)}."""
    made, pairs, index = [], {}, 0
    for group in groups:
        pieces = []
        for whole in group["params"]:
            piece = shards.take(index, whole)
            if piece is not None:
                pieces.append(piece)
                pairs[index] = piece
            index += 1
        made.append({**group, "params": pieces})
    return made, pairs
