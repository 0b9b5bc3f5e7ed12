"""The table of pairs in docs/proofs.md, from what a search has found, and back."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

from tests.pairs.factors import FACTORS, Level, Pair, pairs, why_not
from tests.pairs.outcome import without_numbers
from tests.pairs.search import Findings, Levels

RIGHT, REFUSED, IMPOSSIBLE, WRONG, UNKNOWN = "right", "refused", "not there", "wrong", "unknown"
_LEVELS: list[Level] = [(factor, level) for factor, levels in FACTORS.items() for level in levels]


def page_of(findings: Findings, seed: int) -> str:
    """Return the table for what a search has found; seed: of its draws."""
    ends = Counter(_end(pair, findings) for pair in pairs())
    counts = [f"{ends[end]} {end}" for end in (RIGHT, REFUSED, IMPOSSIBLE, WRONG, UNKNOWN) if ends[end]]
    lines = ["# Pairs", "", f"Seed {seed}, {findings.settings} settings. Pairs: {', '.join(counts)}.", ""]
    lines += ["| refused levels | message |", "|---|---|"]
    alike: dict[str, list[Levels]] = {}
    for cause, text in findings.refused.items():
        alike.setdefault(_key(text), []).append(cause)
    for causes in alike.values():
        message = findings.refused[causes[0]].partition(": ")[2]
        lines.append(f"| {'; '.join(sorted(map(_words, causes)))} | `{message}` |")
    if findings.wrong:
        lines += ["", "**Wrong**", "", *(f"- {_words(cause)}" for cause in findings.wrong)]
    return "\n".join(lines) + "\n"


def _words(cause: Levels) -> str:
    return " with ".join(" ".join(level) for level in sorted(cause, key=_LEVELS.index))


def _key(text: str) -> str:
    """Return what lines about the same argument have in common."""
    return without_numbers(re.sub(r"'[^']*'", "#", text.partition(", got ")[0]))


def _end(pair: Pair, findings: Findings) -> str:
    if why_not(dict(pair)):
        return IMPOSSIBLE
    if _refused({*pair}, findings):  # also of levels that a third one, such as dp 1, leaves without effect
        return REFUSED
    if pair in findings.right:
        return RIGHT
    if all(_refused({*pair, ("wrapper", level)}, findings) for level in FACTORS["wrapper"]):  # each in its own line
        return REFUSED
    return WRONG if any(cause <= {*pair} for cause in findings.wrong) else UNKNOWN


def _refused(levels: set[Level], findings: Findings) -> bool:
    return any(cause <= levels for cause in findings.refused)


# --- and back ---


def counts_of(text: str) -> dict[str, int]:
    """Return how many pairs ended in each way."""
    (line,) = re.findall(r"^Seed .* Pairs: (.*)\.$", text, re.MULTILINE)
    return {end: int(number) for number, end in re.findall(r"(\d+) ([a-z ]+)", line)}


def refused_of(text: str) -> Iterator[Levels]:
    """Yield the refused levels."""
    for causes in re.findall(r"^\| (.* with .*?) \| `", text, re.MULTILINE):
        yield from map(_cause_of, causes.split("; "))


def _cause_of(words: str) -> Levels:
    by_words = {" ".join(level): level for level in _LEVELS}
    return frozenset(by_words[each] for each in words.split(" with "))
