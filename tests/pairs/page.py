"""The table of pairs, from what a search has found, and back."""

from __future__ import annotations

import itertools
import re
import string
from collections import Counter
from collections.abc import Iterator

from tests.pairs.factors import FACTORS, Level, Pair, pairs, why_not
from tests.pairs.outcome import without_numbers
from tests.pairs.search import Findings, Levels

RIGHT, WRONG, IMPOSSIBLE, UNKNOWN = "+", "!", ".", "?"
#: With Greek ones, and Cyrillic capitals that look like none of the others.
_LETTERS = string.ascii_letters + string.digits + "αβγδεζηθικλμξπρσφψω" + "БГДЖИЛЦЧШЩЭЮЯ"
_LEVELS: list[Level] = [(factor, level) for factor, levels in FACTORS.items() for level in levels]

_HEAD = """\
# Pairs of strategies, options and model features

Written by `make pairs`: every level of every factor below with every other, in settings drawn so that all pairs occur.
Each setting trains on up to 8 ranks and is compared with one rank that has all of their samples, and with PyTorch in
float64 where that has what it asks for: parameters, buffers, each rank's losses and the clipped norms. A tensor may be
as far from one rank's as 1e-3 of the way that training has moved it; where values are rounded on purpose more: bf16
0.3, fp16 0.03, compression fp16 0.01, bf16 0.05, int8 0.2, PowerSGD 0.01, the last four four times as much with
RMSProp, which divides by small gradients, but 0.5 at most, and of several their sum; ResNet, whose batch norm makes
rounding grow, 0.05, 0.3 with one of these, and 1 with two. Where ranks take steps of their own one rank takes all of
them, and outer steps by the papers' formulas. Two hosts are one whose ranks are told that they are on two; a GPU is a
CPU that has a GPU's kernels and memory of its own, on every rank or on every other. Thawed parameters are frozen for
half of the steps; edits clamp all parameters after each step, or the averaged gradients before it; clip own is
PyTorch's `clip_grad_norm_`; a checkpoint that is rolled back is loaded again by the job that wrote it. Parameters have
to have the same bits on every rank.

`+` is right, a letter is refused by the line below, on every rank, and `.` does not exist, such as more than 8 ranks
or a network without that feature; `!` is wrong, and `?` occurred in no setting that ended. Rows and columns have the
same numbers. What is refused or wrong only with a third level stands below too.

"""


def page_of(findings: Findings, seed: int) -> str:
    """Return the page for what a search has found; seed: of its draws."""
    letters = _letters(findings)
    refused = {cause: letters[_key(text)] for cause, text in findings.refused.items()}
    cells = Counter(_cell(pair, findings, refused) for pair in pairs())
    others = {RIGHT: "right", IMPOSSIBLE: "not there", WRONG: "wrong", UNKNOWN: "unknown"}
    counts = [f"{cells.pop(cell)} {name}" for cell, name in others.items() if cell in cells]
    counts.insert(1, f"{cells.total()} refused")
    lines = [f"{_HEAD}Seed {seed}, {findings.settings} settings. Pairs: {', '.join(counts)}.", ""]
    lines += ["```", *_table(findings, refused), "```", "", "## Refusals", ""]
    lines += ["| | levels | message |", "|---|---|---|"]
    for cause, text in findings.refused.items():
        lines.append(f"| {letters[_key(text)]} | {_words(cause)} | `{text.partition(': ')[2]}` |")
    if findings.wrong:
        lines += ["", "## Wrong", ""]
        lines += [f"- {_words(cause)}" for cause in findings.wrong]
    return "\n".join(lines) + "\n"


def _words(cause: Levels) -> str:
    return " with ".join(" ".join(level) for level in sorted(cause, key=_LEVELS.index))


def _letters(findings: Findings) -> dict[str, str]:
    keys = dict.fromkeys(_key(text) for text in findings.refused.values())
    return dict(zip(keys, itertools.chain(_LETTERS, itertools.repeat("#")), strict=False))


def _key(text: str) -> str:
    """Return what lines about the same argument have in common."""
    return without_numbers(re.sub(r"'[^']*'", "#", text))


def _table(findings: Findings, refused: dict[Levels, str]) -> Iterator[str]:
    width = max(len(f"{factor} {level}") for factor, level in _LEVELS) + 4
    for digit in (10, 1):
        yield " " * width + "".join(str(n // digit % 10) if n % digit == 0 else " " for n in range(1, len(_LEVELS)))
    for number, level in enumerate(_LEVELS, 1):
        cells = "".join(_cell((other, level), findings, refused) for other in _LEVELS[: number - 1])
        yield f"{number:2} {' '.join(level)}".ljust(width) + cells


def _cell(pair: Pair, findings: Findings, refused: dict[Levels, str]) -> str:
    if pair[0][0] == pair[1][0]:
        return " "
    if why_not(dict(pair)):
        return IMPOSSIBLE
    letters = _letters_of({*pair}, refused)  # also of levels that a third one, such as dp 1, leaves without effect
    if not letters and pair in findings.right:
        return RIGHT
    if not letters:  # refused by every wrapper, in lines of their own
        each = [_letters_of({*pair, ("wrapper", level)}, refused) for level in FACTORS["wrapper"]]
        letters = each[0] if all(each) else []
    letters += [WRONG for cause in findings.wrong if cause <= set(pair)]
    return letters[0] if letters else UNKNOWN


def _letters_of(levels: set[Level], refused: dict[Levels, str]) -> list[str]:
    return [letter for cause, letter in refused.items() if cause <= levels]


# --- and back ---


def cells_of(text: str) -> dict[Pair, str]:
    """Return a page's cell for each pair."""
    rows = text.split("```")[1].splitlines()[3:]
    width = max(len(f"{factor} {level}") for factor, level in _LEVELS) + 4
    found = {}
    for level, row in zip(_LEVELS, rows, strict=True):
        assert row[3:width].strip() == " ".join(level), f"{row[:width]!r} is not {level}"
        found.update({(other, level): cell for other, cell in zip(_LEVELS, row[width:], strict=False) if cell != " "})
    return {pair: found[pair] for pair in pairs()}


def refusals_of(text: str) -> dict[Levels, str]:
    """Return a page's refused levels and the message of each."""
    rows = re.findall(r"^\| \S \| (.*) \| `(.*)` \|$", text, re.MULTILINE)
    return {_cause_of(levels): message for levels, message in rows}


def wrong_of(text: str) -> dict[Levels, str]:
    """Return a page's wrong levels."""
    return {_cause_of(levels): "" for levels in re.findall(r"^- (.*)$", text.partition("## Wrong")[2], re.MULTILINE)}


def _cause_of(words: str) -> Levels:
    by_words = {" ".join(level): level for level in _LEVELS}
    return frozenset(by_words[each] for each in words.split(" with "))
