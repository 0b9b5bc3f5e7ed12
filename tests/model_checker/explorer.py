"""Every order of the steps of several ranks, with deaths at any of them, and with stores that become visible later.

A state is the shared memory, what each processor has not written to it yet, and each rank's place in its course. Equal
states are looked at once. A step that no other rank can notice, as a read of a word that nobody else will write, is
taken with the one before it (a persistent set of one step: Godefroid, 1996). Which words ranks will use is taken from
what is known of their courses; where an exploration has learned more, it is done again. From
every state an end has to be reachable without a further death: there is no deadlock, and no loop that luck would leave.
"""

from __future__ import annotations

import random
from array import array
from typing import Any, NamedTuple

import numpy as np

from tests.model_checker.course import LAST
from tests.model_checker.machine import AssumedWrongly, Machine
from tests.model_checker.scenario import DEAD, Scenario, State

#: States between two looks at whether more is known of the courses.
LOOK = 500


class Finding(NamedTuple):
    """A fault, and the shortest interleaving that leads to it."""

    reason: str
    course: list[str]


class Explored(NamedTuple):
    states: int
    steps: int
    finding: Finding | None


class Explorer(Machine):
    """Explores one scenario; most_states bounds it."""

    def __init__(self, scenario: Scenario, most_states: int = 2_000_000):
        super().__init__(scenario)
        self._most = most_states

    def explore(self) -> Explored:
        draw = random.Random(0)
        while True:
            try:
                quiet = 0
                while quiet < 20:  # walks in a row that taught nothing
                    size = self.size()
                    self._walk(draw)
                    quiet = 0 if size != self.size() else quiet + 1
                self.learn()
                explored = self._explore()
                if explored.finding or self.grown == self.size():
                    return explored
            except AssumedWrongly:  # noqa: PERF203
                pass

    def _walk(self, draw: random.Random) -> None:
        """Take steps in random order until the end, to learn the ranks' courses."""
        state = self.first()
        for _ in range(2000):
            nexts = [after for _, after, _ in self.steps(state) if after != state]
            if not nexts:
                break
            state = draw.choice(nexts)

    def _explore(self) -> Explored:
        first = self.first()
        found: dict[State, int] = {first: 0}
        states, origins = [first], [(-1, -1)]
        begins, ends, sources = array("l"), array("l"), 0
        is_end, look, steps = array("b"), LOOK, 0
        while sources < len(states):
            state = states[sources]
            wrong = self._wrong(state)
            if wrong:
                return Explored(len(states), steps, Finding(wrong, self._course(origins, sources)))
            is_end.append(not any(self.is_running(state, actor) for actor in range(len(self.courses))))
            for choice, (_, after, comes) in enumerate(self.steps(state)):
                where = found.setdefault(after, len(states))
                if where == len(states):
                    states.append(after)
                    origins.append((sources, choice))
                steps += 1
                if comes:
                    begins.append(sources)
                    ends.append(where)
            sources += 1
            if sources >= look and self.grown != self.size():
                raise AssumedWrongly
            look *= 1 + (sources >= look)
            if len(states) > self._most:
                raise RuntimeError(f"{self.scenario.name}: more than {self._most:,} states; make it smaller")
        stuck = _first_without_end(np.frombuffer(is_end, np.int8), np.array(begins), np.array(ends))
        finding = None
        if stuck >= 0:
            finding = Finding("no end can be reached", [*self._course(origins, stuck), *self._places_of(states[stuck])])
        return Explored(len(states), steps, finding)

    def _wrong(self, state: State) -> str:
        """Return what is wrong in a state, if it is one of the last."""
        last: dict[str, Any] = {}
        for name, course, node in zip(self.names, self.courses, state.nodes, strict=True):
            op = course.ops[node] if node != DEAD else ("end", None)
            if op[0] == "failed":
                return f"{name}: {op[1]}"
            if op[0] == "end":
                last[name] = op[1]
        ended = len(last) == len(self.names) and not any(state.buffers)
        return self.scenario.check(last, state) if ended else ""

    def _course(self, origins: list[tuple[int, int]], at: int) -> list[str]:
        choices = []
        while at:
            at, choice = origins[at]
            choices.append(choice)
        self.log = lines = []
        state = self.first()
        for choice in reversed(choices):
            before = len(lines)
            for which, step in enumerate(self.steps(state)):
                if which == choice:
                    lines.insert(before, step[0])
                    state = step[1]
                    break
                del lines[before:]
        self.log = None
        return lines

    def _places_of(self, state: State) -> list[str]:
        return [
            f"{name} stays before: {' '.join(map(str, course.ops[node]))}"
            for name, course, node in zip(self.names, self.courses, state.nodes, strict=True)
            if node != DEAD and course.ops[node][0] not in LAST
        ]


def _first_without_end(is_end: np.ndarray, begins: np.ndarray, ends: np.ndarray) -> int:
    """Return the first state from which no end can be reached; -1: there is none."""
    reaches = is_end.astype(bool)
    while True:
        more = np.zeros_like(reaches)
        more[begins[reaches[ends]]] = True
        more |= reaches
        if (more == reaches).all():
            break
        reaches = more
    missing = np.flatnonzero(~reaches)
    return int(missing[0]) if missing.size else -1
