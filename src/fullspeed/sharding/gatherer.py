"""Making groups whole in time: demands, prefetch under a live budget, and the agreement that keeps ranks in step.

Ranks may use different modules, in different orders, a different number of times. A gather needs every rank,
so before each one the ranks exchange what they are about to do (two integers each, on a group of their own).
In a round
- every group that any rank demands is gathered by all, in index order;
- a prefetch happens if all ranks ask for the same one;
- a rank at the end of its forward or backward, or at its step, says so, and serves the others meanwhile (`Idle`);
- a rank whose file failed says that instead, and every rank raises.
Groups that wait in files are read ahead of their use, not gathered ahead: a rank asks for one when it has it.
No order of uses can therefore mispair two gathers or leave a rank waiting for a gather that its peers never join.
"""

from __future__ import annotations

import enum
import math
import weakref
from collections.abc import Callable, Sequence
from typing import NamedTuple

from fullspeed.base.errors import UsageError
from fullspeed.comm import Agreement, Posted
from fullspeed.sharding.attendant import Attendant
from fullspeed.sharding.file_resident import ValueFiles
from fullspeed.sharding.group import FlatGroup
from fullspeed.sharding.order import LaunchCount
from fullspeed.sharding.trace import UseTrace


class Idle(enum.IntEnum):
    """Why a rank asks for no group: where it is, and so what it waits for."""

    FORWARD_DONE = -1  # until no rank asks for anything
    BACKWARD_DONE = -2  # until, besides, every rank has started the reductions this rank waits for
    AT_STEP = -3  # until every rank is at its step


_FILE_FAILED = 1 << 40  # what a rank says in place of a group; as a demand does, it calls ranks that are away


class LiveBudget(NamedTuple):
    """Limits on whole parameters, in elements per rank."""

    max_live_numel: int  # prefetch and keeping stop here; a demand alone may exceed it
    max_reuse_distance: int  # keep a group whole if it is used again within this many elements of other groups
    prefetch_numel: int  # elements gathered ahead of their use; 0 turns prefetch off


class Gatherer:
    """Owns which transient groups are whole. All methods but `use` and `release` may communicate."""

    def __init__(
        self,
        groups: Sequence[FlatGroup],
        budget: LiveBudget,
        agreement: Agreement,
        launches: LaunchCount,
        files: ValueFiles | None = None,
    ) -> None:
        """`launches` counts reductions: what this rank started is told to the others, what all did is noted.

        `files`: where the resident values of some groups wait, if they do.
        """
        self._groups = groups
        self._files = files
        self._budget = budget
        self._agreement = agreement
        self._launches = launches
        self._posted: Posted | None = None  # a prefetch this rank has asked for, answers not read yet
        self._codes: list[int] = []  # what every rank said in the last round
        self._launched: list[int] = []  # reductions every rank had started by then
        self._communicates = any(group.needs_gather for group in groups)
        if self._communicates:
            launches.by_all = 0
        self._prefetched: set[int] = set()
        self._edited: dict[FlatGroup, None] = {}  # stay whole until their edits can be kept
        self._recent: list[int] = []  # most recently used last; the last two are never evicted
        numels = [group.numel for group in groups]
        self._training_trace, self._evaluation_trace = UseTrace(numels), UseTrace(numels)
        self.trace = self._training_trace
        me = weakref.ref(self)  # the attendant's thread must not keep the model alive
        self._attendant = Attendant(
            # Not for a rank that waits at its step: there the rank itself has to come.
            lambda: agreement.is_called(above=Idle.BACKWARD_DONE),
            lambda: _call(me, Gatherer.serve_once),
            lambda: _call(me, lambda gatherer: gatherer.drain(Idle.AT_STEP)),
        )
        self.live_numel = 0
        self.peak_live_numel = 0
        self._live_bytes = 0
        self.peak_live_bytes = 0

    def leave(self) -> None:
        """The rank leaves the model after an evaluation: from now on a thread serves the others' gathers."""
        if self._communicates:
            self._attendant.leave()

    def follow(self, *, is_training: bool) -> None:
        """What is used from now on belongs to a pass that a backward ends, or to an evaluation."""
        self._attendant.come_back()
        self.trace = self._training_trace if is_training else self._evaluation_trace

    # ------------------------------------------------------------------- use

    def use(self, group: FlatGroup) -> None:
        """Make the group whole for computing, and start fetching what the trace expects next."""
        if not group.is_transient:
            return
        self._resolve()
        self._prefetched.discard(group.index)
        self.trace.use(group.index)
        self._recent = [*[index for index in self._recent if index != group.index][-1:], group.index]
        if not group.is_whole:
            self._make_whole(group)
        self._prefetch()
        self._read_ahead()

    def _make_whole(self, group: FlatGroup) -> None:
        if not group.is_gathering:
            self._make_room(group.numel)
            if group.needs_gather:
                group.resident.begin_wake()
                self._read_ahead()
                group.resident.finish_read()  # if that fails, the round tells
                self._round(self._demand_code(group))
                assert group.is_gathering, "a demand is always honoured in its round"
            else:
                self._begin(group)
        group.finish_unshard()

    def fetch(self, group: FlatGroup) -> None:
        """Make the group whole with its exact values. No rounds: every rank calls this, in the same order."""
        if not group.is_transient or group.is_whole:
            return
        if not group.is_gathering:
            self._make_room(group.numel)
            self._begin(group, exact=True)
        group.finish_unshard()

    def _prefetch(self) -> None:
        if self._budget.prefetch_numel <= 0:
            return
        ahead = sum(self._groups[index].numel for index in self._prefetched)
        for index in self.trace.upcoming():
            group = self._groups[index]
            if group.is_whole or group.is_gathering or not group.needs_gather or group.resident.waits:
                continue
            if self._prefetched and ahead + group.numel > self._budget.prefetch_numel:
                return
            self._make_room(group.numel, further_than=self._distance(group))
            if self.live_numel + group.numel > self._budget.max_live_numel:
                return
            self._posted = self._post(self._prefetch_code(group))
            # The answer can wait until something is needed: ranks need not be in step within a group's compute.
            if not self._posted.poll() or index not in self._resolve():
                return
            ahead += group.numel

    def _read_ahead(self) -> None:
        """Start reading what the trace expects next, as far as there are buffers."""
        if self._files is None:
            return
        for index in self.trace.upcoming():
            if not self._files.has_free_buffer:
                return
            if not self._groups[index].is_whole:
                self._groups[index].resident.begin_wake()

    def end_pass(self) -> None:
        """The pass is over: its order is the record, and nothing is read ahead any more."""
        self.trace.end_pass()
        if self._files is not None:
            self._files.flush()

    # --------------------------------------------------------------- release

    def release(self, group: FlatGroup) -> None:
        """Nobody computes with the group now: free it, unless it is used again soon and there is room."""
        if group.users or group.held_by_backward or not group.is_transient or not group.is_whole:
            return
        distance = self.trace.reuse_distance(group.index)
        if (
            distance is not None
            and distance <= self._budget.max_reuse_distance
            and self.live_numel <= self._budget.max_live_numel
        ):
            return
        self.free(group)

    def free(self, group: FlatGroup) -> None:
        """Free the group's whole values now."""
        if group.is_transient and (group.is_whole or group.is_gathering):
            if not group.is_whole:
                group.finish_unshard()
            if group.edited():
                if group.needs_gather:
                    self._edited[group] = None  # a peer may still be reading this rank's shard
                    return
                group.keep_edits()
            group.reshard()
            self._prefetched.discard(group.index)
            self.live_numel -= group.numel
            self._live_bytes -= group.live_nbytes

    def free_idle(self) -> None:
        """Free every group that nobody computes with."""
        for group in self._groups:
            if not group.users and not group.held_by_backward:
                self.free(group)

    def _make_room(self, numel: int, further_than: float = -1) -> None:
        """Free kept groups, the one used again last first, until `numel` more elements fit the budget.

        Only groups whose next use is more than `further_than` elements away.
        """
        for group in sorted(self._idle(), key=self._distance, reverse=True):
            if self.live_numel + numel <= self._budget.max_live_numel or self._distance(group) <= further_than:
                return
            self.free(group)

    def _distance(self, group: FlatGroup) -> float:
        """Elements used before this group is expected again; infinite when it is not."""
        distance = self.trace.reuse_distance(group.index)
        return math.inf if distance is None else distance

    def _idle(self) -> list[FlatGroup]:
        """Whole groups that may be freed. Frozen ones too: no last gradient ever releases them in backward."""
        return [
            group
            for group in self._groups
            if group.is_transient
            and group.is_whole
            and not group.users
            and group.index not in self._recent
            and not (group.held_by_backward and group.is_trainable)
        ]

    # ------------------------------------------------------------- agreement

    @staticmethod
    def _demand_code(group: FlatGroup) -> int:
        return 2 * group.index + 1

    @staticmethod
    def _prefetch_code(group: FlatGroup) -> int:
        return 2 * group.index

    def _post(self, code: int) -> Posted:
        if self.trace is self._evaluation_trace:
            self._agreement.announce()
        if self._files is not None and self._files.failure is not None:
            code = _FILE_FAILED
        return self._agreement.post([code, self._launches.mine])

    def _resolve(self) -> list[int]:
        """Read the answers to a prefetch this rank has posted; returns the groups whose gathers start now."""
        if self._posted is None:
            return []
        posted, self._posted = self._posted, None
        settled = self._settle(posted.rows())
        self._prefetched.update(settled)
        return settled

    def _round(self, code: int) -> list[int]:
        """One exchange; starts the gathers it settles on and returns their groups. Idle everywhere returns nothing."""
        self._resolve()
        return self._settle(self._post(code).rows())

    def _settle(self, rows: list[list[int]]) -> list[int]:
        """What follows from what every rank said: the same on all of them."""
        settled = self._agreed(rows)
        for index in settled:
            self._begin(self._groups[index])
        return settled

    def _agreed(self, rows: list[list[int]]) -> list[int]:
        codes = [row[0] for row in rows]
        self._codes, self._launched = codes, [row[1] for row in rows]
        self._launches.by_all = min(self._launched)
        if self._files is not None:
            self._files.raise_failures(
                [rank for rank, other in enumerate(codes, self._files.first_rank) if other == _FILE_FAILED]
            )
        settled = sorted({other // 2 for other in codes if other >= 0 and other % 2})
        if not settled and codes[0] >= 0 and all(other == codes[0] for other in codes):
            settled = [codes[0] // 2]
        return settled

    def _begin(self, group: FlatGroup, *, exact: bool = False) -> None:
        if not group.is_whole and not group.is_gathering:
            self.live_numel += group.numel
            self.peak_live_numel = max(self.peak_live_numel, self.live_numel)
            self._live_bytes += group.live_nbytes
            self.peak_live_bytes = max(self.peak_live_bytes, self._live_bytes)
        group.begin_unshard(exact=exact)

    def drain(self, reason: Idle) -> None:
        """Serve the other ranks' demands for as long as `reason` says.

        Raises:
            UsageError: on every rank, when one reached its step with fewer backwards than another.
        """
        if not self._communicates:
            return
        self._attendant.come_back()
        while True:
            for index in self._round(reason):
                group = self._groups[index]
                group.finish_unshard()
                self.release(group)
            if max(self._codes) < 0:
                self._check_backwards()
                if self._may_leave(reason):
                    self._keep_edits()
                    return

    def _keep_edits(self) -> None:
        """No rank reads shards now: take over what was written into whole parameters, and free them."""
        edited, self._edited = self._edited, {}
        for group in edited:
            group.keep_edits()
            self.release(group)

    def serve_once(self) -> None:
        """Take part in a round as a rank that asks for nothing, and in the gathers it settles; touches no parameter."""
        for index in self._agreed(self._post(Idle.FORWARD_DONE).rows()):
            self._groups[index].serve()

    def _may_leave(self, reason: Idle) -> bool:
        if reason is Idle.AT_STEP:
            return all(code == Idle.AT_STEP for code in self._codes)
        return reason is Idle.FORWARD_DONE or self._launches.by_all >= self._launches.mine

    def _check_backwards(self) -> None:
        most = max(self._launched)
        behind = [
            rank
            for rank, (code, launched) in enumerate(zip(self._codes, self._launched, strict=True))
            if code == Idle.AT_STEP and launched < most
        ]
        if behind:
            raise UsageError(
                f"rank {', '.join(map(str, behind))} called step after fewer backwards than the other ranks; "
                f"every rank must call backward equally often (backward a zero loss where there is no data)"
            )


def _call(reference: weakref.ref[Gatherer], action: Callable[[Gatherer], None]) -> None:
    """Do something with a gatherer, if it is still there."""
    gatherer = reference()
    if gatherer is not None:
        action(gatherer)
