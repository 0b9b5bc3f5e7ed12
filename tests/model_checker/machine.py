"""The steps of ranks on a memory whose stores may become visible later, and which of them no other rank can notice."""

from __future__ import annotations

from collections.abc import Hashable, Iterator

from tests.model_checker.course import LAST, Course, Op
from tests.model_checker.scenario import DEAD, STAY, Outcomes, Scenario, State

#: The kinds of steps on a word, and whether they read or write it.
USES = {"read": "r", "write": "w", "exchange": "rw", "sleep": "r"}


class AssumedWrongly(Exception):
    """A word is not as quiet as was assumed, or is new."""


class Machine:
    """What can happen in a scenario."""

    def __init__(self, scenario: Scenario):
        self.scenario = scenario
        self.names = list(scenario.programs)
        self.courses = [Course(name, program, scenario.whole) for name, program in scenario.programs.items()]
        self._mortal = {self.names.index(name) for name in scenario.mortal or self.names}
        self._later = scenario.stores != "at once"
        self._places: dict[int, int] = {}
        self._changing: set[int] = set()
        #: How much was known when the futures were computed.
        self.grown: tuple[int, ...] = ()
        self._futures: list[tuple[list[int], list[int]]] = []
        self.log: list[str] | None = None

    # --- words that no other rank notices ---

    def learn(self) -> None:
        """Compute which words each rank may still read and write from each of its nodes on, as bits."""
        self._futures = [self._futures_of(course) for course in self.courses]
        self.grown = self.size()

    def size(self) -> tuple[int, ...]:
        return len(self._changing), *(course.edges for course in self.courses)

    def _futures_of(self, course: Course) -> tuple[list[int], list[int]]:
        reads, writes = [0] * len(course.ops), [0] * len(course.ops)
        for node, op in enumerate(course.ops):
            if op[0] in USES:
                bit = 1 << self._place(op[1])
                reads[node] |= bit if "r" in USES[op[0]] else 0
                writes[node] |= bit if "w" in USES[op[0]] else 0
        changed = True
        while changed:
            changed = False
            for node in range(len(course.ops) - 1, -1, -1):
                for after in course.afters(node):
                    if reads[after] & ~reads[node] or writes[after] & ~writes[node]:
                        reads[node] |= reads[after]
                        writes[node] |= writes[after]
                        changed = True
        return reads, writes

    def _place(self, offset: int) -> int:
        found = self._places.get(offset)
        if found is None:
            self._places[offset] = len(self._places)
            raise AssumedWrongly
        return found

    def _others_may(self, state: State, actor: int, place: int, what: str) -> bool:
        """Return whether another rank may still write a word, or with "rw" read it."""
        if place not in self._changing:
            return False
        bit = 1 << place
        for other, (reads, writes) in enumerate(self._futures):
            if other == actor:
                continue
            if any(at == place for at, _ in state.buffers[other]):
                return True
            node = state.nodes[other]
            if node == DEAD:
                continue
            if node >= len(reads) or (writes[node] | (reads[node] if what == "rw" else 0)) & bit:
                return True
        return False

    def _note_change(self, place: int, value: Hashable) -> None:
        if value != 0:
            self._changing.add(place)

    def _seen(self, state: State, actor: int, place: int) -> Hashable:
        for at, value in reversed(state.buffers[actor]):
            if at == place:
                return value
        return state.memory[place]

    # --- steps ---

    def first(self) -> State:
        ranks = len(self.courses)
        state = State(
            (0,) * len(self._places),
            ((),) * ranks,
            (0,) * ranks,
            frozenset(),
            self.scenario.extra,
            self.scenario.deaths,
        )
        return self._settled(state)

    def is_running(self, state: State, actor: int) -> bool:
        """Return whether a rank has neither ended nor died."""
        node = state.nodes[actor]
        return node != DEAD and self.courses[actor].ops[node][0] not in LAST

    def moved(self, state: State, actor: int, result: Hashable) -> State:
        """Return the state with a rank one step further."""
        nodes = list(state.nodes)
        nodes[actor] = self.courses[actor].after(nodes[actor], result)
        return state._replace(nodes=tuple(nodes))

    def killed(self, state: State, actor: int) -> State:
        """Return the state with a rank dead; what it has stored becomes visible all the same."""
        nodes = list(state.nodes)
        nodes[actor] = DEAD
        state = state._replace(nodes=tuple(nodes), asleep=state.asleep - {actor})
        return state if self.scenario.on_death is None else self.scenario.on_death(state, actor)

    def _settled(self, state: State) -> State:
        """Take the steps that no other rank notices; of a loop that polls one round at most."""
        changed, polls = True, [0] * len(self.courses)
        while changed:
            changed = False
            for actor, course in enumerate(self.courses):
                while (after := self._quiet(state, actor)) is not None:
                    if after.nodes != state.nodes and course.ops[state.nodes[actor]][0] == "yield":
                        polls[actor] += 1
                        if polls[actor] > 1:
                            break
                    state, changed = after, True
        return state

    def _quiet(self, state: State, actor: int) -> State | None:
        buffer = state.buffers[actor]
        if buffer and not self._others_may(state, actor, buffer[0][0], "rw"):
            return self._stored(state, actor, 0)
        node = state.nodes[actor]
        if node == DEAD:
            return None
        op = self.courses[actor].ops[node]
        if op[0] == "write":
            place = self._place(op[1])
            self._note_change(place, op[2])
            if self._later or not self._others_may(state, actor, place, "rw"):
                self._say(actor, op, None)
                return self.moved(self._written(state, actor, place, op[2]), actor, None)
        elif op[0] == "read":
            place = self._place(op[1])
            if not self._others_may(state, actor, place, "w"):
                return self.moved(state, actor, self._seen(state, actor, place))
        elif (op[0] == "fence" and not buffer) or op[0] == "yield":
            return self.moved(state, actor, None)
        elif op[0] == "progress" and not state.deaths and DEAD not in state.nodes:
            return self.moved(state, actor, False)
        return None

    def _written(self, state: State, actor: int, place: int, value: Hashable) -> State:
        if not self._later:
            memory = list(state.memory)
            memory[place] = value
            return state._replace(memory=tuple(memory))
        if place not in self._changing:
            return state
        buffers = list(state.buffers)
        buffers[actor] = (*buffers[actor], (place, value))
        return state._replace(buffers=tuple(buffers))

    def _stored(self, state: State, actor: int, which: int) -> State:
        """Return the state with one of a processor's stores visible."""
        buffers, memory = list(state.buffers), list(state.memory)
        place, value = buffers[actor][which]
        memory[place] = value
        buffers[actor] = buffers[actor][:which] + buffers[actor][which + 1 :]
        return state._replace(memory=tuple(memory), buffers=tuple(buffers))

    def _say(self, actor: int, op: Op, result: Hashable) -> None:
        if self.log is not None:
            self.log.append(self._in_words(actor, op, result))

    def _in_words(self, actor: int, op: Op, result: Hashable) -> str:
        if op[0] in ("read", "write", "exchange"):
            op = op[0], self.scenario.names(op[1]), *op[2:]
        words = " ".join(map(str, op))
        return f"{self.names[actor]}: {words}" + (f" -> {result}" if result is not None else "")

    def outcomes(self, state: State, actor: int, op: Op) -> Outcomes:
        """Return what may come of a rank's step now; none where it has to wait."""
        kind = op[0]
        own = self.scenario.handlers.get(kind)
        if own is not None:
            return own(self, state, actor, op)
        if kind == "yield":
            return [(None, state)]
        if kind == "read":
            return [(self._seen(state, actor, self._place(op[1])), state)]
        if state.buffers[actor]:
            return []  # the others wait, as a fence does, until all of the processor's stores are visible
        if kind == "write":
            return [(None, self._written(state, actor, self._place(op[1]), op[2]))]
        if kind == "exchange":
            return self._exchanged(state, actor, self._place(op[1]), *op[2:])
        if kind == "sleep":
            return self._asleep(state, actor, self._place(op[1]), *op[2:])
        if kind == "wake":
            for other in state.asleep:
                state = self.moved(state, other, None)
            return [(None, state._replace(asleep=frozenset()))]
        if kind == "progress":
            lost = DEAD in state.nodes
            return [(False, state), *([("lost", state)] if lost else [])]
        assert kind == "fence", op
        return [(None, state)]

    def _exchanged(self, state: State, actor: int, place: int, expected: Hashable, value: Hashable) -> Outcomes:
        self._note_change(place, value)
        seen = state.memory[place]
        if seen != expected:
            return [((False, seen), state)]
        memory = list(state.memory)
        memory[place] = value
        return [((True, seen), state._replace(memory=tuple(memory)))]

    def _asleep(self, state: State, actor: int, place: int, seen: Hashable, naps: bool) -> Outcomes:
        if actor in state.asleep:
            return [(None, state._replace(asleep=state.asleep - {actor}))] if naps else []
        if state.memory[place] != seen:
            return [(None, state)]
        return [(STAY, state._replace(asleep=state.asleep | {actor}))]

    def steps(self, state: State) -> Iterator[tuple[str, State, bool]]:
        """Return every step that may come next, in words, the state after it, and whether ranks may depend on it.

        A death may not come, nor may an error without need.
        """
        for actor, (course, node) in enumerate(zip(self.courses, state.nodes, strict=True)):
            for which in self._next_stores(state.buffers[actor]):
                place, value = state.buffers[actor][which]
                words = (
                    "" if self.log is None else f"{self.names[actor]}'s store is visible: {self._name(place)} {value}"
                )
                yield words, self._settled(self._stored(state, actor, which)), True
            if not self.is_running(state, actor):
                continue
            op = course.ops[node]
            for result, after, *comes in self.outcomes(state, actor, op):
                words = "" if self.log is None else self._in_words(actor, op, None if result is STAY else result)
                yield words, after if result is STAY else self._settled(self.moved(after, actor, result)), not comes
            if state.deaths and actor in self._mortal:
                after = self.killed(state._replace(deaths=state.deaths - 1), actor)
                yield f"{self.names[actor]} dies", self._settled(after), False
        if self.scenario.world is not None:
            for words, after in self.scenario.world(self, state):
                yield words, after, True

    def _next_stores(self, buffer: tuple) -> list[int]:
        if self.scenario.stores != "any order":
            return [0] if buffer else []
        places = [place for place, _ in buffer]
        return [which for which, place in enumerate(places) if place not in places[:which]]

    def _name(self, place: int) -> str:
        return self.scenario.names(next(offset for offset, at in self._places.items() if at == place))
