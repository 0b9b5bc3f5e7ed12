"""The protocols between ranks under every interleaving: a sample; `make model-check` has all."""

from __future__ import annotations

import re

import pytest

from tests.model_checker import kernel
from tests.model_checker.course import ask
from tests.model_checker.explorer import Explorer
from tests.model_checker.planted import BUGS, plant
from tests.model_checker.protocols import scenarios
from tests.model_checker.scenario import Scenario

#: Small ones of each protocol; they take a second or less.
SAMPLE = (
    "rendezvous, 2 ranks", "rendezvous, weak stores, 2 ranks", "rendezvous, one dies, 2 ranks",
    "rendezvous, sleeping, 2 ranks", "different calls, 2 ranks", "slots, 2 ranks", "own parts, 2 ranks",
    "blocking against background, sleeping, 2 ranks", "ring of slots, 2 ranks", "ring of slots, one dies, 2 ranks",
    "in the background, sleeping, 2 ranks", "rendezvous, 3 ranks", "exit monitor, 2 ranks, all end",
    "exit monitor, 2 ranks, one dies", "exit monitor, 2 ranks, one leaves with code 0",
    "elastic, 2 ranks, 2 steps, 1 die",
    "elastic, 3 ranks, 0 steps, 2 die, agreement alone",
)  # fmt: skip
PLANTED = (
    "nobody woken after a start", "a flag before the words", "== in place of >=", "no fence before the counter",
    "no fence between mark and counter", "a slot's side that does not alternate",
    "own parts without the second rendezvous", "sleepers are not woken after a kernel's sum",
    "one slot too many", "the kernel's counter before its tag",
    "a part is counted before it is summed", "exit code 0 ends nobody", "those that the launcher ends are reported",
    "a death while the state moves ends the run",
)  # fmt: skip
FOUND = {each.name: each for each in scenarios(3)}


@pytest.mark.sampled(len(SAMPLE))
@pytest.mark.parametrize("name", SAMPLE)
def test_no_interleaving_goes_wrong(name):
    found = Explorer(FOUND[name]).explore()
    assert found.finding is None, "\n".join([found.finding.reason, *found.finding.course])
    assert found.states > 40


@pytest.mark.sampled(len(PLANTED))
@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_bug_is_found(name):
    bug = next(each for each in BUGS if each.name == name)
    with plant(bug):
        finding = Explorer(bug.scenario()).explore().finding
    assert finding is not None
    assert finding.reason and len(finding.course) > 3, "the interleaving that leads there"


# --- the explorer itself, on steps whose outcomes are known ---


def outcomes_of(*programs, **options) -> tuple[set, Explorer]:
    """Return all results that programs can end with."""
    results = set()

    def check(last: dict, state: object) -> str:
        results.add(tuple(last.values()))
        return ""

    names = {f"rank {rank}": program for rank, program in enumerate(programs)}
    explorer = Explorer(Scenario("", names, check, **options))
    finding = explorer.explore().finding
    return results | ({finding.reason} if finding else set()), explorer


def store_then_load(own: int, other: int, fences: bool):
    def program() -> int:
        ask("write", own, 1)
        if fences:
            ask("fence")
        return ask("read", other)

    return program


@pytest.mark.parametrize(
    ("stores", "fences", "both_miss"), [("at once", False, False), ("later", False, True), ("later", True, False)]
)
def test_stores_that_wait_in_a_buffer(stores, fences, both_miss):
    """Both may miss the other's store on x86, unless there is a fence: Sewell et al. (2010), example SB."""
    found, _ = outcomes_of(store_then_load(0, 8, fences), store_then_load(8, 0, fences), stores=stores)
    assert found == {(0, 1), (1, 0), (1, 1)} | ({(0, 0)} if both_miss else set())


@pytest.mark.parametrize(("stores", "stale"), [("later", False), ("any order", True)])
def test_stores_become_visible_in_order_or_not(stores, stale):
    """Example MP: who sees the flag sees the data, where stores keep their order."""

    def write() -> None:
        ask("write", 0, 1)
        ask("write", 8, 1)

    def look() -> tuple:
        flag = ask("read", 8)
        return flag, ask("read", 0)

    found, _ = outcomes_of(write, look, stores=stores)
    assert {result[1] for result in found} == {(0, 0), (0, 1), (1, 1)} | ({(1, 0)} if stale else set())


def count(exchanges: bool):
    def program() -> None:
        while True:
            seen = ask("read", 0)
            if not exchanges:
                ask("write", 0, seen + 1)
                return
            if ask("exchange", 0, seen, seen + 1)[0]:
                return

    return program


@pytest.mark.parametrize(("exchanges", "totals"), [(True, {3}), (False, {1, 2, 3})])
def test_lost_updates(exchanges, totals):
    found = set()
    names = {f"rank {rank}": count(exchanges) for rank in range(3)}
    explorer = Explorer(Scenario("", names, lambda last, state: found.add(state.memory[0]) or ""))
    assert explorer.explore().finding is None
    assert found == totals


def test_ranks_that_wait_for_each_other_are_found_and_one_that_dies():
    def wait(own: int, other: int):
        def program() -> None:
            while not ask("read", other):
                ask("yield")
            ask("write", own, 1)

        return program

    assert "no end can be reached" in outcomes_of(wait(0, 8), wait(8, 0))[0]

    def give() -> None:
        ask("write", 8, 1)

    assert outcomes_of(wait(0, 8), give)[0] == {(None, None)}
    assert "no end can be reached" in outcomes_of(wait(0, 8), give, deaths=1, mortal=["rank 1"])[0]


def test_a_loop_that_polls_has_few_places():
    """However often it polls: the first look, the next ones, and what comes after it."""

    def poll() -> int:
        polls = 0
        while ask("read", 0) < 2:
            ask("yield")
            polls += 1
        return ask("read", 8)

    def write() -> None:
        for value in (1, 2):
            ask("write", 8, value)
            ask("write", 0, value)

    found, explorer = outcomes_of(poll, write)
    assert found == {(2, None)} and len(explorer.courses[0].ops) == 5


def test_the_kernel_macros_mean_what_the_interpreter_takes_them_for():
    source = re.sub(r"\s+", " ", kernel.SOURCE.read_text())
    assert "#define PUBLISH(call, counter, number) __atomic_store_n(counter, number, __ATOMIC_RELEASE)" in source
    assert "#define SEEN(counter) __atomic_load_n(counter, __ATOMIC_ACQUIRE)" in source
    assert "#define FENCE(call) atomic_add((__global volatile int *)((call) + SPARE), 0)" in source
    assert "#define PARTS_OF(word) ((word) & ((1L << PART_BITS) - 1))" in source
