"""Run settings until every pair has occurred in one that is right; find the fewest levels behind each that is not."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from tests.pairs.covering import Covering
from tests.pairs.factors import (
    FACTORS,
    Level,
    Pair,
    Setting,
    named,
    pairs,
    pairs_of,
    ranks_of,
    setting_of,
    why_not,
    words,
)
from tests.pairs.outcome import REFUSED, RIGHT, Outcome, without_numbers

Levels = frozenset[Level]


@dataclass
class Findings:
    """What a search has found.

    Attributes:
        right: the pairs that were in a setting that came out right.
        refused, wrong: the fewest levels that are refused or wrong together, and the text.
        settings: how many were run to cover the pairs.
    """

    right: set[Pair] = field(default_factory=set)
    refused: dict[Levels, str] = field(default_factory=dict)
    wrong: dict[Levels, str] = field(default_factory=dict)
    settings: int = 0

    def may_stand(self, levels: Mapping[str, str], most_ranks: int) -> bool:
        """Return whether levels exist together, and hold none that was found refused or wrong."""
        if why_not(levels, most_ranks):
            return False
        items = set(levels.items())
        return not any(cause <= items for found in (self.refused, self.wrong) for cause in found)


def search(
    run: Callable[[Setting], Outcome], seed: int, most_ranks: int, tell: Callable[[str], None], known: Iterable[Levels]
) -> Findings:
    """Return what all pairs come to; every rank of a job calls it with a `run` that gives all the same outcomes.

    Args:
        run: trains a setting.
        seed: of the settings' draws.
        most_ranks: that a setting may have.
        tell: is given a line about each setting.
        known: levels that an earlier search found refused; those that still are need not be found again.
    """
    found = Findings()
    for cause in known:
        outcome = run(setting_of(dict(cause)))
        tell(f"known: {outcome.kind}: {words(dict(cause))}")
        if outcome.kind == REFUSED:
            found.refused[cause] = outcome.text
    run = _remembering(run)
    wanted = [pair for pair in pairs() if not why_not(dict(pair), most_ranks)]
    covering = Covering(wanted, lambda levels: found.may_stand(levels, most_ranks), seed)
    rng = random.Random(seed)

    def causes_of(setting: Setting) -> Iterator[Setting]:
        """Run a setting; where it is not right, find the fewest levels behind it, and yield settings next to them."""
        outcome = run(setting)
        tell(f"   {outcome.kind}: {words(setting)}: {outcome.text}")
        if outcome.kind == RIGHT:
            found.right.update(pairs_of(setting))
            for pair in pairs_of(setting):
                covering.missing.pop(pair, None)
            return
        cause = _smallest(run, setting, outcome, most_ranks, rng)
        levels = _levels_of(run, cause)
        (found.refused if outcome.kind == REFUSED else found.wrong)[levels] = cause.outcome.text
        tell(f"   by {words(dict(levels))}: {cause.outcome.text}")
        yield from _next_to(levels)

    while (setting := covering.next()) is not None:
        found.settings += 1
        tell(f"{found.settings}: {len(covering.missing)} pairs left")
        further = [*causes_of(setting)]
        while further:
            setting = further.pop()
            if found.may_stand(setting, most_ranks):
                further += causes_of(setting)
    return found


def _remembering(run: Callable[[Setting], Outcome]) -> Callable[[Setting], Outcome]:
    known: dict[str, Outcome] = {}

    def run_once(setting: Setting) -> Outcome:
        if words(setting) not in known:
            known[words(setting)] = run(setting)
        return known[words(setting)]

    return run_once


def _next_to(levels: Levels) -> Iterator[Setting]:
    """Yield settings with another level of one factor, which tend to come out alike."""
    for factor, level in sorted(levels):
        for other in FACTORS[factor][1:]:
            if other != level:
                yield setting_of({**dict(levels), factor: other})


@dataclass
class _Cause:
    setting: Setting
    outcome: Outcome


def _smallest(
    run: Callable[[Setting], Outcome], setting: Setting, outcome: Outcome, most_ranks: int, rng: random.Random
) -> _Cause:
    """Return the setting with the fewest levels beside the defaults that comes out alike.

    By halves of the levels, then quarters and so on, as Zeller and Hildebrandt's ddmin.
    """
    cause, size = _Cause(setting, outcome), len(named(setting))
    while size >= 1:
        levels = list(named(cause.setting))
        rng.shuffle(levels)
        has_shrunk = False
        for start in range(0, len(levels), size):
            dropped = levels[start : start + size]
            kept = {name: level for name, level in named(cause.setting).items() if name not in dropped}
            fewer = setting_of(kept)
            if why_not(fewer, most_ranks) or ranks_of(fewer) > most_ranks:
                continue
            found = run(fewer)
            if _is_alike(found, outcome):
                cause, has_shrunk = _Cause(fewer, found), True
        if size == 1 and not has_shrunk:
            break
        size = max(1, min(size // 2, len(named(cause.setting))))
        if not named(cause.setting):
            break
    return cause


def _levels_of(run: Callable[[Setting], Outcome], cause: _Cause) -> Levels:
    """Return the levels of a cause: those that are no defaults, and the wrapper where another comes out otherwise."""
    setting = {**cause.setting, "wrapper": "DDP"}
    levels = set(named(cause.setting).items())
    if setting != cause.setting and not _is_alike(run(setting), cause.outcome):
        levels.add(("wrapper", cause.setting["wrapper"]))
    return frozenset(levels)


def _is_alike(one: Outcome, other: Outcome) -> bool:
    """Return whether two settings come out alike: refused by the same line but for numbers, or both wrong."""
    if one.kind != other.kind:
        return False
    return one.kind != REFUSED or without_numbers(one.text) == without_numbers(other.text)
