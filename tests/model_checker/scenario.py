"""What is explored: ranks' programs, what they share, and what has to hold."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from tests.model_checker.course import Op

if TYPE_CHECKING:
    from tests.model_checker.machine import Machine

#: In place of a rank's node: it is dead. As an outcome: its step is not done yet.
DEAD, STAY = -1, object()


class State(NamedTuple):
    """What is shared and where each rank is; `extra` is the scenario's: processes, messages, a clock."""

    memory: tuple
    buffers: tuple
    nodes: tuple
    asleep: frozenset
    extra: Hashable
    deaths: int


#: What may come of a step: results, or STAY, with the states after it, and False where nothing brings it about.
Outcomes = list[tuple]


@dataclass
class Scenario:
    """What ranks do and what has to hold.

    programs: each rank's code, by name; it returns what `check` compares.
    check: returns what is wrong with the results in the end, by name (None of a dead rank), and the last state; or "".
    stores: "at once", or "later": in a buffer of each processor, in order, as x86 has it; or "any order", by word.
    deaths: how many of `mortal` may die, at any step.
    handlers: the steps of kinds that are the scenario's own.
    world: steps that no rank takes.
    on_death: changes the state when a rank has died.
    names: of the shared words, by offset.
    whole: see Course.
    """

    name: str
    programs: Mapping[str, Callable[[], Hashable]]
    check: Callable[[dict[str, Any], State], str]
    stores: str = "at once"
    deaths: int = 0
    mortal: Sequence[str] | None = None
    extra: Hashable = ()
    handlers: Mapping[str, Callable[[Machine, State, int, Op], Outcomes]] = field(default_factory=dict)
    world: Callable[[Machine, State], Iterator[tuple[str, State]]] | None = None
    on_death: Callable[[State, int], State] | None = None
    names: Callable[[int], str] = str
    whole: bool = False
