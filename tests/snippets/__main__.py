"""Draws snippets and prints those that have other values than PyTorch's without an error, as short as they get.

`python -m tests.snippets [COUNT [FIRST SEED]]`; the last line counts how all of them ended.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable

from tests.snippets.differences import is_meant
from tests.snippets.grammar import snippet
from tests.snippets.sides import CRASHED, SILENT, compared, shrunk

MEANT = "different on purpose"


def searched(seeds: Iterable[int]) -> tuple[Counter[str], list[str]]:
    """Return how drawn snippets ended, and those that are wrong, as short as they get, with what is wrong."""
    counts: Counter[str] = Counter()
    wrong = []
    for seed in seeds:
        text = snippet(seed)
        kind, what = compared(text)
        if kind in (SILENT, CRASHED):
            text = shrunk(text, lambda shorter, kind=kind: compared(shorter).kind == kind)
            what = compared(text).what
            if is_meant(text, what):
                kind = MEANT
            else:
                wrong.append(f"# seed {seed}: {kind}: {what}\n{text}\n")
                print(wrong[-1], flush=True)
        counts[kind] += 1
    return counts, wrong


def main() -> int:
    count, first = [*map(int, sys.argv[1:3]), *(1000, 0)[len(sys.argv) - 1 :]]
    counts, wrong = searched(range(first, first + count))
    print(", ".join(f"{number} {kind}" for kind, number in counts.most_common()))
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
