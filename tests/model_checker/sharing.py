"""What ranks do with shared memory: rendezvous, slots, started reductions, rings of slots, and shared work."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from tests.model_checker.memory import name_of
from tests.model_checker.programs import (
    all_get,
    different_calls,
    exchanges,
    on_ranks,
    one_kernel,
    ring,
    shards,
    slots,
    started,
    started_against_blocking,
    total,
    value,
    work_queue_sums,
)
from tests.model_checker.scenario import Scenario, State


def scenario(
    name: str, ranks: int, code: Callable[..., Any], args: Sequence[Any], expected: Any, **options: Any
) -> Scenario:
    how = {key: options.pop(key) for key in ("sleeps", "naps") if key in options}
    return Scenario(
        f"{name}, {ranks} ranks",
        on_ranks(ranks, code, *args, **how),
        all_get(expected),
        names=name_of(ranks),
        **options,
    )


def summed(ranks: int, turns: int, elements: int | None = None) -> Any:
    count = ranks if elements is None else elements
    return tuple((total(ranks, turn),) * count for turn in range(turns))


def exchanged(ranks: int, turns: int) -> Any:
    return tuple(tuple(value(rank, turn) for rank in range(ranks)) for turn in range(turns))


def rendezvous_scenarios(ranks: int) -> list[Scenario]:
    """Return what ranks do that meet, wait and fold, in as many turns as can be explored."""
    few, turns = (2 if ranks == 2 else 1), (3 if ranks == 2 else 2)
    later: dict[str, Any] = {"stores": "later"}
    in_turns = partial(summed, ranks)
    made = [
        scenario("rendezvous", ranks, exchanges, [turns], exchanged(ranks, turns), **later),
        scenario("rendezvous, weak stores", ranks, exchanges, [2], exchanged(ranks, 2), stores="any order"),
        scenario("different calls", ranks, different_calls, [], (7, "differ", 9), **later),
        scenario("slots", ranks, slots, [turns], tuple(total(ranks, turn) for turn in range(turns)), **later),
    ]
    if ranks > 3:
        return made
    made += [
        scenario("rendezvous, one dies", ranks, exchanges, [1], exchanged(ranks, 1), deaths=1, **later),
        scenario("rendezvous, sleeping", ranks, exchanges, [few], exchanged(ranks, few), sleeps=True, **later),
        scenario("own parts", ranks, shards, [2], in_turns(2), **later),
        scenario("own parts in a kernel", ranks, one_kernel, [few], in_turns(few), **later),
        scenario(
            "in the background",
            ranks,
            started,
            [few, 2],
            tuple(turn for turn in in_turns(few) for _ in (0, 1)),
            **later,
        ),
        scenario("blocking against background", ranks, started_against_blocking, [], ("differ",), **later),
    ]
    if ranks == 2:
        naps: dict[str, Any] = {"sleeps": True, "naps": True}
        once = tuple(in_turns(1))
        made += [
            scenario("in the background, sleeping", 2, started, [1, 1], once, sleeps=True, **later),
            scenario("in the background, one dies", 2, started, [1, 1], once, deaths=1, **naps),
            scenario("blocking against background, sleeping", 2, started_against_blocking, [], ("differ",), **naps),
        ]
        made.append(scenario("own parts in a kernel, sleeping", 2, one_kernel, [1], in_turns(1), sleeps=True, **later))
    return made


def ring_scenarios() -> list[Scenario]:
    """Return rings of two slots, in which five messages go round more than twice."""
    sent = tuple(value(0, message) for message in range(5))

    def check(last: dict[str, Any], state: State) -> str:
        return all_get(sent)(last | {"rank 0": last["rank 0"] or sent}, state)

    ways = (
        ("", {"stores": "later"}),
        (", sleeping", {"stores": "later", "sleeps": True}),
        (", one dies", {"deaths": 1}),
    )
    made = [scenario(f"ring of slots{name}", 2, ring, [5], sent, **how) for name, how in ways]  # type: ignore[arg-type]
    return [replace(each, check=all_get(sent) if each.deaths else check) for each in made]


def work_scenarios(ranks: int) -> list[Scenario]:
    """Return shared work: parts that are taken by whoever runs, by ranks that poll, sleep and go on."""
    turns, parts = (2, 2) if ranks == 2 else (1, 1)
    once = [1, parts, 0], summed(ranks, 1, parts)
    made = [
        scenario(
            "shared work, no polls",
            ranks,
            work_queue_sums,
            *once,
            sleeps=True,
            stores="later" if ranks == 2 else "at once",
        )
    ]
    if ranks == 2:
        made += [
            scenario(
                "shared work",
                ranks,
                work_queue_sums,
                [turns, parts, 1],
                summed(ranks, turns, parts),
                sleeps=True,
                stores="later",
            ),
            scenario(
                "shared work apart",
                ranks,
                work_queue_sums,
                [turns, parts, 1, True],
                summed(ranks, turns, parts),
                sleeps=True,
            ),
            scenario("shared work, one dies", ranks, work_queue_sums, *once, sleeps=True, naps=True, deaths=1),
        ]
    return made
