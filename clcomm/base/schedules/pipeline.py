"""Pipeline schedules: the order in which each rank runs its stages' forwards and backwards; arithmetic alone.

A pipeline cuts a model into stages, stage s on rank s modulo the number of ranks, and a batch into micro-batches.
GPipe runs all forwards, then all backwards (Huang et al., 2019). 1F1B runs a backward as soon as it can, so that a rank
keeps the activations of few micro-batches (Narayanan et al., PipeDream, 2019). Interleaved 1F1B gives each rank several
stages, which fill and drain the pipeline in smaller pieces (Narayanan et al., Megatron-LM, 2021).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from clcomm.base.errors import ArgumentError

GPIPE, ONE_F_ONE_B, INTERLEAVED = "gpipe", "1f1b", "interleaved"
SCHEDULES = GPIPE, ONE_F_ONE_B, INTERLEAVED
#: Slots of a link between two stages, at least: one is written while the other is read.
LEAST_SLOTS = 2


class Action(NamedTuple):
    """The forward or the backward of one micro-batch in one stage."""

    stage: int
    micro_batch: int
    is_forward: bool


class Turn(NamedTuple):
    """When a rank runs an action."""

    rank: int
    action: Action
    begin: float
    end: float


class Slots(NamedTuple):
    """Capacity, in micro-batches, of the links into a stage: activations from before, gradients from behind."""

    activations: int
    gradients: int


@dataclass(frozen=True)
class PipelineSchedule:
    """The actions of every rank.

    Attributes:
        name: one of SCHEDULES.
        chunks: stages per rank.
        actions: those of each rank, in order.
    """

    name: str
    ranks: int
    chunks: int
    micro_batches: int
    actions: tuple[tuple[Action, ...], ...]

    @property
    def stages(self) -> int:
        """The number of stages of all ranks."""
        return self.ranks * self.chunks

    def rank_of(self, stage: int) -> int:
        return stage % self.ranks

    @property
    def bubble(self) -> float:
        """The share of time in which ranks idle where all stages take equally long: (p - 1) / (chunks m + p - 1)."""
        return (self.ranks - 1) / (self.chunks * self.micro_batches + self.ranks - 1)

    def most_alive(self, rank: int) -> int:
        """Return the most activations that a rank keeps at once, counted in micro-batches of each of its stages."""
        alive = most = 0
        for action in self.actions[rank]:
            alive += 1 if action.is_forward else -1
            most = max(most, alive)
        return most

    def timetable(
        self, duration: Callable[[Action], float], slots: Mapping[int, Slots] | None = None
    ) -> dict[Action, Turn]:
        """Return each action's turn if ranks begin as soon as they can, and messages take no time.

        Args:
            duration: of each action, above 0.
            slots: of the links into each stage, where a sender waits for room; None: unlimited.

        Raises ArgumentError for a deadlock.
        """
        done: dict[Action, Turn] = {}
        left, free = [list(each) for each in self.actions], [0.0] * self.ranks
        while any(left):
            before = len(done)
            for rank, waiting in enumerate(left):
                while waiting and (begin := self._earliest(waiting[0], done, slots)) is not None:
                    action = waiting.pop(0)
                    begin = max(begin, free[rank])
                    free[rank] = begin + duration(action)
                    done[action] = Turn(rank, action, begin, free[rank])
            if len(done) == before:
                raise ArgumentError(f"schedule: {self.name} on {self.ranks} ranks: every rank waits for another")
        return done

    def _earliest(self, action: Action, done: Mapping[Action, Turn], slots: Mapping[int, Slots] | None) -> float | None:
        """Return the earliest time for an action's inputs; None: unknown yet."""
        needed = self.needs(action)
        if slots is not None:
            needed += self._makes_room(action, slots)
        ends = [done[each].end if each in done else None for each in needed]
        return None if None in ends else max((end for end in ends if end is not None), default=0.0)

    def needs(self, action: Action) -> list[Action]:
        """Return the actions whose results an action uses."""
        stage, micro_batch, is_forward = action
        if is_forward:
            return [Action(stage - 1, micro_batch, True)] if stage else []
        own = [Action(stage, micro_batch, True)]
        return own if stage == self.stages - 1 else [*own, Action(stage + 1, micro_batch, False)]

    def _makes_room(self, action: Action, slots: Mapping[int, Slots]) -> list[Action]:
        """Return the actions that must end before there is room for the result of this one."""
        stage, micro_batch, is_forward = action
        if is_forward and stage < self.stages - 1:
            earlier = micro_batch - slots[stage + 1].activations
            return [Action(stage + 1, earlier, False)] if earlier >= 0 else []
        if not is_forward and stage:
            earlier = micro_batch - slots[stage - 1].gradients
            return [Action(stage - 1, earlier, False)] if earlier >= 0 else []
        return []

    @cached_property
    def slots(self) -> dict[int, Slots]:
        """The slots of the links into each stage that avoid deadlock.

        A result has a slot from when the action that computes it begins until the backward that reads it in place has
        run. The numbers are those in use in a timetable without limits, in which a backward takes as long as two
        forwards. With as many slots that timetable stays possible; and whether actions in a fixed order ever wait for
        each other does not depend on how long they take.
        """
        table = self.timetable(lambda action: 1.0 if action.is_forward else 2.0)
        counts = {}
        for stage in range(self.stages):
            used = [(table[Action(stage - 1, m, True)].begin, table[Action(stage, m, False)].end)
                    for m in range(self.micro_batches)] if stage else []  # fmt: skip
            written = [(table[Action(stage + 1, m, False)].begin, table[Action(stage, m, False)].end)
                       for m in range(self.micro_batches)] if stage < self.stages - 1 else []  # fmt: skip
            counts[stage] = Slots(*(max(LEAST_SLOTS, _most_at_once(each)) for each in (used, written)))
        return counts

    def idle_share(self, table: Mapping[Action, Turn]) -> float:
        span = max(turn.end for turn in table.values())
        return 1 - sum(turn.end - turn.begin for turn in table.values()) / (self.ranks * span)

    def drawing(self) -> str:
        """Return the schedule as text: a row for each rank, a column for each time that an action takes.

        "F2" is the forward of micro-batch 2, "B2" its backward, "." a time in which the rank idles; with several
        stages a rank "F2b" is in its second one.
        """
        table = self.timetable(lambda action: 1.0)
        width = len(str(self.micro_batches - 1)) + (2 if self.chunks > 1 else 1)
        length = round(max(turn.end for turn in table.values()))
        rows = [["." for _ in range(length)] for _ in range(self.ranks)]
        for turn in table.values():
            stage, micro_batch, is_forward = turn.action
            chunk = "abcdefghijklmnopqrstuvwxyz"[stage // self.ranks % 26] if self.chunks > 1 else ""
            rows[turn.rank][round(turn.begin)] = f"{'F' if is_forward else 'B'}{micro_batch}{chunk}"
        return "\n".join(
            f"rank {rank}  {' '.join(f'{cell:<{width}}' for cell in row)}".rstrip() for rank, row in enumerate(rows)
        )


def pipeline_schedule(name: str, ranks: int, micro_batches: int, chunks: int = 1) -> PipelineSchedule:
    """Return a schedule by its name.

    Args:
        name: "gpipe", "1f1b" or "interleaved".
        chunks: stages per rank; more than one with "interleaved", and only there.

    Raises ArgumentError, with the numbers, for what does not fit.
    """
    if name not in SCHEDULES:
        raise ArgumentError(f"schedule: expected one of {', '.join(SCHEDULES)}, got {name!r}")
    for what, value in (("micro_batches", micro_batches), ("chunks", chunks)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ArgumentError(f"{what}: expected a whole number of at least 1, got {value!r}")
    if name == INTERLEAVED:
        if chunks < 2:
            raise ArgumentError(f"chunks: expected 2 or more stages a rank with schedule interleaved, got {chunks}")
        if micro_batches % ranks:
            raise ArgumentError(
                f"micro_batches: expected a multiple of {ranks} ranks with schedule interleaved, got {micro_batches}"
            )
    elif chunks != 1:
        raise ArgumentError(f"chunks: expected 1 with schedule {name}, got {chunks}; 'interleaved' has more")
    order = {GPIPE: _gpipe, ONE_F_ONE_B: _one_f_one_b, INTERLEAVED: _interleaved}[name]
    actions = tuple(tuple(order(rank, ranks, micro_batches, chunks)) for rank in range(ranks))
    return PipelineSchedule(name, ranks, chunks, micro_batches, actions)


def _gpipe(rank: int, ranks: int, micro_batches: int, chunks: int) -> list[Action]:
    return [Action(rank, m, is_forward) for is_forward in (True, False) for m in range(micro_batches)]


def _one_f_one_b(rank: int, ranks: int, micro_batches: int, chunks: int) -> list[Action]:
    forwards, backwards = ([Action(rank, m, f) for m in range(micro_batches)] for f in (True, False))
    return _alternating(forwards, backwards, ranks - rank - 1)


def _interleaved(rank: int, ranks: int, micro_batches: int, chunks: int) -> list[Action]:
    """Return the actions of Megatron-LM's schedule: a stage runs as many micro-batches as there are ranks in a row."""
    forwards, backwards = [], []
    for number in range(chunks * micro_batches):
        group, place = divmod(number, ranks * chunks)
        chunk, within = divmod(place, ranks)
        micro_batch = group * ranks + within
        forwards.append(Action(chunk * ranks + rank, micro_batch, True))
        backwards.append(Action((chunks - 1 - chunk) * ranks + rank, micro_batch, False))
    return _alternating(forwards, backwards, 2 * (ranks - rank - 1) + (chunks - 1) * ranks)


def _alternating(forwards: list[Action], backwards: list[Action], warm_up: int) -> list[Action]:
    """Return `warm_up` forwards, then a forward and a backward in turn, then the other backwards."""
    warm_up = min(warm_up, len(forwards))
    order = forwards[:warm_up]
    for forward, backward in zip(forwards[warm_up:], backwards, strict=False):
        order += forward, backward
    return order + backwards[len(forwards) - warm_up :]


def _most_at_once(spans: list[tuple[float, float]]) -> int:
    """Return the most of these (begin, end) that hold at one time; one that ends makes room for one that begins."""
    changes = sorted([(begin, 1) for begin, _ in spans] + [(end, -1) for _, end in spans])
    now = most = 0
    for _, change in changes:
        now += change
        most = max(most, now)
    return most
